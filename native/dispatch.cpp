#include <cstring>
#include <string>

#include "program.h"
#include "trial.h"

#if defined(PACELINE_X86)
#include <cpuid.h>
#endif
#if defined(PACELINE_X86) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace paceline {

namespace {

struct Set {
  const Kernels* kernels;
  const char* way;  // how pairs of bfloat16 are multiplied, see `bf16_dot_way`
};

struct Choice {
  const Kernels* kernels = nullptr;
  LeftOut left_out;
};

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

void add_avx512(std::vector<Set>& sets) {
  const Set pairs{&kernels_avx512, "pairs"}, floats{&kernels_avx512_floats, "floats"};
  if (!kernels_avx512.bf16_dot()) {
    sets.push_back({&kernels_avx512, ""});
    return;
  }
  if (has_registers()) sets.push_back({&kernels_avx512_registers, "registers"});
  sets.push_back(slow_at_pairs() ? floats : pairs);
  sets.push_back(slow_at_pairs() ? pairs : floats);
}
#endif

#if defined(PACELINE_X86)
bool converts_halves() {  // by the bit: older compilers do not know its name
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & 1u << 29);
}
#endif

std::vector<Set> sets_here() {
  std::vector<Set> sets;
#if defined(PACELINE_X86)
  __builtin_cpu_init();
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && converts_halves();
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
    add_avx512(sets);
  if (avx2) sets.push_back({&kernels_avx2, ""});
#elif defined(PACELINE_ARM)
  sets.push_back({&kernels_neon, ""});
#endif
  sets.push_back({&kernels_generic, ""});
  return sets;
}

// Those that this processor has the instructions for, the best first.
const std::vector<Set>& sets() {
  static const std::vector<Set> here = sets_here();
  return here;
}

// The first set that computes right here. `wrong(set)` says what one gets wrong; the portable set is what others are compared with.
template <class Wrong>
Choice choose(Wrong wrong) {
  Choice choice;
  for (const Set& set : sets()) {
    choice.kernels = set.kernels;
    const char* what = set.kernels == &kernels_generic ? nullptr : wrong(set);
    if (!what) break;
    choice.left_out.emplace_back(std::string(set.kernels->name) + (*set.way ? std::string(" by ") + set.way : ""), what);
  }
  return choice;
}

Choice& chosen() {
  static Choice choice = choose([](const Set& set) { return what_is_wrong(*set.kernels); });
  return choice;
}

const Kernels*& current() {
  static const Kernels* now = chosen().kernels;
  return now;
}

}  // namespace

const Kernels& kernels() { return *current(); }

const LeftOut& left_out() { return chosen().left_out; }

const char* bf16_dot_way() {
  for (const Set& set : sets())
    if (set.kernels == current()) return set.way;
  return "";
}

// For tests: a set that this CPU can run, by name. "pairs", "floats", "registers": avx512 with bfloat16 multiplied in that way.
bool choose_kernels(const char* name) {
  if (std::strcmp(name, "best") == 0) return current() = chosen().kernels, true;
  for (const Set& set : sets())
    if (std::strcmp(name, set.kernels->name) == 0 || (*set.way && std::strcmp(name, set.way) == 0)) return current() = set.kernels, true;
  return false;
}

namespace {

const Kernels* spoilt = nullptr;

void wrong_linear(const Tiles& m, const Prepared& x, int64_t rows, int64_t begin, int64_t end, float* y, int64_t stride) {
  spoilt->linear(m, x, rows, begin, end, y, stride);
  y[0] *= 1.01f;
}

bool wrong_attention(const AttentionArgs& args) {
  const bool done = spoilt->attention(args);
  args.out[0] *= 1.01f;
  return done;
}

void wrong_norm(const float* x, const float* weight, float* y, int64_t width, int groups, float eps) {
  spoilt->norm(x, weight, y, width, groups, eps);
  y[width - 1] += 0.01f;
}

}  // namespace

void choose_again(const std::vector<std::pair<std::string, std::string>>& broken) {
  chosen() = choose([&](const Set& set) {
    Kernels k = *set.kernels;
    spoilt = set.kernels;
    for (const auto& [name, operation] : broken) {
      if (name != set.kernels->name && name != set.way) continue;
      if (operation == "linear") k.linear = wrong_linear;
      if (operation == "attention") k.attention = wrong_attention;
      if (operation == "norm") k.norm = wrong_norm;
    }
    return what_is_wrong(k);
  });
  current() = chosen().kernels;
}

}  // namespace paceline
