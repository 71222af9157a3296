#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include "pool.h"
#include "program.h"

namespace paceline {

namespace {

constexpr int64_t PART = 8192;         // columns of a chunk: its logits stay in the nearest caches between two passes
constexpr int64_t SHARE_FROM = 49152;  // fewer logits than that are done before another thread would wake
constexpr int64_t BATCH = 512;         // rows of one job
constexpr float NEAR = 8, FAR = 16;    // how far below the best logit to look for the threshold, then all the way down
constexpr int64_t GROUP = 32;          // see SamplingKernels::tops
constexpr float NONE = -std::numeric_limits<float>::infinity();

const SamplingKernels& table() {
  const char* name = kernels().name;
#if defined(PACELINE_X86)
  for (const SamplingKernels* k : {&sampling_avx512, &sampling_avx2})
    if (std::strcmp(name, k->name) == 0) return *k;
#elif defined(PACELINE_ARM)
  if (std::strcmp(name, sampling_neon.name) == 0) return sampling_neon;
#else
  (void)name;
#endif
  return sampling_generic;
}

uint32_t mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ x >> 16;
}

uint32_t absorb(uint32_t start, uint64_t seed, uint64_t position) {
  uint32_t h = mix(start);
  h = mix(h ^ static_cast<uint32_t>(seed));
  h = mix(h + static_cast<uint32_t>(seed >> 32));
  h = mix(h ^ static_cast<uint32_t>(position));
  return mix(h + static_cast<uint32_t>(position >> 32));
}

struct Item {
  float y;
  float weight;
};

// The largest v such that the items >= v weigh at least `wanted` (top: weight 1 each); NONE if all are too few.
float cut(Item* a, int64_t n, double wanted, bool top) {
  double above = 0;
  while (n > 0) {
    float p = a[0].y, q = a[n / 2].y, r = a[n - 1].y;
    float pivot = std::max(std::min(p, q), std::min(std::max(p, q), r));
    int64_t more = 0, same = 0;  // [0, more) > pivot, [more, same) == pivot, the rest < pivot
    double heavy = above, equal = 0;
    for (int64_t i = 0; i < n; ++i) {
      if (a[i].y < pivot) continue;
      double w = top ? 1.0 : a[i].weight;
      std::swap(a[i], a[same]);
      if (a[same].y > pivot) {
        std::swap(a[same], a[more++]);
        heavy += w;
      } else {
        equal += w;
      }
      ++same;
    }
    if (more > 0 && heavy >= wanted) {
      n = more;
    } else if (heavy + equal >= wanted) {
      return pivot;
    } else {
      above = heavy + equal;
      a += same;
      n -= same;
    }
  }
  return NONE;
}

// Kept between calls unless large: columns near the best one, for the filtered rows of a batch, and the masked rows.
struct Scratch {
  std::unique_ptr<float[]> y, weight, masked;
  std::unique_ptr<int64_t[]> token;
  int64_t size = 0, masked_size = 0;

  void reserve(int64_t n) {
    if (n <= size) return;
    y.reset(new float[n]);  // not initialised: pages that are never written cost nothing
    weight.reset(new float[n]);
    token.reset(new int64_t[n]);
    size = n;
  }
  void reserve_masked(int64_t n) {
    if (n <= masked_size) return;
    masked.reset(new float[n]);
    masked_size = n;
  }
  void trim() {
    if (size + masked_size > 4 << 20) *this = Scratch();
  }
  Near at(int64_t i) const { return {y.get() + i, weight.get() + i, token.get() + i}; }
};

Scratch& scratch() {
  static thread_local Scratch own;
  return own;
}

struct Part {
  Best best;
  Scan scan;
  int64_t near = 0, tops = 0;
};

class Draw : public Job {
 public:
  Draw(const DrawRow* rows, int64_t count, int64_t width, bool confidence, Drawn* out)
      : k_(table()), rows_(rows), out_(out), count_(count), width_(width), confidence_(confidence), store_(scratch()) {
    parts_ = (width + PART - 1) / PART;
    cells_.resize(count * parts_);
    place_.resize(count, -1);
    masked_.resize(count, -1);
    int64_t filtered = 0, masked = 0;
    for (int64_t r = 0; r < count; ++r) {
      if (sampled(r) && rows[r].filtered()) place_[r] = width * filtered++;
      if (rows[r].allowed && !skims(r)) masked_[r] = width * masked++;
    }
    store_.reserve(width * filtered);
    store_.reserve_masked(width * masked);
    bound_.resize(count);
    tops_.resize(filtered ? count * parts_ * (PART / GROUP) : 0);
  }

