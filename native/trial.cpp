#include "trial.h"

#include <cmath>
#include <cstring>
#include <vector>

namespace paceline {

namespace {

constexpr int64_t kOut = 69, kIn = 256, kRows = 7;  // tiles that are full and one that is not, of one row and of some
constexpr int kColumns = 39;                         // of a row, more than two vectors and a rest
constexpr int kHead = 64, kHeads = 2, kSeen = 37, kSeeing = 3;  // of attention

class Trial {
 public:
  explicit Trial(const Kernels& k) : tried_(k) {}

  const char* wrong() {
    if (const char* what = linears()) return what;
    if (const char* what = rows()) return what;
    return attention();
  }

 private:
  using Floats = std::vector<float>;

  // Multiples of 1/8 up to 2: they are the same in bfloat16.
  float next() {
    state_ = state_ * 1664525u + 1013904223u;
    return static_cast<float>(static_cast<int>(state_ >> 16) % 33 - 16) / 8;
  }
  Floats numbers(int64_t n) {
    Floats out(n);
    for (float& x : out) x = next();
    return out;
  }

  // Within `share` of the largest. What is no number is wrong.
  static bool near(const Floats& got, const Floats& told, float share) {
    float most = 0, off = 0;
    for (size_t i = 0; i < told.size(); ++i) {
      most = std::fmax(most, std::fabs(told[i]));
      const float by = std::fabs(got[i] - told[i]);
      if (!(by <= off)) off = by;
    }
    return off <= share * most;
  }

  struct Weights {
    std::vector<char> bytes;
    Floats scale;
    Matrix matrix;
  };

  // Random bytes, under scales near 1/64 where a block begins with one.
  Weights weights(int kind) {
    Weights w;
    w.matrix.out = kOut, w.matrix.in = kIn, w.matrix.kind = kind;
    w.bytes.resize(w.matrix.row_bytes() * kOut);
    w.scale.assign(kOut * kIn / 32, 1.0f / 64);
    if (kind == FLOAT32 || kind == BFLOAT16 || kind == BF16_DOT) {
      const Floats values = numbers(kOut * kIn);
      for (int64_t i = 0; i < kOut * kIn; ++i)
        if (kind == FLOAT32) std::memcpy(&w.bytes[4 * i], &values[i], 4);
        else std::memcpy(&w.bytes[2 * i], reinterpret_cast<const char*>(&values[i]) + 2, 2);
    } else {
      for (char& byte : w.bytes) byte = static_cast<char>(static_cast<int>(8 * next()) * 7);
    }
    const uint16_t half = 0x2400;  // 1/64
    if (kind == Q8_0 || kind == Q4_K)
      for (size_t at = 0; at < w.bytes.size(); at += block_size(kind).bytes) std::memcpy(&w.bytes[at], &half, 2);
    if (kind == Q4_K)
      for (size_t at = 2; at < w.bytes.size(); at += block_size(kind).bytes) std::memcpy(&w.bytes[at], &half, 2);
    w.matrix.data = w.bytes.data(), w.matrix.scale = w.scale.data();
    return w;
  }

  static Floats product(const Kernels& k, const Matrix& m, const Floats& x, int64_t rows) {
    const int64_t size = k.tile_bytes(m.kind, m.in), tiles = (m.out + k.tile - 1) / k.tile;
    std::vector<char> packed(size * tiles), room(k.prepared_bytes(m.kind, m.in) * rows + 64);
    for (int64_t p = 0; p < tiles; ++p) k.pack(m, p, packed.data() + p * size);
    Floats scales(rows), y(rows * m.out);
    const Prepared p = k.prepare(m.kind, x.data(), m.in, rows, m.in, room.data(), scales.data());
    k.linear({packed.data(), m.out, m.in, m.kind}, p, rows, 0, m.out, y.data(), m.out);
    return y;
  }

  bool linear(int kind) {
    const Floats x = numbers(kRows * kIn);
    const Weights w = weights(kind);
    Matrix as_portable = w.matrix;
    if (kind == BF16_DOT) as_portable.kind = BFLOAT16;
    const float share = kind == INT4 || kind == Q4_K ? 5e-3f : 1e-5f;  // inputs in 8 bits: a tie may be rounded either way
    for (int64_t rows : {int64_t{1}, kRows})
      if (!near(product(tried_, w.matrix, x, rows), product(kernels_generic, as_portable, x, rows), share)) return false;
    return true;
  }

