// y = x W^T for pairs of bfloat16 in AMX's tile registers: 16 rows by 16 outputs each, 32 inputs at a time. A sum takes the
// inputs 32 by 32, whatever else a call computes: bits of y[r, o] depend on x[r] and W[o] only. They are not those of
// ByPairs and ByFloats: an instruction adds its 32 products before they reach the total. Subnormals count as 0 here, too.
#pragma once

#include "simd.h"
#include "types.h"

namespace paceline {
namespace PACELINE_ISA {

#if defined(PL_PAIRS)

constexpr int64_t SIDE = 16, DEPTH = 32;      // rows and outputs of a register; inputs of one instruction
constexpr int64_t LINE = 4 * 2 * SIDE;        // bytes from a pair of inputs of a tile to the next: 2 * SIDE outputs
constexpr int64_t FAR = 16384;                // bytes of weights that are fetched ahead of few rows
constexpr int64_t BLOCK_OF_INPUTS = 2048;     // of many rows

// Registers 0 to 3 hold sums: of the first rows (0, 1) and of those behind them (2, 3). 4 and 5 hold these rows' inputs, 6 and
// 7 weights. `first`, `second`: how many rows; 0 if there are none behind the first.
class Registers {
 public:
  ~Registers() { __asm__ volatile("tilerelease"); }

  void shape(int64_t first, int64_t second) {
    if (first == first_ && second == second_) return;
    first_ = first, second_ = second;
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; ++i) config.bytes[i] = 4 * SIDE, config.rows[i] = SIDE;
    config.rows[0] = config.rows[1] = config.rows[4] = static_cast<uint8_t>(first);
    config.rows[2] = config.rows[3] = config.rows[5] = static_cast<uint8_t>(second ? second : SIDE);
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
  }

 private:
  int64_t first_ = -1, second_ = -1;
};

template <bool two>
PL_INLINE void add_products(const char* w, const int16_t* x, const int16_t* behind, int64_t x_stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm6" : : "r"(w), "r"(LINE) : "memory");
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm4" : : "r"(x), "r"(2 * x_stride) : "memory");
  __asm__ volatile("tdpbf16ps %tmm6, %tmm4, %tmm0");
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm7" : : "r"(w + 4 * SIDE), "r"(LINE) : "memory");
  __asm__ volatile("tdpbf16ps %tmm7, %tmm4, %tmm1");
  if constexpr (two) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm5" : : "r"(behind), "r"(2 * x_stride) : "memory");
    __asm__ volatile("tdpbf16ps %tmm6, %tmm5, %tmm2");
    __asm__ volatile("tdpbf16ps %tmm7, %tmm5, %tmm3");
  }
}

// The inputs that are left behind whole steps, filled up with 0.
template <bool two>
static void add_rest(const char* w, const int16_t* x, int64_t x_stride, int64_t rows, int64_t left) {
  alignas(64) int16_t inputs[2 * SIDE * DEPTH] = {};
  alignas(64) char weights[SIDE * LINE] = {};
  for (int64_t r = 0; r < rows; ++r) std::memcpy(inputs + r * DEPTH, x + r * x_stride, 2 * left);
  std::memcpy(weights, w, left / 2 * LINE);
  add_products<two>(weights, inputs, inputs + SIDE * DEPTH, DEPTH);
}

// Sums of up to 2 * SIDE rows and as many outputs from and to memory.
template <bool two>
PL_INLINE void load_sums(const float* y, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm0" : : "r"(y), "r"(4 * stride) : "memory");
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm1" : : "r"(y + SIDE), "r"(4 * stride) : "memory");
  if constexpr (two) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm2" : : "r"(y + SIDE * stride), "r"(4 * stride) : "memory");
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm3" : : "r"(y + SIDE * stride + SIDE), "r"(4 * stride) : "memory");
  }
}
template <bool two>
PL_INLINE void store_sums(float* y, int64_t stride) {
  __asm__ volatile("tilestored %%tmm0, (%0,%1,1)" : : "r"(y), "r"(4 * stride) : "memory");
  __asm__ volatile("tilestored %%tmm1, (%0,%1,1)" : : "r"(y + SIDE), "r"(4 * stride) : "memory");
  if constexpr (two) {
    __asm__ volatile("tilestored %%tmm2, (%0,%1,1)" : : "r"(y + SIDE * stride), "r"(4 * stride) : "memory");
    __asm__ volatile("tilestored %%tmm3, (%0,%1,1)" : : "r"(y + SIDE * stride + SIDE), "r"(4 * stride) : "memory");
  }
}

