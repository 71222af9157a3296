// y = x W^T for weights in blocks, those of GGUF files and int4, and the doors through which all kinds pass.
//
// Two ways to multiply. Inputs rounded to 8 bits, or 16 where weights have 6 or 8, each 16 with a scale of their own: their
// products are summed as integers. Or EXACT: weights become the float32 that they stand for, and are summed in the order of the FLOAT32 kind. Both
// take the groups one after the other, so the bits of y[r, o] depend on x[r] and W[o] only.
#pragma once

#include "block_forms.h"
#include "rowops.h"

namespace paceline {
namespace PACELINE_ISA {

constexpr int MOST_TILE = 32;  // rows whose sums are kept together

constexpr int FAR_ROWS = 6;    // up to which weights are fetched from memory to the second-level cache: more wait for arithmetic
constexpr int PART = 16;       // inputs that share a scale
constexpr int PLACE = 254;     // of 16 bits: PLACE * x + low

template <class T>
struct Inputs {  // of a row: a group
  T x[GROUP];  // -127..127, or PLACE times as much
  float scale[2], sum;  // sum: of the rounded inputs
  int32_t start[2];  // what sums of integers start with, since weights are kept larger than they are; or, where a part has a
                     // minimum of its own, the sum of its inputs
};
using Group = Inputs<int8_t>;
struct WideGroup : Group {
  int8_t low[GROUP];
  int32_t low_start[2];
};
template <bool shorts, bool wide>
struct GroupFor {
  using type = Inputs<int16_t>;
};
template <bool wide>
struct GroupFor<false, wide> {
  using type = Group;
};
template <>
struct GroupFor<false, true> {
  using type = WideGroup;
};
template <class P>
using GroupOf = typename GroupFor<P::shorts, P::wide>::type;
template <class P>
constexpr bool least_by_part = P::Scales::mins && P::Scales::parts == 2;

// --- linear --------------------------------------------------------------------------------------------------------

struct BlockCall {
  const char* data;
  int64_t in, tile_bytes;
  const char* x;
  int64_t x_stride;  // bytes
  float* y;
  int64_t y_stride, end;  // outputs
  bool far;  // weights are fetched to the second-level cache, too, ahead of use
};

PL_INLINE void store_totals(const BlockCall& c, int64_t r0, int64_t rows, int64_t tile, const V (*total)[VECTORS]) {
  for (int64_t r = 0; r < rows; ++r)
    for (int i = 0; i < VECTORS; ++i) {
      const int64_t o = tile * TILE + i * L;
      float* y = c.y + (r0 + r) * c.y_stride + o;
      if (o + L <= c.end) store(y, total[r][i]);
      else if (o < c.end) std::memcpy(y, &total[r][i], 4 * (c.end - o));
    }
}

PL_INLINE void fetch_group(const char* p, int64_t size, bool far) {
  for (int64_t line = 0; line < size; line += 64) {
    prefetch(p + line + AHEAD / 2);
    if (far) prefetch_far(p + line + FAR_AHEAD);
  }
}

// One group of one vector of outputs for a row.
template <class P>
PL_INLINE V add_group(V total, const GroupOf<P>& x, const VW* w, const V* scale, const V* least) {
  constexpr int units = PART / 4;
  constexpr bool one = P::Scales::parts == 1;  // for both parts, so it is multiplied once
  V both{};
  PL_UNROLL
  for (int part = 0; part < 2; ++part) {
    VI start{};
    if constexpr (P::zero != 0) start = broadcast_word(&x.start[part]);
    V sum = __builtin_convertvector((dot<P::top, units>(w + part * units, x.x + part * PART, start)), V);
    if constexpr (P::wide) {
      VI low{};
      if constexpr (P::zero != 0) low = broadcast_word(&x.low_start[part]);
      low = dot<P::top, units>(w + part * units, x.low + part * PART, low);
      sum = fma(sum, broadcast(PLACE), __builtin_convertvector(low, V));
    }
    if constexpr (!one) total = fma(sum, scale[part] * x.scale[part], total);
    if constexpr (least_by_part<P>) total = fma(least[part], broadcast(static_cast<float>(x.start[part]) * x.scale[part]), total);
    if constexpr (one) both = part == 0 ? sum * x.scale[0] : fma(sum, broadcast(x.scale[1]), both);
  }
  if constexpr (one) total = fma(both, scale[0], total);
  return one && P::Scales::mins ? fma(least[0], broadcast(x.sum), total) : total;
}

struct RowGroups {  // a group of some rows
  const char* x;
  int64_t stride, rows;
  template <class P>
  const GroupOf<P>& at(int64_t r) const { return *reinterpret_cast<const GroupOf<P>*>(x + r * stride); }
};

// One group of vector i of outputs for R rows, or x.rows if R is 0: the weights of a part are widened once for all of them.
template <class P, int R>
PL_INLINE void add_shorts(V (*total)[VECTORS], int i, const RowGroups& x, const VW* w, const V* scale) {
  constexpr int units = PART / 4;
  constexpr bool one = P::Scales::parts == 1;
  V both[R ? R : MOST_TILE];
  PL_UNROLL
  for (int part = 0; part < 2; ++part) {
    H wide[units][2];
    PL_UNROLL
    for (int u = 0; u < units; ++u) widen<P::top>(w[part * units + u], wide[u]);
    for (int64_t r = 0; r < (R ? R : x.rows); ++r) {
      const GroupOf<P>& g = x.at<P>(r);
      VI start{};
      if constexpr (P::zero != 0) start = broadcast_word(&g.start[part]);
      const V sum = __builtin_convertvector(dot<2 * units>(wide[0], g.x + part * PART, start), V);
      if constexpr (!one) total[r][i] = fma(sum, scale[part] * g.scale[part], total[r][i]);
      else if (part == 0) both[r] = sum * g.scale[0];
      else total[r][i] = fma(fma(sum, broadcast(g.scale[1]), both[r]), scale[0], total[r][i]);
    }
  }
}

// Rows r0... of one tile: R of them, or `rows` if R is 0. Integers of a group stay in registers for all rows; sums of several
// rows do not: with them there the compiler reads the integers again, and four rows take a quarter longer.
template <class P, int R>
static void block_tile(const BlockCall& c, int64_t r0, int64_t rows, int64_t tile) {
  constexpr int units = GROUP / 4;
  const int64_t n = R ? R : rows;
  V total[R ? R : MOST_TILE][VECTORS];
  for (int64_t r = 0; r < n; ++r) total[r][0] = total[r][1] = V{};
  const char *p = c.data + tile * c.tile_bytes, *head = p;
  const char* x = c.x + r0 * c.x_stride;
  for (int64_t k = 0; k < c.in; k += GROUP, p += P::size, x += sizeof(GroupOf<P>)) {
    if constexpr (P::Scales::head > 0)
      if (k % 256 == 0) head = p, p += P::Scales::head;
    if (r0 == 0) fetch_group(p, P::size, c.far);
    PL_UNROLL
    for (int i = 0; i < VECTORS; ++i) {
      V scale[P::Scales::parts], least[P::Scales::parts]{};
      P::Scales::load(head, p, i, scale, least);
      VW w[units];
      PL_UNROLL
      for (int u = 0; u < units; ++u) w[u] = P::integers(p, u, i);
      if constexpr (P::shorts) {
        add_shorts<P, R>(total, i, {x, c.x_stride, n}, w, scale);
      } else if constexpr (R > 0) {
        PL_UNROLL
        for (int r = 0; r < R; ++r)
          total[r][i] = add_group<P>(total[r][i], *reinterpret_cast<const GroupOf<P>*>(x + r * c.x_stride), w, scale, least);
      } else {
        const char* row = x;
        for (int64_t r = 0; r < n; ++r, row += c.x_stride)
          total[r][i] = add_group<P>(total[r][i], *reinterpret_cast<const GroupOf<P>*>(row), w, scale, least);
      }
    }
  }
  store_totals(c, r0, n, tile, total);
}

template <class P>
static void block_rows(const BlockCall& c, int64_t r0, int64_t rows, int64_t tile) {
  if (DOTS && rows == 1) block_tile<P, 1>(c, r0, rows, tile);
  else block_tile<P, 0>(c, r0, rows, tile);
}

// Inputs from..to of a tile as float32 in the layout of the FLOAT32 kind.
template <class P>
static void widen(const BlockCall& c, int64_t tile, int64_t from, int64_t to, char* out) {
  const char* start = c.data + tile * c.tile_bytes;
  for (int64_t k = from; k < to; k += GROUP) {
    const char* head = start + k / 256 * (P::Scales::head + 256 / GROUP * P::size);
    const char* p = P::Scales::head > 0 ? head + P::Scales::head + k % 256 / GROUP * P::size : start + k / GROUP * P::size;
    fetch_group(p, P::size, c.far);
    for (int i = 0; i < VECTORS; ++i) {
      V scale[P::Scales::parts], least[P::Scales::parts]{};
      P::Scales::load(head, p, i, scale, least);
      for (int j = 0; j < GROUP; ++j) {
        const VW word = P::integers(p, j / 4, i);
        const int shift = j % 4 * 8;
        V w;
        if constexpr (P::top == SIGNED && P::zero == 0) w = __builtin_convertvector((VI)(word << (24 - shift)) >> 24, V);
        else w = __builtin_convertvector((VI)(word >> shift & 255u) - P::zero, V);
        w *= scale[j / (GROUP / P::Scales::parts)];
        if constexpr (P::Scales::mins) w += least[j / (GROUP / P::Scales::parts)];
        store(reinterpret_cast<float*>(out) + (k - from + j) * TILE + i * L, w);
      }
    }
  }
}

// Adds `inputs` inputs of R rows; `total` is what came of those before.
template <int R>
PL_INLINE void float_rows(const char* w, const float* x, int64_t x_stride, int64_t inputs, bool first, V (*total)[VECTORS]) {
  V acc[R][VECTORS] = {};
  for (int64_t k = 0; k < inputs; ++k) unit<Float32, R, 1>(w + k * Float32::unit, 0, x + k, x_stride, acc);
  PL_UNROLL
  for (int r = 0; r < R; ++r)
    PL_UNROLL
    for (int i = 0; i < VECTORS; ++i) total[r][i] = first ? acc[r][i] : total[r][i] + acc[r][i];
}

template <class P>
static void exact_rows(const BlockCall& c, int64_t r0, int64_t rows, int64_t tile) {
  constexpr int64_t segment = Float32::segment;
  alignas(64) char w[segment * Float32::unit];
  V total[MOST_TILE][VECTORS];
  for (int64_t k = 0; k < c.in; k += segment) {
    const int64_t stop = k + segment < c.in ? k + segment : c.in, stride = c.x_stride / 4;
    widen<P>(c, tile, k, stop, w);
    const float* x = reinterpret_cast<const float*>(c.x + r0 * c.x_stride) + k;
    for (int64_t r = 0; r < rows;) {
      const bool four = r + 4 <= rows;
      if (four) float_rows<4>(w, x + r * stride, stride, stop - k, k == 0, total + r);
      else float_rows<1>(w, x + r * stride, stride, stop - k, k == 0, total + r);
      r += four ? 4 : 1;
    }
  }
  store_totals(c, r0, rows, tile, total);
}

template <class P>
static void linear_of_blocks(const Tiles& m, const BlockCall& c, int64_t rows, int64_t begin) {
  const bool exact = m.kind & EXACT;
  for (int64_t tile = begin / TILE; tile * TILE < c.end; ++tile)
    for (int64_t r = 0, n; r < rows; r += n) {
      n = rows - r < MOST_TILE ? rows - r : MOST_TILE;
      if (exact) exact_rows<P>(c, r, n, tile);
      else block_rows<P>(c, r, n, tile);
    }
}

template <class By>
static void linear_any(const Tiles& m, const Prepared& x, int64_t rows, int64_t begin, int64_t end, float* y,
                       int64_t y_stride) {
  if (!in_blocks(m.kind)) return linear<By>(m, x, rows, begin, end, y, y_stride);
  with_form(m.kind, [&](auto form) {
    using P = decltype(form);
    const bool cached = weights_in_cache.load(std::memory_order_relaxed);
    const bool far = (cached || rows <= FAR_ROWS) && fetches_far.load(std::memory_order_relaxed);
    const int64_t element = m.kind & EXACT ? 4 : 1;
    const BlockCall c{static_cast<const char*>(m.data), m.in, bytes_of_blocks<P>(m.in), static_cast<const char*>(x.data),
                      x.stride * element, y, y_stride, end, far};
    linear_of_blocks<P>(m, c, rows, begin);
  });
}

// --- doors, inputs ---------------------------------------------------------------------------------------

static int64_t tile_bytes_any(int kind, int64_t in) {
  if (!in_blocks(kind)) return tile_bytes(kind, in);
  return with_form(kind, [in](auto form) { return bytes_of_blocks<decltype(form)>(in); });
}

static void pack_any(const Matrix& m, int64_t tile, char* out) {
  if (!in_blocks(m.kind)) return pack(m, tile, out);
  with_form(m.kind, [&](auto form) { pack_blocks<decltype(form)>(m, tile, out); });
}

static void embed_any(const Matrix& m, int64_t token, float factor, float* y) {
  if (in_blocks(m.kind)) embed_blocks(m, token, factor, y);
  else embed(m, token, factor, y);
}

// 32 inputs to integers. Of inputs that are no numbers, or infinite, no integer says it: the scale is no number then.
template <class P>
static void round_group(const float* x, GroupOf<P>& out) {
  constexpr int N = GROUP / L, HALF = PART / L;
  constexpr float most = P::wide ? 127.0f * PLACE : 127.0f;
  constexpr bool in_two = P::wide && !P::shorts;
  const V magic = broadcast(12582912.0f);
  float factors[2], scales[2], broken = 0;  // broken: 0, or no number
  for (int part = 0; part < 2; ++part) {
    V top{}, size{};
    for (int i = part * HALF; i < (part + 1) * HALF; ++i) {
      const V v = (V)((VW)load(x + i * L) & 0x7fffffffu);
      top = vmax(top, v), size += v - v;
    }
    const float largest = reduce_max(top);
    broken += reduce(size);
    factors[part] = most / largest;
    if (!(factors[part] <= 3.4e38f)) factors[part] = 0.0f;  // nothing but zeros, or inputs below 1e-34
    scales[part] = factors[part] > 0 ? largest * (1.0f / most) : 0.0f;
  }
  VI n[N] = {};
  if (broken == 0)
    for (int i = 0; i < N; ++i) n[i] = (VI)fma(load(x + i * L), broadcast(factors[i / HALF]), magic) - (VI)magic;
  int32_t sums[2], low_sums[2] = {};
  if constexpr (in_two) {
    VI low[N];
    for (int i = 0; i < N; ++i) {
      const VI high = (VI)fma(__builtin_convertvector(n[i], V), broadcast(1.0f / PLACE), magic) - (VI)magic;
      low[i] = n[i] - high * PLACE, n[i] = high;
    }
    narrow(low, out.low);
    sum_halves(low, low_sums);
    for (int part = 0; part < 2; ++part) out.low_start[part] = -P::zero * low_sums[part];
  }
  narrow(n, out.x);
  sum_halves(n, sums);
  out.sum = 0;
  for (int part = 0; part < 2; ++part) {
    const int32_t whole = in_two ? PLACE * sums[part] + low_sums[part] : sums[part];
    out.scale[part] = scales[part] + broken;
    out.sum += static_cast<float>(whole) * out.scale[part];
    out.start[part] = (least_by_part<P> ? 1 : -P::zero) * sums[part];
  }
}

template <class By>
static int64_t prepared_bytes_any(int kind, int64_t in) {
  if (!in_blocks(kind)) return prepared_bytes<By>(kind, in);
  if (kind & EXACT) return 0;
  return with_form(kind, [in](auto form) { return in / GROUP * static_cast<int64_t>(sizeof(GroupOf<decltype(form)>)); });
}

template <class By>
static Prepared prepare_any(int kind, const float* x, int64_t stride, int64_t rows, int64_t in, void* data, float* scales) {
  if (!in_blocks(kind)) return prepare<By>(kind, x, stride, rows, in, data, scales);
  if (kind & EXACT) return {x, stride, nullptr};
  with_form(kind, [&](auto form) {
    using P = decltype(form);
    auto* groups = static_cast<GroupOf<P>*>(data);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t k = 0; k < in; k += GROUP) round_group<P>(x + r * stride + k, *groups++);
  });
  return {data, prepared_bytes_any<By>(kind, in), nullptr};
}

}  // namespace PACELINE_ISA
}  // namespace paceline
