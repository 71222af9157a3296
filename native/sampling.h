// Drawing tokens from rows of logits: the rules of paceline/sampling (noise.py, draw.py, filters.py), one call per batch.
#pragma once

#include <cstdint>

namespace paceline {

struct DrawRow {
  const float* x = nullptr;        // [width] logits
  const int64_t* ids = nullptr;    // [width] their token ids; null: 0, 1, 2...
  float factor = 0;                // 1 / temperature; 0: greedy
  uint32_t k0 = 0, k1 = 0;         // keys of the noise
  int64_t top_k = 0;               // 0: off
  double top_p = 1;                // 1: off
  float log_min_p = 0;             // below any gap (-inf): off
  const uint8_t* allowed = nullptr;  // [known] by token id, 0: refused; null: all are allowed
  int64_t known = 0;                 // ids from there on are refused
  bool filtered() const { return top_k > 0 || top_p < 1 || log_min_p > -__builtin_inff(); }
};

struct Drawn {
  int64_t token = -1;     // -1: a NaN, or nothing finite to choose
  double confidence = 0;  // the token's probability after temperature (1 for greedy rows) and filters
};

// The result of a row depends on that row alone: neither on its neighbours nor on the number of threads.
void draw(const DrawRow* rows, int64_t count, int64_t width, bool confidence, Drawn* out);

void noise_keys(uint64_t seed, int64_t position, uint32_t purpose, uint32_t* k0, uint32_t* k1);

// What the kernels (one translation unit per instruction set) and the driver share.
struct Span {  // part of a row
  const float* x;
  const int64_t* ids;  // null: token = base + column
  int64_t base, n;
  const uint8_t* allowed = nullptr;  // [known] by column, 0: refused; null: all are allowed. `best` alone looks at it
  int64_t known = 0;                 // columns from there on are refused
};

struct Best {  // the largest logit and the lowest id that has it
  float value = -__builtin_inff();
  int64_t token = -1;
  bool nan = false;
};

struct Scan {  // one pass over shaped logits y = x * factor that are >= least
  float factor, most, least;
  uint32_t k0, k1;
  bool noisy;    // false: the mass only
  double score;  // best y + noise so far, and whose it is
  int64_t token;
  float y;
  double mass;  // sum of e^(y - most)
};

struct Near {  // columns whose shaped logit is >= a bound
  float* y;
  float* weight;  // e^(y - most)
  int64_t* token;
};

struct SamplingKernels {
  const char* name;
  // `s` with -inf where a token is refused to `out`; whether `s` has a NaN.
  bool (*restrict)(const Span& s, const uint8_t* allowed, int64_t known, float* out);
  Best (*best)(const Span&);
  void (*scan)(const Span&, Scan&);
  // Copies columns with y >= least, returns how many; `mass` (may be null) is that of all columns.
  int64_t (*collect)(const Span&, float factor, float most, float least, const Near&, double* mass);
  int64_t (*tops)(const Span&, float* out);  // the largest logits of disjoint groups of 32 columns; returns how many
};

extern const SamplingKernels sampling_generic;
#if defined(PACELINE_X86)
extern const SamplingKernels sampling_avx2, sampling_avx512;
#endif
#if defined(PACELINE_ARM)
extern const SamplingKernels sampling_neon;
#endif

double exact_score(float y, uint32_t bits);     // y + Gumbel noise
float reach_of(double most, double score);      // see Scan: bits / 2 <= e^(y - most) * reach, or `score` is out of reach

}  // namespace paceline
