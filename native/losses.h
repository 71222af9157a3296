// One drafted position against the target's distribution: the objectives of paceline/train/objectives.py that weigh
// KL(p || q) against the share that would be refused, with their gradients in closed form.
#pragma once

#include "rowops.h"
#include "types.h"

namespace paceline {
namespace PACELINE_ISA {

PL_INLINE V load_or(const float* x, int64_t i, int64_t n, float other) {  // `other` behind the last of n
  if (i + L <= n) return load(x + i);
  float v[L];
  for (int j = 0; j < L; ++j) v[j] = i + j < n ? x[i + j] : other;
  return load(v);
}

static float largest(const float* x, int64_t n) {
  V top = broadcast(x[0]);
  for (int64_t i = 0; i < n; i += L) top = vmax(load_or(x, i, n, x[0]), top);
  return reduce_max(top);
}

// With p and q at the temperature, alpha = sum min(p, q) and w = e^(-decay alpha), which counts as a constant:
// w KL(p || q) + (1 - w)(1 - alpha) - greedy log q1(best), q1 at temperature 1. `logits` become its gradient, times `weight`.
static float hybrid_loss(const LossRow& c) {
  constexpr float NONE = 1e4f;  // below the largest logarithm: no chance at all
  const int64_t n = c.count, wide = (n + L - 1) / L * L;
  float *p = c.room, *q = p + wide;
  const float top = largest(c.logits, n), top_p = largest(c.log_p, n);
  V one{}, at{}, target{}, apart{};
  for (int64_t i = 0; i < n; i += L) {
    const V x = load_or(c.logits, i, n, top - NONE) - top;
    const V y = vmax(load_or(c.log_p, i, n, top_p - NONE) - top_p, broadcast(-NONE)) * c.inverse;
    const V e = vexp(x * c.inverse), t = vexp(y);
    if (c.greedy > 0) one += vexp(x);
    at += e, target += t, apart = fma(t, y - x * c.inverse, apart);
    store(q + i, e), store(p + i, t);
  }
  const float sum_q = reduce(at), sum_p = reduce(target);
  const V by_q = broadcast(1.0f / sum_q), by_p = broadcast(1.0f / sum_p);
  V kept{}, below{};
  for (int64_t i = 0; i < wide; i += L) {
    const V a = load(p + i) * by_p, b = load(q + i) * by_q;
    kept += vmin(a, b);
    below += (V)((VI)b & (b < a));
    store(p + i, a), store(q + i, b);
  }
  const float alpha = reduce(kept), under = reduce(below), sum_one = reduce(one);
  const float w = __builtin_expf(-c.decay * alpha);
  const bool has = c.greedy > 0 && c.best >= 0;
  float value = w * (reduce(apart) / sum_p + __builtin_logf(sum_q / sum_p)) + (1 - w) * (1 - alpha);
  if (has) value -= c.greedy * (c.logits[c.best] - top - __builtin_logf(sum_one));
  const float far = c.weight * w * c.inverse, near = c.weight * (1 - w) * c.inverse;
  const float said = has ? c.weight * c.greedy / sum_one : 0.0f;
  for (int64_t i = 0; i < n; i += L) {
    const V a = load(p + i), b = load(q + i);
    V g = far * (b - a) - near * ((V)((VI)b & (b < a)) - b * under);
    if (has) g += said * vexp(load_or(c.logits, i, n, top - NONE) - top);
    store_at(c.logits, i, n, g);
  }
  if (has) c.logits[c.best] -= c.weight * c.greedy;
  return c.weight * value;
}

}  // namespace PACELINE_ISA
}  // namespace paceline
