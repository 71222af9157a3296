// What became of drafts, and what a copy is worth: `learn` and `offer` of paceline/engine, whose Python is the reference.
// Plain sums in one order, as there: the same numbers.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "round.h"

namespace paceline {

using Numbers = std::vector<double>;

struct Shown {  // by position
  Numbers hits, tries;      // what was seen of it, fading
  Numbers accept, survive;  // acceptance, and its running products
  double hope = 0;          // share of `accept[0]` that is the benefit of the doubt
};

// Counts drafts, as (drafted, accepted): the kept positions, and the first that was not.
void count(Shown& arm, double window, const std::vector<std::pair<int64_t, int64_t>>& outcomes);

// Acceptance and survival from counts, see `acceptance.estimated`.
void estimate(Shown& arm, const Numbers& prior, double weight, double hope);

struct Offer {
  int64_t tokens = 0;
  double gain = 0, kept = 0;  // tokens; the first net of what checking takes
};

struct First {  // of texts' first copies
  double weight = 0;  // that a copy's looks count for; 0: it is not the first
  double kept = 0, tried = 0;
};

struct Copied {  // what became of a text's own copies, by position
  Numbers hits, tries, promised;  // `promised`: hits, as their confidence said
  double weight = 0;              // that the promise counts for besides
};

// How much of a proposal is worth checking. `worth`: of confidence, which the text's own copies speak for or against;
// `prices`: seconds of 1, 2, ... tokens, of which each costs `paid` tokens.
Offer offer(const Numbers& confidence, const Worth& worth, const First& first, const Copied& own, const Numbers& prices,
            double paid);

}  // namespace paceline
