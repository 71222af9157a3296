// What the benchmark holds the kernels against: how fast memory can be read, and how many multiply-adds a core can do.
#pragma once

#include "simd.h"

namespace paceline {
namespace PACELINE_ISA {

static float read_all(const float* data, int64_t n) {
  V acc[8] = {};
  for (int64_t i = 0; i + 8 * L <= n; i += 8 * L)
    for (int j = 0; j < 8; ++j) acc[j] += load(data + i + j * L);
  V total{};
  for (int j = 0; j < 8; ++j) total += acc[j];
  return reduce(total);
}

constexpr int CHAINS = 12;  // enough to hide the latency of a multiply-add

static float burn(int64_t turns) {
  V acc[CHAINS] = {};
  V a = broadcast(1.0000001f), b = broadcast(1e-9f);
  for (int64_t i = 0; i < turns; ++i) {
    _Pragma("GCC unroll 48")  // in registers throughout: kept in memory between turns, they halve the rate
    for (int j = 0; j < 4 * CHAINS; ++j) acc[j % CHAINS] = pin(fma(acc[j % CHAINS], a, b));
  }
  V total{};
  for (int j = 0; j < CHAINS; ++j) total += acc[j];
  return reduce(total);
}

static int64_t burn_flops() { return 2 * 4 * CHAINS * L; }  // of one turn

}  // namespace PACELINE_ISA
}  // namespace paceline
