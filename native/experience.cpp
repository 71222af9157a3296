#include "experience.h"

#include <algorithm>
#include <cmath>

namespace paceline {

namespace {

constexpr double kHopeless = 0.03;  // survival below which nothing more is worth a look

}  // namespace

void count(Shown& arm, double window, const std::vector<std::pair<int64_t, int64_t>>& outcomes) {
  const int64_t most = static_cast<int64_t>(arm.hits.size());
  for (const auto& [drafted, accepted] : outcomes)
    for (int64_t j = 0; j < std::min({accepted + 1, drafted, most}); ++j) {
      const double keep = arm.tries[j] != 0 ? std::min(1.0, (window - 1) / arm.tries[j]) : 1.0;
      arm.hits[j] = arm.hits[j] * keep + (j < accepted ? 1 : 0);
      arm.tries[j] = arm.tries[j] * keep + 1;
    }
}

void estimate(Shown& arm, const Numbers& prior, double weight, double hope) {
  const size_t n = prior.size();
  arm.accept.resize(n), arm.survive.resize(n);
  double shown = arm.tries[0];
  const double first = (arm.hits[0] + weight * prior[0]) / (shown + weight), unknown = weight / (shown + weight);
  const double more = std::min(hope * unknown * std::sqrt(first * (1 - first) / (shown + weight + 1)), 1.0 - first);
  double before = first + more, alive = before;
  arm.hope = before != 0 ? more / before : 0.0;
  for (size_t j = 0; j < n; ++j) {
    const double tried = arm.tries[j];
    if (j > 0) {
      const double drawn = prior[j] + shown / (shown + weight) * (before - prior[j]);
      before = (arm.hits[j] + weight * drawn) / (tried + weight);
      shown = tried > 0.9 * shown ? tried : 0.9 * shown;
      alive *= before;
    }
    arm.accept[j] = before, arm.survive[j] = alive;
  }
}

Offer offer(const Numbers& confidence, const Worth& worth, const First& first, const Copied& own, const Numbers& prices,
            double paid) {
  Offer out;
  double kept = 0, alive = 1;
  const double weight = own.weight;
  const size_t n =
      std::min({confidence.size(), own.hits.size(), own.tries.size(), own.promised.size(), prices.size()});
  for (size_t j = 0; j < n; ++j) {
    double chance = worth_of(worth, confidence[j]);
    if (j == 0 && first.weight > 0) chance = (first.kept + first.weight * chance) / (first.tried + first.weight);
    const double kept_odds = chance * (own.hits[j] + weight) * (own.tries[j] - own.promised[j] + weight);
    const double lost_odds = (1.0 - chance) * (own.tries[j] - own.hits[j] + weight) * (own.promised[j] + weight);
    alive *= kept_odds / (kept_odds + lost_odds);
    kept += alive;
    const double net = kept - paid * prices[j];
    if (net > out.gain) out = {static_cast<int64_t>(j) + 1, net, kept};
    else if (alive < kHopeless) break;
  }
  return out;
}

}  // namespace paceline
