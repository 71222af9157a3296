#include "round.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace paceline {

double worth_of(const Worth& worth, double confidence) {
  const double sure = confidence >= 0 && confidence <= 1 ? confidence : 0;
  const size_t bins = worth.size(), bin = std::min(static_cast<size_t>(sure * bins), bins - 1);
  return worth[bin].first + worth[bin].second * sure;
}

double RoundRow::gain(int step, double confidence) {
  const double most = std::numeric_limits<double>::infinity();
  if (step + 1 >= stop.most) return -most;
  if (stop.chance.empty()) return most;
  alive *= worth_of(stop.worth, confidence);
  return static_cast<size_t>(step) < stop.chance.size() ? alive * stop.chance[step] - stop.price : -most;
}

int draft_round(Program& program, const RoundPlan& plan, RoundStart start, std::vector<RoundRow> how,
                std::vector<Drawn>* out) {
  const int64_t all = static_cast<int64_t>(start.tokens.size()), width = plan.hidden_width;
  std::vector<int64_t> active(all);  // rows that still take part, in order; what is in `start` is theirs
  std::vector<DrawRow> draws(all);
  std::vector<Drawn> drawn(all);
  std::vector<double> gains(all);
  for (int64_t r = 0; r < all; ++r) active[r] = r;
  out->clear();
  program.bind(plan.hidden_buffer, start.hidden.data(), width);
  for (int step = 0; !active.empty(); ++step) {
    const int64_t count = static_cast<int64_t>(active.size());
    const Rows rows{count, start.tokens.data(), start.positions.data(), start.slots.data()};
    if (int status = program.run(rows)) return status;
    for (int64_t r = 0; r < count; ++r) {
      const RoundRow& row = how[active[r]];
      DrawRow& draw = draws[r] = row.draw;
      draw.x = plan.logits + r * plan.logits_stride;
      draw.ids = plan.ids ? plan.ids + r * plan.ids_stride : nullptr;
      noise_keys(row.seed, row.position + step, 0, &draw.k0, &draw.k1);
    }
    draw(draws.data(), count, plan.width, true, drawn.data());
    out->resize(out->size() + all);
    Drawn* found = out->data() + out->size() - all;
    double gained = 0, takes = 0;
    for (int64_t r = 0; r < count; ++r) {
      const int64_t row = active[r];
      found[row] = drawn[r];
      gains[r] = drawn[r].token < 0 ? -1 : how[row].gain(step, drawn[r].confidence);
      if (gains[r] <= 0) continue;
      gained += gains[r];
      takes = std::max(takes, how[row].stop.step);
    }
    int64_t left = 0;
    for (int64_t r = 0; r < count && gained >= takes; ++r) {
      const int64_t row = active[r];
      if (gains[r] <= 0) continue;
      active[left] = row;
      start.tokens[left] = drawn[r].token;
      start.positions[left] = start.positions[r] + (plan.moves ? 1 : 0);
      start.slots[left] = start.slots[r];
      std::memcpy(start.hidden.data() + left * width, plan.after + r * plan.after_stride, sizeof(float) * width);
      ++left;
    }
    active.resize(left);
  }
  return OK;
}

}  // namespace paceline