struct Part {  // inputs k..k + depth - 1 of some rows, and what is fetched meanwhile
  int64_t k, depth, rows;
  const char* ahead;  // weights that come next: `lines` of 64 bytes for each step
  int64_t lines;
};

// `w`, `x`: weights and inputs of the block; y: sums so far, of which the first `outputs` are wanted.
template <bool two>
static void products(const Part& b, const char* w, const int16_t* x, int64_t x_stride, float* y, int64_t y_stride,
                     int64_t outputs) {
  if (b.k > 0) {
    load_sums<two>(y, y_stride);
  } else {
    __asm__ volatile("tilezero %tmm0");
    __asm__ volatile("tilezero %tmm1");
    if constexpr (two) __asm__ volatile("tilezero %tmm2");
    if constexpr (two) __asm__ volatile("tilezero %tmm3");
  }
  const char* ahead = b.ahead;
  int64_t k = 0;
  for (; k + DEPTH <= b.depth; k += DEPTH, w += SIDE * LINE, x += DEPTH) {
    for (int64_t i = 0; i < b.lines; ++i, ahead += 64) prefetch_far(ahead);
    add_products<two>(w, x, x + SIDE * x_stride, x_stride);
  }
  if (k < b.depth) add_rest<two>(w, x, x_stride, b.rows, b.depth - k);
  if (outputs >= 2 * SIDE) return store_sums<two>(y, y_stride);
  alignas(64) float room[4 * SIDE * SIDE];
  store_sums<two>(room, 2 * SIDE);
  for (int64_t r = 0; r < b.rows; ++r) std::memcpy(y + r * y_stride, room + r * 2 * SIDE, 4 * outputs);
}

// y[r, o] for o in [begin, end); `begin` is a multiple of 2 * SIDE. `in` is even, rows of x are prepared as ByPairs' are.
// Many rows take the inputs block by block, so that a block's weights stay in the second-level cache; sums wait in y.
static void linear_in_registers(const Tiles& m, int64_t in, const Prepared& x, int64_t rows, int64_t begin, int64_t end,
                                float* y, int64_t y_stride) {
  Registers registers;
  const bool many = rows > 2 * SIDE && end % (2 * SIDE) == 0;
  const int64_t tile_bytes = in / 2 * LINE, width = (end - begin + 2 * SIDE - 1) / (2 * SIDE) * tile_bytes;
  const int64_t turns = (rows + 2 * SIDE - 1) / (2 * SIDE), lines = (SIDE * LINE / 64 + turns - 1) / turns;
  Part b{0, 0, 0, nullptr, lines};
  for (; b.k < in; b.k += b.depth) {
    b.depth = many && in - b.k > 2 * BLOCK_OF_INPUTS ? BLOCK_OF_INPUTS : in - b.k;
    for (int64_t r = 0; r < rows; r += b.rows) {
      b.rows = rows - r < 2 * SIDE ? rows - r : 2 * SIDE;
      registers.shape(b.rows < SIDE ? b.rows : SIDE, b.rows > SIDE ? b.rows - SIDE : 0);
      const int16_t* row = static_cast<const int16_t*>(x.data) + r * x.stride + b.k;
      for (int64_t o = begin; o < end; o += 2 * SIDE) {
        const char* w = static_cast<const char*>(m.data) + o / (2 * SIDE) * tile_bytes + b.k / 2 * LINE;
        b.ahead = turns == 1 ? w + FAR : b.k + b.depth < in ? w + b.depth / 2 * LINE : w - b.k / 2 * LINE + width;
        b.ahead += r / (2 * SIDE) * (b.depth / DEPTH) * lines * 64;
        float* sums = y + r * y_stride + o;
        if (b.rows > SIDE) products<true>(b, w, row, x.stride, sums, y_stride, end - o);
        else products<false>(b, w, row, x.stride, sums, y_stride, end - o);
      }
    }
  }
}

#endif

}  // namespace PACELINE_ISA
}  // namespace paceline
