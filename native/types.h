// Plain structs that the kernels (one translation unit per instruction set) and the program around them share.
#pragma once

#include <atomic>
#include <cstdint>

namespace paceline {

// Of all models of this process: how a linear reads their weights best depends on it. `fetches_far`: whether those that the
// last-level cache could hold, and those in blocks, are fetched to the second-level cache ahead of use.
inline std::atomic<bool> weights_in_cache{false}, fetches_far{true};

// BF16_DOT: bfloat16 for CPUs that multiply pairs of it, whose inputs are rounded to bfloat16 too; only if Kernels::bf16_dot.
// From Q4_0 on: in blocks, those of GGUF files and INT4, whose inputs are rounded to 8 or 16 bits unless EXACT is added.
enum Kind : int {
  FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, BF16_DOT = 4,
  Q4_0 = 8, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4, INT4,
  Q2_K, Q3_K, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ1_S, IQ1_M, TQ1_0, TQ2_0, NVFP4, Q1_0, Q2_0, EXACT = 64
};
constexpr int LAST_KIND = Q2_0;

inline bool in_blocks(int kind) { return kind >= Q4_0; }

struct BlockSize {
  int64_t elements, bytes;
};

inline BlockSize block_size(int kind) {  // as in files
  switch (kind & ~EXACT) {
    case Q4_0: case IQ4_NL: return {32, 18};
    case Q4_1: return {32, 20};
    case Q5_0: return {32, 22};
    case Q5_1: return {32, 24};
    case Q8_0: return {32, 34};
    case Q4_K: return {256, 144};
    case Q5_K: return {256, 176};
    case Q6_K: return {256, 210};
    case IQ4_XS: return {256, 136};
    case INT4: return {32, 16};
    case Q2_K: return {256, 84};
    case Q3_K: case IQ3_S: return {256, 110};
    case IQ2_XXS: case TQ2_0: return {256, 66};
    case IQ2_XS: return {256, 74};
    case IQ2_S: return {256, 82};
    case IQ3_XXS: return {256, 98};
    case IQ1_S: return {256, 50};
    case IQ1_M: return {256, 56};
    case TQ1_0: return {256, 54};
    case NVFP4: return {64, 36};
    case Q1_0: return {128, 18};
    case Q2_0: return {64, 18};
    default: return {32, 17};  // MXFP4
  }
}

// The grids of IQ blocks, by place: see paceline/ops/grids.py, from which they come once, before anything is packed.
enum Grid : int { IQ2_XXS_GRID = 0, IQ2_XS_GRID = 256, IQ2_S_GRID = 768, IQ1_GRID = 1792, IQ3_XXS_GRID = 3840, IQ3_S_GRID = 4096 };
constexpr int GRIDS = 4608;
inline uint16_t grids[GRIDS];

struct Matrix {  // [out, in], rows contiguous; INT8: scale [out]; INT4: scale [out, in/32], low nibble first, value + 8;
                 // NVFP4: scale [out] of what is beside the blocks; other blocks: no scale, a row is a run of blocks as in the file
  const void* data = nullptr;
  const float* scale = nullptr;
  int64_t out = 0, in = 0;
  int kind = FLOAT32;

  int64_t row_bytes() const {
    if (in_blocks(kind)) return in / block_size(kind).elements * block_size(kind).bytes;
    return kind == FLOAT32 ? in * 4 : kind == INT8 ? in : in * 2;
  }
};

struct Tiles {  // the same matrix as the linear kernels want it, see linear.h
  const void* data = nullptr;
  int64_t out = 0, in = 0;
  int kind = FLOAT32;
};

// A thread's own copy of a linear's input in the form its weight kind wants: see Kernels::prepare.
struct Prepared {
  const void* data = nullptr;
  int64_t stride = 0;  // elements
  const float* row_scale = nullptr;
};

constexpr int SCALED = 32;  // columns of a key or value in int8 that have a float beside them
inline int64_t vector_bytes(int64_t columns) { return columns + columns / SCALED * 4; }

struct Pages {  // one layer's K or V pool with the page table of its kind
  void* pool = nullptr;  // floats [token][kv head][column]; packed: bfloat16, see attention_packed.h
  int64_t tokens = 0;  // rows of the pool
  const int32_t* table = nullptr;
  int64_t table_stride = 0, slots = 0;
  int page_size = 16;
  int kv_heads = 0, head_dim = 0;  // of values narrower than the keys: the keys' pool
  bool packed = false;  // only if Kernels::bf16_dot
  bool bytes = false;   // see attention_bytes.h

