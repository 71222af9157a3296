// Weights in blocks, one by one: what a value means. INT4's scales lie apart, see Matrix. The other layouts are those of ggml's ggml-common.h; values equal those of
// paceline/ops/blocks.py to the bit, so each product and sum stands here in the same order.
#pragma once

#include <cstring>

#include "simd.h"
#include "types.h"

namespace paceline {
namespace PACELINE_ISA {

struct Block {  // value k is scale[k / 16] * q[k], plus least[k / 16] if `mins`; with a table it has table[q[k]] for q[k]
  int elements;
  bool mins;
  const int8_t* table;
  int16_t q[256];
  float scale[16], least[16];
  uint16_t d, m;        // float16 of the block
  uint8_t s[16], l[16];  // what they are multiplied with, by 16 values: 4 to 8 bits, with a sign in Q3_K, Q6_K and IQ4_XS
};

static float half_value(uint16_t half) {
  uint32_t word = static_cast<uint32_t>(half & 0x7fff) << 13;
  float value;
  std::memcpy(&value, &word, 4);
  value *= 0x1p112f;  // exponents of float16 are 112 less
  std::memcpy(&word, &value, 4);
  if ((half & 0x7c00) == 0x7c00) word |= 0x7f800000u;  // infinity, or no number
  word |= static_cast<uint32_t>(half & 0x8000) << 16;
  std::memcpy(&value, &word, 4);
  return value;
}

PL_INLINE uint16_t half_at(const uint8_t* p) { return static_cast<uint16_t>(p[0] | p[1] << 8); }

// Of each `group` bytes all low halves, then all high ones; `bits` of 32 groups may hold a fifth bit of each value.
static void unpack_halves(const uint8_t* p, int count, int group, int16_t* q) {
  for (int k = 0; k < count; ++k) {
    const uint8_t byte = p[k / (2 * group) * group + k % group];
    q[k] = k % (2 * group) < group ? byte & 15 : byte >> 4;
  }
}

static void unpack_six_bits(const uint8_t* p, Block& b) {  // 8 scales and 8 minima in 12 bytes
  for (int k = 0; k < 16; ++k) {
    const int j = k / 2;
    b.s[k] = j < 4 ? p[j] & 63 : (p[j + 4] & 15) | (p[j - 4] >> 6 << 4);
    b.l[k] = j < 4 ? p[j + 4] & 63 : p[j + 4] >> 4 | (p[j] >> 6 << 4);
  }
}

constexpr int8_t IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t E2M1_VALUES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // doubled

static void decode_int4(const uint8_t* p, float scale, Block& b) {  // 32 values
  b.elements = 32, b.mins = false, b.table = nullptr;
  b.scale[0] = b.scale[1] = scale;
  for (int k = 0; k < 32; ++k) b.q[k] = static_cast<int16_t>((p[k / 2] >> k % 2 * 4 & 15) - 8);
}

static void decode_small(int kind, const uint8_t* p, Block& b) {  // 32 values
  b.elements = 32;
  b.table = kind == MXFP4 ? E2M1_VALUES : kind == IQ4_NL ? IQ4_VALUES : nullptr;
  b.d = half_at(p);
  b.mins = kind == Q4_1 || kind == Q5_1;
  b.m = b.mins ? half_at(p + 2) : 0;
  float scale = half_value(b.d);
  if (kind == Q8_0) {
    for (int k = 0; k < 32; ++k) b.q[k] = static_cast<int8_t>(p[2 + k]);
  } else if (kind == MXFP4) {  // half of 2^(e - 127), because the table is doubled
    const uint32_t e = p[0], word = e < 2 ? 0x00200000u << e : (e - 1) << 23;
    std::memcpy(&scale, &word, 4);
    unpack_halves(p + 1, 32, 16, b.q);
  } else {
    const bool fifth = kind == Q5_0 || kind == Q5_1;
    const uint8_t* rest = p + (b.mins ? 4 : 2);
    unpack_halves(rest + (fifth ? 4 : 0), 32, 16, b.q);
    for (int k = 0; k < 32; ++k) {
      if (fifth) b.q[k] = static_cast<int16_t>(b.q[k] | (rest[k / 8] >> k % 8 & 1) << 4);
      if (kind == Q4_0) b.q[k] = static_cast<int16_t>(b.q[k] - 8);
      if (kind == Q5_0) b.q[k] = static_cast<int16_t>(b.q[k] - 16);
    }
  }
  for (int g = 0; g < 2; ++g) b.scale[g] = scale, b.least[g] = half_value(b.m);
}

static void decode_large(int kind, const uint8_t* p, Block& b) {  // 256 values
  b.elements = 256;
  b.table = kind == IQ4_XS ? IQ4_VALUES : nullptr;
  b.mins = kind == Q4_K || kind == Q5_K;
  if (b.mins) {
    b.d = half_at(p), b.m = half_at(p + 2);
    unpack_six_bits(p + 4, b);
    unpack_halves(p + (kind == Q4_K ? 16 : 48), 256, 32, b.q);
    for (int k = 0; kind == Q5_K && k < 256; ++k)
      b.q[k] = static_cast<int16_t>(b.q[k] | (p[16 + k % 32] >> k / 32 & 1) << 4);
  } else if (kind == Q6_K) {
    b.d = half_at(p + 208);
    std::memcpy(b.s, p + 192, 16);
    unpack_halves(p, 256, 64, b.q);
    for (int k = 0; k < 256; ++k) {
      const int high = p[128 + k / 128 * 32 + k % 32] >> k % 128 / 32 * 2 & 3;
      b.q[k] = static_cast<int16_t>((b.q[k] | high << 4) - 32);
    }
  } else {  // IQ4_XS
    b.d = half_at(p);
    for (int k = 0; k < 16; ++k) {
      const int j = k / 2, low = p[4 + j / 2] >> j % 2 * 4 & 15, high = half_at(p + 2) >> 2 * j & 3;
      b.s[k] = static_cast<uint8_t>((low | high << 4) - 32);
    }
    unpack_halves(p + 8, 256, 16, b.q);
  }
  const float d = half_value(b.d), m = b.mins ? half_value(b.m) : 0.0f;
  for (int g = 0; g < 16; ++g) {
    b.scale[g] = d * static_cast<float>(b.mins ? b.s[g] : static_cast<int8_t>(b.s[g]));
    b.least[g] = b.mins ? -(m * static_cast<float>(b.l[g])) : 0.0f;
  }
}

}  // namespace PACELINE_ISA
}  // namespace paceline

