// A whole draft round: the drafter's step, the draw of its token and the hand-over to the next step, one call for all.
// A row takes part until its draft is long enough, or what was drawn is too unlikely to be kept to draw on; and all end
// together where what they would gain does not pay for another step.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "program.h"
#include "sampling.h"

namespace paceline {

struct RoundPlan {  // where the recorded step reads and writes
  int hidden_buffer = 0;           // its input, [rows][hidden_width]
  int64_t hidden_width = 0;
  const float* after = nullptr;    // its output that feeds the next step
  int64_t after_stride = 0;
  const float* logits = nullptr;   // [rows][width]
  int64_t logits_stride = 0, width = 0;
  const int64_t* ids = nullptr;    // [rows][width] token ids of the logits; null: the whole vocabulary
  int64_t ids_stride = 0;          // 0: all rows have the same
  bool moves = false;              // each step stands one position further, not all at one
};

using Worth = std::vector<std::pair<double, double>>;  // chance to be kept, by bin of the confidence: at 0, and its rise until 1

// What a confidence is worth; NaN and what is no probability as much as 0.
double worth_of(const Worth& worth, double confidence);

struct Stop {  // when a row's draft ends
  int most = 0;                // tokens
  std::vector<double> chance;  // that token 1, 2, ... is kept if those before it are; empty: it goes on until `most`
  Worth worth;
  double price = 0, step = 0;  // tokens that a further one of this row must gain, and those of all rows beyond that
};

struct RoundRow {  // how a row's tokens are drawn; `position` is that of its first drafted token
  DrawRow draw;
  uint64_t seed = 0;
  int64_t position = 0;
  Stop stop;
  double alive = 1;  // chance that all tokens so far are kept

  // Tokens that another one gains after this one, net of its price; -inf where none may follow, inf where one has to.
  double gain(int step, double confidence);
};

struct Scores {  // of the tokens that a step draws
  const float* logits = nullptr;  // [rows][width]
  int64_t stride = 0, width = 0;
  const int64_t* ids = nullptr;   // [rows][width] token ids of the logits; null: the whole vocabulary
  int64_t ids_stride = 0;         // 0: all rows have the same
  const float* sure = nullptr;    // [rows] logits of the drafter's own confidence; null: that is the token's probability
  int64_t sure_stride = 0;
};

// The least chance that a token drawn with the target's noise is kept: c / (2 - c), c the sigmoid of the logit.
double shared_chance(double logit);

class RoundRows {  // the rows of a round, as long as each takes part
 public:
  RoundRows(std::vector<RoundRow> how, std::vector<Drawn>* out);
  int64_t count() const { return static_cast<int64_t>(active_.size()); }  // that take part
  int64_t row(int64_t place) const { return active_[place]; }             // which of the round
  const Drawn& drawn(int64_t place) const { return drawn_[place]; }       // by the places before the draw
  // Draw a token for each; the places of those that go on, and only these take part from then on.
  std::vector<int64_t> draw_step(int step, const Scores& scores);

 private:
  std::vector<RoundRow> how_;
  std::vector<int64_t> active_;
  std::vector<DrawRow> draws_;
  std::vector<Drawn> drawn_;
  std::vector<double> gains_;
  std::vector<Drawn>* out_;
};

struct RoundStart {  // by row: the last token, its position, the sequence's slot, and the state to draft from
  std::vector<int64_t> tokens;
  std::vector<int32_t> positions, slots;
  std::vector<float> hidden;  // [rows][hidden_width]
};

struct Lead {  // what gives a round's first token in place of the step: all rows that wait, and the scores of some of them
  Program *look = nullptr, *head = nullptr;  // `look` has its input
  std::vector<int64_t> tokens;
  std::vector<int32_t> positions, slots;
  std::vector<int64_t> last;      // by row of the round: which of those it goes on from
  const float* after = nullptr;   // results of `look`: what the step reads,
  int64_t after_stride = 0;
  const float* seen = nullptr;    // and what `head` reads
  int64_t seen_stride = 0;
  int head_buffer = 0;            // its input, [rows][head_width]
  int64_t head_width = 0;
  const float* logits = nullptr;  // of `head`, as those of the step
  int64_t logits_stride = 0;

  int run() const;  // a Status
};

// Returns a Status; out is [steps][rows], without a token where a row did not take part any more. With a lead, `start`
// has no states, and its positions are those of the rows `last`.
int draft_round(Program& program, const RoundPlan& plan, RoundStart start, std::vector<RoundRow> how, const Lead* lead,
                std::vector<Drawn>* out);

struct Feed {  // an input of a chain's step that was computed for all steps before: [rows][steps][width]
  int buffer = 0;
  const float* data = nullptr;
  int64_t width = 0, steps = 0;
};

struct ChainPlan {  // where the recorded step of a chain reads and writes; it has no K/V
  std::vector<Feed> feeds;
  int state_buffer = -1;           // what a step hands to the next one, zeros at first; -1: nothing
  int64_t state_width = 0;
  const float* after = nullptr;    // its output that is this
  int64_t after_stride = 0;
  Scores scores;
};

// As `draft_round`, for blocks whose tokens are scored beside the token before, see models/drafters/dspark.py.
int chain_round(Program& program, const ChainPlan& plan, std::vector<int64_t> tokens, std::vector<RoundRow> how,
                std::vector<Drawn>* out);

}  // namespace paceline
