#include "tower.h"

#include <algorithm>
#include <cstring>

#include "program.h"

namespace paceline {

namespace {

constexpr int64_t kRows = 128;    // of a thread's piece of work: they share each load of the weights from the last-level cache
constexpr int64_t kSeeing = 32;   // rows whose scores are held at once: those with all keys fit into the second-level cache
constexpr int64_t kOutputs = 128;

int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

uint16_t rounded(float value) {  // to bfloat16, ties to even
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 64);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

float* sized(std::vector<float>& room, int64_t n) {
  if (static_cast<int64_t>(room.size()) < n) room.resize(n);
  return room.data();
}

}  // namespace

Sight::Sight(const Tower& tower, float* x, int64_t count, const float* cos, const float* sin)
    : tower_(tower), x_(x), count_(count), cos_(cos), sin_(sin) {
  const int64_t tile = kernels().tile, d = tower.head_dim;
  key_bytes_ = up(count, tile) / tile * kernels().tile_bytes(tower.seen, d);
  value_bytes_ = kernels().tile_bytes(tower.seen, count);
  const int64_t values = up(d, tile) / tile * value_bytes_;
  room_.resize(tower.heads * (key_bytes_ + values) + 128);
  keys_ = room_.data() + (64 - reinterpret_cast<uintptr_t>(room_.data()) % 64);
  values_ = keys_ + tower.heads * key_bytes_;
}

Tiles Sight::keys_at(int64_t head) const { return {keys_ + head * key_bytes_, count_, tower_.head_dim, tower_.seen}; }

Tiles Sight::values_at(int64_t head) const {
  const int64_t tiles = up(tower_.head_dim, kernels().tile) / kernels().tile;
  return {values_ + head * tiles * value_bytes_, tower_.head_dim, count_, tower_.seen};
}

void Sight::run(int layer, int64_t begin, int64_t end, bool keys) {
  layer_ = &tower_.layers.at(layer);
  begin_ = std::max<int64_t>(begin, 0), end_ = std::min(end, count_), of_keys_ = keys;
  if (begin_ >= end_) return;
  scratch_.resize(Pool::instance().size());
  Pool::instance().run(*this, {static_cast<int>((end_ - begin_ + kRows - 1) / kRows)});
}

void Sight::chunk(int, int index, int thread) {
  const int64_t begin = begin_ + index * kRows;
  const Part part{begin, std::min(end_ - begin, kRows)};
  if (of_keys_) keys_of(part, scratch_[thread]);
  else rows_of(part, scratch_[thread]);
}

void Sight::multiply(const Tiles& m, const float* x, int64_t stride, int64_t rows, float* y, int64_t y_stride, Scratch& s) {
  const Kernels& k = kernels();
  const size_t bytes = k.prepared_bytes(m.kind, m.in) * rows + 64;
  if (s.prepared.size() < bytes) s.prepared.resize(bytes);
  char* room = s.prepared.data() + (64 - reinterpret_cast<uintptr_t>(s.prepared.data()) % 64);
  const Prepared p = k.prepare(m.kind, x, stride, rows, m.in, room, sized(s.scales, rows));
  for (int64_t o = 0; o < m.out; o += kOutputs)
    k.linear(m, p, rows, o, std::min(o + kOutputs, m.out), y, y_stride);
}

void Sight::linear(int which, const float* x, int64_t rows, float* y, Scratch& s) {
  const Tiles& m = layer_->linears[which];
  const float* bounds = layer_->bounds.empty() ? nullptr : layer_->bounds.data() + 4 * which;
  if (bounds) {
    float* clipped = sized(s.clipped, rows * m.in);
    kernels().clamp(x, bounds[0], bounds[1], clipped, rows * m.in);
    x = clipped;
  }
  multiply(m, x, m.in, rows, y, m.out, s);
  if (bounds) kernels().clamp(y, bounds[2], bounds[3], y, rows * m.out);
}

// Turns each head of a row by its place on both axes.
void Sight::turn(float* x, int64_t row) const {
  const int64_t d = tower_.head_dim, half = d / 4;
  const float *cos = cos_ + row * 2 * half, *sin = sin_ + row * 2 * half;
  for (int64_t part = 0; part < 2 * tower_.heads; ++part, x += 2 * half) {
    const int64_t axis = part % 2 * half;
    for (int64_t j = 0; j < half; ++j) {
      const float low = x[j], high = x[half + j], c = cos[axis + j], n = sin[axis + j];
      x[j] = low * c - high * n;
      x[half + j] = high * c + low * n;
    }
  }
}

// Where the linears read a row's key and value: output `row` of the keys, input `row` of the values (linear.h).
void Sight::keep(const float* k, const float* v, int64_t row) {
  const int64_t d = tower_.head_dim, tile = kernels().tile, line = 4 * tile, key_tile = kernels().tile_bytes(tower_.seen, d);
  const bool pairs = tower_.seen != FLOAT32;
  for (int64_t head = 0; head < tower_.heads; ++head, k += d, v += d) {
    char* key = keys_ + head * key_bytes_ + row / tile * key_tile + row % tile * 4;
    char* value = values_ + head * up(d, tile) / tile * value_bytes_ + (pairs ? row / 2 * line + row % 2 * 2 : row * line);
    for (int64_t i = 0; i < d; ++i) {
      const int64_t at = i / tile * value_bytes_ + i % tile * 4;
      if (pairs) {
        const uint16_t one = rounded(k[i]), other = rounded(v[i]);
        std::memcpy(key + i / 2 * line + i % 2 * 2, &one, 2);
        std::memcpy(value + at, &other, 2);
      } else {
        std::memcpy(key + i * line, k + i, 4);
        std::memcpy(value + at, v + i, 4);
      }
    }
  }
}

void Sight::keys_of(const Part& part, Scratch& s) {
  const Kernels& kernel = kernels();
  const int64_t hidden = tower_.hidden, inner = tower_.inner();
  const int heads = static_cast<int>(tower_.heads);
  float *h = sized(s.input, part.count * hidden), *k = sized(s.wide[0], part.count * inner);
  float* v = sized(s.wide[1], part.count * inner);
  for (int64_t r = 0; r < part.count; ++r)
    kernel.norm(x_ + (part.begin + r) * hidden, layer_->norms[TowerLayer::BEFORE], h + r * hidden, hidden, 1, tower_.eps);
  linear(TowerLayer::K, h, part.count, k, s);
  linear(TowerLayer::V, h, part.count, v, s);
  for (int64_t r = 0; r < part.count; ++r) {
    kernel.norm(k + r * inner, layer_->norms[TowerLayer::OF_K], k + r * inner, inner, heads, tower_.eps);
    kernel.norm(v + r * inner, nullptr, v + r * inner, inner, heads, tower_.eps);
    turn(k + r * inner, part.begin + r);
    keep(k + r * inner, v + r * inner, part.begin + r);
  }
}

// What the rows see of the picture, head by head. Their scores are held of some rows at a time.
void Sight::see(const Part& part, const float* q, float* mixed, Scratch& s) {
  const int64_t inner = tower_.inner(), d = tower_.head_dim;
  int64_t stride = up(count_, 16);
  if (stride % 1024 == 0) stride += 16;  // rows that are 4096 bytes apart lie in the same places of a cache
  float* scores = sized(s.scores, kSeeing * stride);
  for (int64_t head = 0; head < tower_.heads; ++head)
    for (int64_t r = 0; r < part.count; r += kSeeing) {
      const int64_t n = std::min(part.count - r, kSeeing), at = r * inner + head * d;
      multiply(keys_at(head), q + at, inner, n, scores, stride, s);
      float sums[kSeeing];
      for (int64_t i = 0; i < n; ++i) sums[i] = kernels().exponents(scores + i * stride, scores + i * stride, count_);
      multiply(values_at(head), scores, stride, n, mixed + at, inner, s);
      for (int64_t i = 0; i < n; ++i) kernels().scale(mixed + at + i * inner, 1 / sums[i], mixed + at + i * inner, d);
    }
}

void Sight::rows_of(const Part& part, Scratch& s) {
  const Kernels& kernel = kernels();
  const int64_t hidden = tower_.hidden, inner = tower_.inner(), wide = tower_.wide, count = part.count;
  float *x = x_ + part.begin * hidden, *h = sized(s.input, count * std::max(hidden, inner));
  float *first = sized(s.wide[0], count * std::max(wide, inner)), *second = sized(s.wide[1], count * std::max(wide, hidden));
  const auto normed = [&](int which, const float* from, float* to) {
    for (int64_t r = 0; r < count; ++r) kernel.norm(from + r * hidden, layer_->norms[which], to + r * hidden, hidden, 1, tower_.eps);
  };
  normed(TowerLayer::BEFORE, x, h);
  linear(TowerLayer::Q, h, count, first, s);
  for (int64_t r = 0; r < count; ++r) {
    float* q = first + r * inner;
    kernel.norm(q, layer_->norms[TowerLayer::OF_Q], q, inner, static_cast<int>(tower_.heads), tower_.eps);
    turn(q, part.begin + r);
  }
  see(part, first, h, s);
  linear(TowerLayer::O, h, count, second, s);
  normed(TowerLayer::AFTER, second, second);
  kernel.add(x, second, x, count * hidden);
  normed(TowerLayer::PRE, x, h);
  linear(TowerLayer::GATE, h, count, first, s);
  linear(TowerLayer::UP, h, count, second, s);
  kernel.gated_gelu(first, second, first, count * wide);
  linear(TowerLayer::DOWN, first, count, second, s);
  normed(TowerLayer::POST, second, second);
  kernel.add(x, second, x, count * hidden);
}

}  // namespace paceline
