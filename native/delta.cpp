// Linear attention by the gated delta rule: which text and head a chunk is, and where its state lies.
#include <algorithm>
#include <cstring>

#include "program.h"

namespace paceline {

// Cuts the rows into texts and says where the state of each is to stand; false if it does not stand where it could go on.
bool Program::find_texts(const Rows& rows) {
  texts_.clear();
  for (int64_t r = 0; r < rows.count;) {
    int64_t end = r + 1;
    while (end < rows.count && rows.slots[end] == rows.slots[r] && rows.positions[end] == rows.positions[end - 1] + 1) ++end;
    const int32_t slot = rows.slots[r];
    if (slot < 0 || slot >= states_.slots) return false;
    const int64_t place = states_.place[slot], first = rows.positions[r], last = first + end - r;
    if (place < 0 || place >= states_.count) return false;
    const int64_t begin = states_.folded[place], goal = std::max<int64_t>(begin, states_.goal[slot]);
    const int64_t oldest = std::min(begin, first) - states_.history;  // that is read; and what is to be read next time
    if (begin > first || goal > last || first - oldest > states_.most || last - (goal - states_.history) > states_.most)
      return false;
    texts_.push_back({r, end - r, place, begin, goal});
    r = end;
  }
  return true;
}

// values: qkv, b, a, out. integers: layer, key heads, value heads, sizes of a key and of a value, rows of the convolution,
// its weights [row][column], dt_bias, decay, whether value heads stand tiled, whether it is plain, the convolution's bias, skip.
void Program::delta(const Step& step, int index, int thread) {
  const int64_t texts = static_cast<int64_t>(texts_.size());
  for (const Op& op : step.ops) {
    const int64_t heads = op.integers[2];
    if (index >= texts * heads) {
      index -= static_cast<int>(texts * heads);
      continue;
    }
    const Text& text = texts_[index / heads];
    const StateLayer& layer = states_.layers[op.integers[0]];
    DeltaArgs a;
    a.head = index % heads, a.heads = heads;
    a.key_dim = op.integers[3], a.value_dim = op.integers[4], a.kernel = op.integers[5];
    const int64_t key_head = op.integers[9] ? a.head % op.integers[1] : a.head / (heads / op.integers[1]), keys = op.integers[1] * a.key_dim;
    a.q_column = key_head * a.key_dim, a.k_column = keys + a.q_column, a.v_column = 2 * keys + a.head * a.value_dim;
    a.channels = op.values[0].width;
    a.conv = reinterpret_cast<const float*>(op.integers[6]);
    a.dt_bias = reinterpret_cast<const float*>(op.integers[7]);
    a.decay = reinterpret_cast<const float*>(op.integers[8]);
    a.plain = op.integers[10] != 0;
    a.conv_bias = reinterpret_cast<const float*>(op.integers[11]);
    a.skip = reinterpret_cast<const float*>(op.integers[12]);
    a.begin = text.begin, a.store = text.goal, a.first = rows_.positions[text.row], a.end = a.first + text.count;
    a.qkv = at(op.values[0], text.row), a.qkv_stride = stride(op.values[0]);
    a.b = at(op.values[1], text.row), a.b_stride = stride(op.values[1]);
    a.a = at(op.values[2], text.row), a.a_stride = stride(op.values[2]);
    a.out = at(op.values[3], text.row) + a.head * a.value_dim, a.out_stride = stride(op.values[3]);
    a.most = states_.most, a.width = a.channels + 2 * heads;
    a.recent = layer.recent + text.place * a.most * a.width;
    a.state = layer.state + (text.place * heads + a.head) * a.key_dim * a.value_dim;
    std::vector<float>& scratch = scratch_[thread].values;
    const size_t room = kernels().delta_scratch(a.key_dim, a.value_dim) + 16;
    if (scratch.size() < room) scratch.resize(room);
    a.scratch = scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64) / sizeof(float);
    return kernels().delta_rule(a);
  }
}

// values: qkv, b, a. Keeps what the row holds, unless a later one of this run takes its place.
void Program::keep_row(const Op& op, int64_t row) {
  const int64_t later = row + states_.most, position = rows_.positions[row];
  if (later < rows_.count && rows_.slots[later] == rows_.slots[row] && rows_.positions[later] == position + states_.most)
    return;
  const int64_t width = op.values[0].width + op.values[1].width + op.values[2].width, place = states_.place[rows_.slots[row]];
  float* to = states_.layers[op.integers[0]].recent + (place * states_.most + position % states_.most) * width;
  for (int i = 0; i < 3; to += op.values[i++].width) std::memcpy(to, at(op.values[i], row), op.values[i].width * sizeof(float));
}

}  // namespace paceline
