// This file and dots.h are all that knows an instruction set. Kernels are written once over GCC/Clang vector types and compiled once
// per instruction set into its own namespace; a lane's operations have one fixed order, so a result depends on the
// instruction set alone. Multiply-add is explicit everywhere (the build forbids contraction).
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define PL_UNROLL _Pragma("GCC unroll 12")  // loops over a tile: else large tiles are left in memory
#define PL_INLINE static inline __attribute__((always_inline))

namespace paceline {
namespace PACELINE_ISA {

#if defined(__AVX512F__) || defined(PACELINE_WIDE)  // PACELINE_WIDE: 16 lanes on any CPU, to test what they change
#define PL_LANES 16
#else
#define PL_LANES 8
#endif
constexpr int L = PL_LANES;  // float lanes

typedef float V __attribute__((vector_size(4 * L)));
typedef int32_t VI __attribute__((vector_size(4 * L)));
typedef uint32_t VW __attribute__((vector_size(4 * L)));
typedef float VMem __attribute__((vector_size(4 * L), aligned(4), may_alias));
typedef uint32_t VWMem __attribute__((vector_size(4 * L), aligned(2), may_alias));

typedef float F8 __attribute__((vector_size(32)));
typedef float F4 __attribute__((vector_size(16)));
typedef int16_t H __attribute__((vector_size(4 * L)));  // pairs: two of a sum's products lie beside each other
typedef int16_t HL __attribute__((vector_size(2 * L)));
typedef int8_t SMem __attribute__((vector_size(2 * L), aligned(1), may_alias));

PL_INLINE V load(const float* p) { return *reinterpret_cast<const VMem*>(p); }
PL_INLINE void store(float* p, V v) { *reinterpret_cast<VMem*>(p) = v; }
PL_INLINE V broadcast(float x) { return x - V{}; }

// Keeps a value in a register: compilers like to load it again for each use, and loads are what these loops lack.
template <class T>
PL_INLINE T pin(T v) {
#if defined(__AVX512F__)
  __asm__("" : "+v"(v));
#elif defined(__AVX2__) && PL_LANES == 8
  __asm__("" : "+x"(v));
#endif
  return v;
}

alignas(32) static const uint32_t HIGH[8] = {0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u,
                                             0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u};
// The upper halves of the words at `p`, with the mask read from memory each time: it takes no register.
PL_INLINE VW high_halves(const char* p) {
#if defined(__AVX2__) && PL_LANES == 8
  VW out;
  __asm__("vmovdqa %1, %0\n\tvpand %2, %0, %0" : "=&x"(out) : "m"(*(const VW*)HIGH), "m"(*(const VWMem*)p));
  return out;
#else
  return *reinterpret_cast<const VWMem*>(p) & 0xffff0000u;
#endif
}

PL_INLINE VW load_words(const void* p) { return *static_cast<const VWMem*>(p); }
PL_INLINE H broadcast_pair(const int16_t* p) {  // two values, in every lane
  int32_t pair;
  std::memcpy(&pair, p, 4);
  return (H)(pair - VI{});
}

PL_INLINE V load_part(const float* p, int n) {  // n < L lanes, the others 0
  float buffer[L] = {};
  std::memcpy(buffer, p, sizeof(float) * n);
  return load(buffer);
}
PL_INLINE void store_part(float* p, V v, int n) {
  float buffer[L];
  store(buffer, v);
  std::memcpy(p, buffer, sizeof(float) * n);
}

#if defined(__AVX512F__)
PL_INLINE V fma(V a, V b, V c) { return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#elif defined(__AVX2__) && PL_LANES == 8
PL_INLINE V fma(V a, V b, V c) { return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
#elif defined(__ARM_NEON) && PL_LANES == 8
PL_INLINE V fma(V a, V b, V c) {
  F4 lo = (F4)vfmaq_f32((float32x4_t)__builtin_shufflevector(c, c, 0, 1, 2, 3),
                        (float32x4_t)__builtin_shufflevector(a, a, 0, 1, 2, 3),
                        (float32x4_t)__builtin_shufflevector(b, b, 0, 1, 2, 3));
  F4 hi = (F4)vfmaq_f32((float32x4_t)__builtin_shufflevector(c, c, 4, 5, 6, 7),
                        (float32x4_t)__builtin_shufflevector(a, a, 4, 5, 6, 7),
                        (float32x4_t)__builtin_shufflevector(b, b, 4, 5, 6, 7));
  return __builtin_shufflevector(lo, hi, 0, 1, 2, 3, 4, 5, 6, 7);
}
#else
PL_INLINE V fma(V a, V b, V c) { return a * b + c; }
#endif

// a += x * w where `a` is: compilers like to overwrite x or w instead, and then run out of registers.
PL_INLINE void accumulate(V& a, V x, V w) {
#if defined(__AVX512F__)
  __asm__("vfmadd231ps %2, %1, %0" : "+v"(a) : "v"(x), "v"(w));
#elif defined(__AVX2__) && PL_LANES == 8
  __asm__("vfmadd231ps %2, %1, %0" : "+x"(a) : "x"(x), "x"(w));
#else
  a = fma(x, w, a);
#endif
}

// The same for pairs of int16. Integers are exact: neither the order nor the instruction set changes a sum.
PL_INLINE void accumulate(VI& a, H x, H w) {
#if defined(__AVX512VNNI__)
  __asm__("vpdpwssd %2, %1, %0" : "+v"(a) : "v"(x), "v"(w));
#elif defined(__AVX2__) && PL_LANES == 8
  a += (VI)_mm256_madd_epi16((__m256i)x, (__m256i)w);
#elif PL_LANES == 8
  typedef int16_t H8 __attribute__((vector_size(16)));
  VI xlo = __builtin_convertvector((H8)__builtin_shufflevector(x, x, 0, 2, 4, 6, 8, 10, 12, 14), VI);
  VI xhi = __builtin_convertvector((H8)__builtin_shufflevector(x, x, 1, 3, 5, 7, 9, 11, 13, 15), VI);
  VI wlo = __builtin_convertvector((H8)__builtin_shufflevector(w, w, 0, 2, 4, 6, 8, 10, 12, 14), VI);
  VI whi = __builtin_convertvector((H8)__builtin_shufflevector(w, w, 1, 3, 5, 7, 9, 11, 13, 15), VI);
  a += xlo * wlo + xhi * whi;
#else
  for (int j = 0; j < L; ++j) a[j] += x[2 * j] * w[2 * j] + x[2 * j + 1] * w[2 * j + 1];
#endif
}

// Products of pairs of bfloat16, summed in float32: that of the second values is added first, then that of the first ones,
// and what is subnormal counts as 0. Two ways to the same bits, each with what it wants to be given: X, an input; H or Both,
// a pair in each lane. Written for the assembler: the compiler may not use these instructions elsewhere.
class Flushed {  // while it lives, this thread takes subnormal numbers for 0 and makes none
#if defined(__AVX512F__)
 public:
  Flushed() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040u); }
  ~Flushed() { _mm_setcsr(before_); }
  Flushed(const Flushed&) = delete;

 private:
  unsigned before_;
#endif
};
struct NoPairs {
  using X = int16_t;
  static constexpr bool usable = false, in_registers = false;
};
#if defined(__AVX512F__)
#define PL_PAIRS
PL_INLINE bool multiplies_pairs() {  // by the bit: older compilers do not know its name
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 5);
}
PL_INLINE HL to_bfloat16(V v) {
  HL out;
  __asm__("vcvtneps2bf16 %1, %0" : "=v"(out) : "v"(v));
  return out;
}

struct ByPairs {  // one instruction: AMD's Zen 4 takes as long for it as for a multiply-add
  using X = int16_t;
  using W = H;
  static constexpr bool usable = true, in_registers = false;
  PL_INLINE HL round(V v) { return to_bfloat16(v); }
  PL_INLINE H pairs(VW w) { return (H)w; }
  PL_INLINE H input(const X* x) { return broadcast_pair(x); }
  PL_INLINE void add(V& a, H x, H w) { __asm__("vdpbf16ps %2, %1, %0" : "+v"(a) : "v"(x), "v"(w)); }
};

struct ByRegisters : ByPairs {  // linears in AMX's tile registers, see registers.h: other bits
  static constexpr bool in_registers = true;
};

struct Both {
  V second, first;
};
PL_INLINE Both pin(const Both& b) { return {pin(b.second), pin(b.first)}; }

// Two multiply-adds of float32, each exact before it is rounded. Intel's (Emerald Rapids) take four times as long for
// vdpbf16ps as for a multiply-add.
struct ByFloats {
  using X = float;  // rounded to bfloat16
  using W = Both;
  static constexpr bool usable = true, in_registers = false;
  PL_INLINE V round(V v) {
    typedef uint16_t Words __attribute__((vector_size(2 * L)));
    return (V)(__builtin_convertvector((Words)to_bfloat16(v), VW) << 16);
  }
  PL_INLINE Both pairs(VW w) { return {(V)(w & 0xffff0000u), (V)(w << 16)}; }
  PL_INLINE Both input(const X* x) { return {broadcast(x[1]), broadcast(x[0])}; }
  PL_INLINE void add(V& a, const Both& x, const Both& w) {
    accumulate(a, x.second, w.second);
    accumulate(a, x.first, w.first);
  }
};
// The L values of `low`, then those of `high`.
PL_INLINE H to_bfloat16(V low, V high) {
  H out;
  __asm__("vcvtne2ps2bf16 %1, %2, %0" : "=v"(out) : "v"(low), "v"(high));
  return out;
}
// Writes the 2 L values at `from` to every second of 4 L places, from the first or second on, and nothing between them.
PL_INLINE void store_every_second(int16_t* to, const int16_t* from, bool second) {
  typedef uint16_t Half __attribute__((vector_size(2 * L), aligned(2), may_alias));
  PL_UNROLL
  for (int i = 0; i < 2; ++i) {
    const VW wide = __builtin_convertvector(*reinterpret_cast<const Half*>(from + i * L), VW);
    if (second) _mm512_mask_storeu_epi16(to + i * 2 * L, 0xaaaaaaaau, (__m512i)(wide << 16));
    else _mm512_mask_storeu_epi16(to + i * 2 * L, 0x55555555u, (__m512i)wide);
  }
}
#else
PL_INLINE bool multiplies_pairs() { return false; }
#endif

#if defined(__AVX2__)
PL_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
#else
PL_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }
#endif
PL_INLINE void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }  // to the second-level cache

