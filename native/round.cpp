#include "round.h"

#include <algorithm>
#include <cstring>

namespace paceline {

int draft_round(Program& program, const RoundPlan& plan, RoundStart start, const std::vector<RoundRow>& how, int steps,
                std::vector<Drawn>* out) {
  const int64_t count = static_cast<int64_t>(start.tokens.size());
  const Rows rows{count, start.tokens.data(), start.positions.data(), start.slots.data()};
  std::vector<DrawRow> draws(count);
  out->assign(static_cast<size_t>(steps) * count, Drawn());
  program.bind(plan.hidden_buffer, start.hidden.data(), plan.hidden_width);
  for (int step = 0; step < steps; ++step) {
    if (int status = program.run(rows)) return status;
    for (int64_t r = 0; r < count; ++r) {
      DrawRow& row = draws[r] = how[r].draw;
      row.x = plan.logits + r * plan.logits_stride;
      row.ids = plan.ids ? plan.ids + r * plan.ids_stride : nullptr;
      noise_keys(how[r].seed, how[r].position + step, 0, &row.k0, &row.k1);
    }
    Drawn* drawn = out->data() + static_cast<size_t>(step) * count;
    draw(draws.data(), count, plan.width, true, drawn);
    for (int64_t r = 0; r < count; ++r) {
      start.tokens[r] = std::max<int64_t>(drawn[r].token, 0);  // a row without a token goes on with any: it is cut off later
      std::memcpy(start.hidden.data() + r * plan.hidden_width, plan.after + r * plan.after_stride,
                  sizeof(float) * plan.hidden_width);
    }
  }
  return OK;
}

}  // namespace paceline
