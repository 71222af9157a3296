// Attention of a forward: which rows, heads and keys a chunk is. Few rows of long texts are cut by segments of keys, so that
// all threads read K/V of all heads in the order in which they lie; many rows are cut by themselves and by heads.
#include <algorithm>

#include "program.h"

namespace paceline {

namespace {

constexpr int kHeads = 16;       // most heads of an attention call that read the same K/V head
constexpr int64_t kFewRows = 16;  // of which the partial results of all segments may be kept
constexpr int64_t kMostKept = 1 << 24;  // floats of these
constexpr int64_t kChunks = 3;   // of a thread, so that one that loses its core leaves something to others

}  // namespace

int64_t Program::group_of(const Op& op) const { return op.integers[1] / layers_[op.integers[0]].k.kv_heads; }

// Heads of the widest attention call.
int64_t Program::most_heads() {
  if (most_heads_) return most_heads_;
  most_heads_ = 1;
  for (const Step& step : steps_)
    for (const Op& op : step.ops)
      if (op.code == ATTENTION) most_heads_ = std::max(most_heads_, std::min<int64_t>(kHeads, group_of(op)));
  return most_heads_;
}

// Whether a row stands one place behind the one before it, in the same sequence.
bool Program::goes_on(int64_t row) const {
  return row < rows_.count && rows_.slots[row] == rows_.slots[row - 1] && rows_.positions[row] == rows_.positions[row - 1] + 1;
}

// Cuts the rows into runs at consecutive positions of one sequence, as long as an attention call takes them and the
// threads have something to share: rows of a run share each load of a key or value.
void Program::cut_runs() {
  runs_.assign(1, 0);
  if (heads_ == INT64_MAX) return;  // nobody asks, and there may be no positions
  int64_t most = MOST_QUERIES / most_heads();
  if (rows_.count > kFewRows)
    while (most > 1 && (rows_.count + most - 1) / most * heads_ < threads_) most /= 2;
  runs_.clear();
  for (int64_t r = 0, end; r < rows_.count; r = end) {
    for (end = r + 1; goes_on(end) && reach_of(end) == reach_of(r);) ++end;
    const int64_t parts = (end - r + most - 1) / most;  // of about the same length
    for (int64_t p = 0; p < parts; ++p) runs_.push_back(r + p * (end - r) / parts);
  }
  runs_.push_back(rows_.count);
  int64_t shortest = runs_[1];
  longest_ = shortest;
  for (size_t r = 2; r < runs_.size(); ++r) {
    shortest = std::min(shortest, runs_[r] - runs_[r - 1]);
    longest_ = std::max(longest_, runs_[r] - runs_[r - 1]);
  }
  uneven_ = longest_ > shortest + 1;
  const int64_t last = *std::max_element(rows_.positions, rows_.positions + rows_.count);
  segmented_ = rows_.count <= kFewRows && runs() < kChunks * threads_ && rows_.count * widest_ * (last / SEGMENT + 1) <= kMostKept;
}

// What the rows of a run see: all but heads and memory.
AttentionArgs Program::seen(const Op& op, int64_t run) const {
  const int64_t row = runs_[run], window = op.integers[2], own = op.integers[3] ? 1 : 0;
  AttentionArgs args{};
  args.rows = static_cast<int>(runs_[run + 1] - row);
  args.slot = rows_.slots[row];
  args.last = rows_.positions[row] + own;
  args.reach = window < 0 || !own ? 0 : reach_of(row);
  args.span = window < 0 ? INT64_MAX / 2 : window + 1 - own;
  if (op.integers[3] == 2) {  // each row sees all that its sequence has in this run
    int64_t end = row + args.rows;
    while (goes_on(end)) ++end;
    args.reach = rows_.positions[end - 1] + 1;
  }
  args.segment = std::max<int64_t>(0, args.last - args.span) / SEGMENT;
  const int64_t end = std::max(args.last + args.rows - 1, args.reach);
  args.segments = std::max<int64_t>(1, (end + SEGMENT - 1) / SEGMENT - args.segment);
  return args;
}

// Shares out the ops of a step; how many chunks that makes. K/V heads stay together while there are chunks enough.
int64_t Program::share_out(Step& step) {
  int64_t total = 0, partial = 0, left = 0;
  step.shares.clear();
  for (const Op& op : step.ops) {
    const Layer& layer = layers_[op.integers[0]];
    const int64_t group = group_of(op);
    Shares s{layer.k.kv_heads, group, std::min<int64_t>(kHeads, group), 1, 0, partial, left};
    int64_t pieces = 0;  // of the rows and their keys
    for (int64_t run = 0; run < runs(); ++run) pieces += segmented_ ? seen(op, run).segments : 1;
    if (s.per == group) s.groups = std::max<int64_t>(1, std::min(s.kv_heads, MOST_QUERIES / (longest_ * group)));
    while (s.groups > 1 && pieces * s.count() < kChunks * threads_) s.groups = (s.groups + 1) / 2;
    while (s.per > 1 && pieces * s.count() < threads_) s.per /= 2;
    s.chunks = pieces * s.count();
    total += s.chunks;
    left += runs() * s.count();
    if (segmented_)
      for (int64_t run = 0; run < runs(); ++run) partial += seen(op, run).segments * s.count() * s.floats(runs_[run + 1] - runs_[run], layer);
    step.shares.push_back(s);
  }
  if (segmented_ && static_cast<int64_t>(partial_.size()) < partial) partial_.resize(partial);
  if (segmented_ && lefts_ < left) {
    left_.reset(new std::atomic<int>[left]());
    lefts_ = left;
  }
  return total;
}

void Program::attention(const Step& step, int index, int thread) {
  for (size_t i = 0; i < step.ops.size(); ++i) {
    const Shares& shares = step.shares[i];
    if (index < shares.chunks) return segmented_ ? attend_segment(step.ops[i], shares, index, thread) : attend(step.ops[i], shares, index, thread);
    index -= static_cast<int>(shares.chunks);
  }
}

// Some heads of a run, and memory for them.
void Program::take(AttentionArgs& args, const Op& op, const Shares& shares, int64_t run, int64_t share, int thread) {
  const Layer& layer = layers_[op.integers[0]];
  const int64_t band = share / shares.parts(), part = share % shares.parts(), row = runs_[run];
  args.kv_head = band * shares.groups;
  args.groups = static_cast<int>(std::min(shares.groups, shares.kv_heads - args.kv_head));
  args.heads = static_cast<int>(std::min(shares.per, shares.group - part * shares.per));
  const int64_t head = args.kv_head * shares.group + part * shares.per;
  args.q = at(op.values[0], row) + head * layer.k.head_dim;
  args.out = at(op.values[1], row) + head * layer.v.head_dim;
  args.q_stride = stride(op.values[0]);
  args.out_stride = stride(op.values[1]);
  const int64_t sinks = op.integers.size() > 4 ? op.integers[4] : 0;
  args.cap = op.number;
  args.sinks = sinks ? reinterpret_cast<const float*>(sinks) + head : nullptr;
  args.k = layer.k;
  args.v = layer.v;
  std::vector<float>& room = scratch_[thread].room;
  const size_t need = attention_room(layer.k, layer.v);
  if (room.size() < need) room.resize(need);
  args.room = room.data();
}

void Program::attend(const Op& op, const Shares& shares, int64_t index, int thread) {
  const int64_t count = shares.count();
  int64_t run = index / count, share = index % count;
  if (uneven_) {  // a thread takes some heads of all runs, and begins at one of its own: two at the same run are slower
    share = index / runs();
    run = (index + share * threads_ / count) % runs();
  }
  AttentionArgs args = seen(op, run);
  take(args, op, shares, run, share, thread);
  if (!kernels().attention(args)) status_ = BAD_POSITION;
}

// One segment of a run's keys, all heads of a share. Who is the last one joins the segments.
void Program::attend_segment(const Op& op, const Shares& shares, int64_t index, int thread) {
  const Layer& layer = layers_[op.integers[0]];
  const int64_t count = shares.count();
  float* partial = partial_.data() + shares.partial;
  for (int64_t run = 0;; ++run) {
    AttentionArgs args = seen(op, run);
    const int64_t size = args.segments * shares.floats(args.rows, layer);
    if (index >= args.segments * count) {
      index -= args.segments * count;
      partial += size * count;
      continue;
    }
    const int64_t share = index % count, segment = index / count;
    take(args, op, shares, run, share, thread);
    float* whole = partial + share * size;
    args.partial = whole + segment * args.rows * args.heads * args.groups * (2 + layer.v.head_dim);
    args.segment += segment;
    if (!kernels().attention(args)) status_ = BAD_POSITION;
    std::atomic<int>& left = left_[shares.left + run * count + share];
    if (left.fetch_add(1, std::memory_order_acq_rel) + 1 < args.segments) return;
    left.store(0, std::memory_order_relaxed);
    args.partial = whole;
    return kernels().attention_join(args);
  }
}

}  // namespace paceline