PL_INLINE V load_bytes(const void* p) {  // L of them, as numbers
#if defined(__AVX512F__)
  return (V)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__) && PL_LANES == 8
  return (V)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  typedef int8_t Few __attribute__((vector_size(L), aligned(1), may_alias));
  return __builtin_convertvector(*static_cast<const Few*>(p), V);
#endif
}

#if defined(__AVX512F__)  // compilers turn the conversion below into five instructions
PL_INLINE H load_int8(const void* p) { return (H)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
#else
PL_INLINE H load_int8(const void* p) { return __builtin_convertvector(*static_cast<const SMem*>(p), H); }
#endif

// `v` where the lane's byte at `p` is not 0, else `other`.
PL_INLINE V where(const uint8_t* p, V v, V other) {
#if defined(__AVX512F__)
  const __m128i flags = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return (V)_mm512_mask_blend_ps(_mm_test_epi8_mask(flags, flags), (__m512)other, (__m512)v);
#elif defined(__AVX2__) && PL_LANES == 8
  const __m256i words = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return (VI)words != 0 ? v : other;
#else
  typedef uint8_t Flags __attribute__((vector_size(L), aligned(1), may_alias));
  return __builtin_convertvector(*reinterpret_cast<const Flags*>(p), VI) != 0 ? v : other;
#endif
}

// Sum of lanes: each is added to the one 8 (with 16 lanes) further, then 4, 2, 1.
// `fold<D>` brings the lanes of two vectors one step nearer to their sums, a's where bit D of the lane is 0, b's where it is 1.
template <int D>
PL_INLINE V fold(V a, V b) {
#if PL_LANES == 16
  if constexpr (D == 8)
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 24, 25, 26, 27, 28, 29, 30, 31) +
           __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23);
  else if constexpr (D == 4)
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 20, 21, 22, 23, 8, 9, 10, 11, 28, 29, 30, 31) +
           __builtin_shufflevector(a, b, 4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27);
  else if constexpr (D == 2)
    return __builtin_shufflevector(a, b, 0, 1, 18, 19, 4, 5, 22, 23, 8, 9, 26, 27, 12, 13, 30, 31) +
           __builtin_shufflevector(a, b, 2, 3, 16, 17, 6, 7, 20, 21, 10, 11, 24, 25, 14, 15, 28, 29);
  else
    return __builtin_shufflevector(a, b, 0, 17, 2, 19, 4, 21, 6, 23, 8, 25, 10, 27, 12, 29, 14, 31) +
           __builtin_shufflevector(a, b, 1, 16, 3, 18, 5, 20, 7, 22, 9, 24, 11, 26, 13, 28, 15, 30);
