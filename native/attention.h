// Softmax attention over the paged cache, of some rows at consecutive positions of one sequence: each K/V vector that is
// loaded serves all of them and the heads that share it. Keys are taken in blocks of BLOCK that lie at absolute positions,
// and a row goes through its own keys in one order, so neither its neighbours nor a cut into chunks changes a bit. A softmax
// of its own is kept for each SEGMENT of keys, and these are joined in their order, whether one thread computes all of them
// or each a thread. Keys and values are float32 here, pairs of bfloat16 in attention_packed.h; the rest is the same. Values
// narrower than keys are the beginnings of these, in the same pool.
#pragma once

#include "rowops.h"

namespace paceline {
namespace PACELINE_ISA {

constexpr int BLOCK = 64;          // keys per running-maximum update
constexpr int PITCH = BLOCK + L;   // room for a block's scores: the last tile of keys may write past them
template <int Q>
constexpr int KEYS = Q == 3 ? L / 4 : L / Q;  // that are scored with Q queries in one tile

struct Places {  // where the keys and values of a block lie, from place `begin` up to `end`
  int begin = 0, end = 0;
  const float *keys[BLOCK + L], *values[BLOCK];
};

struct Queries {  // vectors: heads of a row beside each other, row after row, K/V head after K/V head
  int count;     // of one K/V head
  int64_t d, w;  // floats of a query and of a key; of a value and of a result
  const float** q;  // these four: of the K/V head at hand
  float** out;
  float* top;
  V* sum;
  float high[MOST_QUERIES + L], shrink[MOST_QUERIES + L];
  float p[MOST_QUERIES * PITCH];  // scores, then weights
  Places now{}, next{};
  bool fetches = true;  // the next block, while this one is computed
  struct {
    const float* q[MOST_QUERIES];
    float *out[MOST_QUERIES], top[MOST_QUERIES + L];
    V sum[MOST_QUERIES];
  } all;

