// The passes over logits, compiled once per instruction set. As in kernels.cpp, no C++ library header may enter here.
#include "sampling.h"
#include "simd.h"

#define PL_TEXT_(x) #x
#define PL_TEXT(x) PL_TEXT_(x)
#define PL_JOIN_(a, b) a##b
#define PL_JOIN(a, b) PL_JOIN_(a, b)

namespace paceline {
namespace PACELINE_ISA {

constexpr int B = 4 * L;  // columns per turn
constexpr int64_t SUM = 32 * B;  // columns summed in float before the sum goes into a double
constexpr uint32_t GOLDEN = 0x9e3779b9u;

typedef int64_t VQ __attribute__((vector_size(4 * L)));

struct Turn {  // B columns
  V y[4];
  VI hit[4];
};

PL_INLINE bool any(VI m) {
  VQ q = (VQ)m;
  int64_t r = 0;
  for (int i = 0; i < L / 2; ++i) r |= q[i];
  return r != 0;
}
PL_INLINE bool any(const VI* m) { return any((m[0] | m[1]) | (m[2] | m[3])); }

PL_INLINE VW mix(VW x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}
PL_INLINE uint32_t mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

PL_INLINE int64_t token_at(const Span& s, int64_t i) { return s.ids ? s.ids[i] : s.base + i; }

PL_INLINE VW low_words(const int64_t* ids) {
  uint32_t w[L];
  for (int j = 0; j < L; ++j) w[j] = static_cast<uint32_t>(ids[j]);
  return *reinterpret_cast<const VWMem*>(w);
}

static bool restrict(const Span& s, const uint8_t* allowed, int64_t known, float* out) {
  const V refused = broadcast(-__builtin_inff());
  VI bad{};
  int64_t i = 0;
  for (; !s.ids && i + L <= s.n && s.base + i + L <= known; i += L) {
    V v = load(s.x + i);
    bad |= v != v;
    store(out + i, where(allowed + s.base + i, v, refused));
  }
  bool nan = any(bad);
  for (; i < s.n; ++i) {
    const int64_t token = token_at(s, i);
    nan |= s.x[i] != s.x[i];
    out[i] = token < known && allowed[token] ? s.x[i] : refused[0];
  }
  return nan;
}

// L columns as a mask leaves them; `bad` where there is a NaN, refused or not.
template <bool MASKED>
PL_INLINE V left_of(const Span& s, int64_t i, VI& bad) {
  V v = load(s.x + i);
  bad |= v != v;
  if constexpr (MASKED) return where(s.allowed + i, v, broadcast(-__builtin_inff()));
  return v;
}

template <bool MASKED>
static Best best_of(const Span& s) {
  const int64_t end = MASKED && s.known < s.n ? s.known : s.n;
  Best out;
  V top[4];
  VI bad{};
  for (V& t : top) t = broadcast(-__builtin_inff());
  int64_t i = 0;
  for (; i + B <= end; i += B)
    for (int j = 0; j < 4; ++j) top[j] = vmax(left_of<MASKED>(s, i + j * L, bad), top[j]);
  out.value = reduce_max(vmax(vmax(top[0], top[1]), vmax(top[2], top[3])));
  out.nan = any(bad);
  for (; i < s.n; ++i) {
    out.nan |= s.x[i] != s.x[i];
    if (i < end && s.x[i] > out.value && (!MASKED || s.allowed[i])) out.value = s.x[i];
  }
  V value = broadcast(out.value);
  for (i = 0; i < end; i += B) {
    int width = static_cast<int>(end - i < B ? end - i : B);
    if (width == B) {
      VI hit[4];
      for (int j = 0; j < 4; ++j) hit[j] = left_of<MASKED>(s, i + j * L, bad) == value;
      if (!any(hit)) continue;
    }
    for (int j = 0; j < width; ++j)
      if (s.x[i + j] == out.value && (!MASKED || s.allowed[i + j]) && (out.token < 0 || token_at(s, i + j) < out.token))
        out.token = token_at(s, i + j);
    if (!s.ids && out.token >= 0) break;
  }
  return out;
}

static Best best(const Span& s) { return s.allowed ? best_of<true>(s) : best_of<false>(s); }

// y and e^(y - most) of B columns at x, the latter 0 where y < least.
PL_INLINE void weigh(const float* x, float factor, float most, float least, V* y, V* e) {
  for (int j = 0; j < 4; ++j) {
    y[j] = load(x + j * L) * broadcast(factor);
    VI keep = y[j] >= broadcast(least);
    e[j] = (V)((VI)vexp(y[j] - broadcast(most)) & keep);
  }
}

// The turn's exact scores, for the few columns that can reach the best one so far.
static __attribute__((noinline)) void settle(const Turn& t, const Span& s, int64_t at, int width, Scan& scan) {
  float y[B];
  int32_t hit[B];
  std::memcpy(y, t.y, sizeof(y));
  std::memcpy(hit, t.hit, sizeof(hit));
  for (int j = 0; j < width; ++j) {
    if (!hit[j] || !(y[j] >= scan.least)) continue;
    int64_t token = token_at(s, at + j);
    uint32_t bits = mix(mix(static_cast<uint32_t>(token) * GOLDEN + scan.k0) ^ scan.k1);
    double score = exact_score(y[j], bits);
    if (score > scan.score || (score == scan.score && token < scan.token)) {
      scan.score = score;
      scan.token = token;
      scan.y = y[j];
    }
  }
}

template <bool DENSE>
PL_INLINE void scan_turn(const Span& s, const float* x, const int64_t* ids, int64_t at, int width, Scan& scan, float& reach,
                         V& sum, VW counter) {
  Turn t;
  V e[4];
  weigh(x, scan.factor, scan.most, scan.least, t.y, e);
  sum += (e[0] + e[1]) + (e[2] + e[3]);
  if (!scan.noisy) return;
  for (int j = 0; j < 4; ++j) {
    VW h = DENSE ? counter + static_cast<uint32_t>(j * L) * GOLDEN : low_words(ids + j * L) * GOLDEN + scan.k0;
    h = mix(mix(h) ^ scan.k1);
    t.hit[j] = __builtin_convertvector((VI)(h >> 1), V) <= e[j] * broadcast(reach);
  }
  if (any(t.hit)) {
    settle(t, s, at, width, scan);
    reach = reach_of(scan.most, scan.score);
  }
}

template <bool DENSE>
static void scan_span(const Span& s, Scan& scan) {
  Scan own = scan;
  float reach = own.noisy ? reach_of(own.most, own.score) : 0;
  V sum{};
  double mass = 0;
  VW counter{};
  for (int j = 0; j < L; ++j) counter[j] = static_cast<uint32_t>(s.base + j) * GOLDEN + own.k0;
  int64_t i = 0;
  for (; i + B <= s.n; i += B) {
    scan_turn<DENSE>(s, s.x + i, s.ids + (DENSE ? 0 : i), i, B, own, reach, sum, counter);
    counter += static_cast<uint32_t>(B) * GOLDEN;
    if ((i + B) % SUM == 0) {
      mass += reduce(sum);
      sum = V{};
    }
  }
  if (i < s.n) {
    float x[B];
    int64_t ids[B] = {};
    for (int j = 0; j < B; ++j) x[j] = i + j < s.n ? s.x[i + j] : -__builtin_inff();
    for (int j = 0; !DENSE && i + j < s.n; ++j) ids[j] = s.ids[i + j];
    scan_turn<DENSE>(s, x, ids, i, static_cast<int>(s.n - i), own, reach, sum, counter);
  }
  own.mass = mass + reduce(sum);
  scan = own;
}

static void scan(const Span& s, Scan& scan) {
  if (s.ids) scan_span<false>(s, scan);
  else scan_span<true>(s, scan);
}

// A group is a lane of 32 consecutive vectors: no lanes need to be compared with each other. The rest is left out.
static int64_t tops(const Span& s, float* out) {
  int64_t count = 0;
  for (int64_t i = 0; i + 32 * L <= s.n; i += 32 * L) {
    V top = load(s.x + i);
    for (int j = 1; j < 32; ++j) top = vmax(load(s.x + i + j * L), top);
    store(out + count, top);
    count += L;
  }
  return count;
}

static int64_t collect(const Span& s, float factor, float most, float least, const Near& out, double* mass) {
  int64_t count = 0;
  V sum{};
  double total = 0;
  for (int64_t i = 0; i < s.n; i += B) {
    float padded[B];
    const float* x = s.x + i;
    int width = static_cast<int>(s.n - i < B ? s.n - i : B);
    if (width < B) {
      for (int j = 0; j < B; ++j) padded[j] = j < width ? x[j] : -__builtin_inff();
      x = padded;
    }
    V y[4], e[4];
    VI hit[4];
    for (int j = 0; j < 4; ++j) hit[j] = load(x + j * L) * broadcast(factor) >= broadcast(least);
    bool some = any(hit);
    if (!some && !mass) continue;
    weigh(x, factor, most, -__builtin_inff(), y, e);
    sum += (e[0] + e[1]) + (e[2] + e[3]);
    if (some) {
      float values[B], weights[B];
      std::memcpy(values, y, sizeof(values));
      std::memcpy(weights, e, sizeof(weights));
      for (int j = 0; j < width; ++j) {  // without a branch: in flat rows nobody could foretell it
        out.y[count] = values[j];
        out.weight[count] = weights[j];
        out.token[count] = token_at(s, i + j);
        count += values[j] >= least;
      }
    }
    if ((i + B) % SUM == 0) {
      total += reduce(sum);
      sum = V{};
    }
  }
  if (mass) *mass = total + reduce(sum);
  return count;
}

}  // namespace PACELINE_ISA

extern const SamplingKernels PL_JOIN(sampling_, PACELINE_ISA) = {
    PL_TEXT(PACELINE_ISA), PACELINE_ISA::restrict, PACELINE_ISA::best, PACELINE_ISA::scan, PACELINE_ISA::collect,
    PACELINE_ISA::tops};

}  // namespace paceline
