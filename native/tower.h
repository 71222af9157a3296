// The encoder of a vision tower: every row of a picture sees every other. Rows are computed some at a time, so that other
// work can come between; their bits depend on the picture alone.
#pragma once

#include <cstdint>
#include <vector>

#include "pool.h"
#include "types.h"

namespace paceline {

struct TowerLayer {
  enum { Q, K, V, O, GATE, UP, DOWN, LINEARS };
  enum { BEFORE, AFTER, PRE, POST, OF_Q, OF_K, NORMS };
  const float* norms[NORMS];
  Tiles linears[LINEARS];
  std::vector<float> bounds;  // of each linear: lowest and highest input, lowest and highest output; or none
};

struct Tower {
  int64_t hidden, wide, heads, head_dim;
  float eps;
  int seen;  // kind in which keys and values are kept: FLOAT32 or BF16_DOT
  std::vector<TowerLayer> layers;

  int64_t inner() const { return heads * head_dim; }
};

// One picture on its way through the layers: x [count][hidden] is overwritten, `turns` are cos and sin of its rows' angles,
// [count][head_dim / 2] each: a part of each head for each axis, whose halves are pairs.
class Sight : Job {
 public:
  Sight(const Tower& tower, float* x, int64_t count, const float* cos, const float* sin);

  // Of rows begin..end - 1 what others see in a layer; then, once that is there of all rows, the layer itself.
  void keys(int layer, int64_t begin, int64_t end) { run(layer, begin, end, true); }
  void rows(int layer, int64_t begin, int64_t end) { run(layer, begin, end, false); }

 private:
  struct Scratch {
    std::vector<float> clipped, input, wide[2], scores, scales;
    std::vector<char> prepared;
  };
  struct Part {
    int64_t begin, count;
  };

  void run(int layer, int64_t begin, int64_t end, bool keys);
  void chunk(int step, int index, int thread) override;
  void keys_of(const Part&, Scratch&);
  void rows_of(const Part&, Scratch&);
  void see(const Part&, const float* q, float* mixed, Scratch&);
  void linear(int which, const float* x, int64_t rows, float* y, Scratch&);
  void multiply(const Tiles&, const float* x, int64_t stride, int64_t rows, float* y, int64_t y_stride, Scratch&);
  void turn(float* x, int64_t row) const;
  void keep(const float* k, const float* v, int64_t row);
  Tiles keys_at(int64_t head) const;
  Tiles values_at(int64_t head) const;

  const Tower& tower_;
  float* x_;
  int64_t count_, key_bytes_, value_bytes_;  // bytes of a head's keys, of a tile of its values
  const float *cos_, *sin_;
  std::vector<char> room_;
  char *keys_, *values_;
  const TowerLayer* layer_ = nullptr;
  int64_t begin_ = 0, end_ = 0;
  bool of_keys_ = false;
  std::vector<Scratch> scratch_;
};

}  // namespace paceline