  const char* linears() {
    if (!linear(FLOAT32)) return "a linear of float32";
    if (!linear(BFLOAT16) || (tried_.bf16_dot() && !linear(BF16_DOT))) return "a linear of bfloat16";
    if (!linear(INT8)) return "a linear of int8";
    if (!linear(INT4)) return "a linear of int4";
    return linear(Q8_0) && linear(Q4_K) ? nullptr : "a linear over blocks";
  }

  template <class F>
  bool same(F f) const {  // f(kernels, result) of a row
    Floats got(2 * kColumns), told(2 * kColumns);
    f(tried_, got.data()), f(kernels_generic, told.data());
    return near(got, told, 1e-5f);
  }

  const char* rows() {
    const Floats x = numbers(2 * kColumns), z = numbers(2 * kColumns);
    const float *a = x.data(), *b = z.data();
    if (!same([&](const Kernels& k, float* y) { k.norm(a, b, y, 2 * kColumns, 2, 1e-6f); })) return "a norm";
    if (!same([&](const Kernels& k, float* y) { k.rotary(a, b, y, 2 * 36, 2, 36, 1.0f, 7); })) return "rotary positions";
    if (!same([&](const Kernels& k, float* y) { k.softmax(a, y, kColumns); })) return "a softmax";
    if (!same([&](const Kernels& k, float* y) { k.low_rank({a, b, b, y, kColumns, kColumns, 2, 0, kColumns, 0.5f}); })) return "an adapter";
    if (!same([&](const Kernels& k, float* y) { k.gated_silu(a, b, y, kColumns), k.gated_gelu(a, b, y + kColumns, kColumns); }))
      return "an activation";
    return same([&](const Kernels& k, float* y) { k.softcap(a, 1.5f, y, kColumns), k.add(a, b, y + kColumns, kColumns); }) ? nullptr : "a sum";
  }

  enum Cache { FLOATS, BYTES, PACKED };

  Floats seen(const Kernels& k, Cache cache, const Floats& q, const Floats& keys, const Floats& values) const {
    constexpr int tokens = 48;
    std::vector<char> held[2];
    const int32_t table[3] = {2, 0, 1};
    Pages pages[2];
    for (int i : {0, 1}) {
      Pages& p = pages[i];
      p.tokens = tokens, p.table = table, p.table_stride = 3, p.slots = 1, p.kv_heads = 1, p.head_dim = kHead;
      p.packed = cache == PACKED, p.bytes = cache == BYTES;
      held[i].resize(tokens * p.place_bytes());
      p.pool = held[i].data();
      const float* from = i ? values.data() : keys.data();
      for (int j = 0; j < kSeen; ++j, from += kHead) {
        const int64_t at = table[j / 16] * 16 + j % 16;
        if (cache == PACKED) k.store_packed(p, i == 0, at, from);
        else if (cache == BYTES) k.store_bytes(p, at, from);
        else std::memcpy(held[i].data() + at * p.place_bytes(), from, 4 * kHead);
      }
    }
    Floats out(kSeeing * kHeads * kHead), room(attention_room(pages[0], pages[1]));
    AttentionArgs args{};
    args.q = q.data(), args.out = out.data(), args.q_stride = args.out_stride = kHeads * kHead;
    args.rows = kSeeing, args.heads = kHeads, args.groups = 1;
    args.last = kSeen - kSeeing + 1, args.span = INT64_MAX / 2, args.room = room.data();
    args.k = pages[0], args.v = pages[1];
    return k.attention(args) ? out : Floats(out.size(), NAN);
  }

  const char* attention() {
    Floats q = numbers(kSeeing * kHeads * kHead), keys = numbers(kSeen * kHead), values = numbers(kSeen * kHead);
    for (float& x : q) x /= 16;
    const Floats told = seen(kernels_generic, FLOATS, q, keys, values);
    if (!near(seen(tried_, FLOATS, q, keys, values), told, 1e-5f)) return "attention";
    if (!near(seen(tried_, BYTES, q, keys, values), seen(kernels_generic, BYTES, q, keys, values), 1e-5f)) return "attention over bytes";
    if (tried_.bf16_dot() && !near(seen(tried_, PACKED, q, keys, values), told, 2e-2f)) return "attention over bfloat16";
    return nullptr;
  }

  const Kernels& tried_;
  uint32_t state_ = 1;
};

}  // namespace

const char* what_is_wrong(const Kernels& k) { return Trial(k).wrong(); }

}  // namespace paceline
