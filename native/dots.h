// What the kernels of block kinds need beyond simd.h: float16, bytes, and dot products of integers in 32-bit lanes. A lane
// holds four inputs of one output. Integers are exact: neither the order nor the instruction set changes a sum.
#pragma once

#include "simd.h"

namespace paceline {
namespace PACELINE_ISA {

// Weights of `SIGNED` values take a whole byte; otherwise `top` is the largest value, which is never negative.
constexpr int SIGNED = 255;
#if defined(__AVX2__)
constexpr bool DOTS = true;
#else
constexpr bool DOTS = false;  // no instruction for it
#endif
#if (defined(__AVX512VNNI__) && PL_LANES == 16) || defined(PACELINE_WIDE)
constexpr int WIDE_ZERO = 128;  // a SIGNED weight is kept this much too large: the instruction wants it without a sign
#else
constexpr int WIDE_ZERO = 0;
#endif

// Whether inputs are multiplied in 16 bits, by weights that are widened to as many. AVX2's product of bytes wants one without a
// sign, and its sums of 16 bits hold one product of such weights only: that takes twice as long, for wide inputs four times.
template <int top, bool wide>
constexpr bool SHORTS = DOTS && L == 8 && (wide || top == SIGNED);

typedef uint16_t HalfMem __attribute__((vector_size(2 * L), aligned(1), may_alias));
typedef uint8_t ByteMem __attribute__((vector_size(L), aligned(1), may_alias));
typedef int8_t SignedByteMem __attribute__((vector_size(L), aligned(1), may_alias));

PL_INLINE VI broadcast_word(const void* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return word - VI{};
}

PL_INLINE V load_halves(const char* p) {  // L float16
#if defined(__AVX512F__)
  return (V)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__) && PL_LANES == 8
  return (V)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  const VW half = __builtin_convertvector(*reinterpret_cast<const HalfMem*>(p), VW);
  const V scaled = (V)((half & 0x7fffu) << 13) * 0x1p112f;  // exponents of float16 are 112 less
  const VW broken = (VW)((half & 0x7c00u) == 0x7c00u) & 0x7f800000u;  // infinity, or no number
  return (V)((VW)scaled | broken | (half & 0x8000u) << 16);
#endif
}

PL_INLINE V load_bytes(const char* p) {  // L values 0..255
#if defined(__AVX512F__)
  return (V)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__) && PL_LANES == 8
  return (V)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  return __builtin_convertvector(*reinterpret_cast<const ByteMem*>(p), V);
#endif
}

PL_INLINE V load_signed_bytes(const char* p) {  // L values -128..127
#if defined(__AVX512F__)
  return (V)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__) && PL_LANES == 8
  return (V)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  return __builtin_convertvector(*reinterpret_cast<const SignedByteMem*>(p), V);
#endif
}

// Of each byte 0..15 what stands in `table` at its place.
PL_INLINE VW look_up(const int8_t (&table)[16], VW at) {
#if defined(__AVX512F__)
  const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return (VW)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), (__m512i)at);
#elif defined(__AVX2__) && PL_LANES == 8
  const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return (VW)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), (__m256i)at);
#else
  uint8_t bytes[sizeof(VW)];
  std::memcpy(bytes, &at, sizeof(bytes));
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(table[byte]);
  std::memcpy(&at, bytes, sizeof(bytes));
  return at;
#endif
}

// The sums of the first and last 16 of 32 integers: below 2^24, exact in any order.
PL_INLINE void sum_halves(const VI (&n)[32 / L], int32_t (&sums)[2]) {
  PL_UNROLL
  for (int half = 0; half < 2; ++half) {
    VI sum{};
    PL_UNROLL
    for (int i = half * 16 / L; i < (half + 1) * 16 / L; ++i) sum += n[i];
    sums[half] = static_cast<int32_t>(reduce(__builtin_convertvector(sum, V)));
  }
}

