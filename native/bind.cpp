// Python's door. Addresses come as integers from paceline/ops, which has checked dtype, device, shape and contiguity.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "exchange.h"
#include "measure_jobs.h"
#include "program.h"
#include "round.h"
#include "sampling.h"
#include "search.h"
#include "tower.h"

namespace nb = nanobind;
using namespace paceline;

namespace {

using ValueTuple = std::tuple<int, int64_t, int64_t>;
using MatrixTuple = std::tuple<int64_t, int64_t, int64_t, int64_t, int>;
using LayerTuple = std::tuple<int64_t, int64_t, int64_t, int, int, int, int64_t, int64_t, int64_t, int>;

Matrix matrix(const MatrixTuple& t) {
  Matrix m;
  m.data = reinterpret_cast<const void*>(std::get<0>(t));
  m.scale = reinterpret_cast<const float*>(std::get<1>(t));
  m.out = std::get<2>(t);
  m.in = std::get<3>(t);
  m.kind = std::get<4>(t);
  return m;
}

void add(Program& p, int code, const std::vector<ValueTuple>& values, const std::vector<MatrixTuple>& matrices,
         const std::vector<int64_t>& integers, double number) {
  Op op;
  op.code = code;
  for (const auto& [buffer, column, width] : values) op.values.push_back({buffer, column, width});
  for (const auto& m : matrices)
    if (code == EMBED) op.table = matrix(m);
    else op.weights.push_back({reinterpret_cast<const void*>(std::get<0>(m)), std::get<2>(m), std::get<3>(m), std::get<4>(m)});
  op.integers = integers;
  op.number = static_cast<float>(number);
  p.add(std::move(op));
}

// Rows of `m` as tiles to `out`, all zero, of packed_bytes(...).
void pack(const MatrixTuple& m, int64_t out) {
  nb::gil_scoped_release release;
  pack_tiles(matrix(m), reinterpret_cast<char*>(out));
}

void bind_cache_as(Program& p, const std::vector<LayerTuple>& layers, bool packed, bool bytes) {
  std::vector<Layer> out;
  for (const auto& [k, v, tokens, kv_heads, head_dim, value_dim, table, table_stride, slots, page_size] : layers) {
    Layer layer;
    layer.k = {reinterpret_cast<void*>(k), tokens, reinterpret_cast<const int32_t*>(table), table_stride, slots,
               page_size, kv_heads, head_dim, packed, bytes};
    layer.v = layer.k;
    layer.v.pool = reinterpret_cast<void*>(v);
    layer.v.head_dim = value_dim;
    out.push_back(layer);
  }
  p.bind_cache(std::move(out));
}

void bind_cache(Program& p, const std::vector<LayerTuple>& layers, bool packed) { bind_cache_as(p, layers, packed, false); }
void bind_bytes(Program& p, const std::vector<LayerTuple>& layers) { bind_cache_as(p, layers, false, true); }

// Recurrent states: (state, recent) of each layer, places and goals by slot, where they stand by state.
void bind_states(Program& p, const std::vector<std::tuple<int64_t, int64_t>>& layers, int64_t place, int64_t goal, int64_t folded,
                 int64_t slots, int64_t count, int64_t most, int64_t history) {
  States out;
  for (const auto& [state, recent] : layers)
    out.layers.push_back({reinterpret_cast<float*>(state), reinterpret_cast<float*>(recent)});
  out.place = reinterpret_cast<const int32_t*>(place);
  out.goal = reinterpret_cast<const int32_t*>(goal);
  out.folded = reinterpret_cast<int32_t*>(folded);
  out.slots = slots, out.count = count, out.most = most, out.history = history;
  p.bind_states(std::move(out));
}

int run(Program& p, int64_t count, int64_t tokens, int64_t positions, int64_t slots) {
  Rows rows{count, reinterpret_cast<const int64_t*>(tokens), reinterpret_cast<const int32_t*>(positions),
            reinterpret_cast<const int32_t*>(slots)};
  nb::gil_scoped_release release;
  return p.run(rows);
}

int run_numbers(Program& p, const std::vector<int64_t>& tokens, const std::vector<int32_t>& positions,
                const std::vector<int32_t>& slots) {
  if (positions.size() != tokens.size() || slots.size() != tokens.size())
    throw nb::value_error("a forward needs a position and a slot for each token");
  nb::gil_scoped_release release;
  return p.run({static_cast<int64_t>(tokens.size()), tokens.data(), positions.data(), slots.data()});
}

using RuleTuple = std::tuple<double, uint64_t, int64_t, int64_t, double, double>;
using Cells = std::tuple<int64_t, int64_t>;  // where the first row lies, and bytes from one to the next

DrawRow draw_row(const RuleTuple& rule) {
  const auto& [factor, seed, position, top_k, top_p, log_min_p] = rule;
  return {nullptr, nullptr, static_cast<float>(factor), 0, 0, top_k, top_p, static_cast<float>(log_min_p), nullptr, 0};
}

// Bytes of a mask, by token id, for as long as this lives.
class Mask {
 public:
  explicit Mask(nb::handle array) {
    if (PyObject_GetBuffer(array.ptr(), &view_, PyBUF_SIMPLE)) throw nb::python_error();
  }
  Mask(Mask&& other) noexcept : view_(other.view_) { other.view_.obj = nullptr; }
  ~Mask() { PyBuffer_Release(&view_); }
  void shape(DrawRow& row) const {
    row.allowed = static_cast<const uint8_t*>(view_.buf);
    row.known = view_.len;
  }

