// Experts and the centroid head: ops whose weights depend on the row.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "program.h"

namespace paceline {

namespace {

// Indices of the k largest of x[n], largest first, lowest index on ties. NaN comes before all: it must be seen, and an
// order in which it equals everything is none.
void top_indices(const float* x, int64_t n, int64_t k, std::vector<int64_t>& out) {
  out.resize(n);
  std::iota(out.begin(), out.end(), 0);
  auto before = [x](int64_t a, int64_t b) {
    const bool nan_a = x[a] != x[a], nan_b = x[b] != x[b];
    if (nan_a || nan_b) return nan_a && (!nan_b || a < b);
    return x[a] > x[b] || (x[a] == x[b] && a < b);
  };
  std::nth_element(out.begin(), out.begin() + (k - 1), out.end(), before);
  out.resize(k);
  std::sort(out.begin(), out.end(), before);
}

// Scores -> sigmoids in `law`, and in `choice` what the experts are chosen by: sigmoid + bias, -inf outside of the `kept`
// groups whose two largest add up to the most.
void choose_by_groups(float* law, const float* bias, float* choice, int64_t experts, int64_t groups, int64_t kept) {
  for (int64_t e = 0; e < experts; ++e) {
    law[e] = 1.0f / (1.0f + std::exp(-law[e]));
    choice[e] = law[e] + bias[e];
  }
  if (kept == groups) return;
  const int64_t size = experts / groups;
  std::vector<float> sums(groups);
  std::vector<int64_t> best;
  for (int64_t g = 0; g < groups; ++g) {
    top_indices(choice + g * size, size, 2, best);
    sums[g] = choice[g * size + best[0]] + choice[g * size + best[1]];
  }
  top_indices(sums.data(), groups, kept, best);
  for (int64_t g = 0; g < groups; ++g)
    if (std::find(best.begin(), best.end(), g) == best.end())
      std::fill(choice + g * size, choice + (g + 1) * size, -__builtin_inff());
}

}  // namespace

// values: input, route [2 * top_k]: expert ids ascending, then their shares. integers: top_k, router_scale
// and expert_scale (0: none), whether shares add up to 1, bias of the choice (0: a softmax router), groups and how many of
// them are kept, bias of the scores (0: none). number: eps of the norm before it, below 0 without one.
void Program::route(const Op& op, int64_t row, int thread) {
  const Kernels& k = kernels();
  const Tiles& router = op.weights[0];
  Scratch& s = scratch_[thread];
  int64_t top_k = op.integers[0], width = router.in, experts = router.out;
  s.values.resize(width + 2 * experts);
  float* normed = s.values.data();
  float* law = normed + width;
  const float* router_scale = reinterpret_cast<const float*>(op.integers[1]);
  if (op.number >= 0) k.norm(at(op.values[0], row), nullptr, normed, width, 1, op.number);
  else std::memcpy(normed, at(op.values[0], row), width * 4);
  if (router_scale) k.mul(normed, router_scale, normed, width);
  std::vector<char> room(k.prepared_bytes(router.kind, width) + 64);
  float scale = 0;
  Prepared x = k.prepare(router.kind, normed, width, 1, width, room.data(), &scale);
  k.linear(router, x, 1, 0, experts, law, experts);
  if (const float* added = reinterpret_cast<const float*>(op.integers[7])) k.add(law, added, law, experts);
  const float *bias = reinterpret_cast<const float*>(op.integers[4]), *choice = law;
  if (bias && op.integers[8]) {  // shares by softmax, chosen with a bias
    k.softmax(law, law, experts);
    k.add(law, bias, law + experts, experts);
    choice = law + experts;
  } else if (bias) choose_by_groups(law, bias, law + experts, experts, op.integers[5], op.integers[6]), choice = law + experts;
  else k.softmax(law, law, experts);
  std::vector<int64_t> chosen;
  top_indices(choice, experts, top_k, chosen);
  float total = bias ? 1e-20f : 0.0f;
  for (int64_t e : chosen) total += law[e];
  if (!op.integers[3]) total = 1;
  std::sort(chosen.begin(), chosen.end());
  float* out = at(op.values[1], row);
  const float* expert_scale = reinterpret_cast<const float*>(op.integers[2]);
  for (int64_t i = 0; i < top_k; ++i) {
    out[i] = static_cast<float>(chosen[i]);
    out[top_k + i] = law[chosen[i]] / total * (expert_scale ? expert_scale[chosen[i]] : 1.0f);
  }
}

// values: route, input, output [top_k * out]. weights: one per expert. integers: top_k, input columns per rank
// (0: shared), op code of what gate and up go through, biases [experts][out] (0: none).
void Program::experts(const Op& op, int index, int thread) {
  const Kernels& k = kernels();
  const Tiles& m = op.weights[index];
  int64_t top_k = op.integers[0], per_rank = op.integers[1];
  Scratch& s = scratch_[thread];
  std::vector<std::pair<int64_t, int64_t>> places;  // (row, rank)
  for (int64_t r = 0; r < rows_.count; ++r)
    for (int64_t i = 0; i < top_k; ++i)
      if (at(op.values[0], r)[i] == static_cast<float>(index)) places.emplace_back(r, i);
  if (places.empty()) return;
  int64_t n = static_cast<int64_t>(places.size());
  const int64_t act = op.integers[2];
  const auto gated = act == GATED_CLAMPED ? k.gated_clamped : act == GATED_SILU ? k.gated_silu : k.gated_gelu;
  const float* biases = reinterpret_cast<const float*>(op.integers[3]);
  s.values.resize(n * m.in);
  s.more.resize(n * m.out);
  for (int64_t i = 0; i < n; ++i)
    std::memcpy(s.values.data() + i * m.in, at(op.values[1], places[i].first) + places[i].second * per_rank, m.in * 4);
  std::vector<char> room(k.prepared_bytes(m.kind, m.in) * n + 64);
  std::vector<float> scales(n);
  Prepared x = k.prepare(m.kind, s.values.data(), m.in, n, m.in, room.data(), scales.data());
  k.linear(m, x, n, 0, m.out, s.more.data(), m.out);
  for (int64_t i = 0; i < n; ++i) {
    float* y = at(op.values[2], places[i].first);
    float* from = s.more.data() + i * m.out;
    if (biases) k.add(from, biases + index * m.out, from, m.out);
    int64_t half = m.out / 2;
    if (per_rank == 0) gated(from, from + half, y + places[i].second * half, half);  // gate and up
    else std::memcpy(y + places[i].second * m.out, from, m.out * 4);
  }
}

// values: scores [clusters], chosen clusters [top_k], token ids int64 [top_k * size]. integers: ordering, size.
void Program::top_clusters(const Op& op, int64_t row) {
  std::vector<int64_t> chosen;
  int64_t top_k = op.values[1].width, size = op.integers[1];
  top_indices(at(op.values[0], row), op.values[0].width, top_k, chosen);
  const int64_t* ordering = reinterpret_cast<const int64_t*>(op.integers[0]);
  const Buffer& ids = buffers_[op.values[2].buffer];
  for (int64_t i = 0; i < top_k; ++i) {
    at(op.values[1], row)[i] = static_cast<float>(chosen[i]);
    std::memcpy(static_cast<int64_t*>(ids.data) + row * ids.stride + i * size, ordering + chosen[i] * size, size * 8);
  }
}

// values: input, chosen clusters, logits. integers: size, top_k. A cluster begins with a tile.
void Program::gather(const Op& op, int step_index, int index, int thread) {
  const Kernels& k = kernels();
  const Tiles& m = op.weights[0];
  int64_t size = op.integers[0], top_k = op.integers[1], row = index / top_k, rank = index % top_k;
  Prepared x = prepared(op.values[0], m, step_index, scratch_[thread]);
  const int64_t bytes = k.prepared_bytes(m.kind, m.in);  // of a row; 0: floats, used in place
  x.data = static_cast<const char*>(x.data) + row * (bytes ? bytes : 4 * x.stride);
  if (x.row_scale) x.row_scale += row;
  const int64_t tile = k.tile, begin = static_cast<int64_t>(at(op.values[1], row)[rank]) * ((size + tile - 1) / tile * tile);
  k.linear(m, x, 1, begin, begin + size, at(op.values[2], row) + rank * size - begin, 0);
}

}  // namespace paceline