  int64_t place_bytes() const {  // of a token
    return kv_heads * (bytes ? vector_bytes(head_dim) : static_cast<int64_t>(head_dim) * (packed ? 2 : 4));
  }
};

struct Rows {  // what one run computes
  int64_t count = 0;
  const int64_t* tokens = nullptr;
  const int32_t* positions = nullptr;
  const int32_t* slots = nullptr;
};

constexpr int MOST_QUERIES = 96;  // rows * heads * groups of an attention call
constexpr int SEGMENT = 256;      // keys that have a softmax of their own

struct AttentionArgs {  // `rows` rows at consecutive positions of a sequence, `groups` K/V heads, `heads` heads that read each
  const float* q;
  float* out;
  int64_t q_stride, out_stride;  // from a row to the next
  int rows, heads, groups;       // heads of a row lie beside each other
  int64_t kv_head;               // the first of them
  int32_t slot;
  int64_t last, span;  // the first row sees keys max(0, last - span)..last-1, each further row one key further
  int64_t reach;       // all rows see keys up to reach-1, too
  const float* sinks;  // by head, the score of a key without a value that each row sees, too; may be null
  float cap;           // scores become cap * tanh(score / cap); 0: they stay
  float* room;         // `attention_room` floats of this thread
  float* partial;      // null, or one segment only is computed: to [query][2 + columns of a value], highest score and sum before the values
  int64_t segment;     // which, that is keys segment * SEGMENT..
  int64_t segments;    // of `attention_join`: [segments][query]...
  Pages k, v;
};

inline int64_t attention_room(const Pages& k, const Pages& v) {  // sums of all queries, and a block of keys and values
  return MOST_QUERIES * static_cast<int64_t>(v.head_dim) + (k.bytes ? 2 * 64 * k.head_dim : 0);
}

struct DeltaArgs {  // one value head of linear attention over a run of rows of one text, see delta.h
  int64_t begin, store, first, end;  // positions: the state stands before `begin` and is stored before `store`; the run's rows
  const float *qkv, *b, *a;          // of the run's rows
  int64_t qkv_stride, b_stride, a_stride;
  const float* recent;  // what earlier rows hold, qkv, b and a [most][width], each at position % most
  int64_t most, width;
  const float *conv, *dt_bias, *decay;  // [kernel][channels], [heads], [heads]
  const float *conv_bias, *skip;  // [channels], [heads]; null where there is none
  bool plain;                     // Mamba 2, see delta.h
  int64_t kernel, channels, head, heads;
  int64_t q_column, k_column, v_column, key_dim, value_dim;
  float* state;  // [key_dim][value_dim]
  float* out;
  int64_t out_stride;
  float* scratch;  // delta_scratch(...) floats
};

struct LowRankArgs {  // what an adapter adds to outputs begin..end-1 of one row, see rowops.h
  const float *x, *a, *b;
  float* y;
  int64_t in, out, rank, begin, end;
  float factor;
};

struct LossRow {
  float* logits;        // [count] the drafter's; they become the gradient
  const float* log_p;   // [count] of the target
  int64_t count, best;  // best: the target's most likely token, -1: it cannot be drafted
  float weight;
  float inverse;  // of the temperature
  float greedy, decay;
  float* room;  // [2 * count], each filled up to whole vectors
};

struct Kernels {
  const char* name;
  int lanes;
  int tile;  // outputs
  bool (*bf16_dot)();
  int64_t (*tile_bytes)(int kind, int64_t in);
  void (*pack)(const Matrix&, int64_t tile, char* out);
  // Bytes of one prepared row, and preparing `rows` rows of x; floats are used in place.
  int64_t (*prepared_bytes)(int kind, int64_t in);
  Prepared (*prepare)(int kind, const float* x, int64_t stride, int64_t rows, int64_t in, void* data, float* scales);
  void (*linear)(const Tiles&, const Prepared&, int64_t rows, int64_t begin, int64_t end, float* y,
                 int64_t y_stride);  // y[r, o] for o in [begin, end), begin a multiple of `tile`
  bool (*attention)(const AttentionArgs&);  // false: a page id is out of range
  void (*attention_join)(const AttentionArgs&);
  void (*store_bytes)(const Pages&, int64_t index, const float* x);
  void (*store_packed)(const Pages&, bool keys, int64_t index, const float* x);  // place `index` of the pool, all heads
  int64_t (*delta_scratch)(int64_t key_dim, int64_t value_dim);
  void (*delta_rule)(const DeltaArgs&);
  // y[o] += sum over k < rank of factor * (a[k] . x) * b[k][o] for o in [begin, end); a [rank][in], b [rank][out]
  void (*low_rank)(const LowRankArgs&);
  void (*center)(const float* x, float* y, int64_t n);  // x less its mean
  void (*norm)(const float* x, const float* weight, float* y, int64_t width, int groups, float eps);
  void (*rotary)(const float* x, const float* inv_freq, float* y, int64_t width, int heads, int64_t rotated,
                 float factor, int32_t position);  // the first `rotated` columns of each head, times factor
  void (*embed)(const Matrix&, int64_t token, float scale, float* y);
  void (*add)(const float*, const float*, float* y, int64_t n);
  void (*mul)(const float*, const float*, float* y, int64_t n);
  void (*scale)(const float*, float, float* y, int64_t n);
  void (*gelu)(const float*, float* y, int64_t n);
  void (*gated_gelu)(const float*, const float*, float* y, int64_t n);
  void (*gated_silu)(const float*, const float*, float* y, int64_t n);
  void (*gated_clamped)(const float*, const float*, float* y, int64_t n);
  void (*gated_relu)(const float*, const float*, float* y, int64_t n);
  void (*gated_sigmoid)(const float*, const float*, float* y, int64_t n);
  void (*softcap)(const float*, float cap, float* y, int64_t n);
  void (*softmax)(const float*, float* y, int64_t n);
  void (*clamp)(const float*, float lowest, float highest, float* y, int64_t n);
  float (*exponents)(const float*, float* y, int64_t n);
  float (*hybrid_loss)(const LossRow&);
  float (*read_all)(const float*, int64_t n);
  float (*burn)(int64_t turns);
  int64_t (*burn_flops)();
};

extern const Kernels kernels_generic;
#if defined(PACELINE_X86)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512, kernels_avx512_floats;  // pairs in one instruction, or by floats: the same bits
extern const Kernels kernels_avx512_registers;               // pairs in AMX's tile registers
#endif
#if defined(PACELINE_ARM)
extern const Kernels kernels_neon;
#endif

}  // namespace paceline
