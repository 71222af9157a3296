// y = x W^T for few rows. Each loaded weight vector is applied to all rows of a tile, so that more rows cost arithmetic
// but no memory traffic. One accumulator per (row, output) runs along `in` in steps of one block whatever the tile, and
// is summed by one fixed tree: bits of y[r, o] depend on x[r] and W[o] only.
#pragma once

#include "simd.h"
#include "types.h"

namespace paceline {
namespace PACELINE_ISA {

constexpr int GROUP = 24;  // most outputs whose accumulators are kept while `in` is walked in cache-sized parts

// Bytes of input that a part of `in` holds for all rows of a tile: beside them, 32 KB of first-level cache has room for a
// panel of weights and the next one. An input that fits ONE_PART is not cut: longer runs of weights are read faster.
constexpr int64_t PART = 12288, ONE_PART = 24576;
constexpr int64_t AHEAD = 4096;  // bytes of weights to fetch ahead at least: panels of short rows are over before they arrive
constexpr int64_t SPREAD = 1536;  // rows of prepared input lie this far from a multiple of 4 KB, see prepared_bytes

// What a weight kind means by a block of `in`: its size, its parts, how to load and multiply one. `roomy`: the tile leaves
// registers for constants.
struct Float32 {
  using X = float;
  using W = V;
  using A = V;
  using Sum = float;
  static constexpr int parts = 2, block = parts * L, bytes = 4 * block;
  static constexpr bool scaled = false;  // a scale per block
  template <bool>
  PL_INLINE W weight(const char* w, const float*, int64_t b, int part) {
    return pin(load(reinterpret_cast<const float*>(w + b * bytes) + part * L));
  }
  PL_INLINE V input(const X* x, int64_t b, int part) { return load(x + b * block + part * L); }
  PL_INLINE A madd(W w, V x, A a) { return fma(w, x, a); }
  PL_INLINE F8 lanes(A a) { return half(a); }
  PL_INLINE float finish(float sum, const float*, float) { return sum; }
};

struct Bfloat16 {  // the even values of 2 L are the low halves of their words: prepared x has evens first, then odds
  using X = float;
  using W = V;
  using A = V;
  using Sum = float;
  static constexpr int parts = 4, block = parts * L, bytes = 2 * block;
  static constexpr bool scaled = false;
  template <bool roomy>
  PL_INLINE W weight(const char* w, const float*, int64_t b, int part) {
    VW words = *reinterpret_cast<const VWMem*>(w + b * bytes + part / 2 * (4 * L));
    return pin(part % 2 == 0 ? (V)(words << 16) : roomy ? (V)(words & 0xffff0000u) : (V)high_halves(words));
  }
  PL_INLINE V input(const X* x, int64_t b, int part) { return load(x + b * block + part * L); }
  PL_INLINE A madd(W w, V x, A a) { return fma(w, x, a); }
  PL_INLINE F8 lanes(A a) { return half(a); }
  PL_INLINE float finish(float sum, const float*, float) { return sum; }
};

struct Int8 {
  using X = int16_t;
  using W = H16;
  using A = I8;
  using Sum = int32_t;
  static constexpr int block = 16, parts = 1, bytes = 16;
  static constexpr bool scaled = false;
  template <bool>
  PL_INLINE W weight(const char* w, const float*, int64_t b, int) { return load_int8(w + b * 16); }
  PL_INLINE H16 input(const X* x, int64_t b, int) { return load_int16(x + b * 16); }
  PL_INLINE A madd(W w, H16 x, A a) { return a + dot16(w, x); }
  PL_INLINE I8 lanes(A a) { return a; }
  PL_INLINE float finish(int32_t sum, const float* scale, float row) { return static_cast<float>(sum) * (scale[0] * row); }
};

struct Nibbles {
  H16 even, odd;
  F8 scale;
};
struct Pair {
  H16 even, odd;
};
PL_INLINE Pair pin(const Pair& p) { return {pin(p.even), pin(p.odd)}; }

struct Int4 {
  using X = int16_t;
  using W = Nibbles;
  using A = F8;
  using Sum = float;
  static constexpr int block = 32, parts = 1, bytes = 16;
  static constexpr bool scaled = true;
  template <bool>
  PL_INLINE W weight(const char* w, const float* scale, int64_t b, int) {
    H16 raw = load_uint8(w + b * 16);
    return {(raw & 15) - 8, (raw >> 4) - 8, scale[b] - F8{}};
  }
  PL_INLINE Pair input(const X* x, int64_t b, int) { return {load_int16(x + b * 32), load_int16(x + b * 32 + 16)}; }
  PL_INLINE A madd(const W& w, const Pair& x, A a) {
    I8 sum = dot16(w.even, x.even) + dot16(w.odd, x.odd);
    return fma8(__builtin_convertvector(sum, F8), w.scale, a);
  }
  PL_INLINE F8 lanes(A a) { return a; }
  PL_INLINE float finish(float sum, const float*, float row) { return sum * row; }
};

template <class P>
struct Call {
  const char* data;
  int64_t row_bytes;
  const float* scale;
  int64_t scales;  // per output
  int64_t in, whole;  // values of a row, whole blocks
  const typename P::X* x;
  int64_t x_stride;
  const float* row_scale;
  float* y;
  int64_t y_stride;

