// Compiled once per instruction set with PACELINE_ISA naming it. No C++ library header may enter here: an inline function
// compiled for a newer instruction set could be the copy that the linker keeps for everyone.
#include "attention_packed.h"
#include "blocks.h"
#include "delta.h"
#include "losses.h"
#include "measure.h"

#define PL_TEXT_(x) #x
#define PL_TEXT(x) PL_TEXT_(x)
#define PL_JOIN_(a, b) a##b
#define PL_JOIN(a, b) PL_JOIN_(a, b)

namespace paceline {

using namespace PACELINE_ISA;

template <class By, class Seen = By>  // of linears, and of attention
static constexpr Kernels table() {
  return {PL_TEXT(PACELINE_ISA), L, TILE, has_bf16_dot, tile_bytes_any, pack_any, prepared_bytes_any<By>, prepare_any<By>, linear_any<By>,
          attention<Seen>, join_segments, store_bytes, store_packed, delta_scratch, delta_rule, low_rank, center, norm, rotary, embed_any, add, mul, scale, gelu, gated_gelu, gated_silu, gated_clamped, gated_relu, gated_sigmoid, softcap, softmax, clamp, exponents, hybrid_loss,
          read_all, burn, burn_flops};
}

#if defined(PL_PAIRS)
extern const Kernels PL_JOIN(kernels_, PACELINE_ISA) = table<ByPairs>();
extern const Kernels PL_JOIN(PL_JOIN(kernels_, PACELINE_ISA), _floats) = table<ByFloats>();
extern const Kernels PL_JOIN(PL_JOIN(kernels_, PACELINE_ISA), _registers) = table<ByRegisters, ByFloats>();
#else
extern const Kernels PL_JOIN(kernels_, PACELINE_ISA) = table<NoPairs>();
#endif

}  // namespace paceline
