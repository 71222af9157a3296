// Blocks of one to three bits, ternary ones, and NVFP4, one by one: what a value means. Layouts: ggml's ggml-common.h; values equal
// those of paceline/ops/blocks.py and paceline/ops/iq_blocks.py to the bit. Included by block_formats.h.
#pragma once

namespace paceline {
namespace PACELINE_ISA {

// By 2 * code + sign; IQ1: by 2 * code, plus one where 1/8 is taken away, times 8.
constexpr int8_t IQ1_VALUES[16] = {-7, -9, 1, -1, 9, 7};
constexpr int8_t IQ2_VALUES[16] = {8, -8, 25, -25, 43, -43};
constexpr int8_t IQ3_XXS_VALUES[16] = {4, -4, 12, -12, 20, -20, 28, -28, 36, -36, 44, -44, 52, -52, 62, -62};
constexpr int8_t IQ3_S_VALUES[16] = {1, -1, 3, -3, 5, -5, 7, -7, 9, -9, 11, -11, 13, -13, 15, -15};

// Of each `group` bytes all lowest pairs of bits, then the next, to the highest.
static void unpack_pairs(const uint8_t* p, int count, int group, int16_t* q) {
  for (int k = 0; k < count; ++k) q[k] = p[k / (4 * group) * group + k % group] >> k % (4 * group) / group * 2 & 3;
}

// `count` digits to base 3 in each of `group` bytes, as a fraction of 256: first digits first.
static void unpack_trits(const uint8_t* p, int group, int count, int16_t* q) {
  for (int n = 0, power = 1; n < count; ++n, power *= 3)
    for (int i = 0; i < group; ++i) q[n * group + i] = static_cast<int16_t>((static_cast<uint8_t>(p[i] * power) * 3 >> 8) - 1);
}

static uint8_t even_signs(uint32_t seven) {  // the eighth makes their number even
  const uint32_t low = seven & 127;
  uint32_t odd = low ^ low >> 4;
  odd ^= odd >> 2, odd ^= odd >> 1;
  return static_cast<uint8_t>(low | (odd & 1) << 7);
}

// Entry `at` of a grid of eight, or of four, to places in a table.
static void put_eight(int at, uint32_t signs, int16_t* q) {
  for (int j = 0; j < 8; ++j) q[j] = static_cast<int16_t>((grids[at] >> 2 * j & 3) * 2 + (signs >> j & 1));
}
static void put_four(int at, uint32_t signs, int16_t* q) {
  for (int j = 0; j < 4; ++j) q[j] = static_cast<int16_t>((grids[at] >> 3 * j & 7) * 2 + (signs >> j & 1));
}

PL_INLINE uint32_t word_at(const uint8_t* p) { return half_at(p) | static_cast<uint32_t>(half_at(p + 2)) << 16; }

static void set_scales(Block& b, int from, int count, uint32_t stored) {  // of 16 values each
  for (int k = from; k < from + count; ++k) b.s[k] = static_cast<uint8_t>(2 * stored + 1);
}

static void decode_iq2(int kind, const uint8_t* p, Block& b) {
  b.table = IQ2_VALUES;
  b.d = half_at(p);
  for (int i = 0; i < 32; ++i) {  // eight values each
    int at = 0;
    uint8_t signs = 0;
    if (kind == IQ2_XXS) {
      const uint32_t word = word_at(p + 2 + i / 4 * 8 + 4);
      at = IQ2_XXS_GRID + p[2 + i / 4 * 8 + i % 4], signs = even_signs(word >> i % 4 * 7);
      set_scales(b, i / 2, 1, word >> 28);
    } else if (kind == IQ2_XS) {
      const int word = half_at(p + 2 + 2 * i);
      at = IQ2_XS_GRID + (word & 511), signs = even_signs(word >> 9);
      set_scales(b, i / 2, 1, p[66 + i / 4] >> i / 2 % 2 * 4 & 15);
    } else {
      at = IQ2_S_GRID + (p[2 + i] | (p[66 + i / 4] >> i % 4 * 2 & 3) << 8), signs = p[34 + i];
      set_scales(b, i / 2, 1, p[74 + i / 4] >> i / 2 % 2 * 4 & 15);
    }
    put_eight(at, signs, b.q + 8 * i);
  }
}

static void decode_iq3(int kind, const uint8_t* p, Block& b) {
  b.table = kind == IQ3_XXS ? IQ3_XXS_VALUES : IQ3_S_VALUES;
  b.d = half_at(p);
  for (int i = 0; i < 64; ++i) {  // four values each
    int at = p[2 + i];
    uint8_t signs = 0;
    if (kind == IQ3_XXS) {
      const uint32_t word = word_at(p + 66 + i / 8 * 4);
      at += IQ3_XXS_GRID, signs = even_signs(word >> i % 8 / 2 * 7);
      set_scales(b, i / 4, 1, word >> 28);
    } else {
      at += IQ3_S_GRID + (p[66 + i / 8] >> i % 8 & 1) * 256, signs = p[74 + i / 2];
      set_scales(b, i / 4, 1, p[106 + i / 16] >> i / 8 % 2 * 4 & 15);
    }
    put_four(at, signs >> i % 2 * 4, b.q + 4 * i);
  }
}

static void decode_iq1(int kind, const uint8_t* p, Block& b) {
  b.table = IQ1_VALUES;
  if (kind == IQ1_S) b.d = half_at(p);
  else b.d = static_cast<uint16_t>(half_at(p + 48) >> 12 | half_at(p + 50) >> 12 << 4 | half_at(p + 52) >> 12 << 8 | half_at(p + 54) >> 12 << 12);
  for (int i = 0; i < 32; ++i) {  // eight values each
    int at = 0, below = 0;
    if (kind == IQ1_S) {
      const int word = half_at(p + 34 + i / 4 * 2);
      at = p[2 + i] | (word >> i % 4 * 3 & 7) << 8, below = word >> 15;
      set_scales(b, i / 2, 1, word >> 12 & 7);
    } else {
      const int high = p[32 + i / 2] >> i % 2 * 4;
      at = p[i] | (high & 7) << 8, below = high >> 3 & 1;
      set_scales(b, i / 2, 1, half_at(p + 48 + i / 8 * 2) >> i / 2 % 4 * 3 & 7);
    }
    put_eight(IQ1_GRID + at, below ? 255 : 0, b.q + 8 * i);
  }
}

static void decode_q2_k(const uint8_t* p, Block& b) {
  b.mins = true;
  b.d = half_at(p + 80), b.m = half_at(p + 82);
  for (int k = 0; k < 16; ++k) b.s[k] = p[k] & 15, b.l[k] = p[k] >> 4;
  unpack_pairs(p + 16, 256, 32, b.q);
}

static void decode_q3_k(const uint8_t* p, Block& b) {
  b.d = half_at(p + 108);
  for (int k = 0; k < 16; ++k) {
    const int low = p[96 + k % 8] >> k / 8 * 4 & 15, high = p[104 + k % 4] >> k / 4 * 2 & 3;
    b.s[k] = static_cast<uint8_t>((low | high << 4) - 32);
  }
  unpack_pairs(p + 32, 256, 32, b.q);
  for (int k = 0; k < 256; ++k) b.q[k] = static_cast<int16_t>((b.q[k] | (p[k % 32] >> k / 32 & 1) << 2) - 4);
}

// One float16 for all values.
static void decode_ternary(int kind, const uint8_t* p, Block& b) {
  for (uint8_t& one : b.s) one = 1;
  if (kind == TQ1_0) {
    b.d = half_at(p + 52);
    unpack_trits(p, 32, 5, b.q), unpack_trits(p + 32, 16, 5, b.q + 160), unpack_trits(p + 48, 4, 4, b.q + 240);
    return;
  }
  b.d = half_at(kind == TQ2_0 ? p + 64 : p);
  if (kind == Q1_0) {
    for (int k = 0; k < 128; ++k) b.q[k] = static_cast<int16_t>((p[2 + k / 8] >> k % 8 & 1) * 2 - 1);
    return;
  }
  unpack_pairs(kind == TQ2_0 ? p : p + 2, b.elements, kind == TQ2_0 ? 32 : 1, b.q);
  for (int k = 0; k < b.elements; ++k) b.q[k] = static_cast<int16_t>(b.q[k] - 1);
}

static void decode_nvfp4(const uint8_t* p, float beside, Block& b) {
  b.table = E2M1_VALUES;
  for (int k = 0; k < 4; ++k) {
    const int exponent = p[k] >> 3 & 15, rest = p[k] & 7;  // half of the scale, because the table is doubled
    const float one = exponent == 0 ? static_cast<float>(rest) / 1024 : static_cast<float>(8 + rest) * static_cast<float>(1 << exponent) / 2048;
    b.scale[k] = (p[k] == 0x7f ? 0.0f : one) * beside;
    unpack_halves(p + 4 + 8 * k, 16, 8, b.q + 16 * k);
  }
}

// `beside`: what scales of NVFP4 are multiplied with.
static void decode_few_bits(int kind, const uint8_t* p, float beside, Block& b) {
  b.elements = static_cast<int>(block_size(kind).elements);
  b.mins = false, b.table = nullptr, b.m = 0;
  float power = 1;
  switch (kind) {
    case Q2_K: decode_q2_k(p, b); break;
    case Q3_K: decode_q3_k(p, b); break;
    case IQ2_XXS: case IQ2_XS: case IQ2_S: decode_iq2(kind, p, b), power = 0.125f; break;
    case IQ3_XXS: decode_iq3(kind, p, b), power = 0.25f; break;
    case IQ3_S: decode_iq3(kind, p, b); break;
    case IQ1_S: case IQ1_M: decode_iq1(kind, p, b), power = 0.125f; break;
    case NVFP4: decode_nvfp4(p, beside, b); return;
    default: decode_ternary(kind, p, b);
  }
  const float d = half_value(b.d) * power, m = half_value(b.m);
  for (int g = 0; g < b.elements / 16; ++g) {
    b.scale[g] = d * static_cast<float>(kind == Q3_K ? static_cast<int8_t>(b.s[g]) : static_cast<int>(b.s[g]));
    b.least[g] = b.mins ? -(m * static_cast<float>(b.l[g])) : 0.0f;
  }
}

}  // namespace PACELINE_ISA
}  // namespace paceline
