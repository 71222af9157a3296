#include "round.h"

#include <algorithm>
#include <cmath>
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

double shared_chance(double logit) {
  const double sure = logit > -700 ? 1 / (1 + std::exp(-logit)) : 0;  // 0 for NaN, too
  return sure / (2 - sure);
}

RoundRows::RoundRows(std::vector<RoundRow> how, std::vector<Drawn>* out) : how_(std::move(how)), out_(out) {
  const size_t all = how_.size();
  active_.resize(all), draws_.resize(all), drawn_.resize(all), gains_.resize(all);
  for (size_t r = 0; r < all; ++r) active_[r] = static_cast<int64_t>(r);
  out_->clear();
}

std::vector<int64_t> RoundRows::draw_step(int step, const Scores& scores) {
  const int64_t all = static_cast<int64_t>(how_.size());
  for (int64_t r = 0; r < count(); ++r) {
    const RoundRow& row = how_[active_[r]];
    DrawRow& draw = draws_[r] = row.draw;
    draw.x = scores.logits + r * scores.stride;
    draw.ids = scores.ids ? scores.ids + r * scores.ids_stride : nullptr;
    noise_keys(row.seed, row.position + step, 0, &draw.k0, &draw.k1);
  }
  draw(draws_.data(), count(), scores.width, !scores.sure, drawn_.data());
  out_->resize(out_->size() + all);
  Drawn* found = out_->data() + out_->size() - all;
  double gained = 0, takes = 0;
  for (int64_t r = 0; r < count(); ++r) {
    const int64_t row = active_[r];
    if (scores.sure && drawn_[r].token >= 0) drawn_[r].confidence = shared_chance(scores.sure[r * scores.sure_stride]);
    found[row] = drawn_[r];
    gains_[r] = drawn_[r].token < 0 ? -1 : how_[row].gain(step, drawn_[r].confidence);
    if (gains_[r] <= 0) continue;
    gained += gains_[r];
    takes = std::max(takes, how_[row].stop.step);
  }
  std::vector<int64_t> on, left;
  for (int64_t r = 0; r < count() && gained >= takes; ++r)
    if (gains_[r] > 0) on.push_back(r), left.push_back(active_[r]);
  active_ = std::move(left);
  return on;
}

int draft_round(Program& program, const RoundPlan& plan, RoundStart start, std::vector<RoundRow> how, const Lead* lead,
                std::vector<Drawn>* out) {
  const int64_t width = plan.hidden_width;
  RoundRows rows(std::move(how), out);
  start.hidden.resize(rows.count() * width);
  program.bind(plan.hidden_buffer, start.hidden.data(), width);
  for (int step = 0; rows.count(); ++step) {
    const bool leads = lead && !step;
    if (int status = leads ? lead->run()
                           : program.run({rows.count(), start.tokens.data(), start.positions.data(), start.slots.data()}))
      return status;
    const Scores scores{leads ? lead->logits : plan.logits, leads ? lead->logits_stride : plan.logits_stride, plan.width,
                        plan.ids, plan.ids_stride, nullptr, 0};
    int64_t left = 0;
    for (int64_t r : rows.draw_step(step, scores)) {
      const float* after = leads ? lead->after + lead->last[r] * lead->after_stride : plan.after + r * plan.after_stride;
      start.tokens[left] = rows.drawn(r).token;
      start.positions[left] = start.positions[r] + (plan.moves ? 1 : 0);
      start.slots[left] = start.slots[r];
      std::memcpy(start.hidden.data() + left * width, after, sizeof(float) * width);
      ++left;
    }
  }
  return OK;
}

int chain_round(Program& program, const ChainPlan& plan, std::vector<int64_t> tokens, std::vector<RoundRow> how,
                std::vector<Drawn>* out) {
  const int64_t all = static_cast<int64_t>(tokens.size()), width = plan.state_width;
  RoundRows rows(std::move(how), out);
  std::vector<float> state(all * width);
  std::vector<std::vector<float>> gathered(plan.feeds.size());
  if (plan.state_buffer >= 0) program.bind(plan.state_buffer, state.data(), width);
  for (int step = 0; rows.count(); ++step) {
    for (size_t f = 0; f < plan.feeds.size(); ++f) {
      const Feed& feed = plan.feeds[f];
      float* own = const_cast<float*>(feed.data) + step * feed.width;  // inputs are bound as all buffers are, and read
      int64_t stride = feed.steps * feed.width;
      if (rows.count() < all) {  // some have ended: the others close up
        gathered[f].resize(rows.count() * feed.width);
        for (int64_t r = 0; r < rows.count(); ++r)
          std::memcpy(gathered[f].data() + r * feed.width, own + rows.row(r) * stride, sizeof(float) * feed.width);
        own = gathered[f].data(), stride = feed.width;
      }
      program.bind(feed.buffer, own, stride);
    }
    if (int status = program.run({rows.count(), tokens.data(), nullptr, nullptr})) return status;
    int64_t left = 0;
    for (int64_t r : rows.draw_step(step, plan.scores)) {
      tokens[left] = rows.drawn(r).token;
      if (width) std::memcpy(state.data() + left * width, plan.after + r * plan.after_stride, sizeof(float) * width);
      ++left;
    }
  }
  return OK;
}

}  // namespace paceline
