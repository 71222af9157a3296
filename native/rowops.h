// Ops on one row, and attention of one row. Every loop runs in one fixed order; tails are zero-padded vectors.
#pragma once

#include "simd.h"
#include "types.h"

namespace paceline {
namespace PACELINE_ISA {

PL_INLINE V load_at(const float* p, int64_t i, int64_t n) {
  return i + L <= n ? load(p + i) : load_part(p + i, static_cast<int>(n - i));
}
PL_INLINE void store_at(float* p, int64_t i, int64_t n, V v) {
  if (i + L <= n) store(p + i, v);
  else store_part(p + i, v, static_cast<int>(n - i));
}

template <class F>
PL_INLINE void each(const float* x, float* y, int64_t n, F f) {
  for (int64_t i = 0; i < n; i += L) store_at(y, i, n, f(load_at(x, i, n)));
}
template <class F>
PL_INLINE void each2(const float* x, const float* z, float* y, int64_t n, F f) {
  for (int64_t i = 0; i < n; i += L) store_at(y, i, n, f(load_at(x, i, n), load_at(z, i, n)));
}

static void add(const float* x, const float* z, float* y, int64_t n) {
  each2(x, z, y, n, [](V a, V b) { return a + b; });
}
static void mul(const float* x, const float* z, float* y, int64_t n) {
  each2(x, z, y, n, [](V a, V b) { return a * b; });
}
static void scale(const float* x, float factor, float* y, int64_t n) {
  each(x, y, n, [factor](V a) { return a * factor; });
}
static void gelu(const float* x, float* y, int64_t n) {
  each(x, y, n, [](V a) { return vgelu(a); });
}
static void gated_gelu(const float* x, const float* z, float* y, int64_t n) {
  each2(x, z, y, n, [](V a, V b) { return vgelu(a) * b; });
}
static void softcap(const float* x, float cap, float* y, int64_t n) {
  each(x, y, n, [cap](V a) { return vtanh(a / broadcast(cap)) * cap; });
}

static void norm(const float* x, const float* weight, float* y, int64_t width, int groups, float eps) {
  int64_t n = width / groups;
  for (int g = 0; g < groups; ++g, x += n, y += n) {
    V s[4] = {};
    for (int64_t i = 0; i < n; i += 4 * L)
      for (int j = 0; j < 4; ++j)
        if (i + j * L < n) {
          V v = load_at(x, i + j * L, n);
          s[j] = fma(v, v, s[j]);
        }
    float mean = reduce((s[0] + s[1]) + (s[2] + s[3])) / static_cast<float>(n);
    float factor = 1.0f / __builtin_sqrtf(mean + eps);
    if (weight) each2(x, weight, y, n, [factor](V a, V w) { return a * factor * w; });
    else each(x, y, n, [factor](V a) { return a * factor; });
  }
}

static void softmax(const float* x, float* y, int64_t n) {
  float top = x[0];
  for (int64_t i = 1; i < n; ++i) top = x[i] > top ? x[i] : top;
  V total{};
  for (int64_t i = 0; i < n; i += L) {
    store_at(y, i, n, vexp(load_at(x, i, n) - top));
    total += load_at(y, i, n);
  }
  float sum = reduce(total);
  each(y, y, n, [sum](V a) { return a / broadcast(sum); });
}

// sin and cos in double (error far below a float's), of the float product that the reference rounds.
typedef double D4 __attribute__((vector_size(32)));
typedef int64_t Q4 __attribute__((vector_size(32)));

PL_INLINE void sincos4(D4 x, D4& s, D4& c) {
  const double magic = 6755399441055744.0;  // 1.5 * 2^52
  D4 t = x * 0.63661977236758134308 + magic;
  D4 k = t - magic;
  D4 r = x - k * 1.57079632673412561417;
  r = r - k * 6.07710050650619224932e-11;
  D4 z = r * r;
  D4 sine = r + r * z * (-1.66666666666666324348e-01 + z * (8.33333333332248946124e-03 +
            z * (-1.98412698298579493134e-04 + z * (2.75573137070700676789e-06 + z * -2.50507602534068634195e-08))));
  D4 cosine = 1.0 - 0.5 * z + z * z * (4.16666666666666019037e-02 + z * (-1.38888888888741095749e-03 +
              z * (2.48015872894767294178e-05 + z * -2.75573143513906633035e-07)));
  Q4 q = (Q4)t;
  Q4 swap = (q & 1) != 0;
  D4 a = swap ? cosine : sine, b = swap ? sine : cosine;
  s = (q & 2) != 0 ? -a : a;
  c = ((q + 1) & 2) != 0 ? -b : b;
}

static void rotary(const float* x, const float* inv_freq, float* y, int64_t width, int heads, int32_t position) {
  int64_t d = width / heads, half = d / 2;
  for (int64_t i = 0; i < half; i += 4) {
    D4 angle{};
    int n = half - i < 4 ? static_cast<int>(half - i) : 4;
    for (int j = 0; j < n; ++j) angle[j] = static_cast<double>(static_cast<float>(position) * inv_freq[i + j]);
    D4 s, c;
    sincos4(angle, s, c);
    F4 sf = __builtin_convertvector(s, F4), cf = __builtin_convertvector(c, F4);
    for (int h = 0; h < heads; ++h)
      for (int j = 0; j < n; ++j) {
        float a = x[h * d + i + j], b = x[h * d + half + i + j];
        y[h * d + i + j] = a * cf[j] - b * sf[j];
        y[h * d + half + i + j] = b * cf[j] + a * sf[j];
      }
  }
}

static void embed(const Matrix& m, int64_t token, float factor, float* y) {
  const char* row = static_cast<const char*>(m.data) + token * m.row_bytes();
  if (m.kind == FLOAT32) {
    const float* w = reinterpret_cast<const float*>(row);
    for (int64_t i = 0; i < m.in; ++i) y[i] = w[i] * factor;
  } else if (m.kind == BFLOAT16) {
    for (int64_t i = 0; i < m.in; ++i) {
      uint16_t half;
      std::memcpy(&half, row + 2 * i, 2);
      uint32_t word = static_cast<uint32_t>(half) << 16;
      float w;
      std::memcpy(&w, &word, 4);
      y[i] = w * factor;
    }
  } else if (m.kind == INT8) {
    float s = m.scale[token];
    for (int64_t i = 0; i < m.in; ++i) y[i] = static_cast<float>(static_cast<int8_t>(row[i])) * s * factor;
  } else {
    const float* s = m.scale + token * (m.in / 32);
    for (int64_t i = 0; i < m.in; ++i) {
      int q = (static_cast<uint8_t>(row[i / 2]) >> (i % 2 * 4)) & 15;
      y[i] = static_cast<float>(q - 8) * s[i / 32] * factor;
    }
  }
}

// --- attention: blocks are the pages, which lie at absolute key positions, so no cut of a text changes a bit ----------

template <int Q, int K>
PL_INLINE void scores(const AttentionArgs& a, const float* keys, int64_t key_stride, int64_t d, float* out) {
  V acc[Q][K] = {};
  int64_t i = 0;
  for (; i + L <= d; i += L) {
    V k[K];
    for (int j = 0; j < K; ++j) k[j] = load(keys + j * key_stride + i);
    for (int q = 0; q < Q; ++q) {
      V x = load(a.q + q * d + i);
      for (int j = 0; j < K; ++j) acc[q][j] = fma(k[j], x, acc[q][j]);
    }
  }
  if (i < d)
    for (int q = 0; q < Q; ++q)
      for (int j = 0; j < K; ++j) {
        int n = static_cast<int>(d - i);
        acc[q][j] = fma(load_part(keys + j * key_stride + i, n), load_part(a.q + q * d + i, n), acc[q][j]);
      }
  for (int q = 0; q < Q; ++q)
    for (int j = 0; j < K; ++j) out[q * 32 + j] = reduce(acc[q][j]);
}

template <int Q, int C>
PL_INLINE void mix(const float* p, const float* values, int64_t stride, int count, float* out, int64_t d, int64_t i) {
  V acc[Q][C];
  for (int q = 0; q < Q; ++q)
    for (int c = 0; c < C; ++c) acc[q][c] = load(out + q * d + i + c * L);
  for (int j = 0; j < count; ++j) {
    V v[C];
    for (int c = 0; c < C; ++c) v[c] = load(values + j * stride + i + c * L);
    for (int q = 0; q < Q; ++q)
      for (int c = 0; c < C; ++c) acc[q][c] = fma(broadcast(p[q * 32 + j]), v[c], acc[q][c]);
  }
  for (int q = 0; q < Q; ++q)
    for (int c = 0; c < C; ++c) store(out + q * d + i + c * L, acc[q][c]);
}

template <int Q>
static void mix_all(const float* p, const float* values, int64_t stride, int count, float* out, int64_t d) {
  int64_t i = 0;
  for (; i + 2 * L <= d; i += 2 * L) mix<Q, 2>(p, values, stride, count, out, d, i);
  for (; i + L <= d; i += L) mix<Q, 1>(p, values, stride, count, out, d, i);
  for (; i < d; ++i)
    for (int q = 0; q < Q; ++q)
      for (int j = 0; j < count; ++j) out[q * d + i] += p[q * 32 + j] * values[j * stride + i];
}

template <int Q>
static void attend_page(const AttentionArgs& a, const float* keys, const float* values, int64_t stride, int count,
                        float* top, float* sum) {
  constexpr int K = Q <= 2 ? 4 : 2;
  int64_t d = a.k.head_dim;
  float s[Q * 32];
  int j = 0;
  for (; j + K <= count; j += K) scores<Q, K>(a, keys + j * stride, stride, d, s + j);
  for (; j < count; ++j) scores<Q, 1>(a, keys + j * stride, stride, d, s + j);
  for (int q = 0; q < Q; ++q) {
    float* p = s + q * 32;
    float high = top[q];
    for (j = 0; j < count; ++j) high = p[j] > high ? p[j] : high;
    if (high > top[q]) {
      float shrink = vexp(broadcast(top[q] - high))[0];  // top is -inf at first: the clamped e^-87 scales zeros
      sum[q] *= shrink;
      each(a.out + q * d, a.out + q * d, d, [shrink](V x) { return x * shrink; });
      top[q] = high;
    }
    V total{};
    for (j = 0; j < count; j += L) {
      store_at(p, j, count, vexp(load_at(p, j, count) - high));
      total += load_at(p, j, count);
    }
    sum[q] += reduce(total);
  }
  mix_all<Q>(s, values, stride, count, a.out, d);
}

template <int Q>
static bool attend(const AttentionArgs& a) {
  int64_t d = a.k.head_dim, stride = d * a.k.kv_heads;
  float top[Q], sum[Q];
  for (int q = 0; q < Q; ++q) top[q] = -__builtin_inff(), sum[q] = 0.0f;
  std::memset(a.out, 0, sizeof(float) * Q * d);
  const int32_t* table = a.k.table + a.slot * a.k.table_stride;
  for (int64_t j = a.first; j < a.last;) {
    int64_t page = j / a.k.page_size, end = (page + 1) * a.k.page_size;
    int64_t count = (end < a.last ? end : a.last) - j;
    int64_t at = static_cast<int64_t>(table[page]) * a.k.page_size + j % a.k.page_size;
    if (table[page] < 0 || at + count > a.k.tokens) return false;
    int64_t offset = at * stride + a.kv_head * d;
    attend_page<Q>(a, a.k.pool + offset, a.v.pool + offset, stride, static_cast<int>(count), top, sum);
    j += count;
  }
  for (int q = 0; q < Q; ++q) {
    float total = sum[q] > 0 ? sum[q] : 1.0f;  // a row without keys gives zeros
    each(a.out + q * d, a.out + q * d, d, [total](V x) { return x / broadcast(total); });
  }
  return true;
}

static bool attention(const AttentionArgs& a, float*) {
  switch (a.queries) {
    case 1: return attend<1>(a);
    case 2: return attend<2>(a);
    case 3: return attend<3>(a);
    default: return attend<4>(a);
  }
}

}  // namespace PACELINE_ISA
}  // namespace paceline