// 32 integers -127..127 as bytes.
PL_INLINE void narrow(const VI (&n)[32 / L], int8_t* out) {
#if defined(__AVX512F__)
  for (int i = 0; i < 2; ++i)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 16 * i), _mm512_cvtepi32_epi8((__m512i)n[i]));
#elif defined(__AVX2__) && PL_LANES == 8
  const __m256i low = _mm256_packs_epi32((__m256i)n[0], (__m256i)n[1]), high = _mm256_packs_epi32((__m256i)n[2], (__m256i)n[3]);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packs work within halves of a vector
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order));
#else
  for (int i = 0; i < 32; ++i) out[i] = static_cast<int8_t>(n[i / L][i % L]);
#endif
}

// 32 integers of 16 bits. Of each four the second and third change places, as `widen` has them.
PL_INLINE void narrow(const VI (&n)[32 / L], int16_t* out) {
#if defined(__AVX2__) && PL_LANES == 8
  for (int i = 0; i < 2; ++i) {
    const __m256i v = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)n[2 * i], (__m256i)n[2 * i + 1]), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 16 * i), _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(v, 0xd8), 0xd8));
  }
#else
  for (int i = 0; i < 32; ++i) out[i / 4 * 4 + i % 2 * 2 + i % 4 / 2] = static_cast<int16_t>(n[i / L][i % L]);
#endif
}

// Of each lane's four bytes the first and third as 16 bits, and the others.
template <int top>
PL_INLINE void widen(VW w, H (&out)[2]) {
  if constexpr (top == SIGNED) out[0] = (H)w << 8 >> 8, out[1] = (H)w >> 8;
  else out[0] = (H)(w & 0x00ff00ffu), out[1] = (H)(w >> 8 & 0x00ff00ffu);
}

// start + the sum of 2 N products of 16 bits in each lane.
template <int N>
PL_INLINE VI dot(const H* w, const int16_t* x, VI start) {
  PL_UNROLL
  for (int u = 0; u < N; ++u) accumulate(start, broadcast_pair(x + 2 * u), w[u]);
  return start;
}

// start + the sum of 4 N products in each lane: weights `w`, and 4 N inputs at `x`, each -127..127.
template <int top, int N>
PL_INLINE VI dot(const VW* w, const int8_t* x, VI start) {
#if defined(__AVX512VNNI__) && PL_LANES == 16
  PL_UNROLL
  for (int u = 0; u < N; ++u)
    start = (VI)_mm512_dpbusd_epi32((__m512i)start, (__m512i)w[u], (__m512i)broadcast_word(x + 4 * u));
  return start;
#elif defined(__AVX2__) && PL_LANES == 8
  const __m256i ones = _mm256_set1_epi16(1);
  constexpr int fit = 32767 / (2 * top * 127) < N ? 32767 / (2 * top * 127) : N;  // sums of int16
  static_assert(fit > 0 && N % fit == 0, "what is summed in 16 bits must fit in them");
  PL_UNROLL
  for (int u = 0; u < N; u += fit) {
    __m256i sum{};
    PL_UNROLL
    for (int i = u; i < u + fit; ++i) {
      const __m256i two = _mm256_maddubs_epi16((__m256i)w[i], (__m256i)broadcast_word(x + 4 * i));
      sum = i == u ? two : _mm256_add_epi16(sum, two);
    }
    start += (VI)_mm256_madd_epi16(sum, ones);
  }
  return start;
#else
  for (int u = 0; u < N; ++u)
    for (int b = 0; b < 4; ++b) {
      const VI weight = top == SIGNED && WIDE_ZERO == 0 ? (VI)(w[u] << (24 - 8 * b)) >> 24 : (VI)(w[u] >> 8 * b & 255u);
      start += weight * static_cast<int32_t>(x[4 * u + b]);
    }
  return start;
#endif
}

}  // namespace PACELINE_ISA
}  // namespace paceline
