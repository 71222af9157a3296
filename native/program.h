// A recorded forward: steps of ops over buffers, replayed by one call. Python decides the order and owns all memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "pool.h"
#include "types.h"

namespace paceline {

const Kernels& kernels();  // the best that this CPU can run, of those that compute right on it
using LeftOut = std::vector<std::pair<std::string, std::string>>;
const LeftOut& left_out();  // better ones that do not, and what they get wrong
// For tests: as if the linear, attention or norm of these sets gave a wrong number.
void choose_again(const std::vector<std::pair<std::string, std::string>>& broken);
bool choose_kernels(const char* name);
const char* bf16_dot_way();  // how pairs of bfloat16 are multiplied: "registers", "pairs" or "floats"; "" if they are not

enum Code : int {
  EMBED, NORM, ROTARY, STORE, ADD, MUL, SCALE, GELU, GATED_GELU, GATED_SILU, BIAS, SOFTCAP, COPY, ROUTE, MIX, TOP_CLUSTERS, GATED_SIGMOID, KEEP, ADAPT,  // of one row
  LINEAR, ATTENTION, EXPERTS, GATHER, DELTA,
  GATED_CLAMPED = 25,  // only what experts' gate and value go through
  BLOCK_CONV = 26,
  CONVOLVE = 27,
  GATED_RELU = 28  // of one row, too
};

struct Value {  // `width` columns of a buffer, from `column`
  int buffer = 0;
  int64_t column = 0, width = 0;
};

struct Op {
  int code = 0;
  std::vector<Value> values;  // inputs, then outputs
  Matrix table;                 // of EMBED
  std::vector<Tiles> weights;  // of all others
  std::vector<int64_t> integers;  // counts, and addresses of float or int64 arrays
  float number = 0;
};

struct Layer {
  Pages k, v;
};

struct StateLayer {
  float *state, *recent;  // [count][value heads][key][value], [count][most][width]
};

struct States {  // recurrent states: of which there are `count`, one for each slot that is in use
  std::vector<StateLayer> layers;
  const int32_t *place = nullptr, *goal = nullptr;  // by slot: its state, and the position where it shall stand after a run
  int32_t* folded = nullptr;                        // by state: the position where it stands
  int64_t slots = 0, count = 0, most = 0, history = 0;  // rows that are kept, and that a row reads before itself
};

void pack_tiles(const Matrix& m, char* out);  // with all threads; `out` is zero

enum Status : int { OK = 0, BAD_TOKEN = 1, BAD_POSITION = 2, NOT_BOUND = 3, TOO_MANY_ROWS = 4, BAD_STATE = 5 };

class Program : public Job {
 public:
  void begin_step() { steps_.emplace_back(); }
  void add(Op op);
  void bind(int buffer, void* data, int64_t stride);
  void bind_cache(std::vector<Layer> layers) {
    layers_ = std::move(layers);
    counted_[0] = most_heads_ = 0;
  }
  using Further = std::pair<int64_t, int32_t>;
  using Copy = std::tuple<int32_t, int32_t, int64_t>;
  void branch(std::vector<Further> further, std::vector<Copy> copies);
  void reach(std::vector<int32_t> ends) { reach_ = std::move(ends); }  // of the next run only: by row, see `AttentionArgs`
  using Blend = std::vector<std::pair<int, float>>;  // adapters, by number, and what each is multiplied with
  void adapt(const std::vector<int64_t>& starts, std::vector<Blend> texts);  // of the next run only: texts by their first rows
  void bind_states(States states) { states_ = std::move(states); }
  int run(const Rows& rows);
  void chunk(int step, int index, int thread) override;
  int64_t steps() const { return static_cast<int64_t>(steps_.size()); }
  void profile(bool on);
  std::vector<double> seconds() const;  // per step, the shortest of the profiled runs
  double spent() const { return spent_; }  // seconds of all runs that were not profiled

 private:
  struct Shares {  // how an attention op is shared out: `per` of a `group` that reads the same K/V head, of `groups` K/V heads
    int64_t kv_heads, group, per, groups;
    int64_t chunks, partial, left;  // how many, and where what is kept of the op's segments begins
    int64_t parts() const { return (group + per - 1) / per; }
    int64_t count() const { return (kv_heads + groups - 1) / groups * parts(); }
    int64_t floats(int64_t rows, const Layer& layer) const { return rows * groups * per * (2 + layer.v.head_dim); }  // of a segment
  };
  struct Step {
    std::vector<Op> ops;
    bool row_ops = false;      // one chunk per row
    int64_t column_chunk = 0;  // > 0: only elementwise ops of one width, cut by columns too
    double seconds = 0;
    std::vector<Shares> shares;  // of attention, by op
  };
  struct Buffer {
    void* data = nullptr;
    int64_t stride = 0;
  };
  struct Text {  // rows of one text, its state, where that stands and shall stand
    int64_t row, count, place, begin, goal;
  };
  struct Scratch {  // of one thread
    std::vector<char> data;
    std::vector<float> scales, values, more, room;
    const float* source = nullptr;
    int kind = -1, step = -1;
    uint64_t run = 0;
    Prepared prepared;
  };

