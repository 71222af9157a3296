// Softmax attention of one row over the paged cache. Keys are taken in blocks of BLOCK that lie at absolute positions, so
// no cut of a text into chunks changes a bit; the heads that share a K/V head share each load of it.
#pragma once

#include "rowops.h"

namespace paceline {
namespace PACELINE_ISA {

constexpr int BLOCK = 64;  // keys per running-maximum update

// Dot products of Q query heads with K keys; out[q * BLOCK + j].
template <int Q, int K>
PL_INLINE void scores(const AttentionArgs& a, const float* keys, int64_t stride, int64_t d, float* out) {
  V acc[Q][K] = {};
  int64_t i = 0;
  for (; i + L <= d; i += L) {
    V k[K];
    PL_UNROLL
    for (int j = 0; j < K; ++j) k[j] = pin(load(keys + j * stride + i));
    PL_UNROLL
    for (int q = 0; q < Q; ++q) {
      V x = load(a.q + q * d + i);
      PL_UNROLL
      for (int j = 0; j < K; ++j) acc[q][j] = fma(k[j], x, acc[q][j]);
    }
  }
  if (i < d)
    PL_UNROLL
    for (int q = 0; q < Q; ++q)
      PL_UNROLL
      for (int j = 0; j < K; ++j) {
        int n = static_cast<int>(d - i);
        acc[q][j] = fma(load_part(keys + j * stride + i, n), load_part(a.q + q * d + i, n), acc[q][j]);
      }
  PL_UNROLL
  for (int q = 0; q < Q; ++q)
    PL_UNROLL
    for (int j = 0; j < K; j += 4) {
      F4 total = sums(half(acc[q][j]), half(acc[q][K > 1 ? j + 1 : j]), half(acc[q][K > 2 ? j + 2 : j]),
                      half(acc[q][K > 3 ? j + 3 : j]));
      PL_UNROLL
      for (int n = 0; n < (K < 4 ? K : 4); ++n) out[q * BLOCK + j + n] = total[n];
    }
}

struct Block {  // the values of a block of keys: page by page
  const float* values[BLOCK];
  int counts[BLOCK], pages;
  int64_t stride;
};

// out[q][i..] += sum_j p[q][j] * value_j[i..] over C vectors of columns.
template <int Q, int C>
PL_INLINE void mix(const float* p, const Block& block, float* out, int64_t d, int64_t i) {
  V acc[Q][C];
  PL_UNROLL
  for (int q = 0; q < Q; ++q)
    PL_UNROLL
    for (int c = 0; c < C; ++c) acc[q][c] = load(out + q * d + i + c * L);
  for (int page = 0; page < block.pages; ++page) {
    const float* values = block.values[page] + i;
    for (int j = 0; j < block.counts[page]; ++j, ++p, values += block.stride) {
      V v[C];
      PL_UNROLL
      for (int c = 0; c < C; ++c) v[c] = pin(load(values + c * L));
      PL_UNROLL
      for (int q = 0; q < Q; ++q) {
        V weight = broadcast(p[q * BLOCK]);
        PL_UNROLL
        for (int c = 0; c < C; ++c) acc[q][c] = fma(weight, v[c], acc[q][c]);
      }
    }
  }
  PL_UNROLL
  for (int q = 0; q < Q; ++q)
    PL_UNROLL
    for (int c = 0; c < C; ++c) store(out + q * d + i + c * L, acc[q][c]);
}

template <int Q>
PL_INLINE void mix_all(const float* p, const Block& block, float* out, int64_t d) {
  constexpr int C = Q == 1 ? 8 : Q == 2 ? 4 : 2;
  int64_t i = 0;
  for (; i + C * L <= d; i += C * L) mix<Q, C>(p, block, out, d, i);
  for (; i + L <= d; i += L) mix<Q, 1>(p, block, out, d, i);
  for (; i < d; ++i)
    for (int page = 0, at = 0; page < block.pages; at += block.counts[page++])
      for (int j = 0; j < block.counts[page]; ++j)
        for (int q = 0; q < Q; ++q) out[q * d + i] += p[q * BLOCK + at + j] * block.values[page][j * block.stride + i];
}

// Turns n scores (the room up to a whole vector is filled with -inf) into weights; scales what was summed before.
PL_INLINE void soften(float* p, int n, float& top, float& sum, float* out, int64_t d) {
  V most = broadcast(top);
  for (int j = n; j % L; ++j) p[j] = -__builtin_inff();
  for (int j = 0; j < n; j += L) most = vmax(most, load(p + j));
  float high = reduce_max(most);
  if (high > top) {
    float shrink = vexp(broadcast(top - high))[0];  // top is -inf at first: the clamped e^-87 scales zeros
    sum *= shrink;
    each(out, out, d, [shrink](V x) { return x * shrink; });
    top = high;
  }
  V total{};
  for (int j = 0; j < n; j += L) {
    V e = vexp(load(p + j) - top);
    if (j + L > n) {
      store(p + j, e);
      for (int i = n; i < j + L; ++i) p[i] = 0;
      e = load(p + j);
    }
    store(p + j, e);
    total += e;
  }
  sum += reduce(total);
}

template <int Q>
static bool attend(const AttentionArgs& a) {
  constexpr int K = Q == 1 ? 8 : Q == 2 ? 4 : 2;
  const int64_t d = a.k.head_dim, stride = d * a.k.kv_heads, page_size = a.k.page_size;
  const int32_t* table = a.k.table + a.slot * a.k.table_stride;
  float top[Q], sum[Q], p[Q * BLOCK];
  for (int q = 0; q < Q; ++q) top[q] = -__builtin_inff(), sum[q] = 0.0f;
  each(a.out, a.out, Q * d, [](V) { return V{}; });
  Block block;
  block.stride = stride;
  for (int64_t begin = a.first; begin < a.last;) {
    int64_t end = (begin / BLOCK + 1) * BLOCK;
    if (end > a.last) end = a.last;
    int filled = 0;
    block.pages = 0;
    for (int64_t j = begin; j < end; ++block.pages) {
      int64_t page = j / page_size, stop = (page + 1) * page_size < end ? (page + 1) * page_size : end;
      int64_t at = table[page] * page_size + j % page_size;
      int count = static_cast<int>(stop - j), i = 0;
      if (table[page] < 0 || at + count > a.k.tokens) return false;
      const float* keys = a.k.pool + at * stride + a.kv_head * d;
      for (; i + K <= count; i += K) scores<Q, K>(a, keys + i * stride, stride, d, p + filled + i);
      for (; i < count; ++i) scores<Q, 1>(a, keys + i * stride, stride, d, p + filled + i);
      block.values[block.pages] = a.v.pool + at * stride + a.kv_head * d;
      block.counts[block.pages] = count;
      filled += count;
      j = stop;
    }
    PL_UNROLL
    for (int q = 0; q < Q; ++q) soften(p + q * BLOCK, filled, top[q], sum[q], a.out + q * d, d);
    mix_all<Q>(p, block, a.out, d);
    begin = end;
  }
  PL_UNROLL
  for (int q = 0; q < Q; ++q) {
    float total = sum[q] > 0 ? sum[q] : 1.0f;  // a row without keys gives zeros
    each(a.out + q * d, a.out + q * d, d, [total](V x) { return x / broadcast(total); });
  }
  return true;
}

static bool attention(const AttentionArgs& a) {
  switch (a.queries) {
    case 1: return attend<1>(a);
    case 2: return attend<2>(a);
    case 3: return attend<3>(a);
    default: return attend<4>(a);
  }
}

}  // namespace PACELINE_ISA
}  // namespace paceline