#else
  if constexpr (D == 4)
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 12, 13, 14, 15) + __builtin_shufflevector(a, b, 4, 5, 6, 7, 8, 9, 10, 11);
  else if constexpr (D == 2)
    return __builtin_shufflevector(a, b, 0, 1, 10, 11, 4, 5, 14, 15) + __builtin_shufflevector(a, b, 2, 3, 8, 9, 6, 7, 12, 13);
  else
    return __builtin_shufflevector(a, b, 0, 9, 2, 11, 4, 13, 6, 15) + __builtin_shufflevector(a, b, 1, 8, 3, 10, 5, 12, 7, 14);
#endif
}
template <int D>
PL_INLINE void fold_all(V* v) {
  PL_UNROLL
  for (int i = 0; i < D; ++i) v[i] = fold<D>(v[i], v[i + D]);
  if constexpr (D > 1) fold_all<D / 2>(v);
}
PL_INLINE V sums(V (&v)[L]) {  // lane i: the sum of v[i]
  fold_all<L / 2>(v);
  return v[0];
}
template <int D = L / 2>
PL_INLINE float reduce(V a) {
  V b = fold<D>(a, a);
  if constexpr (D > 1) return reduce<D / 2>(b);
  else return b[0];
}

// Of two numbers that do not compare the second. Compilers make a comparison and a slow blend of this.
#if defined(__AVX512F__)
PL_INLINE V vmax(V a, V b) { return (V)_mm512_max_ps((__m512)a, (__m512)b); }
PL_INLINE V vmin(V a, V b) { return (V)_mm512_min_ps((__m512)a, (__m512)b); }
#elif defined(__AVX2__) && PL_LANES == 8
PL_INLINE V vmax(V a, V b) { return (V)_mm256_max_ps((__m256)a, (__m256)b); }
PL_INLINE V vmin(V a, V b) { return (V)_mm256_min_ps((__m256)a, (__m256)b); }
#else
PL_INLINE V vmax(V a, V b) { return a > b ? a : b; }
PL_INLINE V vmin(V a, V b) { return a < b ? a : b; }
#endif
PL_INLINE float reduce_max(V a) {
#if PL_LANES == 16
  F8 b = __builtin_shufflevector(a, a, 0, 1, 2, 3, 4, 5, 6, 7), c = __builtin_shufflevector(a, a, 8, 9, 10, 11, 12, 13, 14, 15);
  b = b > c ? b : c;
#else
  F8 b = a;
#endif
  F8 d = __builtin_shufflevector(b, b, 4, 5, 6, 7, 0, 1, 2, 3);
  b = b > d ? b : d;
  d = __builtin_shufflevector(b, b, 2, 3, 0, 1, 6, 7, 4, 5);
  b = b > d ? b : d;
  return b[0] > b[1] ? b[0] : b[1];
}