#include "few_bits.h"

namespace paceline {
namespace PACELINE_ISA {

// The block at inputs i... of output `row`.
static void decode(const Matrix& m, int64_t row, int64_t i, Block& b) {
  const int kind = m.kind & ~EXACT;
  const BlockSize size = block_size(kind);
  const uint8_t* p = static_cast<const uint8_t*>(m.data) + row * m.row_bytes() + i / size.elements * size.bytes;
  if (kind == INT4) decode_int4(p, m.scale[row * (m.in / 32) + i / 32], b);
  else if (kind > INT4) decode_few_bits(kind, p, kind == NVFP4 && m.scale ? m.scale[row] : 1.0f, b);
  else if (size.elements == 32) decode_small(kind, p, b);
  else decode_large(kind, p, b);
}

static void embed_blocks(const Matrix& m, int64_t token, float factor, float* y) {
  Block b;
  for (int64_t i = 0; i < m.in; i += b.elements) {
    decode(m, token, i, b);
    for (int k = 0; k < b.elements; ++k) {
      float w = b.scale[k / 16] * static_cast<float>(b.table ? b.table[b.q[k]] : b.q[k]);
      if (b.mins) w += b.least[k / 16];
      y[i + k] = w * factor;
    }
  }
}

}  // namespace PACELINE_ISA
}  // namespace paceline
