// Attention over keys and values that are kept as int8, a quarter of the memory: a block is made float32 in a thread's own
// memory and then read as any other, so neither an instruction set nor a head needs anything else.
//
// A place of a K/V head holds its columns, a byte each, and behind them a float for each SCALED columns: what these bytes are
// to be multiplied with.
#pragma once

#include "attention.h"

namespace paceline {
namespace PACELINE_ISA {

struct Bytes {
  static constexpr int step = 1;
  struct Spots {
    const char *keys[BLOCK], *values[BLOCK];
  };
  const AttentionArgs& a;
  Queries& s;
  float* room;  // [keys, values][place][column]
  Spots now{}, next{};

  Bytes(const AttentionArgs& args, Queries& all) : a(args), s(all), room(args.room + MOST_QUERIES * args.v.head_dim) {}

  void begin() {
    s.fetches = false;
    for (int j = 0; j < BLOCK; ++j) s.now.keys[j] = room + j * s.d, s.now.values[j] = room + (BLOCK + j) * s.d;
  }

  bool find(int64_t start, int g) {
    const int64_t size = vector_bytes(s.d), stride = size * a.k.kv_heads, offset = (a.kv_head + g) * size;
    const char *keys = static_cast<const char*>(a.k.pool) + offset, *values = static_cast<const char*>(a.v.pool) + offset;
    return find_places(a, start, s.next, [&](int j, int64_t at) {
      next.keys[j] = keys + at * stride;
      next.values[j] = values + at * stride;
    });
  }

  void turn(int) { now = next, s.now.begin = s.next.begin, s.now.end = s.next.end; }

  void score() {
    for (int j = s.now.begin; j < s.now.end; ++j) {
      for (int64_t i = 0; i < vector_bytes(s.d); i += 64) prefetch(next.keys[j] + i), prefetch(next.values[j] + i);
      widen(now.keys[j], room + j * s.d);
      widen(now.values[j], room + (BLOCK + j) * s.d);
    }
    for (int j = 0; j < L && s.now.begin < s.now.end; ++j) s.now.keys[s.now.end + j] = room + (s.now.end - 1) * s.d;
    PACELINE_ISA::score(s);
    for (int j = s.now.end; j < s.now.end + L && j < BLOCK; ++j) s.now.keys[j] = room + j * s.d;
  }

  void weigh(int) {}
  void mix(int m, int count, int lo, int hi) { mix_all(s, m, count, lo, hi); }

 private:
  void widen(const char* from, float* to) {
    for (int64_t i = 0; i < s.d; i += SCALED) {
      float scale;
      std::memcpy(&scale, from + s.d + i / SCALED * 4, sizeof(scale));
      PL_UNROLL
      for (int c = 0; c < SCALED; c += L) PACELINE_ISA::store(to + i + c, load_bytes(from + i + c) * scale);
    }
  }
};

// SCALED columns to bytes; what they are to be multiplied with. Where one is no number that is none, too.
static float to_bytes(const float* x, char* to) {
  V most{}, broken{};
  for (int i = 0; i < SCALED; i += L) {
    const V v = load(x + i);
    most = vmax(most, (V)((VW)v & 0x7fffffffu));
    broken += v - v;
  }
  const float high = reduce_max(most), factor = high > 0 ? 127 / high : 0;
  for (int i = 0; i < SCALED; ++i) {  // to the nearest, ties to even: 1.5 * 2^23 has no room for fractions
    const float shifted = x[i] * factor + 12582912.0f;
    int32_t word;
    std::memcpy(&word, &shifted, sizeof(word));
    to[i] = static_cast<char>(word);
  }
  return high / 127 + reduce(broken);
}

static void store_bytes(const Pages& pages, int64_t index, const float* x) {
  const int64_t d = pages.head_dim, size = vector_bytes(d);
  char* to = static_cast<char*>(pages.pool) + index * pages.kv_heads * size;
  for (int h = 0; h < pages.kv_heads; ++h, x += d, to += size)
    for (int64_t i = 0; i < d; i += SCALED) {
      const float scale = to_bytes(x + i, to + i);
      std::memcpy(to + d + i / SCALED * 4, &scale, sizeof(scale));
    }
}

}  // namespace PACELINE_ISA
}  // namespace paceline