// e^x, relative error below 2e-7 on [-87, 88]; arguments beyond are clamped. Of two numbers that do not compare vmin and
// vmax take the second, so NaN stays NaN: what is broken must reach the check of the logits.
PL_INLINE V vexp(V x) {
  const V magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  x = vmin(broadcast(88.3f), vmax(broadcast(-87.3f), x));
  V t = fma(x, broadcast(1.44269504088896341f), magic);
  V n = t - magic;
  V r = fma(n, broadcast(-0.693359375f), x);
  r = fma(n, broadcast(2.12194440e-4f), r);
  V p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  p = fma(p, r * r, r) + broadcast(1.0f);
  VW bits = ((VW)t << 23) + (uint32_t)(127u << 23);
  return p * (V)bits;
}

PL_INLINE bool all(VI mask) {  // of lanes that are 0 or -1
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)mask) == 0xffff;
#elif defined(__AVX2__) && PL_LANES == 8
  return _mm256_movemask_ps((__m256)mask) == 0xff;
#else
  int32_t both = -1;
  for (int i = 0; i < L; ++i) both &= mask[i];
  return both != 0;
#endif
}

PL_INLINE V vtanh(V x) {
  VW sign = (VW)x & 0x80000000u;
  V a = (V)((VW)x & 0x7fffffffu);
  V z = a * a;
  V p = broadcast(-5.70498872745e-3f);
  p = fma(p, z, broadcast(2.06390887954e-2f));
  p = fma(p, z, broadcast(-5.37397155531e-2f));
  p = fma(p, z, broadcast(1.33314422036e-1f));
  p = fma(p, z, broadcast(-3.33332819422e-1f));
  V y = fma(p * z, a, a);
  const VI near = a < broadcast(0.625f);
  if (!all(near)) y = near ? y : broadcast(1.0f) - broadcast(2.0f) / (vexp(a + a) + broadcast(1.0f));
  return (V)((VW)y | sign);
}

// x * sigmoid(2u) with u = sqrt(2/pi) (x + 0.044715 x^3): the tanh form of gelu without its cancellation.
PL_INLINE V vgelu(V x) {
  V u2 = broadcast(1.5957691216057308f) * x * fma(broadcast(0.044715f) * x, x, broadcast(1.0f));
  return x / (broadcast(1.0f) + vexp(-u2));
}

// x * sigmoid(x)
PL_INLINE V vsilu(V x) { return x / (broadcast(1.0f) + vexp(-x)); }

}  // namespace PACELINE_ISA
}  // namespace paceline
