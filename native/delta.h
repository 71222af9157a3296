// The gated delta rule of linear attention, for one value head of one text: row after row, never in chunks, so that a row's
// bits depend on its own text alone. The state S [key][value] is brought from where it stands over what was kept since, is
// stored where it shall stand, and goes on over the run's rows in a copy that is thrown away.
//
//   S = decay * S;  S += k (beta * (v - S^T k))^T;  out = S^T q        with q, k, v from a short convolution over rows
//
// Plain, as in Mamba 2: S = decay * S;  S += k (beta * v)^T;  out = S^T q + skip * v, with q and k as they are.
#pragma once

#include "rowops.h"

namespace paceline {
namespace PACELINE_ISA {

constexpr int64_t BATCH = 32;       // rows whose q, k and v are made at a time
constexpr int64_t MOST_KERNEL = 8;  // rows of the convolution, see models/layers/delta_net.py

static int64_t delta_pitch(int64_t width) { return (width + L - 1) / L * L; }

static int64_t delta_scratch(int64_t key_dim, int64_t value_dim) {
  const int64_t pitch = delta_pitch(value_dim);
  return pitch * key_dim + BATCH * (2 * key_dim + pitch + 2);
}

struct DeltaBatch {  // rows of a batch: their keys and queries [row][key_dim], values [row][pitch], decay and beta
  float *s, *k, *q, *v, *decay, *beta;
  int64_t rows, key_dim, pitch;
  float skip;
  bool plain;
};

// What the row at `position` holds: of the run, or of those that were kept. Null before the beginning of the text.
PL_INLINE const float* delta_row(const DeltaArgs& a, int64_t position) {
  if (position < 0) return nullptr;
  return position >= a.first ? a.qkv + (position - a.first) * a.qkv_stride : a.recent + position % a.most * a.width;
}

// silu of the convolution, columns c..c+n-1, over what `rows` hold: as many as its kernel has, from tap `from` on.
static void delta_conv(const DeltaArgs& a, const float* const* rows, int64_t from, int64_t c, int64_t n, float* y) {
  for (int64_t i = 0; i < n; i += L) {
    V sum = a.conv_bias ? load_at(a.conv_bias + c, i, n) : V{};
    for (int64_t t = from; t < a.kernel; ++t)
      sum = fma(load_at(a.conv + t * a.channels + c, i, n), load_at(rows[t] + c, i, n), sum);
    store_at(y, i, n, vsilu(sum));
  }
}

static void delta_unit(float* x, int64_t n, float factor) {  // of length `factor`
  V sum{};
  for (int64_t i = 0; i < n; i += L) {
    const V v = load_at(x, i, n);
    sum = fma(v, v, sum);
  }
  const float unit = 1.0f / __builtin_sqrtf(reduce(sum) + 1e-6f);
  each(x, x, n, [unit, factor](V v) { return v * unit * factor; });
}

static void delta_prepare(const DeltaArgs& a, DeltaBatch& b, int64_t position) {
  const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(a.key_dim));
  for (int64_t r = 0; r < b.rows; ++r) {
    const int64_t p = position + r;
    const float* rows[MOST_KERNEL];
    for (int64_t t = 0; t < a.kernel; ++t) rows[t] = delta_row(a, p - a.kernel + 1 + t);
    const int64_t from = p + 1 < a.kernel ? a.kernel - 1 - p : 0;  // before it the text has not begun
    delta_conv(a, rows, from, a.k_column, a.key_dim, b.k + r * b.key_dim);
    if (!a.plain) delta_unit(b.k + r * b.key_dim, a.key_dim, 1.0f);
    delta_conv(a, rows, from, a.v_column, a.value_dim, b.v + r * b.pitch);
    for (int64_t i = a.value_dim; i < b.pitch; ++i) b.v[r * b.pitch + i] = 0;
    const float* kept = p >= a.first ? nullptr : rows[a.kernel - 1] + a.channels;
    const float rate = kept ? kept[a.head] : a.b[(p - a.first) * a.b_stride + a.head];
    const float fade = (kept ? kept[a.heads + a.head] : a.a[(p - a.first) * a.a_stride + a.head]) + a.dt_bias[a.head];
    const float step = fade > 20.0f ? fade : __builtin_log1pf(__builtin_expf(fade));
    b.beta[r] = a.plain ? step : 1.0f / (1.0f + __builtin_expf(-rate));
    b.decay[r] = __builtin_expf(a.decay[a.head] * step);
    if (p < a.first) continue;
    delta_conv(a, rows, from, a.q_column, a.key_dim, b.q + r * b.key_dim);
    if (!a.plain) delta_unit(b.q + r * b.key_dim, a.key_dim, scale);
  }
}

// One row over C vectors of columns: `seen` is S^T k before it, and of the next row after it. READS: out = S^T q.
template <int C, bool READS>
PL_INLINE void delta_step(const DeltaBatch& b, int64_t r, int64_t column, V* seen, float* out) {
  const V decay = broadcast(b.decay[r]), beta = broadcast(b.beta[r]);
  const float *k = b.k + r * b.key_dim, *q = b.q + r * b.key_dim, *next = r + 1 < b.rows ? k + b.key_dim : k;
  V change[C], ahead[C] = {}, read[C] = {};
  PL_UNROLL
  for (int c = 0; c < C; ++c) change[c] = (load(b.v + r * b.pitch + column + c * L) - decay * seen[c]) * beta;
  float* s = b.s + column;
  for (int64_t i = 0; i < b.key_dim; ++i, s += b.pitch) {
    const V own = broadcast(k[i]), after = broadcast(next[i]), query = READS ? broadcast(q[i]) : V{};
    PL_UNROLL
    for (int c = 0; c < C; ++c) {
      const V x = fma(own, change[c], load(s + c * L) * decay);
      store(s + c * L, x);
      ahead[c] = fma(after, x, ahead[c]);
      if (READS) read[c] = fma(query, x, read[c]);
    }
  }
  PL_UNROLL
  for (int c = 0; c < C; ++c) {
    if (!b.plain) seen[c] = ahead[c];
    if (READS) store(out + c * L, b.plain ? fma(broadcast(b.skip), load(out + c * L), read[c]) : read[c]);
  }
}

// All rows of a batch over C vectors of columns, which no other column reads. `silent`: rows whose output nobody wants; that
// of the others replaces their values.
template <int C>
static void delta_columns(const DeltaBatch& b, int64_t silent, int64_t column) {
  V seen[C] = {};
  for (int64_t i = 0; i < b.key_dim && !b.plain; ++i)
    PL_UNROLL
    for (int c = 0; c < C; ++c) seen[c] = fma(broadcast(b.k[i]), load(b.s + i * b.pitch + column + c * L), seen[c]);
  for (int64_t r = 0; r < b.rows; ++r) {
    float* out = b.v + r * b.pitch + column;
    if (r < silent) delta_step<C, false>(b, r, column, seen, out);
    else delta_step<C, true>(b, r, column, seen, out);
  }
}

static void delta_rule(const DeltaArgs& a) {
  DeltaBatch b;
  b.plain = a.plain, b.skip = a.skip ? a.skip[a.head] : 0;
  b.key_dim = a.key_dim, b.pitch = delta_pitch(a.value_dim);
  b.s = a.scratch, b.k = b.s + b.pitch * b.key_dim, b.q = b.k + BATCH * b.key_dim, b.v = b.q + BATCH * b.key_dim;
  b.decay = b.v + BATCH * b.pitch, b.beta = b.decay + BATCH;
  for (int64_t i = 0; i < a.key_dim; ++i)
    for (int64_t j = 0; j < b.pitch; j += L)
      store(b.s + i * b.pitch + j, a.begin && j < a.value_dim ? load_at(a.state + i * a.value_dim, j, a.value_dim) : V{});
  for (int64_t p = a.begin; p < a.end; p += b.rows) {
    const int64_t stop = p < a.store ? a.store : a.end;
    b.rows = stop - p < BATCH ? stop - p : BATCH;
    delta_prepare(a, b, p);
    const int64_t silent = p < a.first ? (a.first - p < b.rows ? a.first - p : b.rows) : 0;
    int64_t column = 0;
    for (; column + 4 * L <= b.pitch; column += 4 * L) delta_columns<4>(b, silent, column);
    for (; column < b.pitch; column += L) delta_columns<1>(b, silent, column);
    for (int64_t r = silent; r < b.rows; ++r)
      std::memcpy(a.out + (p + r - a.first) * a.out_stride, b.v + r * b.pitch, a.value_dim * sizeof(float));
    if (p + b.rows == a.store)
      for (int64_t i = 0; i < a.key_dim; ++i)
        std::memcpy(a.state + i * a.value_dim, b.s + i * b.pitch, a.value_dim * sizeof(float));
  }
}

}  // namespace PACELINE_ISA
}  // namespace paceline
