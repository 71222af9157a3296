// How tiles hold weights in blocks: the scales of a group of 32 inputs for TILE outputs, then their integers, four inputs
// of an output beside each other; what 256 inputs share stands before their groups. A tile takes about the bytes that the
// file does, and no value is changed.
#pragma once

#include "block_formats.h"
#include "dots.h"
#include "linear.h"

namespace paceline {
namespace PACELINE_ISA {

constexpr int GROUP = 32;  // inputs

// --- how groups are scaled: `load` gives scales and minima of vector i, `put` writes those of output j ----------------

struct Half {  // a float16 by 32
  static constexpr int64_t head = 0, size = 2 * TILE;
  static constexpr int parts = 1;  // scales of a group
  static constexpr bool mins = false;
  PL_INLINE void load(const char*, const char* p, int i, V (&s)[parts], V (&)[parts]) { s[0] = load_halves(p + 2 * L * i); }
  static void put(char*, char* p, int64_t j, const Block& b, int) { std::memcpy(p + 2 * j, &b.d, 2); }
};

struct HalfMin {  // two float16 by 32
  static constexpr int64_t head = 0, size = 4 * TILE;
  static constexpr int parts = 1;
  static constexpr bool mins = true;
  PL_INLINE void load(const char*, const char* p, int i, V (&s)[parts], V (&m)[parts]) {
    s[0] = load_halves(p + 2 * L * i);
    m[0] = load_halves(p + 2 * TILE + 2 * L * i);
  }
  static void put(char*, char* p, int64_t j, const Block& b, int) {
    std::memcpy(p + 2 * j, &b.d, 2);
    std::memcpy(p + 2 * TILE + 2 * j, &b.m, 2);
  }
};

struct Single {  // a float32 by 32
  static constexpr int64_t head = 0, size = 4 * TILE;
  static constexpr int parts = 1;
  static constexpr bool mins = false;
  PL_INLINE void load(const char*, const char* p, int i, V (&s)[parts], V (&)[parts]) {
    s[0] = PACELINE_ISA::load(reinterpret_cast<const float*>(p) + L * i);
  }
  static void put(char*, char* p, int64_t j, const Block& b, int) { std::memcpy(p + 4 * j, b.scale, 4); }
};

struct SuperMin {  // two float16 by 256, two bytes by 32
  static constexpr int64_t head = 4 * TILE, size = 2 * TILE;
  static constexpr int parts = 1;
  static constexpr bool mins = true;
  PL_INLINE void load(const char* h, const char* p, int i, V (&s)[parts], V (&m)[parts]) {
    s[0] = load_halves(h + 2 * L * i) * load_bytes(p + L * i);
    m[0] = -(load_halves(h + 2 * TILE + 2 * L * i) * load_bytes(p + TILE + L * i));
  }
  static void put(char* h, char* p, int64_t j, const Block& b, int g) {
    std::memcpy(h + 2 * j, &b.d, 2);
    std::memcpy(h + 2 * TILE + 2 * j, &b.m, 2);
    p[j] = static_cast<char>(b.s[2 * g]), p[TILE + j] = static_cast<char>(b.l[2 * g]);
  }
};

template <int POWER = 0>
struct Super16 {  // a float16 by 256, over 2^POWER, a byte with a sign by 16
  static constexpr int64_t head = 2 * TILE, size = 2 * TILE;
  static constexpr int parts = 2;
  static constexpr bool mins = false;
  PL_INLINE void load(const char* h, const char* p, int i, V (&s)[parts], V (&)[parts]) {
    const V d = load_halves(h + 2 * L * i) * (1.0f / (1 << POWER));
    s[0] = d * load_signed_bytes(p + L * i);
    s[1] = d * load_signed_bytes(p + TILE + L * i);
  }
  static void put(char* h, char* p, int64_t j, const Block& b, int g) {
    std::memcpy(h + 2 * j, &b.d, 2);
    p[j] = static_cast<char>(b.s[2 * g]), p[TILE + j] = static_cast<char>(b.s[2 * g + 1]);
  }
};

struct Super16Min {  // two float16 by 256, two times four bits by 16
  static constexpr int64_t head = 4 * TILE, size = 2 * TILE;
  static constexpr int parts = 2;
  static constexpr bool mins = true;
  PL_INLINE void load(const char* h, const char* p, int i, V (&s)[parts], V (&m)[parts]) {
    const V d = load_halves(h + 2 * L * i), least = load_halves(h + 2 * TILE + 2 * L * i);
    PL_UNROLL
    for (int part = 0; part < 2; ++part) {
      const V both = load_bytes(p + part * TILE + L * i);
      const V high = __builtin_convertvector(__builtin_convertvector(both * (1.0f / 16), VI), V);
      s[part] = d * (both - high * 16.0f), m[part] = -(least * high);
    }
  }
  static void put(char* h, char* p, int64_t j, const Block& b, int g) {
    std::memcpy(h + 2 * j, &b.d, 2);
    std::memcpy(h + 2 * TILE + 2 * j, &b.m, 2);
    for (int part = 0; part < 2; ++part) p[part * TILE + j] = static_cast<char>(b.s[2 * g + part] | b.l[2 * g + part] << 4);
  }
};

struct Singles {  // a float32 by 16
  static constexpr int64_t head = 0, size = 8 * TILE;
  static constexpr int parts = 2;
  static constexpr bool mins = false;
  PL_INLINE void load(const char*, const char* p, int i, V (&s)[parts], V (&)[parts]) {
    PL_UNROLL
    for (int part = 0; part < 2; ++part) s[part] = PACELINE_ISA::load(reinterpret_cast<const float*>(p) + part * TILE + L * i);
  }
  static void put(char*, char* p, int64_t j, const Block& b, int g) {
    for (int part = 0; part < 2; ++part) std::memcpy(p + 4 * (part * TILE + j), &b.scale[2 * g + part], 4);
  }
};

// --- forms: `BITS` of an integer that is kept `ZERO` larger than it is, at most `TOP` ---------------------------------

struct NoTable {
  static constexpr bool usable = false;
};
struct Iq4Table {
  static constexpr bool usable = true;
  static constexpr int8_t values[16] = {
      static_cast<int8_t>(WIDE_ZERO - 127), static_cast<int8_t>(WIDE_ZERO - 104), static_cast<int8_t>(WIDE_ZERO - 83),
      static_cast<int8_t>(WIDE_ZERO - 65), static_cast<int8_t>(WIDE_ZERO - 49), static_cast<int8_t>(WIDE_ZERO - 35),
      static_cast<int8_t>(WIDE_ZERO - 22), static_cast<int8_t>(WIDE_ZERO - 10), static_cast<int8_t>(WIDE_ZERO + 1),
      static_cast<int8_t>(WIDE_ZERO + 13), static_cast<int8_t>(WIDE_ZERO + 25), static_cast<int8_t>(WIDE_ZERO + 38),
      static_cast<int8_t>(WIDE_ZERO + 53), static_cast<int8_t>(WIDE_ZERO + 69), static_cast<int8_t>(WIDE_ZERO + 89),
      static_cast<int8_t>(WIDE_ZERO + 113)};
};
struct E2m1Table {
  static constexpr bool usable = true;
  static constexpr int8_t values[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};  // 12 larger
};

// What `Z` is added to, without signs.
template <const int8_t (&VALUES)[16], int Z>
struct RaisedTable {
  static constexpr bool usable = true;
  static constexpr int8_t values[16] = {
      VALUES[0] + Z, VALUES[1] + Z, VALUES[2] + Z, VALUES[3] + Z, VALUES[4] + Z, VALUES[5] + Z, VALUES[6] + Z, VALUES[7] + Z,
      VALUES[8] + Z, VALUES[9] + Z, VALUES[10] + Z, VALUES[11] + Z, VALUES[12] + Z, VALUES[13] + Z, VALUES[14] + Z, VALUES[15] + Z};
};

// Integers of 2 and 3 bits: the low pairs of bits of a group lie in four vectors of words, the third bits in two behind them.
// Word n of a group is unit n / 2 of vector n % 2.
template <int BITS, int TOP, int ZERO, class SCALES, class TABLE = NoTable>
struct NarrowForm {
  using Scales = SCALES;
  static constexpr int top = TOP, zero = ZERO;
  static constexpr bool wide = false, shorts = SHORTS<TOP, wide>;
  static constexpr int64_t third = Scales::size + GROUP / 4 * TILE, size = third + (BITS == 3 ? 4 : 0) * TILE;

