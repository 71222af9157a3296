// Attention over keys and values that are kept as bfloat16, for CPUs that multiply pairs of it: half the memory, twice as
// many products in an instruction, and nothing to unpack or to sum across lanes. Softmax and all sums are float32.
//
// A page holds 16 places of each kv head, one head after the other. Keys lie [pair of columns][place][2], so that a vector
// holds the same two columns of 16 keys; values lie [pair of places][column][2], so that it holds 16 columns of two
// neighbouring keys. Pairs begin at even positions of the text: bits do not depend on what else a call computes.
#pragma once

#include "attention_bytes.h"

namespace paceline {
namespace PACELINE_ISA {

constexpr int GROUPS = BLOCK / L, WIDEST = 512;  // pages of a block; most columns of a head

template <class By>
struct Packed {
  using X = typename By::X;
  static constexpr int step = 2;
  static constexpr int most = sizeof(X) == 2 ? 4 : 2;  // vectors of keys or columns of a tile: by floats each takes two registers
  struct Groups {
    const int16_t *keys[GROUPS], *values[GROUPS];  // of one kv head
  };

  const AttentionArgs& a;
  Queries& s;
  Groups now{}, next{};
  const X* asked = nullptr;                      // the queries of the K/V head at hand
  alignas(64) X queries[MOST_QUERIES * WIDEST];  // [query][column]
  alignas(64) X weights[MOST_QUERIES * BLOCK];   // [query][place]

  Packed(const AttentionArgs& args, Queries& all) : a(args), s(all) {}

  void begin() {
    for (int m = 0; m < s.count * a.groups; ++m)
      for (int64_t i = 0; i < s.d; i += L) round(s.all.q[m] + i, queries + m * s.d + i);
  }

  bool find(int64_t start, int head) {
    const int32_t* table = a.k.table + a.slot * a.k.table_stride + start / L;
    s.next.begin = place(first_key(a, 0), start), s.next.end = place(last_key(a, a.rows - 1), start);
    for (int g = s.next.begin / L; g * L < s.next.end; ++g) {
      if (table[g] < 0 || (table[g] + 1) * static_cast<int64_t>(L) > a.k.tokens) return false;
      const int64_t offset = (table[g] * static_cast<int64_t>(a.k.kv_heads) + a.kv_head + head) * L * s.d;
      next.keys[g] = static_cast<const int16_t*>(a.k.pool) + offset;
      next.values[g] = static_cast<const int16_t*>(a.v.pool) + offset;
    }
    return true;
  }

  void turn(int head) {
    now = next, asked = queries + head * s.count * s.d;
    s.now.begin = s.next.begin, s.now.end = s.next.end;
  }

  void score() {
    const Flushed mode;
    const int last = (s.now.end + L - 1) / L;
    int g = s.now.begin / L;
    if constexpr (most == 4)
      for (; g + 4 <= last; g += 4) scores_of<4>(g);
    for (; g + 2 <= last; g += 2) scores_of<2>(g);
    if (g < last) scores_of<1>(g);
  }

  // Of places that the query does not see `mix` reads no weight but that of a pair's other half, which is 0.
  void weigh(int m) {
    for (int j = 0; j < BLOCK; j += L) round(s.p + m * PITCH + j, weights + m * BLOCK + j);
  }

  // Where only one of a pair is seen, the other's value is left out, too: it may be no number.
  void mix(int m, int count, int lo, int hi) {
    if (lo >= hi) return;
    const Flushed mode;
    if (lo % 2) mix_pairs(m, count, lo / 2, lo / 2 + 1, 0xffff0000u), ++lo;
    if (lo < hi / 2 * 2) mix_pairs(m, count, lo / 2, hi / 2, 0xffffffffu);
    if (hi % 2 && lo < hi) mix_pairs(m, count, hi / 2, hi / 2 + 1, 0x0000ffffu);
  }

 private:
  static void round(const float* from, X* to) {
    const auto rounded = By::round(load(from));
    std::memcpy(to, &rounded, sizeof(rounded));
  }

  template <int G>
  void scores_of(int g) {
    int m = 0;
    for (; m + 6 <= s.count; m += 6) tile<6, G>(m, g);
    for (; m + 4 <= s.count; m += 4) tile<4, G>(m, g);
    for (; m + 2 <= s.count; m += 2) tile<2, G>(m, g);
    if (m < s.count) tile<1, G>(m, g);
  }

