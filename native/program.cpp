#include "program.h"

#include <algorithm>
#include <chrono>
#include <cstring>

namespace paceline {

namespace {

constexpr int64_t kChunkBytes = 96 * 1024;  // weights per chunk: some microseconds, far more than taking a chunk costs
constexpr int64_t kColumns = 1024, kCutRows = 64;  // with more rows the threads have enough to share

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct OneStep : Job {
  OneStep(Job& whole, int step) : whole_(whole), step_(step) {}
  void chunk(int, int index, int thread) override { whole_.chunk(step_, index, thread); }
  Job& whole_;
  int step_;
};

struct Pack : Job {
  Pack(const Matrix& m, char* out) : m_(m), out_(out) {}
  int64_t tiles() const { return (m_.out + kernels().tile - 1) / kernels().tile; }
  int parts() const { return static_cast<int>(std::min<int64_t>(tiles(), 1024)); }
  void chunk(int, int index, int) override {
    const int64_t size = kernels().tile_bytes(m_.kind, m_.in);
    for (int64_t p = index; p < tiles(); p += parts()) kernels().pack(m_, p, out_ + p * size);
  }
  const Matrix& m_;
  char* out_;
};

bool elementwise(int code) { return (code >= ADD && code <= COPY) || code == ADAPT; }  // column by column

}  // namespace

void pack_tiles(const Matrix& m, char* out) {
  Pack job(m, out);
  Pool::instance().run(job, {job.parts()});
}

void Program::add(Op op) {
  Step& step = steps_.back();
  counted_[0] = most_heads_ = 0;
  reads_cache_ = reads_cache_ || op.code == STORE || op.code == ATTENTION || op.code == CONVOLVE;
  reads_states_ = reads_states_ || op.code == DELTA;
  if (op.code == ATTENTION) heads_ = std::min(heads_, op.integers[1]), widest_ = std::max(widest_, op.values[1].width);
  if (op.code == EMBED) token_limit_ = std::min(token_limit_, op.table.out);
  for (const Value& v : op.values)
    if (v.buffer >= static_cast<int>(buffers_.size())) buffers_.resize(v.buffer + 1), bound_ = false;
  bool first = step.ops.empty();
  int64_t width = op.values.empty() ? 0 : op.values.back().width;
  bool wide = elementwise(op.code) && width >= 2 * kColumns;
  step.row_ops = op.code < LINEAR || op.code == GATED_RELU;
  step.column_chunk = wide && (first || (step.column_chunk && step.ops[0].values.back().width == width)) ? kColumns : 0;
  step.ops.push_back(std::move(op));
}

void Program::bind(int buffer, void* data, int64_t stride) {
  if (buffer < static_cast<int>(buffers_.size())) buffers_[buffer] = {data, stride};
}

int64_t Program::outputs_per_chunk(const Tiles& m) const {
  const int64_t tiles = (m.out + kernels().tile - 1) / kernels().tile;
  int64_t group = rows_.count < 4 ? 4 : rows_.count > 6 ? 2 : 1;  // tiles that are taken together
  if (m.kind == BF16_DOT && rows_.count > 32) group = 4;  // they share each load of the inputs, see registers.h
  while (group > 1 && group * threads_ > tiles) group /= 2;  // each thread has some
  const int64_t outputs = group * kernels().tile, bytes = group * std::max<int64_t>(1, kernels().tile_bytes(m.kind, m.in));
  int64_t groups = std::max<int64_t>(1, kChunkBytes / bytes);
  int64_t share = std::max<int64_t>(1, m.out / (outputs * 4 * threads_));  // leave something to share
  return std::max<int64_t>(std::min(groups, share), (m.out / outputs + 32767) / 32768) * outputs;
}

// Parts that a row of the step is cut into.
int64_t Program::columns_of(const Step& step) const {
  if (!step.column_chunk || rows_.count > kCutRows) return 1;
  return (step.ops[0].values.back().width + kColumns - 1) / kColumns;
}

int64_t Program::chunks_of(Step& step) {
  const Op& op = step.ops[0];
  int64_t total = 0;
  if (step.row_ops) {
    total = rows_.count * columns_of(step);
  } else if (op.code == ATTENTION) {
    total = share_out(step);
  } else if (op.code == LINEAR) {
    for (const Op& o : step.ops) {
      int64_t per = outputs_per_chunk(o.weights[0]);
      total += (o.weights[0].out + per - 1) / per;
    }
  } else if (op.code == DELTA) {
    for (const Op& o : step.ops) total += static_cast<int64_t>(texts_.size()) * o.integers[2];
  } else if (op.code == BLOCK_CONV || op.code == CONVOLVE) {
    total = rows_.count;
  } else if (op.code == EXPERTS) {
    total = static_cast<int64_t>(op.weights.size());
  } else {
    total = rows_.count * op.integers[1];  // GATHER: clusters of each row
  }
  return total;
}

// False if a step has more chunks than the pool can count.
bool Program::count_chunks() {
  const int64_t now[4] = {rows_.count, runs(), static_cast<int64_t>(texts_.size()), threads_};
  const bool known = std::equal(now, now + 4, counted_);
  counted_[0] = 0;
  chunks_.resize(steps_.size());
  for (size_t s = 0; s < steps_.size(); ++s) {
    if (known && steps_[s].ops[0].code != ATTENTION) continue;  // whose chunks depend on positions, too
    const int64_t chunks = chunks_of(steps_[s]);
    if (chunks > Pool::max_chunks) return false;
    chunks_[s] = static_cast<int>(chunks);
  }
  std::copy(now, now + 4, counted_);
  return true;
}

int Program::check(const Rows& rows) {
  if (!bound_)
    for (const Buffer& buffer : buffers_)
      if (!buffer.data) return NOT_BOUND;
  bound_ = true;
  if ((reads_cache_ && layers_.empty()) || (reads_states_ && states_.layers.empty())) return NOT_BOUND;
  for (int64_t r = 0; r < rows.count; ++r) {
    if (token_limit_ != INT64_MAX && (rows.tokens[r] < 0 || rows.tokens[r] >= token_limit_)) return BAD_TOKEN;
    if (!reads_cache_) continue;
    for (const Layer& layer : layers_)
      if (rows.positions[r] < 0 || rows.positions[r] / layer.k.page_size >= layer.k.table_stride || rows.slots[r] < 0 ||
          rows.slots[r] >= layer.k.slots || !reaches(r, layer))
        return BAD_POSITION;
  }
  return reads_states_ && !find_texts(rows) ? BAD_STATE : OK;
}

// Whether what a row sees after itself is inside the page table, and of the right number of rows.
bool Program::reaches(int64_t row, const Layer& layer) const {
  if (reach_.empty()) return true;
  return row < static_cast<int64_t>(reach_.size()) && reach_[row] >= 0 &&
         (reach_[row] - 1) / layer.k.page_size < layer.k.table_stride;
}

int Program::run(const Rows& rows) {
  int status = check(rows);
  if (!status && further_.size() + copies_.size()) status = check_branches(rows) ? (copy_pages(), OK) : BAD_POSITION;
  status = status ? status : replay(rows);
  further_.clear(), copies_.clear(), reach_.clear(), text_of_.clear();
  return status;
}

int Program::replay(const Rows& rows) {
  rows_ = rows;
  threads_ = Pool::instance().size();
  scratch_.resize(threads_);
  ++run_;
  status_ = OK;
  cut_runs();
  if (!count_chunks()) return TOO_MANY_ROWS;
  double begin = now();
  if (!profiling_) {
    Pool::instance().run(*this, chunks_);
    spent_ += now() - begin;
    return settle();
  }
  for (size_t i = 0; i < steps_.size(); ++i) {  // the same chunks, one step at a time with a clock around it
    OneStep alone(*this, static_cast<int>(i));
    double start = now();
    Pool::instance().run(alone, {chunks_[i]});
    steps_[i].seconds = std::min(steps_[i].seconds, now() - start);  // what else ran on the core does not count
  }
  return settle();
}

// The states of all layers stand where they shall from here on: what comes after the run may fail.
int Program::settle() {
  if (reads_states_)
    for (const Text& text : texts_) states_.folded[text.place] = static_cast<int32_t>(text.goal);
  return status_;
}

void Program::profile(bool on) {
  profiling_ = on;
  for (Step& step : steps_)
    if (on) step.seconds = 1e9;
}

std::vector<double> Program::seconds() const {
  std::vector<double> out;
  for (const Step& step : steps_) out.push_back(step.seconds);
  return out;
}

void Program::chunk(int step_index, int index, int thread) {
  Step& step = steps_[step_index];
  if (!step.row_ops) {
    switch (step.ops[0].code) {
      case LINEAR: return linear(step, step_index, index, thread);
      case ATTENTION: return attention(step, index, thread);
      case EXPERTS: return experts(step.ops[0], index, thread);
      case DELTA: return delta(step, index, thread);
      case BLOCK_CONV: return block_conv(step.ops[0], index);
      case CONVOLVE: return convolve(step.ops[0], index);
      default: return gather(step.ops[0], step_index, index, thread);
    }
  }
  int64_t row = index, begin = 0, end = INT64_MAX;
  if (const int64_t parts = columns_of(step); parts > 1) {
    row = index / parts;
    begin = index % parts * kColumns;
    end = begin + kColumns;
  }
  for (const Op& op : step.ops) {
    if (op.code == ROUTE) route(op, row, thread);
    else row_op(op, row, begin, end);
  }
}

void Program::row_op(const Op& op, int64_t row, int64_t begin, int64_t end) {
  const Kernels& k = kernels();
  const auto& v = op.values;
  auto pointer = [&](int i) { return reinterpret_cast<const float*>(op.integers[i]); };
  float* y = at(v.back(), row);
  const float* x = at(v[0], row);
  int64_t n = std::min(end, v.back().width) - begin;
  switch (op.code) {
    case EMBED: return k.embed(op.table, rows_.tokens[row], op.number, y);
    case NORM: {
      const int64_t groups = op.integers[0], width = v[0].width / groups;
      if (op.integers[2]) k.center(x, y, v[0].width);
      if (!op.integers[3]) return k.norm(op.integers[2] ? y : x, pointer(1), y, v[0].width, static_cast<int>(groups), op.number);
      for (int64_t i = 0; i < groups * width; i += width) k.norm(x + i, pointer(1) + i, y + i, width, 1, op.number);  // each its own weights
      return;
    }
    case ROTARY: {
      float factor = op.number;
      if (op.integers.size() > 3) factor *= pointer(4)[std::min<int64_t>(rows_.positions[row] / op.integers[3], op.integers[5] - 1)];
      return k.rotary(x, pointer(1), y, v[0].width, static_cast<int>(op.integers[0]), op.integers[2], factor,
                      rows_.positions[row]);
    }
    case STORE: return store(op, row);
    case ADD: return k.add(x + begin, at(v[1], row) + begin, y + begin, n);
    case MUL: return k.mul(x + begin, at(v[1], row) + begin, y + begin, n);
    case SCALE: return k.scale(x + begin, op.number, y + begin, n);
    case GELU: return k.gelu(x + begin, y + begin, n);
    case GATED_GELU: return k.gated_gelu(x + begin, at(v[1], row) + begin, y + begin, n);
    case GATED_SILU: return k.gated_silu(x + begin, at(v[1], row) + begin, y + begin, n);
    case GATED_RELU: return k.gated_relu(x + begin, at(v[1], row) + begin, y + begin, n);
    case GATED_SIGMOID: {
      const float* gate = x;
      if (v[0].width > 1) return k.gated_sigmoid(gate, at(v[1], row), y, v.back().width);
      const float one = 1;  // a gate of the whole row
      float open;
      k.gated_sigmoid(gate, &one, &open, 1);
      return k.scale(at(v[1], row), open, y, v.back().width);
    }
    case KEEP: return keep_row(op, row);
    case ADAPT: return adapt_row(op, row, begin, begin + n);
    case BIAS: return k.add(x + begin, pointer(0) + begin, y + begin, n);
    case SOFTCAP: return k.softcap(x + begin, op.number, y + begin, n);
    case COPY: std::memcpy(y + begin, x + begin, n * sizeof(float)); return;
    case TOP_CLUSTERS: return top_clusters(op, row);
    case MIX: {  // sum over ranks of share * value, in the order of the ranks
      int64_t top_k = op.integers[0], width = v.back().width;
      const float* values = at(v[1], row);
      std::fill(y, y + width, 0.0f);
      for (int64_t rank = 0; rank < top_k; ++rank)
        for (int64_t i = 0; i < width; ++i) y[i] += values[rank * width + i] * x[top_k + rank];
      return;
    }
  }
}

void Program::adapt(const std::vector<int64_t>& starts, std::vector<Blend> texts) {
  blends_ = std::move(texts);
  text_of_.clear();
  for (size_t text = 0; text < blends_.size() && text + 1 < starts.size(); ++text)
    if (starts[text + 1] > static_cast<int64_t>(text_of_.size())) text_of_.resize(starts[text + 1], static_cast<int32_t>(text));
}

// values: x, y, which the adapters add to. integers: rank, a and b of each adapter; rank 0 where it changes nothing here.
void Program::adapt_row(const Op& op, int64_t row, int64_t begin, int64_t end) {
  if (row >= static_cast<int64_t>(text_of_.size())) return;
  for (const auto& [number, factor] : blends_[text_of_[row]]) {
    const int64_t* one = number < 0 || 3 * number + 2 >= static_cast<int64_t>(op.integers.size()) ? nullptr : &op.integers[3 * number];
    if (!one || !one[0]) continue;
    kernels().low_rank({at(op.values[0], row), reinterpret_cast<const float*>(one[1]), reinterpret_cast<const float*>(one[2]),
                        at(op.values[1], row), op.values[0].width, op.values[1].width, one[0], begin, end, factor});
  }
}

// values: x, mix, y. integers: taps, base [taps][width]. A row's taps are those of the base plus what `mix` says of each
// group of columns; rows before the first of its sequence in this run count as zeros.
void Program::block_conv(const Op& op, int64_t row) {
  const int64_t taps = op.integers[0], width = op.values[0].width, groups = op.values[1].width / taps, group = width / groups;
  const float *base = reinterpret_cast<const float*>(op.integers[1]), *mix = at(op.values[1], row);
  float* y = at(op.values[2], row);
  std::fill(y, y + width, 0.0f);
  for (int64_t tap = 0; tap < taps; ++tap) {
    if (tap && (row < tap || !goes_on(row - tap + 1))) return;
    const float* x = at(op.values[0], row - tap);
    for (int64_t g = 0; g < groups; ++g)
      for (int64_t c = g * group; c < (g + 1) * group; ++c) y[c] += (base[tap * width + c] + mix[tap * groups + g]) * x[c];
  }
}

void Program::store_at(const Op& op, int64_t row, int32_t slot) {
  const Layer& layer = layers_[op.integers[0]];
  for (size_t i = 0; i < op.values.size(); ++i) {  // keys alone where they hold the values
    const Pages& pages = i == 0 ? layer.k : layer.v;
    int32_t position = rows_.positions[row];
    int64_t page = pages.table[slot * pages.table_stride + position / pages.page_size];
    int64_t index = page * pages.page_size + position % pages.page_size;
    if (page < 0 || index >= pages.tokens) {
      status_ = BAD_POSITION;
      return;
    }
    const float* x = at(op.values[i], row);
    const int64_t width = static_cast<int64_t>(pages.kv_heads) * pages.head_dim;
    if (pages.packed) kernels().store_packed(pages, i == 0, index, x);
    else if (pages.bytes) kernels().store_bytes(pages, index, x);
    else std::memcpy(static_cast<float*>(pages.pool) + index * width, x, width * sizeof(float));
  }
}

const Prepared& Program::prepared(const Value& x, const Tiles& m, int step_index, Scratch& s) {
  const float* source = at(x, 0);
  if (s.run == run_ && s.step == step_index && s.source == source && s.kind == m.kind) return s.prepared;
  size_t bytes = kernels().prepared_bytes(m.kind, m.in) * rows_.count;
  if (s.data.size() < bytes + 64) s.data.resize(bytes + 64);
  if (s.scales.size() < static_cast<size_t>(rows_.count)) s.scales.resize(rows_.count);
  char* aligned = s.data.data() + (64 - reinterpret_cast<uintptr_t>(s.data.data()) % 64);
  s.prepared = kernels().prepare(m.kind, source, stride(x), rows_.count, m.in, aligned, s.scales.data());
  s.run = run_;
  s.step = step_index;
  s.source = source;
  s.kind = m.kind;
  return s.prepared;
}

void Program::linear(const Step& step, int step_index, int index, int thread) {
  for (const Op& op : step.ops) {
    const Tiles& m = op.weights[0];
    int64_t per = outputs_per_chunk(m), count = (m.out + per - 1) / per;
    if (index >= count) {
      index -= static_cast<int>(count);
      continue;
    }
    const Prepared& x = prepared(op.values[0], m, step_index, scratch_[thread]);
    int64_t begin = index * per;
    kernels().linear(m, x, rows_.count, begin, std::min(begin + per, m.out), at(op.values[1], 0),
                     stride(op.values[1]));
    return;
  }
}

}  // namespace paceline