  PL_INLINE VW integers(const char* group, int u, int i) {
    const int n = 2 * u + i;
    VW q = load_words(group + Scales::size + 4 * L * (n / 4)) >> n % 4 * 2 & 0x03030303u;
    if constexpr (BITS == 3) {
      const VW more = load_words(group + third + 4 * L * (n / 8));
      q |= (n % 8 < 2 ? more << (2 - n % 8) : more >> (n % 8 - 2)) & 0x04040404u;
    }
    if constexpr (TABLE::usable) return look_up(TABLE::values, q);
    else return q;
  }
  static void put(char* group, int64_t j, int k, int q) {
    const int value = TABLE::usable ? q : q + ZERO, n = k / 4 * 2 + static_cast<int>(j / L);
    const int64_t at = j % L * 4 + k % 4;
    char& low = group[Scales::size + 4 * L * (n / 4) + at];
    low = static_cast<char>(low | (value & 3) << n % 4 * 2);
    if constexpr (BITS == 3) {
      char& high = group[third + 4 * L * (n / 8) + at];
      high = static_cast<char>(high | value >> 2 << n % 8);
    }
  }
};

// Integers of 5 and 6 bits: the low 4 as those of 4 bits, behind them the others of all units, vector by vector.
template <int BITS, int TOP, int ZERO, class SCALES, class TABLE = NoTable>
struct Form {
  using Scales = SCALES;
  static constexpr int top = TOP, zero = ZERO;
  static constexpr bool wide = BITS >= 6;  // inputs have 16 bits: who spends so many on weights wants them exact
  static constexpr bool shorts = SHORTS<TOP, wide>;
  static constexpr int64_t unit = (BITS == 8 ? 4 : 2) * TILE;  // bytes of four inputs, without the high bits
  static constexpr int64_t high = Scales::size + GROUP / 4 * unit;
  static constexpr int64_t size = high + (BITS == 6 ? 8 : BITS == 5 ? 4 : 0) * TILE;