 private:
  Py_buffer view_{};
};

// `instead`: logits that lie elsewhere, `masks`: what may be taken, each with its row.
std::tuple<std::vector<int64_t>, std::vector<double>> draw_rows(
    const Cells& logits, const Cells& ids, const std::vector<RuleTuple>& rules, int64_t width, uint32_t purpose,
    bool confidence, const std::vector<std::pair<size_t, int64_t>>& instead,
    const std::vector<std::pair<size_t, nb::handle>>& masks) {
  const auto [x, step] = logits;
  const auto [cells, cells_step] = ids;
  std::vector<DrawRow> rows;
  std::vector<Mask> held;
  for (const RuleTuple& rule : rules) {
    const int64_t r = static_cast<int64_t>(rows.size());
    DrawRow row = draw_row(rule);
    row.x = reinterpret_cast<const float*>(x + r * step);
    row.ids = reinterpret_cast<const int64_t*>(cells ? cells + r * cells_step : 0);
    noise_keys(std::get<1>(rule), std::get<2>(rule), purpose, &row.k0, &row.k1);
    rows.push_back(row);
  }
  for (const auto& [r, data] : instead) rows.at(r).x = reinterpret_cast<const float*>(data);
  for (const auto& [r, mask] : masks) held.emplace_back(mask).shape(rows.at(r));
  std::vector<Drawn> out(rows.size());
  {
    nb::gil_scoped_release release;
    draw(rows.data(), static_cast<int64_t>(rows.size()), width, confidence, out.data());
  }
  std::tuple<std::vector<int64_t>, std::vector<double>> result;
  for (const Drawn& d : out) {
    std::get<0>(result).push_back(d.token);
    std::get<1>(result).push_back(d.confidence);
  }
  return result;
}

// Rows of logits [n, count] against distributions [.., count], `row` says which: see `hybrid_loss`. Their values to `out`.
struct LossJob : Job {
  LossRow shape;
  const int64_t *row, *best;
  const float* weight;
  float* out;
  int64_t rows, each, room;
  std::vector<float> rooms;
  void chunk(int, int index, int thread) override {
    LossRow one = shape;
    one.room = rooms.data() + thread * room;
    for (int64_t r = index * each; r < rows && r < (index + 1) * each; ++r) {
      one.logits = shape.logits + r * shape.count, one.log_p = shape.log_p + row[r] * shape.count;
      one.best = best[row[r]], one.weight = weight[r];
      out[r] = kernels().hybrid_loss(one);
    }
  }
};

void hybrid_loss(int64_t logits, int64_t log_p, std::tuple<int64_t, int64_t> shape, std::tuple<int64_t, int64_t, int64_t> rows,
                 std::tuple<double, double, double> constants, int64_t out) {
  nb::gil_scoped_release release;
  const auto [inverse, greedy, decay] = constants;
  LossJob job;
  job.rows = std::get<0>(shape), job.each = 4;
  job.room = 2 * (std::get<1>(shape) + 16);
  job.shape = {reinterpret_cast<float*>(logits), reinterpret_cast<const float*>(log_p), std::get<1>(shape), -1, 0,
               static_cast<float>(inverse), static_cast<float>(greedy), static_cast<float>(decay), nullptr};
  job.row = reinterpret_cast<const int64_t*>(std::get<0>(rows)), job.best = reinterpret_cast<const int64_t*>(std::get<1>(rows));
  job.weight = reinterpret_cast<const float*>(std::get<2>(rows)), job.out = reinterpret_cast<float*>(out);
  job.rooms.resize(job.room * Pool::instance().size());
  Pool::instance().run(job, {static_cast<int>((job.rows + job.each - 1) / job.each)});
}

using RowsTuple = std::tuple<std::vector<int64_t>, std::vector<int32_t>, std::vector<int32_t>>;
using HiddenTuple = std::tuple<int, int64_t, int64_t, int64_t>;  // buffer, width, states by slot and their number
using OutputTuple = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool>;
using StopTuple = std::tuple<int, std::vector<double>, Worth, double, double>;
// The program that reads the rows, those, which of them the round goes on from, its results (what the step reads, what the
// head reads), the program of the head, its (input buffer, width), its scores
using LeadTuple = std::tuple<Program*, RowsTuple, std::vector<int64_t>, std::tuple<int64_t, int64_t, int64_t, int64_t>, Program*,
                             std::tuple<int, int64_t>, std::tuple<int64_t, int64_t>>;

Lead lead_of(const LeadTuple& t, size_t count) {
  const auto& [look, rows, last, results, head, input, scores] = t;
  const auto& [tokens, positions, slots] = rows;
  if (!look || !head || last.size() != count || positions.size() != tokens.size() || slots.size() != tokens.size())
    throw nb::value_error("a lead needs its programs, a position and a slot for each token, and a row for each text");
  for (int64_t row : last)
    if (row < 0 || row >= static_cast<int64_t>(tokens.size())) throw nb::value_error("a round goes on from a row that its lead lacks");
  const auto floats = [](int64_t at) { return reinterpret_cast<const float*>(at); };
  const auto& [after, after_stride, seen, seen_stride] = results;
  return {look, head, tokens, positions, slots, last, floats(after), after_stride, floats(seen), seen_stride, std::get<0>(input),
          std::get<1>(input), floats(std::get<0>(scores)), std::get<1>(scores)};
}

using RoundResult = std::tuple<int, std::vector<int64_t>, std::vector<double>>;  // status, tokens and confidences [steps][rows]

std::vector<RoundRow> rows_of(const std::vector<RuleTuple>& rules, const std::vector<StopTuple>& stops) {
  std::vector<RoundRow> how;
  for (const RuleTuple& rule : rules) how.push_back({draw_row(rule), std::get<1>(rule), std::get<2>(rule), {}});
  for (size_t r = 0; r < stops.size(); ++r) {
    const auto& [most, chance, worth, price, step] = stops[r];
    if (!chance.empty() && worth.empty()) throw nb::value_error("a stop has to say what a confidence is worth");
    how[r].stop = {most, chance, worth, price, step};
  }
  return how;
}

RoundResult round_result(int status, const std::vector<Drawn>& out) {
  RoundResult result;
  std::get<0>(result) = status;
  for (const Drawn& d : out) {
    std::get<1>(result).push_back(d.token);
    std::get<2>(result).push_back(d.confidence);
  }
  return result;
}

RoundResult run_round(Program& program, const RowsTuple& rows, const HiddenTuple& hidden, const OutputTuple& output,
                      const std::vector<RuleTuple>& rules, const std::vector<StopTuple>& stops, const std::optional<LeadTuple>& led) {
  const auto& [tokens, positions, slots] = rows;
  const size_t count = tokens.size();
  if (positions.size() != count || slots.size() != count || rules.size() != count || stops.size() != count)
    throw nb::value_error("a draft round needs a position, a slot, a rule and a stop for each token");
  const float* states = reinterpret_cast<const float*>(std::get<2>(hidden));
  for (int32_t slot : slots)
    if (!led && (slot < 0 || slot >= std::get<3>(hidden))) throw nb::value_error("a slot has no hidden state");
  RoundPlan plan;
  plan.hidden_buffer = std::get<0>(hidden);
  plan.hidden_width = std::get<1>(hidden);
  plan.after = reinterpret_cast<const float*>(std::get<0>(output));
  plan.after_stride = std::get<1>(output);
  plan.logits = reinterpret_cast<const float*>(std::get<2>(output));
  plan.logits_stride = std::get<3>(output);
  plan.width = std::get<4>(output);
  plan.ids = reinterpret_cast<const int64_t*>(std::get<5>(output));
  plan.ids_stride = std::get<6>(output);
  plan.moves = std::get<7>(output);
  std::vector<RoundRow> how = rows_of(rules, stops);
  Lead lead;
  if (led) lead = lead_of(*led, count);
  std::vector<Drawn> out;
  int status;
  {
    nb::gil_scoped_release release;
    RoundStart start{tokens, positions, slots, {}};
    for (size_t r = 0; r < count && !led; ++r) {
      const float* from = states + slots[r] * plan.hidden_width;
      start.hidden.insert(start.hidden.end(), from, from + plan.hidden_width);
    }
    status = draft_round(program, plan, std::move(start), std::move(how), led ? &lead : nullptr, &out);
  }
  return round_result(status, out);
}

using FeedTuple = std::tuple<int, int64_t, int64_t, int64_t>;  // buffer, address, width, steps
using StateTuple = std::tuple<int, int64_t, int64_t, int64_t>;  // buffer or -1, width, address of what becomes it, stride
using ScoresTuple = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>;  // as `Scores`, whose rows share ids

RoundResult run_chain(Program& program, const std::vector<int64_t>& tokens, const std::vector<FeedTuple>& feeds, const StateTuple& state,
                      const ScoresTuple& scores, const std::vector<RuleTuple>& rules, const std::vector<StopTuple>& stops) {
  if (rules.size() != tokens.size() || stops.size() != tokens.size())
    throw nb::value_error("a draft round needs a rule and a stop for each token");
  ChainPlan plan;
  int most = 0;
  for (const StopTuple& stop : stops) most = std::max(most, std::get<0>(stop));
  for (const auto& [buffer, data, width, steps] : feeds) {
    if (steps < most) throw nb::value_error("a chain is fed for fewer steps than it may have");
    plan.feeds.push_back({buffer, reinterpret_cast<const float*>(data), width, steps});
  }
  plan.state_buffer = std::get<0>(state), plan.state_width = std::get<1>(state);
  plan.after = reinterpret_cast<const float*>(std::get<2>(state)), plan.after_stride = std::get<3>(state);
  const auto& [logits, stride, width, ids, sure, sure_stride] = scores;
  plan.scores = {reinterpret_cast<const float*>(logits), stride, width, reinterpret_cast<const int64_t*>(ids), 0,
                 reinterpret_cast<const float*>(sure), sure_stride};
  std::vector<RoundRow> how = rows_of(rules, stops);
  std::vector<Drawn> out;
  int status;
  {
    nb::gil_scoped_release release;
    status = chain_round(program, plan, tokens, std::move(how), &out);
  }
  return round_result(status, out);
}

// The search, with what `tokens` has come to have since it was asked last.
Search& grown(Search& search, const nb::list& tokens) {
  Source& text = search.text();
  const size_t count = tokens.size();
  if (text.size() > count) text.cut(count);
  for (size_t i = text.size(); i < count; ++i) text.push(nb::cast<int32_t>(tokens[i]));
  return search;
}

std::tuple<uint32_t, uint32_t> keys(uint64_t seed, int64_t position, uint32_t purpose) {
  std::tuple<uint32_t, uint32_t> out;
  noise_keys(seed, position, purpose, &std::get<0>(out), &std::get<1>(out));
  return out;
}

void add_layer(Tower& tower, const std::vector<int64_t>& norms, const std::vector<MatrixTuple>& linears, std::vector<float> bounds) {
  if (norms.size() != TowerLayer::NORMS || linears.size() != TowerLayer::LINEARS ||
      (!bounds.empty() && bounds.size() != 4 * TowerLayer::LINEARS))
    throw nb::value_error("a tower's layer has six norms, seven linears, and for each of them four bounds or none");
  TowerLayer layer;
  for (size_t i = 0; i < norms.size(); ++i) layer.norms[i] = reinterpret_cast<const float*>(norms[i]);
  for (size_t i = 0; i < linears.size(); ++i)
    layer.linears[i] = {reinterpret_cast<const void*>(std::get<0>(linears[i])), std::get<2>(linears[i]), std::get<3>(linears[i]),
                        std::get<4>(linears[i])};
  layer.bounds = std::move(bounds);
  tower.layers.push_back(std::move(layer));
}

}  // namespace

