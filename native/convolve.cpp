// A short convolution over the rows of a text: what rows before it hold lies in pages, as keys do.
#include <algorithm>

#include "program.h"

namespace paceline {

// values: out. integers: layer, rows of the convolution, its weights [row][column] with the row itself last, bias or 0.
void Program::convolve(const Op& op, int64_t row) {
  const Pages& pages = layers_[op.integers[0]].k;
  const int64_t taps = op.integers[1], width = op.values[0].width, slot = rows_.slots[row];
  const float* weights = reinterpret_cast<const float*>(op.integers[2]);
  const float* bias = reinterpret_cast<const float*>(op.integers[3]);
  float* y = at(op.values[0], row);
  std::fill(y, y + width, 0.0f);
  for (int64_t tap = 0; tap < taps; ++tap, weights += width) {  // the oldest row first
    const int64_t position = rows_.positions[row] - (taps - 1) + tap;
    if (position < 0) continue;
    const int64_t page = pages.table[slot * pages.table_stride + position / pages.page_size];
    const int64_t place = page * pages.page_size + position % pages.page_size;
    if (page < 0 || place >= pages.tokens) {
      status_ = BAD_POSITION;
      return;
    }
    const float* x = static_cast<const float*>(pages.pool) + place * width;
    for (int64_t i = 0; i < width; ++i) y[i] += weights[i] * x[i];
  }
  if (bias)
    for (int64_t i = 0; i < width; ++i) y[i] += bias[i];
}

}  // namespace paceline