  float* at(const Value& v, int64_t row) const {
    const Buffer& b = buffers_[v.buffer];
    return static_cast<float*>(b.data) + row * b.stride + v.column;
  }
  int64_t stride(const Value& v) const { return buffers_[v.buffer].stride; }
  int64_t columns_of(const Step& step) const;
  int64_t chunks_of(Step& step);
  int64_t outputs_per_chunk(const Tiles& m) const;
  int64_t group_of(const Op& op) const;
  int64_t share_out(Step& step);
  AttentionArgs seen(const Op& op, int64_t run) const;
  int64_t most_heads();
  void cut_runs();
  bool count_chunks();
  int64_t runs() const { return static_cast<int64_t>(runs_.size()) - 1; }
  int check(const Rows& rows);
  int replay(const Rows& rows);
  int settle();

  void row_op(const Op& op, int64_t row, int64_t begin, int64_t end);
  void adapt_row(const Op& op, int64_t row, int64_t begin, int64_t end);
  void store(const Op& op, int64_t row);
  void store_at(const Op& op, int64_t row, int32_t slot);
  bool check_branches(const Rows& rows) const;
  void copy_pages();
  void route(const Op& op, int64_t row, int thread);
  void top_clusters(const Op& op, int64_t row);
  void linear(const Step& step, int step_index, int index, int thread);
  void attention(const Step& step, int index, int thread);
  void take(AttentionArgs& args, const Op& op, const Shares& shares, int64_t run, int64_t share, int thread);
  void attend(const Op& op, const Shares& shares, int64_t index, int thread);
  void attend_segment(const Op& op, const Shares& shares, int64_t index, int thread);
  bool find_texts(const Rows& rows);
  void delta(const Step& step, int index, int thread);
  void convolve(const Op& op, int64_t row);
  void keep_row(const Op& op, int64_t row);
  void block_conv(const Op& op, int64_t row);
  bool goes_on(int64_t row) const;
  bool reaches(int64_t row, const Layer& layer) const;
  int32_t reach_of(int64_t row) const { return reach_.empty() ? 0 : reach_[row]; }
  void experts(const Op& op, int index, int thread);
  void gather(const Op& op, int step_index, int index, int thread);
  const Prepared& prepared(const Value& x, const Tiles& m, int step_index, Scratch& scratch);

  std::vector<Step> steps_;
  std::vector<Buffer> buffers_;
  std::vector<Layer> layers_;
  States states_;
  std::vector<Text> texts_;
  std::vector<Scratch> scratch_;
  std::vector<int> chunks_;
  std::vector<int64_t> runs_;  // first rows, then the number of rows
  bool uneven_ = false;        // runs are of lengths that differ by more than one
  bool segmented_ = false;     // attention is cut by keys, not by rows
  int64_t longest_ = 1;        // run
  int64_t widest_ = 0;         // result of attention
  std::vector<float> partial_;  // results of segments, before they are joined
  std::unique_ptr<std::atomic<int>[]> left_;  // segments that are done, by run and share
  int64_t lefts_ = 0;
  int64_t most_heads_ = 0;     // 0: not known
  Rows rows_;
  std::vector<Further> further_;  // sorted
  std::vector<Copy> copies_;
  std::vector<Blend> blends_;   // by text
  std::vector<int32_t> text_of_;  // by row; empty: no row has adapters
  std::vector<int32_t> reach_;  // 0: a row sees no key after itself
  int64_t token_limit_ = INT64_MAX, heads_ = INT64_MAX;  // least of any op
  bool reads_cache_ = false, reads_states_ = false;  // an op does
  bool bound_ = false;                                 // all buffers were there at the last look
  int64_t counted_[4] = {};                   // rows, runs, texts and threads that chunks_ was counted for
  uint64_t run_ = 0;
  int threads_ = 1;
  bool profiling_ = false;
  double spent_ = 0;
  std::atomic<int> status_{0};
};

}  // namespace paceline
