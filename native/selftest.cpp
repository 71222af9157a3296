// Checks one instruction set without Python, for CPUs that the build machine is not, e.g. AArch64 under an emulator:
//
//   aarch64-linux-gnu-g++ -std=c++17 -O3 -ffp-contract=off -fno-math-errno -Wno-psabi -static -DPACELINE_ARM
//     -DPACELINE_ISA=neon native/selftest.cpp native/kernels.cpp -o selftest && qemu-aarch64-static ./selftest
//
// Linears of every kind against double, their rows bit for bit against themselves alone, attention against double.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "types.h"

#define PL_JOIN_(a, b) a##b
#define PL_JOIN(a, b) PL_JOIN_(a, b)

using namespace paceline;

namespace {

const Kernels& k = PL_JOIN(kernels_, PACELINE_ISA);
std::mt19937 rng(1);
int failures = 0;

float normal() { return std::normal_distribution<float>()(rng); }

void expect(bool ok, const char* what, int a, int b) {
  if (!ok) ++failures, std::printf("FAILED %s (%d, %d)\n", what, a, b);
}

struct Random {  // a matrix, and what its values mean
  std::vector<char> bytes;
  std::vector<float> scale;
  std::vector<double> means;
  Matrix m;

  Random(int kind, int64_t out, int64_t in) : means(out * in) {
    m.out = out, m.in = in, m.kind = kind & ~EXACT;
    scale.assign(m.kind == INT4 ? out * in / 32 : out, 0.0f);
    for (float& s : scale) s = 0.01f * (1.5f + normal() * 0.1f);
    m.scale = scale.data();
    if (in_blocks(kind)) {
      random_blocks(kind);
      return;
    }
    bytes.resize(m.row_bytes() * out);
    for (int64_t i = 0; i < out * in; ++i) {
      if (kind == FLOAT32 || kind == BFLOAT16 || kind == BF16_DOT) {
        float v = normal();
        uint32_t word;
        std::memcpy(&word, &v, 4);
        if (kind != FLOAT32) word &= 0xffff0000u;
        std::memcpy(&v, &word, 4);
        means[i] = v;
        if (kind == FLOAT32) std::memcpy(&bytes[4 * i], &v, 4);
        else std::memcpy(&bytes[2 * i], reinterpret_cast<char*>(&word) + 2, 2);
      } else {
        int q = static_cast<int>(rng() % 255) - 127;
        bytes[i] = static_cast<char>(q);
        means[i] = q * static_cast<double>(scale[i / in]);
      }
    }
    m.data = bytes.data();
  }