  void turn_to(int g) { q = all.q + g * count, out = all.out + g * count, top = all.top + g * count, sum = all.sum + g * count; }
};

// Adds the products of C vectors of columns, from column `i`.
template <int Q, int K, int C>
PL_INLINE void columns(V (&acc)[L], const float* const (&queries)[Q], const float* const (&keys)[K], int64_t i) {
  PL_UNROLL
  for (int c = 0; c < C; ++c) {
    V x[Q];
    PL_UNROLL
    for (int q = 0; q < Q; ++q) x[q] = pin(load(queries[q] + i + c * L));
    PL_UNROLL
    for (int j = 0; j < K; ++j) {
      V k = load(keys[j] + i + c * L);
      PL_UNROLL
      for (int q = 0; q < Q; ++q) accumulate(acc[q * K + j], x[q], k);
    }
  }
}

// Scores of Q queries with the K keys from place `at`: up to L sums, whose lanes are added up together. The first queries
// fetch those of the next block, a few lines at a time: who asks for many at once waits for memory, and computes nothing.
template <int Q>
PL_INLINE void scores(Queries& s, int m, int at) {
  constexpr int K = KEYS<Q>;
  V acc[L] = {};
  const float *keys[K], *queries[Q];
  if (m == 0 && s.fetches)
    for (int j = at; j < at + K && j < BLOCK; ++j)
      for (int64_t i = 0; i < s.d; i += 16) prefetch_far(s.next.keys[j] + i);
  PL_UNROLL
  for (int j = 0; j < K; ++j) keys[j] = s.now.keys[at + j];
  PL_UNROLL
  for (int q = 0; q < Q; ++q) queries[q] = s.q[m + q];
  int64_t i = 0;
  for (; i + 4 * L <= s.d; i += 4 * L) columns<Q, K, 4>(acc, queries, keys, i);
  for (; i + L <= s.d; i += L) columns<Q, K, 1>(acc, queries, keys, i);
  if (i < s.d) {
    int n = static_cast<int>(s.d - i);
    PL_UNROLL
    for (int q = 0; q < Q; ++q)
      PL_UNROLL
      for (int j = 0; j < K; ++j)
        acc[q * K + j] = fma(load_part(keys[j] + i, n), load_part(queries[q] + i, n), acc[q * K + j]);
  }
  const V total = sums(acc);
  PL_UNROLL
  for (int q = 0; q < Q; ++q)
    std::memcpy(s.p + (m + q) * PITCH + at, reinterpret_cast<const float*>(&total) + q * K, K * sizeof(float));
}

// Scores of Q queries with the keys at places at..end-1; up to the next multiple of KEYS<Q> are scored.
template <int Q>
PL_INLINE void scores_up_to(Queries& s, int m, int at, int end) {
  for (; at < end; at += KEYS<Q>) scores<Q>(s, m, at);
}

// Scores of all queries with the keys of the block.
static void score(Queries& s) {
  for (int at = s.now.begin; at < s.now.end; at += L) {
    const int end = at + L < s.now.end ? at + L : s.now.end;
    int m = 0;
    for (; m + 4 <= s.count; m += 4) scores_up_to<4>(s, m, at, end);
    if (m + 3 == s.count) {
      scores_up_to<3>(s, m, at, end);
      continue;
    }
    for (; m + 2 <= s.count; m += 2) scores_up_to<2>(s, m, at, end);
    if (m < s.count) scores_up_to<1>(s, m, at, end);
  }
}

// Scores of the block go through cap * tanh(score / cap).
static void cap_scores(Queries& s, float cap) {
  const V most = broadcast(cap);
  for (int m = 0; m < s.count; ++m)
    for (int j = s.now.begin / L * L; j < s.now.end; j += L) {
      float* p = s.p + m * PITCH + j;
      store(p, vtanh(load(p) / most) * most);
    }
}

// The largest score so far of a query that sees places lo..hi-1; whole vectors around them are filled.
PL_INLINE float highest(Queries& s, int m, int lo, int hi) {
  float* p = s.p + m * PITCH;
  int begin = lo / L * L, end = (hi + L - 1) / L * L;
  for (int j = begin; j < lo; ++j) p[j] = -__builtin_inff();
  for (int j = hi; j < end; ++j) p[j] = -__builtin_inff();
  V most = broadcast(s.top[m]);
  for (int j = begin; j < end; j += L) most = vmax(most, load(p + j));
  return reduce_max(most);
}

// Turns scores into weights and scales what was summed before.
PL_INLINE void soften(Queries& s, int m, int lo, int hi) {
  float* p = s.p + m * PITCH;
  float high = s.high[m];
  if (high > s.top[m]) {
    float shrink = s.shrink[m];
    s.sum[m] *= shrink;
    for (int64_t i = 0; i < s.w; i += L) store_at(s.out[m], i, s.w, load_at(s.out[m], i, s.w) * shrink);
    s.top[m] = high;
  }
  V sum = s.sum[m], top = broadcast(high), lowest = broadcast(-__builtin_inff());
  for (int j = lo / L * L; j < hi; j += L) {
    V x = load(p + j), e = vexp(x - top);
    e = x == lowest ? V{} : e;
    store(p + j, e);
    sum += e;
  }
  s.sum[m] = sum;
}

// out[i..] += sum over places lo..hi-1 of weight * value[i..], over C vectors of columns of Q queries.
template <int Q, int C>
PL_INLINE void mix(Queries& s, int m, int lo, int hi, int64_t i) {
  V acc[Q][C];
  PL_UNROLL
  for (int q = 0; q < Q; ++q)
    PL_UNROLL
    for (int c = 0; c < C; ++c) acc[q][c] = load(s.out[m + q] + i + c * L);
  const float* p = s.p + m * PITCH;
  for (int j = lo; j < hi; ++j) {
    const float* value = s.now.values[j] + i;
    if (m == 0 && s.fetches) {
      PL_UNROLL
      for (int c = 0; c < C * L; c += 16) prefetch_far(s.next.values[j] + i + c);
    }
    V weight[Q];
    PL_UNROLL
    for (int q = 0; q < Q; ++q) weight[q] = broadcast(p[q * PITCH + j]);
    PL_UNROLL
    for (int c = 0; c < C; ++c) {
      V v = pin(load(value + c * L));
      PL_UNROLL
      for (int q = 0; q < Q; ++q) acc[q][c] = fma(weight[q], v, acc[q][c]);
    }
  }
  PL_UNROLL
  for (int q = 0; q < Q; ++q)
    PL_UNROLL
    for (int c = 0; c < C; ++c) store(s.out[m + q] + i + c * L, acc[q][c]);
}

template <int C>
PL_INLINE void mix_columns(Queries& s, int m, int left, int lo, int hi, int64_t i) {
  if constexpr (L == 16)  // registers enough
    for (; left == 4 || left > 5; m += 4, left -= 4) mix<4, C>(s, m, lo, hi, i);
  for (; left == 3 || left > 4; m += 3, left -= 3) mix<3, C>(s, m, lo, hi, i);
  for (; left > 1; m += 2, left -= 2) mix<2, C>(s, m, lo, hi, i);
  if (left) mix<1, C>(s, m, lo, hi, i);
}

// Places lo..hi-1 of queries m..m+count-1. A slice of the values stays in the first-level cache for all queries.
static void mix_all(Queries& s, int m, int count, int lo, int hi) {
  if (lo >= hi) return;
  int64_t i = 0;
  for (; i + 4 * L <= s.w; i += 4 * L) mix_columns<4>(s, m, count, lo, hi, i);
  for (; i + L <= s.w; i += L) mix_columns<1>(s, m, count, lo, hi, i);
  for (; i < s.w; ++i)
    for (int q = m; q < m + count; ++q)
      for (int j = lo; j < hi; ++j) s.out[q][i] += s.p[q * PITCH + j] * s.now.values[j][i];
}

PL_INLINE int64_t first_key(const AttentionArgs& a, int row) {
  int64_t first = a.last + row - a.span;
  return first > 0 ? first : 0;
}

PL_INLINE int64_t last_key(const AttentionArgs& a, int row) {  // the first that the row does not see
  int64_t last = a.last + row;
  return last > a.reach ? last : a.reach;
}

PL_INLINE int place(int64_t key, int64_t start) {
  int64_t at = key - start;
  return static_cast<int>(at < 0 ? 0 : at < BLOCK ? at : BLOCK);
}

// Calls `each` with what some row sees of the block at `start`: its place in the block, and in the pool.
template <class F>
PL_INLINE bool find_places(const AttentionArgs& a, int64_t start, Places& found, F each) {
  const int32_t* table = a.k.table + a.slot * a.k.table_stride;
  const int64_t page_size = a.k.page_size;
  int lo = found.begin = place(first_key(a, 0), start), hi = found.end = place(last_key(a, a.rows - 1), start);
  for (int j = lo; j < hi;) {
    int64_t page = (start + j) / page_size, in_page = (start + j) % page_size, at = table[page] * page_size + in_page;
    int64_t count = page_size - in_page < hi - j ? page_size - in_page : hi - j;
    if (table[page] < 0 || at + count > a.k.tokens) return false;
    for (int end = j + static_cast<int>(count); j < end; ++j, ++at) each(j, at);
  }
  return true;
}

static bool find(const AttentionArgs& a, int64_t d, int64_t start, int64_t kv_head, Places& found) {
  const int64_t stride = d * a.k.kv_heads, offset = kv_head * d;
  const float *keys = static_cast<const float*>(a.k.pool) + offset, *values = static_cast<const float*>(a.v.pool) + offset;
  const bool known = find_places(a, start, found, [&](int j, int64_t at) {
    found.keys[j] = keys + at * stride;
    found.values[j] = values + at * stride;
  });
  const int hi = found.end;
  for (int j = 0; j < L && known && found.begin < hi; ++j) found.keys[hi + j] = found.keys[hi - 1];  // the last tile is a whole one
  return known;
}

struct Floats {
  static constexpr int step = 1;  // places that are mixed together
  const AttentionArgs& a;
  Queries& s;
  void begin() {}
  bool find(int64_t start, int g) { return PACELINE_ISA::find(a, s.d, start, a.kv_head + g, s.next); }  // the next block
  void turn(int) { s.now = s.next; }                                                                // to that block
  void score() { PACELINE_ISA::score(s); }
  void weigh(int) {}  // the weights of a query have changed
  void mix(int m, int count, int lo, int hi) { mix_all(s, m, count, lo, hi); }
};

// One block of all rows: each row sees its own places, [lo, hi); values that all rows see are loaded once for all.
template <class Store>
static void attend(const AttentionArgs& a, Store& held, int64_t start) {
  Queries& s = held.s;
  int lo[MOST_QUERIES], hi[MOST_QUERIES], low = 0, high = BLOCK;
  for (int r = 0; r < a.rows; ++r) {
    lo[r] = place(first_key(a, r), start);
    hi[r] = place(last_key(a, r), start);
    low = lo[r] > low ? lo[r] : low;
    high = hi[r] < high ? hi[r] : high;
  }
  held.score();
  if (a.cap > 0) cap_scores(s, a.cap);
  for (int m = 0; m < s.count; ++m) {
    int r = m / a.heads;
    s.high[m] = lo[r] < hi[r] ? highest(s, m, lo[r], hi[r]) : s.top[m];
  }
  for (int m = 0; m < s.count; m += L) store(s.shrink + m, vexp(load(s.top + m) - load(s.high + m)));
  for (int m = 0; m < s.count; ++m)
    if (lo[m / a.heads] < hi[m / a.heads]) soften(s, m, lo[m / a.heads], hi[m / a.heads]), held.weigh(m);
  low += low % Store::step, high -= high % Store::step;
  if (high < low) high = low = BLOCK;  // no place that all rows see
  for (int r = 0; r < a.rows; ++r) held.mix(r * a.heads, a.heads, lo[r], hi[r] < low ? hi[r] : low);
  held.mix(0, s.count, low, high);
  for (int r = 0; r < a.rows; ++r) held.mix(r * a.heads, a.heads, lo[r] > high ? lo[r] : high, hi[r]);
}

struct Softmax {  // of some keys of a query: the highest score, the sum of the weights, and that of the values
  float top, sum;
  float* out;
};

// Adds what further keys have brought; a segment of which the query sees nothing changes no bit.
PL_INLINE void join(Softmax& all, const Softmax& more, int64_t w) {
  if (more.sum == 0) return;
  if (all.sum == 0) {
    all.top = more.top, all.sum = more.sum;
    std::memcpy(all.out, more.out, w * sizeof(float));
    return;
  }
  const float top = all.top > more.top ? all.top : more.top;
  const V a = vexp(broadcast(all.top - top)), b = vexp(broadcast(more.top - top));
  all.top = top, all.sum = all.sum * a[0] + more.sum * b[0];
  each2(all.out, more.out, all.out, w, [a, b](V x, V y) { return x * a + y * b; });
}

PL_INLINE float* out_of(const AttentionArgs& a, int m) {
  const int g = m / (a.rows * a.heads), r = m / a.heads % a.rows, h = m % a.heads;
  return a.out + r * a.out_stride + (g * a.heads + h) * static_cast<int64_t>(a.v.head_dim);
}

// Divides by the sum of the weights. A row without keys gives zeros.
PL_INLINE void finish(const AttentionArgs& a, int m, const Softmax& all) {
  float sum = all.sum;
  if (a.sinks) sum += vexp(broadcast(a.sinks[m / (a.rows * a.heads) * a.heads + m % a.heads] - all.top))[0];
  const V total = broadcast(sum > 0 ? sum : 1.0f);
  each(all.out, all.out, a.v.head_dim, [total](V x) { return x / total; });
}

PL_INLINE Softmax nothing(float* out, int64_t w) {
  each(out, out, w, [](V) { return V{}; });
  return {-__builtin_inff(), 0, out};
}

// Joins the segments that other calls have left in `partial`.
static void join_segments(const AttentionArgs& a) {
  const int64_t w = a.v.head_dim, count = a.rows * a.heads * a.groups;
  for (int m = 0; m < count; ++m) {
    Softmax all = nothing(out_of(a, m), w);
    for (int64_t i = 0; i < a.segments; ++i) {
      float* at = a.partial + (i * count + m) * (w + 2);
      join(all, {at[0], at[1], at + 2}, w);
    }
    finish(a, m, all);
  }
}

// All queries over the keys from `start` up to `end`, within one segment. `after`: where the keys begin that are read next.
template <class Store>
static bool attend_segment(const AttentionArgs& a, Store& held, int64_t start, int64_t end, bool more) {
  Queries& s = held.s;
  for (int m = 0; m < s.count * a.groups; ++m) {
    nothing(s.all.out[m], s.w);
    s.all.top[m] = -__builtin_inff(), s.all.sum[m] = V{};
  }
  for (; start < end; start += BLOCK)
    for (int g = 0; g < a.groups; ++g) {
      held.turn(g);
      s.turn_to(g);
      const bool last = g + 1 == a.groups;
      if ((!last || start + BLOCK < end || more) && !held.find(last ? start + BLOCK : start, last ? 0 : g + 1)) return false;
      attend(a, held, start);
    }
  return true;
}

template <class Store>
static bool attend_all(const AttentionArgs& a, Store& held) {
  Queries& s = held.s;
  s.d = a.k.head_dim, s.w = a.v.head_dim, s.count = a.rows * a.heads;
  const int count = s.count * a.groups;
  Softmax whole[MOST_QUERIES];
  for (int m = 0; m < count; ++m) {
    const int g = m / s.count, r = m / a.heads % a.rows, h = m % a.heads;
    s.all.q[m] = a.q + r * a.q_stride + (g * a.heads + h) * s.d;
    s.all.out[m] = a.room + m * s.w;
    if (!a.partial) whole[m] = nothing(out_of(a, m), s.w);
  }
  held.begin();
  const int64_t least = first_key(a, 0), most = last_key(a, a.rows - 1);
  int64_t segment = a.partial ? a.segment : least / SEGMENT, last = a.partial ? segment + 1 : (most + SEGMENT - 1) / SEGMENT;
  int64_t start = (segment * SEGMENT > least ? segment * SEGMENT : least) / BLOCK * BLOCK;
  if (start < most && !held.find(start, 0)) return false;
  for (; segment < last; ++segment) {
    const int64_t end = (segment + 1) * SEGMENT < most ? (segment + 1) * SEGMENT : most;
    if (!attend_segment(a, held, start, end, end < most)) return false;
    start = end;
    for (int m = 0; m < count; ++m) {
      const Softmax part{s.all.top[m], reduce(s.all.sum[m]), s.all.out[m]};
      if (!a.partial) {
        join(whole[m], part, s.w);
        continue;
      }
      float* at = a.partial + m * (s.w + 2);
      at[0] = part.top, at[1] = part.sum;
      std::memcpy(at + 2, part.out, s.w * sizeof(float));
    }
  }
  if (!a.partial)
    for (int m = 0; m < count; ++m) finish(a, m, whole[m]);
  return true;
}

}  // namespace PACELINE_ISA
}  // namespace paceline