  const char* row(int64_t o) const { return data + o * row_bytes; }
  const float* row_scales(int64_t o) const { return scale ? scale + o * scales : nullptr; }
};

template <class P, int R, int O>
PL_INLINE void blocks(const Call<P>& c, const char* const* w, const float* const* s, const typename P::X* x, int64_t b0,
                      int64_t b1, int64_t ahead, typename P::A (&acc)[R][O]) {
  constexpr bool roomy = R * O + O < 15;  // registers are left
  for (int64_t b = b0; b < b1; ++b) {
    PL_UNROLL
    for (int o = 0; o < O; ++o) {
      prefetch(w[o] + b * P::bytes + ahead);
      if (P::bytes > 64) prefetch(w[o] + b * P::bytes + ahead + 64);
      if (P::scaled && b % 16 == 0) prefetch(s[o] + b + ahead / P::bytes);
    }
    PL_UNROLL
    for (int part = 0; part < P::parts; ++part) {
      typename P::W weights[O];
      PL_UNROLL
      for (int o = 0; o < O; ++o) weights[o] = P::template weight<roomy>(w[o], s[o], b, part);
      PL_UNROLL
      for (int r = 0; r < R; ++r) {
        auto input = P::input(x + r * c.x_stride, b, part);
        if (O > 1 && roomy) input = pin(input);  // loaded once, not once per output
        PL_UNROLL
        for (int o = 0; o < O; ++o) {
          acc[r][o] = P::madd(weights[o], input, acc[r][o]);
          if (P::parts > 1 && roomy) acc[r][o] = pin(acc[r][o]);  // else one of 5x2 is kept in memory
        }
      }
    }
  }
}

// The rest of a row, zero-padded: x is prepared with zeros there.
template <class P, int R, int O>
static __attribute__((noinline)) void rest(const Call<P>& c, const char* const* w, const float* const* s,
                                           const typename P::X* x, typename P::A (&acc)[R][O]) {
  char bytes[O][P::bytes] = {};
  const char* shifted[O];
  for (int i = 0; i < O; ++i) {
    std::memcpy(bytes[i], w[i] + c.whole * P::bytes, c.row_bytes - c.whole * P::bytes);
    shifted[i] = bytes[i] - c.whole * P::bytes;
  }
  blocks<P, R, O>(c, shifted, s, x, c.whole, c.whole + 1, 0, acc);
}

// Blocks b0..b1 of outputs o..o+O-1; accumulators live in `kept` between parts, y is written with the last one.
template <class P, int R, int O>
PL_INLINE void tile(const Call<P>& c, int64_t r0, int64_t o, int64_t b0, int64_t b1, int64_t ahead, typename P::A* kept) {
  typename P::A acc[R][O];
  const char* w[O];
  const float* s[O];
  PL_UNROLL
  for (int i = 0; i < O; ++i) w[i] = c.row(o + i), s[i] = c.row_scales(o + i);
  PL_UNROLL
  for (int r = 0; r < R; ++r)
    PL_UNROLL
    for (int i = 0; i < O; ++i) acc[r][i] = b0 == 0 ? typename P::A{} : kept[r * GROUP + i];
  const typename P::X* x = c.x + r0 * c.x_stride;
  blocks<P, R, O>(c, w, s, x, b0, b1, ahead, acc);
  if (b1 < c.whole) {
    PL_UNROLL
    for (int r = 0; r < R; ++r)
      PL_UNROLL
      for (int i = 0; i < O; ++i) kept[r * GROUP + i] = acc[r][i];
    return;
  }
  if (c.whole * P::block < c.in) {
    typename P::A spilled[R][O];
    PL_UNROLL
    for (int r = 0; r < R; ++r)
      PL_UNROLL
      for (int i = 0; i < O; ++i) spilled[r][i] = acc[r][i];
    rest<P, R, O>(c, w, s, x, spilled);
    PL_UNROLL
    for (int r = 0; r < R; ++r)
      PL_UNROLL
      for (int i = 0; i < O; ++i) acc[r][i] = spilled[r][i];
  }
  PL_UNROLL
  for (int r = 0; r < R; ++r)
    PL_UNROLL
    for (int i = 0; i < O; ++i) acc[r][i] = pin(acc[r][i]);  // so that the sums do not decide over the loop's registers
  constexpr int N = R * O;
  typename P::Sum flat[(N + 3) / 4 * 4];  // four at a time, whatever their rows
  PL_UNROLL
  for (int i = 0; i < N; i += 4) {
    const int j = i + 1 < N ? i + 1 : i, k = i + 2 < N ? i + 2 : i, l = i + 3 < N ? i + 3 : i;
    auto four = sums(P::lanes(acc[i / O][i % O]), P::lanes(acc[j / O][j % O]), P::lanes(acc[k / O][k % O]),
                     P::lanes(acc[l / O][l % O]));
    std::memcpy(flat + i, &four, sizeof(four));
  }
  PL_UNROLL
  for (int r = 0; r < R; ++r)
    PL_UNROLL
    for (int i = 0; i < O; ++i)
      c.y[(r0 + r) * c.y_stride + o + i] = P::finish(flat[r * O + i], s[i], c.row_scale ? c.row_scale[r0 + r] : 1.0f);
}

// Rows r0..r0+R+S-1 of outputs begin..end-1, at most GROUP: part of `in` by part, and in each, panel of O outputs by
// panel. A panel is applied to R rows, then from the first-level cache to S more, while the next one is fetched.
template <class P, int R, int S, int O>
static void rows_tile(const Call<P>& c, int64_t r0, int64_t begin, int64_t end) {
  constexpr int64_t block_bytes = (R + S) * static_cast<int64_t>(sizeof(typename P::X)) * P::block;
  int64_t parts = c.whole * block_bytes <= ONE_PART ? 1 : (c.whole * block_bytes + PART - 1) / PART;
  int64_t size = c.whole > parts ? (c.whole + parts - 1) / parts : 1;
  const int64_t panel = O * c.row_bytes, reach = (AHEAD + panel - 1) / panel * panel;
  typename P::A kept[(R + S) * GROUP];
  for (int64_t b0 = 0; b0 == 0 || b0 < c.whole; b0 += size) {
    int64_t b1 = b0 + size < c.whole ? b0 + size : c.whole;
    int64_t o = begin;
    for (; o + O <= end; o += O) {
      int64_t ahead = reach;
      if (o + 2 * O > end) ahead = b1 < c.whole ? (begin - o) * c.row_bytes + size * P::bytes : ahead - b0 * P::bytes;
      tile<P, R, O>(c, r0, o, b0, b1, ahead, kept + (o - begin));
      if constexpr (S > 0) tile<P, S, O>(c, r0 + R, o, b0, b1, ahead, kept + R * GROUP + (o - begin));
    }
    for (; o < end; ++o) {
      tile<P, R, 1>(c, r0, o, b0, b1, 0, kept + (o - begin));
      if constexpr (S > 0) tile<P, S, 1>(c, r0 + R, o, b0, b1, 0, kept + R * GROUP + (o - begin));
    }
  }
}

template <class P>
static void linear_of(const Matrix& m, const Prepared& x, int64_t rows, int64_t begin, int64_t end, float* y,
                      int64_t y_stride) {
  Call<P> c{static_cast<const char*>(m.data), m.row_bytes(), m.scale, m.kind == INT4 ? m.in / 32 : 1, m.in,
            m.in / P::block, static_cast<const typename P::X*>(x.data), x.stride, x.row_scale, y, y_stride};
  constexpr int64_t room = 147456;  // a group of weights and what is fetched for the next stay in the second-level cache
  int64_t size = c.row_bytes * GROUP <= room ? GROUP : c.row_bytes * (GROUP / 2) <= room || rows <= 2 ? GROUP / 2 : GROUP / 4;
  for (int64_t group = begin; group < end; group += size) {
    int64_t stop = group + size < end ? group + size : end;
    int64_t r = 0;
    for (; rows - r > 8; r += 6) rows_tile<P, 6, 0, 2>(c, r, group, stop);
    switch (rows - r) {
      case 1: rows_tile<P, 1, 0, 4>(c, r, group, stop); break;
      case 2: rows_tile<P, 2, 0, 4>(c, r, group, stop); break;
      case 3: rows_tile<P, 3, 0, 3>(c, r, group, stop); break;
      case 4: rows_tile<P, 4, 0, 3>(c, r, group, stop); break;
      case 5: rows_tile<P, 5, 0, 2>(c, r, group, stop); break;
      case 6: rows_tile<P, 6, 0, 2>(c, r, group, stop); break;
      case 7: rows_tile<P, 4, 3, 3>(c, r, group, stop); break;
      case 8: rows_tile<P, 4, 4, 3>(c, r, group, stop); break;
    }
  }
}

static void linear(const Matrix& m, const Prepared& x, int64_t rows, int64_t begin, int64_t end, float* y,
                   int64_t y_stride) {
  switch (m.kind) {
    case FLOAT32: return linear_of<Float32>(m, x, rows, begin, end, y, y_stride);
    case BFLOAT16: return linear_of<Bfloat16>(m, x, rows, begin, end, y, y_stride);
    case INT8: return linear_of<Int8>(m, x, rows, begin, end, y, y_stride);
    case INT4: return linear_of<Int4>(m, x, rows, begin, end, y, y_stride);
  }
}

// --- the form that each kind wants its input in -----------------------------------------------------------------

static int64_t padded(int kind, int64_t in) {
  int64_t block = kind == FLOAT32    ? Float32::block
                  : kind == BFLOAT16 ? Bfloat16::block
                  : kind == INT8     ? Int8::block
                                     : Int4::block;
  return (in + block - 1) / block * block;
}

// Of one row. Rows a multiple of 4 KB apart would all want the same eight places of the first-level cache.
static int64_t prepared_bytes(int kind, int64_t in) {
  int64_t bytes = padded(kind, in) * (kind <= BFLOAT16 ? 4 : 2);
  return bytes <= SPREAD ? bytes : (bytes - SPREAD + 4095) / 4096 * 4096 + SPREAD;
}

static float prepare_int16(int kind, const float* x, int64_t in, int16_t* y) {
  V top{}, total{};
  int64_t i = 0;
  for (; i < in; i += L) {
    V v = (V)((VW)(i + L <= in ? load(x + i) : load_part(x + i, static_cast<int>(in - i))) & 0x7fffffffu);
    top = vmax(top, v);
    total += v;
  }
  float largest = reduce_max(top), size = reduce(total), factor = largest > 0 ? 32767.0f / largest : 0.0f;
  // INT8 sums a whole row in int32: the inputs' sizes together, times 128, must stay below 2^31.
  const float room = 16.7e6f - 0.5f * static_cast<float>(in);
  if (kind == INT8 && size * factor > room) factor = room / size;
  const V factors = broadcast(factor), magic = broadcast(12582912.0f);
  int64_t wide = padded(kind, in);
  for (i = 0; i < wide; i += L) {
    V v = i + L <= in ? load(x + i) : i < in ? load_part(x + i, static_cast<int>(in - i)) : V{};
    VI n = (VI)fma(v, factors, magic) - (VI)magic;
    *reinterpret_cast<HLMem*>(y + i) = __builtin_convertvector(n, HL);
  }
  for (i = 0; kind == INT4 && i < wide; i += 32) {  // evens of a group first, as nibbles are unpacked
    H16 a = load_int16(y + i), b = load_int16(y + i + 16);
    *reinterpret_cast<H16Mem*>(y + i) = evens(a, b);
    *reinterpret_cast<H16Mem*>(y + i + 16) = odds(a, b);
  }
  return factor > 0 ? 1.0f / factor : 0.0f;
}

static void prepare_pairs(const float* x, int64_t in, float* y) {
  for (int64_t i = 0; i < padded(BFLOAT16, in); i += 2 * L) {
    float rest[2 * L] = {};
    const float* from = x + i;
    if (i + 2 * L > in) {
      if (i < in) std::memcpy(rest, from, (in - i) * 4);
      from = rest;
    }
    V a = load(from), b = load(from + L);
    store(y + i, evens(a, b));
    store(y + i + L, odds(a, b));
  }
}

static Prepared prepare(int kind, const float* x, int64_t stride, int64_t rows, int64_t in, void* data, float* scales) {
  if (kind == FLOAT32 && in % Float32::block == 0 && (rows <= 2 || rows * in * 4 <= ONE_PART)) return {x, stride, nullptr};
  int64_t wide = padded(kind, in), step = prepared_bytes(kind, in) / (kind <= BFLOAT16 ? 4 : 2);
  for (int64_t r = 0; r < rows; ++r) {
    const float* from = x + r * stride;
    float* to = static_cast<float*>(data) + r * step;
    if (kind == FLOAT32) {
      std::memcpy(to, from, in * 4);
      std::memset(to + in, 0, (wide - in) * 4);
    } else if (kind == BFLOAT16) {
      prepare_pairs(from, in, to);
    } else {
      scales[r] = prepare_int16(kind, from, in, static_cast<int16_t*>(data) + r * step);
    }
  }
  return {data, step, kind >= INT8 ? scales : nullptr};
}

}  // namespace PACELINE_ISA
}  // namespace paceline