  // Random integers under scales near 0.01; what they mean is told by the table.
  void random_blocks(int kind) {
    const BlockSize size = block_size(kind);
    bytes.resize(m.row_bytes() * m.out);
    for (char& byte : bytes) byte = static_cast<char>(rng());
    for (size_t at = 0; m.kind != INT4 && at < bytes.size(); at += size.bytes) {
      const uint16_t half = static_cast<uint16_t>(0x2000 + rng() % 0x400);
      const int64_t last = m.kind == Q6_K ? 208 : m.kind == Q2_K ? 80 : m.kind == Q3_K ? 108 : m.kind == TQ1_0 ? 52 : m.kind == TQ2_0 ? 64 : 0;
      if (m.kind == MXFP4) bytes[at] = static_cast<char>(120 + rng() % 3);
      else if (m.kind == NVFP4) for (int i = 0; i < 4; ++i) bytes[at + i] = static_cast<char>(16 + rng() % 16);
      else if (m.kind == IQ1_M) for (int i = 0; i < 4; ++i) bytes[at + 49 + 2 * i] = static_cast<char>((bytes[at + 49 + 2 * i] & 15) | (i == 3 ? 0x20 : 0));
      else std::memcpy(&bytes[at + last], &half, 2);
      if (m.kind == Q4_1 || m.kind == Q5_1 || m.kind == Q4_K || m.kind == Q5_K || m.kind == Q2_K) std::memcpy(&bytes[at + last + 2], &half, 2);
    }
    m.data = bytes.data();
    std::vector<float> row(m.in);
    for (int64_t o = 0; o < m.out; ++o) {
      k.embed(m, o, 1.0f, row.data());
      for (int64_t i = 0; i < m.in; ++i) means[o * m.in + i] = row[i];
    }
    m.kind = kind;
  }
};

std::vector<float> linear(const Random& w, const float* x, int64_t rows) {
  const int64_t size = k.tile_bytes(w.m.kind, w.m.in), tiles = (w.m.out + k.tile - 1) / k.tile;
  std::vector<char> packed(size * tiles), room(k.prepared_bytes(w.m.kind, w.m.in) * rows + 64);
  for (int64_t p = 0; p < tiles; ++p) k.pack(w.m, p, packed.data() + p * size);
  const Tiles m{packed.data(), w.m.out, w.m.in, w.m.kind};
  std::vector<float> scales(rows), y(rows * w.m.out);
  Prepared p = k.prepare(w.m.kind, x, w.m.in, rows, w.m.in, room.data(), scales.data());
  k.linear(m, p, rows, 0, w.m.out, y.data(), w.m.out);
  return y;
}

void check_linear(int kind, int out, int in) {
  Random w(kind, out, in);
  std::vector<float> x(17 * in);
  for (float& v : x) v = normal();
  std::vector<float> whole = linear(w, x.data(), 17);
  double worst = 0, size = 0;
  for (int r = 0; r < 17; ++r)
    for (int o = 0; o < out; ++o) {
      double want = 0;
      for (int i = 0; i < in; ++i) want += w.means[o * in + i] * x[r * in + i];
      worst = std::fmax(worst, std::fabs(want - whole[r * out + o]));
      size = std::fmax(size, std::fabs(want));
    }
  const bool exact = kind < INT8 || (kind & EXACT);
  expect(worst < size * (in_blocks(kind) && !exact ? 2e-2 : kind == BF16_DOT ? 5e-3 : exact ? 3e-6 : 5e-4), "linear is off", kind, in);
  for (int rows = 1; rows <= 17; ++rows) {
    weights_in_cache = rows % 2;
    std::vector<float> part = linear(w, x.data() + (17 - rows) * in, rows);
    expect(!std::memcmp(part.data(), whole.data() + (17 - rows) * out, part.size() * 4), "bits depend on rows", kind, rows);
  }
}

constexpr int kTokens = 320;

// `rows` rows, the first of which sees keys max(0, last - span)..last-1; each alone has the bits it has beside the others.
// Values of `w` floats, fewer than `d`, are the beginnings of the keys.
void check_attention(int rows, int heads, int d, int w, int last, int span, bool packed) {
  std::vector<float> pool(2 * kTokens * 2 * d), q(rows * heads * d), out(rows * heads * w), alone(heads * w);
  std::vector<int16_t> halves(packed ? pool.size() : 0, 0x7fff);  // what nobody has stored is no number
  for (float& v : pool) v = normal();
  for (float& v : q) v = 0.3f * normal();
  std::vector<int32_t> table(kTokens / 16);
  for (int i = 0; i < kTokens / 16; ++i) table[i] = (7 * i + 3) % (kTokens / 16);
  AttentionArgs a{};
  std::vector<float> sinks(heads);
  for (float& v : sinks) v = 2 * normal();
  if (rows == 5) a.sinks = sinks.data();
  if (rows == 3) a.cap = 2;
  a.q = q.data(), a.out = out.data(), a.q_stride = heads * d, a.out_stride = heads * w;
  a.rows = rows, a.heads = heads, a.groups = 1, a.kv_head = 1, a.last = last, a.span = span;
  std::vector<float> room(MOST_QUERIES * w);
  a.room = room.data();
  const float *keys = pool.data(), *values = w < d ? keys : keys + kTokens * 2 * d;
  a.k = {pool.data(), kTokens, table.data(), kTokens / 16, 1, 16, 2, d, packed};
  a.v = a.k;
  a.v.pool = const_cast<float*>(values), a.v.head_dim = w;
  if (packed) {
    a.k.pool = halves.data(), a.v.pool = halves.data() + kTokens * 2 * d;
    for (int j = last > span ? last - span : 0; j < last + rows - 1; ++j) {
      const int64_t at = table[j / 16] * 16 + j % 16;
      k.store_packed(a.k, true, at, keys + at * 2 * d), k.store_packed(a.v, false, at, values + at * 2 * d);
    }
  }
  expect(k.attention(a), "attention refused", rows, d);
  for (int n = 0; n < rows * heads; ++n) {
    std::vector<double> sum(w);
    double total = a.sinks ? std::exp(static_cast<double>(sinks[n % heads])) : 0;
    int end = last + n / heads;
    for (int j = end > span ? end - span : 0; j < end; ++j) {
      int64_t at = ((table[j / 16] * 16 + j % 16) * 2 + 1) * d;
      double score = 0;
      for (int i = 0; i < d; ++i) score += static_cast<double>(q[n * d + i]) * keys[at + i];
      if (a.cap > 0) score = a.cap * std::tanh(score / a.cap);
      double e = std::exp(score);
      total += e;
      for (int i = 0; i < w; ++i) sum[i] += e * values[at + i];
    }
    for (int i = 0; i < w; ++i)
      expect(std::fabs((total > 0 ? sum[i] / total : 0) - out[n * w + i]) < (packed ? 0.06 : 1e-5), "attention is off", rows, d);
  }
  std::vector<float> parts(2 * rows * heads * (2 + w)), joined(out.size());
  AttentionArgs cut = a;
  cut.partial = parts.data(), cut.out = joined.data(), cut.segments = (last + rows - 1 + SEGMENT - 1) / SEGMENT;
  for (cut.segment = 0; cut.segment < cut.segments; ++cut.segment, cut.partial += rows * heads * (2 + w))
    expect(k.attention(cut), "attention refused", rows, d);
  cut.partial = parts.data();
  k.attention_join(cut);
  expect(!std::memcmp(joined.data(), out.data(), out.size() * 4), "bits depend on who computes a segment", rows, d);
  AttentionArgs one = a;
  one.out = alone.data(), one.rows = 1;
  for (int r = 0; r < rows; ++r, one.q += heads * d, ++one.last) {
    expect(k.attention(one), "attention refused", 1, d);
    expect(!std::memcmp(alone.data(), out.data() + r * heads * w, alone.size() * 4), "bits depend on rows", rows, d);
  }
}

}  // namespace

