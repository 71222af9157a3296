// y = x W^T for few rows. Weights lie in tiles: TILE outputs beside each other, input by input, so that one load brings
// an input's weights for many outputs, and a tile is one run of memory. Each loaded weight is applied to all rows of a
// tile: more rows cost arithmetic but no memory traffic. One accumulator per (row, output) takes the inputs one after the
// other, segment by segment, whatever the tile: bits of y[r, o] depend on x[r] and W[o] only, and there is nothing to sum
// across lanes.
#pragma once

#include "registers.h"

namespace paceline {
namespace PACELINE_ISA {

constexpr int VECTORS = 2, TILE = VECTORS * L;  // outputs of a tile
constexpr int64_t ROOM = 262144;  // bytes of weights that stay in the second-level cache from one tile to the next
constexpr int64_t AHEAD = 8192;      // bytes of a tile's tiles to fetch ahead, at most half of them of one
constexpr int64_t FAR_AHEAD = 24576;  // of a tile that is alone, to the second-level cache

// What a weight kind means by a unit of a tile: `depth` inputs of TILE outputs in two vectors. A segment is summed
// for itself and then added to the total, which keeps long sums exact. `tight`: no register is left for constants.
struct Float32 {
  using X = float;
  using A = V;
  static constexpr int kind = FLOAT32, depth = 1, segment = 1024;  // inputs
  static constexpr int64_t unit = 4 * TILE, scales = 0;                        // bytes
  template <bool>
  PL_INLINE V weight(const char* p, int i) { return load(reinterpret_cast<const float*>(p) + i * L); }
  PL_INLINE V input(const X* x) { return broadcast(*x); }
  PL_INLINE void add(A& a, V x, V w) { accumulate(a, x, w); }
};

struct Bfloat16 {  // word j holds output j in its low and output L + j in its high half
  using X = float;
  using A = V;
  static constexpr int kind = BFLOAT16, depth = 1, segment = 1024;
  static constexpr int64_t unit = 2 * TILE, scales = 0;
  template <bool tight>
  PL_INLINE V weight(const char* p, int i) {
    if (i == 0) return (V)(*reinterpret_cast<const VWMem*>(p) << 16);
    return tight ? (V)high_halves(p) : (V)(*reinterpret_cast<const VWMem*>(p) & 0xffff0000u);
  }
  PL_INLINE V input(const X* x) { return broadcast(*x); }
  PL_INLINE void add(A& a, V x, V w) { accumulate(a, x, w); }
};

struct Int8 {
  using X = int16_t;
  using A = VI;
  static constexpr int kind = INT8, depth = 2, segment = 1 << 30;
  static constexpr int64_t unit = 2 * TILE, scales = 4 * TILE;
  template <bool>
  PL_INLINE H weight(const char* p, int i) { return load_int8(p + i * 2 * L); }
  PL_INLINE H input(const X* x) { return broadcast_pair(x); }
  PL_INLINE void add(A& a, H x, H w) { accumulate(a, x, w); }
};

// Integer inputs, and these, come in pairs: a vector of L outputs has the two weights of each beside each other.
template <class By>
struct Pairs {
  using X = typename By::X;
  using A = V;
  static constexpr int kind = BF16_DOT, depth = 2, segment = 1024;
  static constexpr int64_t unit = 4 * TILE, scales = 0;
  template <bool>
  PL_INLINE auto weight(const char* p, int i) { return By::pairs(load_words(p + i * 4 * L)); }
  PL_INLINE auto input(const X* x) { return By::input(x); }
  template <class T>
  PL_INLINE void add(A& a, const T& x, const T& w) { By::add(a, x, w); }
};

static bool has_bf16_dot() { return multiplies_pairs(); }

template <class P>
struct Call {
  const char* data;
  int64_t in, tile_bytes;
  const typename P::X* x;
  int64_t x_stride;
  const float* row_scale;
  float* y;
  int64_t y_stride, end;  // outputs
  bool cached, far;  // weights: the last-level cache could hold them; they are fetched from there ahead of use
};

static int64_t padded(int kind, int64_t in) {
  return kind == INT8 || kind == BF16_DOT ? (in + 1) / 2 * 2 : in;
}

// Rows from which on arithmetic takes about as long as memory: neither may wait for the other, so weights are fetched to
// the second-level cache, too. Where the last-level cache holds them all, `fetches_far` says it.
template <class P>
constexpr int busy_rows() {
  return P::kind == BFLOAT16 || P::kind == INT8 ? 5 : P::kind == BF16_DOT ? 8 : 1 << 30;
}

template <class P>
static int64_t bytes_of_tile(int64_t in) {
  int64_t segments = (in + P::segment - 1) / P::segment;
  return padded(P::kind, in) / P::depth * P::unit + segments * P::scales;
}

// One unit: R rows, C tiles. The fewer of weights and inputs are kept in registers.
template <class P, int R, int C>
PL_INLINE void unit(const char* w, int64_t tile_bytes, const typename P::X* x, int64_t x_stride,
                    typename P::A (&acc)[R][VECTORS * C]) {
  constexpr int N = VECTORS * C;
  if constexpr (R < N) {
    decltype(P::input(x)) inputs[R];
    PL_UNROLL
    for (int r = 0; r < R; ++r) inputs[r] = pin(P::input(x + r * x_stride));
    PL_UNROLL
    for (int i = 0; i < N; ++i) {
      auto weight = pin(P::template weight<(R * N + R > 13)>(w + i / VECTORS * tile_bytes, i % VECTORS));
      PL_UNROLL
      for (int r = 0; r < R; ++r) P::add(acc[r][i], inputs[r], weight);
    }
  } else {
    decltype(P::template weight<true>(w, 0)) weights[N];
    PL_UNROLL
    for (int i = 0; i < N; ++i)
      weights[i] = pin(P::template weight<(R * N + N > 12)>(w + i / VECTORS * tile_bytes, i % VECTORS));
    PL_UNROLL
    for (int r = 0; r < R; ++r) {
      auto input = pin(P::input(x + r * x_stride));
      PL_UNROLL
      for (int i = 0; i < N; ++i) P::add(acc[r][i], input, weights[i]);
    }
  }
}

// Rows r0..r0+R-1 of C tiles from `tile`.
template <class P, int R, int C>
static void tile(const Call<P>& c, int64_t r0, int64_t tile) {
  constexpr int N = VECTORS * C;
  constexpr int64_t step = P::unit < 64 ? 64 / P::unit : 1;  // units of a cache line
  constexpr int64_t near_by = AHEAD / (C < 2 ? 2 : C);
  const bool far = r0 == 0 && (c.far || R >= busy_rows<P>());
  const int64_t far_by = C > 1 ? C * c.tile_bytes : FAR_AHEAD;  // to the same place of the next tile
  const char* start = c.data + tile * c.tile_bytes;
  const typename P::X* x = c.x + r0 * c.x_stride;
  V total[R][N];
  for (int64_t k = 0; k < c.in || k == 0; k += P::segment) {
    const int64_t units = ((c.in - k < P::segment ? c.in - k : P::segment) + P::depth - 1) / P::depth;
    const char* scales = start + k / P::depth * P::unit + k / P::segment * P::scales;
    const char* w = scales + P::scales;
    typename P::A acc[R][N];
    PL_UNROLL
    for (int r = 0; r < R; ++r)
      PL_UNROLL
      for (int i = 0; i < N; ++i) acc[r][i] = typename P::A{};
    // The last bytes of a tile fetch the first ones of its place in the next tile.
    const int64_t left = c.tile_bytes - near_by - (w - start), near = left < 0 ? 0 : left / P::unit / step * step;
    int64_t u = 0;
    for (int part = 0; part < 2; ++part) {
      const int64_t stop = part == 0 && near < units ? near : units / step * step;
      const int64_t ahead = part == 0 ? near_by : near_by + (C - 1) * c.tile_bytes;
      for (; u < stop; u += step) {
        PL_UNROLL
        for (int j = 0; j < C; ++j)
          for (int64_t line = 0; line < P::unit * step; line += 64) {
            const char* p = w + j * c.tile_bytes + u * P::unit + line;
            prefetch(p + ahead);
            if (far) prefetch_far(p + far_by);
          }
        PL_UNROLL
        for (int s = 0; s < step; ++s)
          unit<P, R, C>(w + (u + s) * P::unit, c.tile_bytes, x + k + (u + s) * P::depth, c.x_stride, acc);
      }
    }
    for (; u < units; ++u) unit<P, R, C>(w + u * P::unit, c.tile_bytes, x + k + u * P::depth, c.x_stride, acc);
    PL_UNROLL
    for (int r = 0; r < R; ++r)
      PL_UNROLL
      for (int i = 0; i < N; ++i) {
        V sum;
        if constexpr (P::kind == INT8) sum = __builtin_convertvector(acc[r][i], V);
        else sum = acc[r][i];
        if constexpr (P::kind == INT8) {
          V scale = load(reinterpret_cast<const float*>(scales + i / VECTORS * c.tile_bytes) + i % VECTORS * L);
          total[r][i] = sum * (scale * c.row_scale[r0 + r]);
        } else {
          total[r][i] = k == 0 ? sum : total[r][i] + sum;
        }
      }
  }
  PL_UNROLL
  for (int r = 0; r < R; ++r)
    PL_UNROLL
    for (int i = 0; i < N; ++i) {
      const int64_t o = tile * TILE + i * L;
      float* y = c.y + (r0 + r) * c.y_stride + o;
      if (o + L <= c.end) store(y, total[r][i]);
      else if (o < c.end) std::memcpy(y, &total[r][i], 4 * (c.end - o));
    }
}

template <class P, int R, int C>
static void rows_tile(const Call<P>& c, int64_t r0, int64_t begin, int64_t end) {
  for (; begin + C <= end; begin += C) tile<P, R, C>(c, r0, begin);
  if constexpr (C > 1) rows_tile<P, R, C / 2>(c, r0, begin, end);
}

// Rows of a tile at most: they accumulate in 12 of AVX2's 16 registers, 24 of AVX-512's 32.
constexpr int64_t MOST_ROWS = L == 16 ? 12 : 6;

// Tiles of a tile. Eight accumulators are what hides how long a multiply-add takes, so few rows take more tiles where
// those lie in a cache. From memory one run of it comes faster than several.
template <class P, int R>
constexpr int tiles_of_tile(bool cached) {
  constexpr bool unpacked = P::kind == BFLOAT16;
  if (R > 3 || (!cached && (L == 16 || (L == 8 && (R == 1 || !unpacked))))) return 1;
  return R == 1 ? 4 : 2;
}

// Rows of the next tile where `left` are left. `near`: weights of the tile before lie two tiles near.
PL_INLINE int64_t rows_of_tile(int64_t left, bool near) {
  if (left <= MOST_ROWS) return left;
  if (MOST_ROWS == 12) return (left - 1) / ((left + 11) / 12) + 1;
  return left > 8 ? 6 : near ? left - 2 : 4;
}

// The tile of `rows` rows: R is counted up to them.
template <class P, int R = 1>
static void rows_tiles(int64_t rows, const Call<P>& c, int64_t r0, int64_t begin, int64_t end) {
  if (rows == R) {
    if (c.cached) return rows_tile<P, R, tiles_of_tile<P, R>(true)>(c, r0, begin, end);
    return rows_tile<P, R, tiles_of_tile<P, R>(false)>(c, r0, begin, end);
  }
  if constexpr (R < MOST_ROWS) rows_tiles<P, R + 1>(rows, c, r0, begin, end);
}

// After the first tile the weights of two tiles, or one, are in the second-level cache.
template <class P>
static void linear_of(const Tiles& m, const Prepared& x, int64_t rows, int64_t begin, int64_t end, float* y,
                      int64_t y_stride) {
  Call<P> c{static_cast<const char*>(m.data), m.in, bytes_of_tile<P>(m.in), static_cast<const typename P::X*>(x.data),
            x.stride, x.row_scale, y, y_stride, end, weights_in_cache.load(std::memory_order_relaxed), false};
  c.far = c.cached && fetches_far.load(std::memory_order_relaxed);
  const int64_t first = begin / TILE, last = (end + TILE - 1) / TILE;
  const int64_t group = rows <= MOST_ROWS ? last - first : 2 * c.tile_bytes <= ROOM ? 2 : 1;
  for (int64_t p = first; p < last; p += group) {
    const int64_t stop = p + group < last ? p + group : last;
    for (int64_t r = 0, n; r < rows; r += n) {
      n = rows_of_tile(rows - r, group > 1);
      rows_tiles(n, c, r, p, stop);
    }
  }
}

// y[r, o] for o in [begin, end); `begin` is a multiple of TILE.
template <class By>
static void linear(const Tiles& m, const Prepared& x, int64_t rows, int64_t begin, int64_t end, float* y,
                   int64_t y_stride) {
  switch (m.kind) {
    case FLOAT32: return linear_of<Float32>(m, x, rows, begin, end, y, y_stride);
    case BFLOAT16: return linear_of<Bfloat16>(m, x, rows, begin, end, y, y_stride);
    case INT8: return linear_of<Int8>(m, x, rows, begin, end, y, y_stride);
    case BF16_DOT:
#if defined(PL_PAIRS)
      if constexpr (By::in_registers) {
        return linear_in_registers(m, padded(BF16_DOT, m.in), x, rows, begin, end, y, y_stride);
      }
#endif
      if constexpr (By::usable) {
        const Flushed mode;
        linear_of<Pairs<By>>(m, x, rows, begin, end, y, y_stride);
      }
  }
}

// --- packing ------------------------------------------------------------------------------------------------------

static int64_t tile_bytes(int kind, int64_t in) {
  switch (kind) {
    case FLOAT32: return bytes_of_tile<Float32>(in);
    case BFLOAT16: return bytes_of_tile<Bfloat16>(in);
    case INT8: return bytes_of_tile<Int8>(in);
    default: return padded(BF16_DOT, in) * 2 * TILE;
  }
}

// Outputs tile * TILE... of `m` to `out`, which is all zero.
static void pack(const Matrix& m, int64_t tile, char* out) {
  const int64_t first = tile * TILE, size = m.row_bytes();
  for (int64_t j = 0; j < TILE && first + j < m.out; ++j) {
    const char* row = static_cast<const char*>(m.data) + (first + j) * size;
    if (m.kind == FLOAT32) {
      for (int64_t k = 0; k < m.in; ++k) std::memcpy(out + k * Float32::unit + 4 * j, row + 4 * k, 4);
    } else if (m.kind == BFLOAT16) {
      const int64_t at = 4 * (j % L) + 2 * (j / L);
      for (int64_t k = 0; k < m.in; ++k) std::memcpy(out + k * Bfloat16::unit + at, row + 2 * k, 2);
    } else if (m.kind == BF16_DOT) {
      for (int64_t k = 0; k < m.in; ++k) std::memcpy(out + k / 2 * 4 * TILE + 4 * j + k % 2 * 2, row + 2 * k, 2);
    } else {
      std::memcpy(out + 4 * j, m.scale + first + j, 4);
      char* data = out + Int8::scales + 2 * j;
      for (int64_t k = 0; k < m.in; ++k) data[k / 2 * Int8::unit + k % 2] = row[k];
    }
  }
}

// --- the form that each kind wants its input in -------------------------------------------------------------------

// Of one row: none where inputs are used as they are.
template <class By>
static int64_t prepared_bytes(int kind, int64_t in) {
  const int64_t size = kind == BF16_DOT ? sizeof(typename By::X) : 2, lines = (padded(kind, in) * size + 63) / 64;
  if (kind <= BFLOAT16) return 0;
  return (By::in_registers ? lines | 1 : lines) * 64;  // odd: 16 rows that are loaded at once lie in different sets of a cache
}

static float prepare_int16(const float* x, int64_t in, int16_t* y) {
  V top{}, total{};
  int64_t i = 0;
  for (; i < in; i += L) {
    V v = (V)((VW)(i + L <= in ? load(x + i) : load_part(x + i, static_cast<int>(in - i))) & 0x7fffffffu);
    top = vmax(top, v);
    total += v;
  }
  float largest = reduce_max(top), size = reduce(total), factor = largest > 0 ? 32767.0f / largest : 0.0f;
  const bool broken = !(size - size == 0);  // a NaN or an infinity among the inputs: no integer says that
  // It sums a whole row in int32: the inputs' sizes together, times 128, must stay below 2^31.
  const float room = 16.7e6f - 0.5f * static_cast<float>(in);
  if (size * factor > room) factor = room / size;
  const V factors = broadcast(factor), magic = broadcast(12582912.0f);
  int64_t wide = padded(INT8, in);
  for (i = 0; i < wide; i += L) {
    V v = i + L <= in ? load(x + i) : load_part(x + i, static_cast<int>(in - i));
    VI n = (VI)fma(v, factors, magic) - (VI)magic;
    HL narrow = __builtin_convertvector(n, HL);
    std::memcpy(y + i, &narrow, 2 * (i + L <= wide ? L : wide - i));
  }
  return broken ? __builtin_nanf("") : factor > 0 ? 1.0f / factor : 0.0f;
}

template <class By>
static void prepare_pairs(const float* x, int64_t in, typename By::X* y) {
  const int64_t wide = padded(BF16_DOT, in);
  for (int64_t i = 0; i < wide; i += L) {
    const auto rounded = By::round(i + L <= in ? load(x + i) : load_part(x + i, static_cast<int>(in - i)));
    std::memcpy(y + i, &rounded, sizeof(*y) * (i + L <= wide ? L : wide - i));
  }
}

template <class By>
static Prepared prepare(int kind, const float* x, int64_t stride, int64_t rows, int64_t in, void* data, float* scales) {
  if (kind <= BFLOAT16) return {x, stride, nullptr};
  const int64_t bytes = prepared_bytes<By>(kind, in);
  char* row = static_cast<char*>(data);
  for (int64_t r = 0; r < rows; ++r, row += bytes) {
    if (kind != BF16_DOT) scales[r] = prepare_int16(x + r * stride, in, reinterpret_cast<int16_t*>(row));
    else if constexpr (By::usable) prepare_pairs<By>(x + r * stride, in, reinterpret_cast<typename By::X*>(row));
  }
  return {data, bytes / static_cast<int64_t>(kind == BF16_DOT ? sizeof(typename By::X) : 2), scales};
}

}  // namespace PACELINE_ISA
}  // namespace paceline
