#include <algorithm>
#include <chrono>
#include <cstring>

#include "program.h"

#if defined(PACELINE_X86)
#include <cpuid.h>
#endif

namespace paceline {

namespace {

#if defined(PACELINE_X86)
double seconds(float (*work)(int64_t)) {
  constexpr int64_t turns = 50;  // a microsecond
  volatile float keep = work(40 * turns);  // cores that wake their wide units do a quarter of the work for some microseconds
  double least = 1;
  for (int i = 0; i < 9; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    keep = work(turns);
    least = std::min(least, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  (void)keep;
  return least;
}

// A multiply-add of floats is half of a product of pairs, and what it multiplies has to be widened.
const Kernels* faster_at_pairs() {
  const Kernels& k = kernels_avx512;
  return k.bf16_dot() && seconds(k.burn_bf16_dot) > 2.5 * seconds(k.burn) ? &kernels_avx512_floats : &k;
}
#endif

#if defined(PACELINE_X86)
bool converts_halves() {  // by the bit: older compilers do not know its name
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & 1u << 29);
}
#endif

const Kernels* best() {
#if defined(PACELINE_X86)
  __builtin_cpu_init();
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && converts_halves();
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
    return faster_at_pairs();
  if (avx2) return &kernels_avx2;
#elif defined(PACELINE_ARM)
  return &kernels_neon;
#endif
  return &kernels_generic;
}

const Kernels* top() {
  static const Kernels* const kernels = best();
  return kernels;
}

const Kernels*& current() {
  static const Kernels* chosen = top();
  return chosen;
}

}  // namespace

const Kernels& kernels() { return *current(); }

bool bf16_dot_by_floats() {
#if defined(PACELINE_X86)
  return current() == &kernels_avx512_floats;
#else
  return false;
#endif
}

// For tests: a set that this CPU can run, by name. "pairs" and "floats": avx512 with bfloat16 multiplied in that way.
bool choose_kernels(const char* name) {
  const Kernels* chosen = nullptr;
  if (std::strcmp(name, "best") == 0 || std::strcmp(name, top()->name) == 0) chosen = top();
  else if (std::strcmp(name, "generic") == 0) chosen = &kernels_generic;
#if defined(PACELINE_X86)
  else if (std::strcmp(name, "avx2") == 0 && top() != &kernels_generic) chosen = &kernels_avx2;
  else if (std::strcmp(name, "pairs") == 0 && top()->bf16_dot()) chosen = &kernels_avx512;
  else if (std::strcmp(name, "floats") == 0 && top()->bf16_dot()) chosen = &kernels_avx512_floats;
#endif
  if (chosen) current() = chosen;
  return chosen != nullptr;
}

}  // namespace paceline