  void run() {
    int cells = static_cast<int>(count_ * parts_), rows = static_cast<int>(count_);
    std::vector<int> chunks{cells, rows, cells, rows};
    if (count_ * width_ >= SHARE_FROM && Pool::instance().size() > 1) {
      Pool::instance().run(*this, chunks);
    } else {
      for (int s = 0; s < 4; ++s)
        for (int i = 0; i < chunks[s]; ++i) chunk(s, i, 0);
    }
    store_.trim();
  }

  void chunk(int step, int index, int) override {
    if (step == 1) return bound(index);
    if (step == 3) return finish(index);
    int64_t row = index / parts_, part = index % parts_;
    Span s = span(row, part * PART, std::min(PART, width_ - part * PART));
    Part& cell = cells_[index];
    if (step == 0) {
      const bool nan = masked_[row] >= 0 && restrict(row, s);
      cell.best = k_.best(s);
      cell.best.nan |= nan;
      if (limited(row)) cell.tops = k_.tops(s, tops_.data() + index * (PART / GROUP));
    } else {
      look(row, part, s, cell);
    }
  }

 private:
  bool sampled(int64_t r) const { return rows_[r].factor != 0; }
  bool limited(int64_t r) const { return place_[r] >= 0 && rows_[r].top_k > 0 && rows_[r].top_k < width_; }
  float factor(int64_t r) const { return sampled(r) ? rows_[r].factor : 1.0f; }

  // Whether all that is asked of a row is its largest logit, by its place: then its mask is looked at where it lies.
  bool skims(int64_t r) const { return !sampled(r) && !confidence_ && !rows_[r].ids; }

  Span span(int64_t r, int64_t begin, int64_t n) const {
    const DrawRow& row = rows_[r];
    const float* x = masked_[r] < 0 ? row.x : store_.masked.get() + masked_[r];
    Span s{x + begin, row.ids ? row.ids + begin : nullptr, begin, n};
    if (row.allowed && masked_[r] < 0) s.allowed = row.allowed + begin, s.known = std::max<int64_t>(row.known - begin, 0);
    return s;
  }

  // Writes what the mask leaves of a part to where `s` reads it. Whether a NaN was there, refused or not.
  bool restrict(int64_t r, const Span& s) {
    Span raw = s;
    raw.x = rows_[r].x + s.base;
    return k_.restrict(raw, rows_[r].allowed, rows_[r].known, store_.masked.get() + masked_[r] + s.base);
  }

  Best best(int64_t r) const {  // of all parts; token -1 if the row cannot be drawn from
    Best top = cells_[r * parts_].best;
    for (int64_t p = 1; p < parts_; ++p) {
      const Best& b = cells_[r * parts_ + p].best;
      if (b.value > top.value || (b.value == top.value && b.token < top.token)) {
        top.value = b.value;
        top.token = b.token;
      }
      top.nan |= b.nan;
    }
    if (top.nan || !std::isfinite(top.value * factor(r))) top.token = -1;
    return top;
  }

  Scan scan(int64_t r, const Best& top, float least) const {
    const DrawRow& row = rows_[r];
    Scan s{factor(r), top.value * factor(r), least, row.k0, row.k1, sampled(r), 0, top.token, 0, 0};
    s.y = s.most;
    if (s.noisy) s.score = exact_score(s.most, mix(mix(static_cast<uint32_t>(top.token) * 0x9e3779b9u + s.k0) ^ s.k1));
    return s;
  }

  // Where to begin to look for the threshold: if k groups have a logit as large, top_k keeps nothing smaller.
  void bound(int64_t r) {
    bound_[r] = best(r).value * factor(r) - NEAR;
    if (!limited(r)) return;
    float* all = tops_.data() + r * parts_ * (PART / GROUP);
    float* end = all;
    for (int64_t p = 0; p < parts_; ++p) {
      const float* own = all + p * (PART / GROUP);
      end = std::copy(own, own + cells_[r * parts_ + p].tops, end);
    }
    float* kth = all + rows_[r].top_k - 1;
    if (best(r).token < 0 || kth >= end) return;
    std::nth_element(all, kth, end, std::greater<float>());
    bound_[r] = *kth * factor(r);
  }

  void look(int64_t r, int64_t part, const Span& s, Part& cell) {
    Best top = best(r);
    if (top.token < 0 || (!sampled(r) && !confidence_)) return;
    cell.scan = scan(r, top, NONE);
    if (place_[r] < 0) k_.scan(s, cell.scan);
    else
      cell.near = k_.collect(s, cell.scan.factor, cell.scan.most, bound_[r], store_.at(place_[r] + part * PART),
                             needs_mass(r) ? &cell.scan.mass : nullptr);
  }

  bool needs_mass(int64_t r) const { return rows_[r].top_p < 1 && !limited(r); }

