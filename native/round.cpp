#include "round.h"

#include <algorithm>
#include <cstring>

namespace paceline {

int draft_round(Program& program, const RoundPlan& plan, Rows rows, int64_t* tokens, float* hidden,
                const std::vector<RoundRow>& how, int steps, std::vector<Drawn>* out) {
  const int64_t count = rows.count;
  std::vector<DrawRow> draws(count);
  out->assign(static_cast<size_t>(steps) * count, Drawn());
  program.bind(plan.hidden_buffer, hidden, plan.hidden_width);
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
      tokens[r] = std::max<int64_t>(drawn[r].token, 0);  // a row without a token goes on with any: it is cut off later
      std::memcpy(hidden + r * plan.hidden_width, plan.after + r * plan.after_stride,
                  sizeof(float) * plan.hidden_width);
    }
  }
  return OK;
}

}  // namespace paceline