NB_MODULE(_native, m) {
  m.attr("layout") = 32;  // raised whenever these signatures change; paceline/ops/native.py checks it
  m.attr("most_rows") = static_cast<int>(Pool::max_chunks);  // of one run: a row has at least a chunk of its own
  m.def("isa", [] { return std::string(kernels().name); });
  m.def("choose_isa", [](const std::string& name) { return choose_kernels(name.c_str()); });
  m.def("left_out", [] { return left_out(); });
  m.def("choose_again", &choose_again);
  m.def("set_threads", [](int n) { nb::gil_scoped_release r; Pool::instance().resize(n); });
  m.def("threads", [] { return Pool::instance().size(); });
  m.def("read_memory", [](int64_t data, int64_t n) {
    nb::gil_scoped_release r;
    return read_memory(reinterpret_cast<const float*>(data), n);
  });
  m.def("burn", [](int64_t turns) {
    nb::gil_scoped_release r;
    return burn_multiply_adds(turns);
  });
  m.def("bf16_dot", [] { return kernels().bf16_dot(); });
  m.def("bf16_dot_way", [] { return std::string(bf16_dot_way()); });
  m.def("tile", [] { return kernels().tile; });
  m.def("packed_bytes", [](int kind, int64_t out, int64_t in) {
    return (out + kernels().tile - 1) / kernels().tile * kernels().tile_bytes(kind, in);
  });
  m.def("pack", &pack);
  m.def("set_grids", [](int64_t data) { std::memcpy(grids, reinterpret_cast<const void*>(data), sizeof(grids)); });
  m.def("set_weights_in_cache", [](bool yes) { weights_in_cache = yes; });
  m.def("set_fetches_far", [](bool yes) { fetches_far = yes; });
  m.def("get_fetches_far", [] { return fetches_far.load(); });
  m.def("get_weights_in_cache", [] { return weights_in_cache.load(); });
  m.def("exchange_bytes", &Exchange::bytes);
  m.attr("exchange_slot") = Exchange::slot;
  m.def("exchange", [](int64_t base, int rank, int ranks, uint64_t turn, std::tuple<int64_t, int64_t, int64_t, int64_t> x, bool begin,
                       double seconds) {
    nb::gil_scoped_release release;
    const auto [data, count, width, stride] = x;
    return Exchange{reinterpret_cast<char*>(base), rank, ranks}.add(turn, reinterpret_cast<float*>(data), count, width, stride, begin, seconds);
  });
  m.def("draw", &draw_rows);
  m.def("noise_keys", &keys);
  m.def("hybrid_loss", &hybrid_loss);
  nb::class_<Search>(m, "Search")
      .def(nb::init<std::vector<int32_t>, std::vector<int64_t>>())
      .def("in_text", [](Search& s, const nb::list& tokens) { return grown(s, tokens).in_text(); })
      .def("in_reference", [](Search& s, const nb::list& tokens) { return grown(s, tokens).in_reference(); });
  nb::class_<Program>(m, "Program")
      .def(nb::init<>())
      .def("begin_step", &Program::begin_step)
      .def("add", &add)
      .def("bind", [](Program& p, int buffer, int64_t data, int64_t stride) { p.bind(buffer, reinterpret_cast<void*>(data), stride); })
      .def("bind_cache", &bind_cache)
      .def("bind_bytes", &bind_bytes)
      .def("branch", &Program::branch)
      .def("reach", &Program::reach)
      .def("adapt", &Program::adapt)
      .def("bind_states", &bind_states)
      .def("run", &run)
      .def("run_numbers", &run_numbers)
      .def("draft_round", &run_round, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none())
      .def("chain_round", &run_chain)
      .def("profile", &Program::profile)
      .def("seconds", &Program::seconds)
      .def("spent", &Program::spent)
      .def_prop_ro("steps", &Program::steps);
  nb::class_<Tower>(m, "Tower")
      .def("__init__", [](Tower* t, int64_t hidden, int64_t wide, int64_t heads, int64_t head_dim, float eps, int seen) {
        new (t) Tower{hidden, wide, heads, head_dim, eps, seen, {}};
      })
      .def("add", &add_layer);
  nb::class_<Sight>(m, "Sight")
      .def("__init__", [](Sight* s, const Tower& tower, int64_t x, int64_t count, int64_t cos, int64_t sin) {
        new (s) Sight(tower, reinterpret_cast<float*>(x), count, reinterpret_cast<const float*>(cos), reinterpret_cast<const float*>(sin));
      }, nb::keep_alive<1, 2>())
      .def("keys", &Sight::keys, nb::call_guard<nb::gil_scoped_release>())
      .def("rows", &Sight::rows, nb::call_guard<nb::gil_scoped_release>());
}