  void finish(int64_t r) {
    Best top = best(r);
    Drawn& out = out_[r];
    out = Drawn();
    if (top.token < 0) return;
    out.token = top.token;
    if (!sampled(r) && !confidence_) return;
    Scan s = place_[r] < 0 ? merged(r) : filtered(r, top);
    out.token = s.token;
    out.confidence = std::min(1.0, std::exp(static_cast<double>(s.y - s.most)) / s.mass);
  }

  Scan merged(int64_t r) const {
    Scan s = cells_[r * parts_].scan;
    for (int64_t p = 1; p < parts_; ++p) {
      const Scan& o = cells_[r * parts_ + p].scan;
      s.mass += o.mass;
      if (o.score > s.score || (o.score == s.score && o.token < s.token)) {
        s.score = o.score;
        s.token = o.token;
        s.y = o.y;
      }
    }
    return s;
  }

  Scan filtered(int64_t r, const Best& top) {
    Near near = store_.at(place_[r]);
    int64_t n = 0;
    double mass = 0;
    for (int64_t p = 0; p < parts_; ++p) {  // close the gaps between the parts
      const Part& cell = cells_[r * parts_ + p];
      std::memmove(near.y + n, near.y + p * PART, cell.near * sizeof(float));
      std::memmove(near.weight + n, near.weight + p * PART, cell.near * sizeof(float));
      std::memmove(near.token + n, near.token + p * PART, cell.near * sizeof(int64_t));
      n += cell.near;
      mass += cell.scan.mass;
    }
    Scan s = scan(r, top, NONE);
    float bound = bound_[r];
    while (!threshold(r, near, n, mass, s.most, bound, &s.least)) {
      bound = bound > s.most - FAR ? s.most - FAR : NONE;
      n = k_.collect(span(r, 0, width_), s.factor, s.most, bound, near, nullptr);
    }
    Span kept{near.y, near.token, 0, n};
    s.factor = 1;
    k_.scan(kept, s);
    return s;
  }

  // The smallest kept logit, if the n columns >= bound tell.
  bool threshold(int64_t r, const Near& near, int64_t n, double mass, float most, float bound, float* least) const {
    const DrawRow& row = rows_[r];
    bool whole = bound == NONE;
    float t = NONE;
    std::vector<Item> items(n);
    for (int64_t i = 0; i < n; ++i) items[i] = {near.y[i], near.weight[i]};
    if (limited(r)) {
      if (n < row.top_k && !whole) return false;
      t = cut(items.data(), n, static_cast<double>(row.top_k), true);
    }
    if (row.top_p < 1) {
      if (limited(r)) {
        n = std::partition(items.begin(), items.end(), [t](const Item& i) { return i.y >= t; }) - items.begin();
        mass = 0;
        for (int64_t i = 0; i < n; ++i) mass += items[i].weight;
      }
      float lowest = cut(items.data(), n, row.top_p * mass, false);
      if (lowest == NONE && t == NONE && !whole) return false;
      t = std::max(t, lowest);
    }
    t = std::max(t, most + row.log_min_p);
    *least = t;
    return whole || t >= bound;
  }

  const SamplingKernels& k_;
  const DrawRow* rows_;
  Drawn* out_;
  int64_t count_, width_, parts_;
  bool confidence_;
  std::vector<Part> cells_;
  std::vector<float> bound_;  // where filtered rows begin to look for their threshold
  std::vector<float> tops_;
  std::vector<int64_t> place_;  // where in the scratch a filtered row's columns go, -1 for the others
  std::vector<int64_t> masked_;  // and where a masked row lies
  Scratch& store_;
};

}  // namespace

double exact_score(float y, uint32_t bits) {
  double v = (static_cast<double>(bits) + 0.5) * 0x1p-32;
  return static_cast<double>(y) - std::log(-std::log1p(-v));
}

// A token reaches `score` only if v <= 1 - exp(-exp(y - score)), which is less than exp(y - score). The slack covers
// float32 arithmetic and, for huge logits, the rounding of the scores themselves.
float reach_of(double most, double score) {
  return static_cast<float>(std::exp(most - score + 1e-3 + std::fabs(most) * 4e-16) * 0x1p31);
}

void draw(const DrawRow* rows, int64_t count, int64_t width, bool confidence, Drawn* out) {
  for (int64_t r = 0; r < count; r += BATCH)
    Draw(rows + r, std::min(BATCH, count - r), width, confidence, out + r).run();
}

void noise_keys(uint64_t seed, int64_t position, uint32_t purpose, uint32_t* k0, uint32_t* k1) {
  *k0 = absorb(0x243f6a88u + purpose, seed, static_cast<uint64_t>(position));
  *k1 = absorb(0x85a308d3u + purpose, seed, static_cast<uint64_t>(position));
}

}  // namespace paceline