  // Scores of Q queries with G groups of keys: a sum for each takes the pairs of columns one after the other.
  template <int Q, int G>
  void tile(int m, int g) {
    V acc[Q][G] = {};
    const int16_t *key[G], *ahead[G];
    const X* query = asked + m * s.d;
    PL_UNROLL
    for (int c = 0; c < G; ++c) key[c] = now.keys[g + c], ahead[c] = next.keys[g + c];
    const int64_t d = s.d;
    for (int64_t i = 0; i < d; i += 2) {
      if (m == 0) {
        PL_UNROLL
        for (int c = 0; c < G; ++c) prefetch_far(ahead[c] + i * L);
      }
      typename By::W k[G];
      PL_UNROLL
      for (int c = 0; c < G; ++c) k[c] = pin(By::pairs(load_words(key[c] + i * L)));
      PL_UNROLL
      for (int q = 0; q < Q; ++q) {
        const auto x = pin(By::input(query + q * d + i));
        PL_UNROLL
        for (int c = 0; c < G; ++c) By::add(acc[q][c], x, k[c]);
      }
    }
    PL_UNROLL
    for (int q = 0; q < Q; ++q)
      PL_UNROLL
      for (int c = 0; c < G; ++c) store(s.p + (m + q) * PITCH + (g + c) * L, acc[q][c]);
  }

  void mix_pairs(int m, int count, int first, int last, uint32_t seen) {
    int64_t i = 0;
    if constexpr (most == 4)
      for (; i + 4 * L <= s.d; i += 4 * L) mix_columns<4>(m, count, first, last, i, seen);
    for (; i < s.d; i += 2 * L) mix_columns<2>(m, count, first, last, i, seen);
  }

  template <int C>
  void mix_columns(int m, int left, int first, int last, int64_t i, uint32_t seen) {
    for (; left >= 6; m += 6, left -= 6) mix_tile<6, C>(m, first, last, i, seen);
    for (; left >= 4; m += 4, left -= 4) mix_tile<4, C>(m, first, last, i, seen);
    for (; left >= 2; m += 2, left -= 2) mix_tile<2, C>(m, first, last, i, seen);
    if (left) mix_tile<1, C>(m, first, last, i, seen);
  }

  // out[i..] += sum over pairs first..last-1 of their weights * values, over C vectors of columns of Q queries.
  template <int Q, int C>
  void mix_tile(int m, int first, int last, int64_t i, uint32_t seen) {
    V acc[Q][C];
    PL_UNROLL
    for (int q = 0; q < Q; ++q)
      PL_UNROLL
      for (int c = 0; c < C; ++c) acc[q][c] = load(s.out[m + q] + i + c * L);
    const VW mask = seen - VW{};
    for (int j = first; j < last; ++j) {
      const int16_t* value = now.values[j / (L / 2)] + (j % (L / 2) * s.d + i) * 2;
      if (m == 0) {
        PL_UNROLL
        for (int c = 0; c < C; ++c) prefetch_far(next.values[j / (L / 2)] + (j % (L / 2) * s.d + i + c * L) * 2);
      }
      typename By::W v[C];
      PL_UNROLL
      for (int c = 0; c < C; ++c) v[c] = pin(By::pairs(load_words(value + c * 2 * L) & mask));
      PL_UNROLL
      for (int q = 0; q < Q; ++q) {
        const auto weight = pin(By::input(weights + (m + q) * BLOCK + 2 * j));
        PL_UNROLL
        for (int c = 0; c < C; ++c) By::add(acc[q][c], weight, v[c]);
      }
    }
    PL_UNROLL
    for (int q = 0; q < Q; ++q)
      PL_UNROLL
      for (int c = 0; c < C; ++c) store(s.out[m + q] + i + c * L, acc[q][c]);
  }
};

#if defined(PL_PAIRS)

// Rows of one page may be stored by several threads at once: nothing but the own places is written.
static void store_packed(const Pages& pages, bool keys, int64_t index, const float* x) {
  const int64_t d = pages.head_dim, at = index % L;
  int16_t* page = static_cast<int16_t*>(pages.pool) + index / L * L * pages.kv_heads * d;
  for (int h = 0; h < pages.kv_heads; ++h, x += d, page += L * d)
    for (int64_t i = 0; i < d; i += 2 * L) {
      alignas(64) int16_t rounded[2 * L];
      *reinterpret_cast<H*>(rounded) = to_bfloat16(load(x + i), load(x + i + L));
      if (keys)
        for (int64_t j = 0; j < 2 * L; j += 2) std::memcpy(page + (i + j) * L + 2 * at, rounded + j, 4);
      else
        store_every_second(page + (at / 2 * d + i) * 2, rounded, at % 2);
    }
}

#else

static void store_packed(const Pages&, bool, int64_t, const float*) {}

#endif

template <class By>
static bool attention(const AttentionArgs& a) {
  Queries s;
  if constexpr (By::usable)
    if (a.k.packed) {
      Packed<By> held(a, s);
      return attend_all(a, held);
    }
  if (a.k.bytes) {
    Bytes held(a, s);
    return attend_all(a, held);
  }
  Floats held{a, s};
  return attend_all(a, held);
}

}  // namespace PACELINE_ISA
}  // namespace paceline
