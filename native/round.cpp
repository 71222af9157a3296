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

int Lead::run() const {
  if (int status = look->run({static_cast<int64_t>(tokens.size()), tokens.data(), positions.data(), slots.data()}))
    return status;
  const int64_t count = static_cast<int64_t>(last.size());
  std::vector<float> read(count * head_width);
  for (int64_t r = 0; r < count; ++r)
    std::memcpy(read.data() + r * head_width, seen + last[r] * seen_stride, sizeof(float) * head_width);
  head->bind(head_buffer, read.data(), head_width);
  return head->run({count, nullptr, nullptr, nullptr});
}

int draft_round(Program& program, const RoundPlan& plan, RoundStart start, std::vector<RoundRow> how, const Lead* lead,
                std::vector<Drawn>* out) {
  const int64_t all = static_cast<int64_t>(start.tokens.size()), width = plan.hidden_width;
  std::vector<int64_t> active(all);  // rows that still take part, in order; what is in `start` is theirs
  std::vector<DrawRow> draws(all);
  std::vector<Drawn> drawn(all);
  std::vector<double> gains(all);
  for (int64_t r = 0; r < all; ++r) active[r] = r;
  out->clear();
  start.hidden.resize(all * width);
  program.bind(plan.hidden_buffer, start.hidden.data(), width);
  for (int step = 0; !active.empty(); ++step) {
    const int64_t count = static_cast<int64_t>(active.size());
    const bool leads = lead && !step;
    const Rows rows{count, start.tokens.data(), start.positions.data(), start.slots.data()};
    if (int status = leads ? lead->run() : program.run(rows)) return status;
    const float* logits = leads ? lead->logits : plan.logits;
    const int64_t logits_stride = leads ? lead->logits_stride : plan.logits_stride;
    for (int64_t r = 0; r < count; ++r) {
      const RoundRow& row = how[active[r]];
      DrawRow& draw = draws[r] = row.draw;
      draw.x = logits + r * logits_stride;
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
      const float* after = leads ? lead->after + lead->last[r] * lead->after_stride : plan.after + r * plan.after_stride;
      active[left] = row;
      start.tokens[left] = drawn[r].token;
      start.positions[left] = start.positions[r] + (plan.moves ? 1 : 0);
      start.slots[left] = start.slots[r];
      std::memcpy(start.hidden.data() + left * width, after, sizeof(float) * width);
      ++left;
    }
    active.resize(left);
  }
  return OK;
}

}  // namespace paceline
