// A whole draft round: the drafter's step, the draw of its token and the hand-over to the next step, one call for all.
#pragma once

#include <cstdint>
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
  int64_t ids_stride = 0;
};

struct RoundRow {  // how a row's tokens are drawn; `position` is that of its first drafted token
  DrawRow draw;
  uint64_t seed = 0;
  int64_t position = 0;
};

struct RoundStart {  // by row: the last token, its position, the sequence's slot, and the state to draft from
  std::vector<int64_t> tokens;
  std::vector<int32_t> positions, slots;
  std::vector<float> hidden;  // [rows][hidden_width]
};

// Returns a Status; out is [steps][rows].
int draft_round(Program& program, const RoundPlan& plan, RoundStart start, const std::vector<RoundRow>& how, int steps,
                std::vector<Drawn>* out);

}  // namespace paceline
