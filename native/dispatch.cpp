#include <cstring>

#include "program.h"

namespace paceline {

namespace {

const Kernels* best() {
#if defined(PACELINE_X86)
  __builtin_cpu_init();
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
    return &kernels_avx512;
  if (avx2) return &kernels_avx2;
#elif defined(PACELINE_ARM)
  return &kernels_neon;
#endif
  return &kernels_generic;
}

const Kernels*& current() {
  static const Kernels* chosen = best();
  return chosen;
}

}  // namespace

const Kernels& kernels() { return *current(); }

// For tests: a set that this CPU can run, by name.
bool choose_kernels(const char* name) {
  const Kernels* top = best();
  if (std::strcmp(name, "best") == 0) current() = top;
  else if (std::strcmp(name, "generic") == 0) current() = &kernels_generic;
#if defined(PACELINE_X86)
  else if (std::strcmp(name, "avx2") == 0 && top != &kernels_generic) current() = &kernels_avx2;
#endif
  else if (std::strcmp(name, top->name) == 0) current() = top;
  else return false;
  return true;
}

}  // namespace paceline