int main() {
  for (int kind : {FLOAT32, BFLOAT16, INT8, BF16_DOT})
    for (int in : {32, 96, 256, 2080})
      if (kind != BF16_DOT || k.bf16_dot()) check_linear(kind, 53, in);
  for (int i = 0; i < GRIDS; ++i)  // any codes that there are, three of two bits or eight of three
    for (int j = 0; j < 8; ++j) grids[i] = static_cast<uint16_t>(i < IQ3_XXS_GRID ? grids[i] | rng() % 3 << 2 * j : rng() & 0xfff);
  for (int kind = Q4_0; kind <= LAST_KIND; ++kind)
    for (int in : {32, 96, 256, 2304})
      if (in % block_size(kind).elements == 0) check_linear(kind, 53, in), check_linear(kind | EXACT, 53, in);
  for (int in : {5, 40}) check_linear(FLOAT32, 9, in), check_linear(BFLOAT16, 9, in), check_linear(INT8, 9, in);
  if (k.bf16_dot()) check_linear(BF16_DOT, 9, 5), check_linear(BF16_DOT, 9, 40);
  for (int heads = 1; heads <= 4; ++heads)
    for (int rows : {1, 3, 5, 8})
      for (int d : {16, 36, 64})
        for (int span : {3, 61, 1000})
          for (int last : {0, 4, 62, 130, 290}) {
            check_attention(rows, heads, d, d, last, span, false);
            check_attention(rows, heads, d, d * 3 / 4, last, span, false);
            if (k.bf16_dot() && d % 16 == 0) check_attention(rows, heads, 2 * d, 2 * d, last, span, true);
          }
  std::printf("%s: %s\n", k.name, failures ? "FAILED" : "ok");
  return failures != 0;
}
