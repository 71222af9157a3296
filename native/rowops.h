// Ops on one row. Every loop runs in one fixed order; tails are zero-padded vectors.
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
static void gated_silu(const float* x, const float* z, float* y, int64_t n) {
  each2(x, z, y, n, [](V a, V b) { return vsilu(a) * b; });
}
static void gated_clamped(const float* x, const float* z, float* y, int64_t n) {  // gpt-oss's, see ops/base.py
  const V most = broadcast(7.0f), least = broadcast(-7.0f), one = broadcast(1.0f);
  each2(x, z, y, n, [=](V a, V b) {
    a = vmin(most, a), b = vmin(most, vmax(least, b));
    return a / (one + vexp(a * -1.702f)) * (b + one);
  });
}
static void gated_relu(const float* x, const float* z, float* y, int64_t n) {  // what is no number stays none
  each2(x, z, y, n, [](V a, V b) { return vmax(V{}, a) * b; });
}
static void gated_sigmoid(const float* x, const float* z, float* y, int64_t n) {
  each2(x, z, y, n, [](V a, V b) { return b / (broadcast(1.0f) + vexp(-a)); });
}
static void softcap(const float* x, float cap, float* y, int64_t n) {
  each(x, y, n, [cap](V a) { return vtanh(a / broadcast(cap)) * cap; });
}

// Blocks of ranks, each rank and each output in one order: a row's bits do not depend on which part of it is computed.
static void low_rank(const LowRankArgs& c) {
  constexpr int BLOCK = 64;
  float inner[BLOCK];
  for (int64_t first = 0; first < c.rank; first += BLOCK) {
    const int64_t count = c.rank - first < BLOCK ? c.rank - first : BLOCK;
    for (int64_t k = 0; k < count; ++k) {
      const float* a = c.a + (first + k) * c.in;
      V s[4] = {};
      for (int64_t i = 0; i < c.in; i += 4 * L)
        for (int j = 0; j < 4; ++j)
          if (i + j * L < c.in) s[j] = fma(load_at(a, i + j * L, c.in), load_at(c.x, i + j * L, c.in), s[j]);
      inner[k] = c.factor * reduce((s[0] + s[1]) + (s[2] + s[3]));
    }
    for (int64_t o = c.begin; o < c.end; o += L) {
      V sum = load_at(c.y, o, c.end);
      for (int64_t k = 0; k < count; ++k) sum = fma(broadcast(inner[k]), load_at(c.b + (first + k) * c.out, o, c.end), sum);
      store_at(c.y, o, c.end, sum);
    }
  }
}

static void center(const float* x, float* y, int64_t n) {
  V s[4] = {};
  for (int64_t i = 0; i < n; i += 4 * L)
    for (int j = 0; j < 4; ++j)
      if (i + j * L < n) s[j] += load_at(x, i + j * L, n);
  const float mean = reduce((s[0] + s[1]) + (s[2] + s[3])) / static_cast<float>(n);
  each(x, y, n, [mean](V a) { return a - mean; });
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

static void clamp(const float* x, float lowest, float highest, float* y, int64_t n) {
  each(x, y, n, [=](V a) { return vmin(broadcast(highest), vmax(broadcast(lowest), a)); });
}

// e^(x - the largest x); their sum is returned.
static float exponents(const float* x, float* y, int64_t n) {
  V most[4], total{};
  for (V& m : most) m = broadcast(x[0]);
  int64_t i = 0;
  for (; i + 4 * L <= n; i += 4 * L)
    for (int j = 0; j < 4; ++j) most[j] = vmax(load(x + i + j * L), most[j]);
  float top = reduce_max(vmax(vmax(most[0], most[1]), vmax(most[2], most[3])));
  for (; i < n; ++i) top = x[i] > top ? x[i] : top;
  for (i = 0; i < n; i += L) {
    const V e = vexp(load_at(x, i, n) - top);
    store_at(y, i, n, e);
    total += i + L <= n ? e : load_at(y, i, n);
  }
  return reduce(total);
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

static void rotary(const float* x, const float* inv_freq, float* y, int64_t width, int heads, int64_t rotated,
                   float factor, int32_t position) {
  constexpr int64_t MOST = 512;  // pairs of a head
  float sine[MOST], cosine[MOST];
  int64_t d = width / heads, half = rotated / 2 < MOST ? rotated / 2 : MOST;
  for (int64_t i = 0; i < half; i += 4) {
    F4 angle{};
    for (int j = 0; j < 4 && i + j < half; ++j) angle[j] = static_cast<float>(position) * inv_freq[i + j];
    D4 s, c;
    sincos4(__builtin_convertvector(angle, D4), s, c);
    for (int j = 0; j < 4 && i + j < half; ++j) {
      sine[i + j] = static_cast<float>(s[j]) * factor;
      cosine[i + j] = static_cast<float>(c[j]) * factor;
    }
  }
  for (int h = 0; h < heads; ++h, x += d, y += d) {
    for (int64_t i = 0; i < half; i += L) {
      V a = load_at(x, i, half), b = load_at(x + half, i, half);
      V s = load_at(sine, i, half), c = load_at(cosine, i, half);
      store_at(y, i, half, a * c - b * s);
      store_at(y + half, i, half, b * c + a * s);
    }
    for (int64_t i = 2 * half; i < d; ++i) y[i] = x[i];
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

}  // namespace PACELINE_ISA
}  // namespace paceline
