#include <cstring>

#include "program.h"

#if defined(PACELINE_X86)
#include <cpuid.h>
#endif
#if defined(PACELINE_X86) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace paceline {

namespace {

#if defined(PACELINE_X86)
// AMX, with its products of bfloat16. Linux gives its registers to a process that asks for them.
bool has_registers() {
#if defined(__linux__)
  unsigned a, b, c, d;
  constexpr unsigned tiles = 1u << 24 | 1u << 22;
  constexpr long ask = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & tiles) == tiles && !syscall(SYS_arch_prctl, ask, tile_data);
#else
  return false;
#endif
}

// For the same bits, one of two ways is faster. Measured on AMD's Zen 4 (linears of bfloat16, 1 to 64 rows): pairs never lose, 1.0 to 1.1
// times as fast for one row and twice for 8 and more. Measured on an Intel processor with AVX512-BF16: floats, up to 1.5 times for many
// rows. Cooper Lake, the first that had the instruction, was not measured and gets pairs. The processor decides, no clock does.
bool slow_at_pairs() {
  unsigned a, b, c, d;
  if (!__get_cpuid(0, &a, &b, &c, &d) || b != signature_INTEL_ebx || c != signature_INTEL_ecx || d != signature_INTEL_edx) return false;
  __get_cpuid(1, &a, &b, &c, &d);
  const unsigned family = a >> 8 & 15, model = (a >> 4 & 15) | (a >> 12 & 0xf0);
  return !(family == 6 && model == 0x55);
}

const Kernels* best_at_pairs() {
  const Kernels& k = kernels_avx512;
  if (k.bf16_dot() && has_registers()) return &kernels_avx512_registers;
  return k.bf16_dot() && slow_at_pairs() ? &kernels_avx512_floats : &k;
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
    return best_at_pairs();
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

const char* bf16_dot_way() {
#if defined(PACELINE_X86)
  if (current() == &kernels_avx512_registers) return "registers";
  if (current() == &kernels_avx512_floats) return "floats";
#endif
  return kernels().bf16_dot() ? "pairs" : "";
}

// For tests: a set that this CPU can run, by name. "pairs", "floats", "registers": avx512 with bfloat16 multiplied in that way.
bool choose_kernels(const char* name) {
  const Kernels* chosen = nullptr;
  if (std::strcmp(name, "best") == 0 || std::strcmp(name, top()->name) == 0) chosen = top();
  else if (std::strcmp(name, "generic") == 0) chosen = &kernels_generic;
#if defined(PACELINE_X86)
  else if (std::strcmp(name, "avx2") == 0 && top() != &kernels_generic) chosen = &kernels_avx2;
  else if (std::strcmp(name, "pairs") == 0 && top()->bf16_dot()) chosen = &kernels_avx512;
  else if (std::strcmp(name, "floats") == 0 && top()->bf16_dot()) chosen = &kernels_avx512_floats;
  else if (std::strcmp(name, "registers") == 0 && top() == &kernels_avx512_registers) chosen = top();
#endif
  if (chosen) current() = chosen;
  return chosen != nullptr;
}

}  // namespace paceline