  // The integers of unit u, vector i; those of 4 bits share bytes: the low halves are the first vector.
  PL_INLINE VW integers(const char* group, int u, int i) {
    const char* p = group + Scales::size + u * unit;
    if constexpr (BITS == 8) return load_words(p + 4 * L * i);
    const VW low = (i == 0 ? load_words(p) : load_words(p) >> 4) & 0x0f0f0f0fu;
    if constexpr (BITS == 5) {
      const VW more = load_words(group + high + 4 * L * i);
      return low | ((u < 4 ? more << (4 - u) : more >> (u - 4)) & 0x10101010u);
    } else if constexpr (BITS == 6) {
      const VW more = load_words(group + high + 4 * L * (2 * i + u / 4));
      return low | ((u % 4 < 2 ? more << (4 - u % 4 * 2) : more >> (u % 4 * 2 - 4)) & 0x30303030u);
    } else if constexpr (TABLE::usable) {
      return look_up(TABLE::values, low);
    } else {
      return low;
    }
  }
  static void set(char& byte, int bits) { byte = static_cast<char>(byte | bits); }
  // Integer k of output j; of a table its place there.
  static void put(char* group, int64_t j, int k, int q) {
    char* p = group + Scales::size + k / 4 * unit;
    const int value = TABLE::usable ? q : q + ZERO, u = k / 4;
    const int64_t i = j / L, at = j % L * 4 + k % 4;
    if constexpr (BITS == 8) p[4 * j + k % 4] = static_cast<char>(value);
    else set(p[at], (value & 15) << 4 * i);
    if constexpr (BITS == 5) set(group[high + 4 * L * i + at], value >> 4 << u);
    if constexpr (BITS == 6) set(group[high + 4 * L * (2 * i + u / 4) + at], value >> 4 << u % 4 * 2);
  }
};

// Calls f with the form of a kind.
template <class F>
static auto with_form(int kind, F f) {
  switch (kind & ~EXACT) {
    case Q4_0: return f(Form<4, 15, 8, Half>());
    case Q4_1: return f(Form<4, 15, 0, HalfMin>());
    case Q5_0: return f(Form<5, 31, 16, Half>());
    case Q5_1: return f(Form<5, 31, 0, HalfMin>());
    case Q4_K: return f(Form<4, 15, 0, SuperMin>());
    case Q5_K: return f(Form<5, 31, 0, SuperMin>());
    case Q6_K: return f(Form<6, 63, 32, Super16<>>());
    case IQ4_XS: return f(Form<4, SIGNED, WIDE_ZERO, Super16<>, Iq4Table>());
    case MXFP4: return f(Form<4, 31, 12, Single, E2m1Table>());
    case INT4: return f(Form<4, 15, 8, Single>());
    case IQ4_NL: return f(Form<4, SIGNED, WIDE_ZERO, Half, Iq4Table>());
    case Q2_K: return f(NarrowForm<2, 3, 0, Super16Min>());
    case Q3_K: return f(NarrowForm<3, 7, 4, Super16<>>());
    case IQ2_XXS: case IQ2_XS: case IQ2_S: return f(NarrowForm<3, 86, 43, Super16<3>, RaisedTable<IQ2_VALUES, 43>>());
    case IQ3_XXS: return f(Form<4, 124, 62, Super16<2>, RaisedTable<IQ3_XXS_VALUES, 62>>());
    case IQ3_S: return f(Form<4, 30, 15, Super16<>, RaisedTable<IQ3_S_VALUES, 15>>());
    case IQ1_S: case IQ1_M: return f(NarrowForm<3, 18, 9, Super16<3>, RaisedTable<IQ1_VALUES, 9>>());
    case TQ1_0: case TQ2_0: case Q1_0: case Q2_0: return f(NarrowForm<2, 3, 1, Half>());
    case NVFP4: return f(Form<4, 24, 12, Singles, E2m1Table>());
    default: return f(Form<8, SIGNED, WIDE_ZERO, Half>());  // Q8_0
  }
}

template <class P>
static int64_t bytes_of_blocks(int64_t in) {
  return in / GROUP * P::size + in / 256 * P::Scales::head;
}

template <class P>
static void pack_blocks(const Matrix& m, int64_t tile, char* out) {
  Block b;
  for (int64_t j = 0; j < TILE && tile * TILE + j < m.out; ++j) {
    char* to = out;
    for (int64_t i = 0; i < m.in; i += b.elements) {
      decode(m, tile * TILE + j, i, b);
      char* head = to;
      to += P::Scales::head;
      for (int g = 0; g < b.elements / GROUP; ++g, to += P::size) {
        P::Scales::put(head, to, j, b, g);
        for (int k = 0; k < GROUP; ++k) P::put(to, j, k, b.q[g * GROUP + k]);
      }
    }
  }
}

}  // namespace PACELINE_ISA
}  // namespace paceline
