"""Weights as the native kernels read them: checked, and packed in tiles (`native/linear.h`)."""

from __future__ import annotations

from types import ModuleType

import torch

from paceline.errors import UsageError
from paceline.memory import LINE, Arena, Loaded, last_level_cache
from paceline.ops.base import Weight

# In the order of `Kind` in native/types.h.
_SMALL = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs", "mxfp4")
_FEW_BITS = (
    "q2_k", "q3_k", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq1_s", "iq1_m", "tq1_0", "tq2_0", "nvfp4",
    "q1_0", "q2_0",
)  # fmt: skip
BLOCK_KINDS = (*_SMALL, *_FEW_BITS)
IN_BLOCKS = 8  # from this kind on
KINDS = {"float32": 0, "bfloat16": 1, "int8": 2} | {
    k: IN_BLOCKS + i for i, k in enumerate((*_SMALL, "int4", *_FEW_BITS))
}
PAIRS = 4  # bfloat16 whose inputs are rounded to bfloat16 too
EXACT = 64  # is added to a kind in blocks whose inputs are not rounded
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8, "int4": torch.uint8}


def tiles(
    extension: ModuleType, weight: Weight, cluster: int, arena: Arena, exact: bool
) -> tuple[torch.Tensor, int]:
    """(`weight` in tiles of outputs, kind). With each `cluster` outputs filled up (by the last) to whole tiles.

    `exact`: bfloat16, int4 and blocks stay kinds that are multiplied with float32; else inputs are rounded to bfloat16
    where the CPU multiplies pairs of it, and those of int4 and blocks to 8 bits (16 for q6_k and q8_0), each 16 with a
    scale of their own.
    Raises UsageError for a weight that native code cannot read.
    """
    weight, padding = usable(weight), -cluster % int(extension.tile())
    if padding:
        ids = torch.arange(weight.out_features).view(-1, cluster)
        weight = weight.rows(torch.cat((ids, ids[:, -1:].expand(-1, padding)), dim=1).reshape(-1))
    scale = None if weight.scale is None else weight.scale.float().contiguous()
    shape, kind = (weight.out_features, weight.in_features), _kind(extension, weight, exact)
    out = arena.zeros(extension.packed_bytes(kind, *shape))
    rows = weight.data.data_ptr(), 0 if scale is None else scale.data_ptr(), *shape, kind
    extension.pack(rows, out.data_ptr())
    Loaded.add(out)
    extension.set_weights_in_cache(Loaded.total <= last_level_cache())
    return out, kind


def packed(extension: ModuleType, weight: Weight, exact: bool) -> tuple[torch.Tensor, int]:
    """As `tiles`, of a matrix without scales that no step of a language model reads."""
    weight = usable(weight)
    shape, kind = (weight.out_features, weight.in_features), _kind(extension, weight, exact)
    out = torch.zeros(extension.packed_bytes(kind, *shape) + LINE, dtype=torch.uint8)
    out = out[-out.data_ptr() % LINE :]
    extension.pack((weight.data.data_ptr(), 0, *shape, kind), out.data_ptr())
    return out, kind


def _kind(extension: ModuleType, weight: Weight, exact: bool) -> int:
    kind = KINDS[weight.kind]
    if kind == KINDS["bfloat16"] and not exact and extension.bf16_dot():
        return PAIRS
    return kind + EXACT if exact and kind >= IN_BLOCKS else kind


def usable(weight: Weight) -> Weight:
    """`weight` in a form that the kernels read in place; float16 becomes float32 once. Raises UsageError."""
    if weight.kind == "float16":
        weight = Weight(weight.data.float(), "float32")
    data, scale, layout = weight.data, weight.scale, weight.blocks
    if layout is not None and data.dim() == 2 and data.shape[1] % layout.size:
        raise UsageError(
            f"rows of {data.shape[1]} bytes are no whole {weight.kind} blocks of {layout.size}: cut the matrix at blocks"
        )
    dtype = torch.uint8 if layout is not None else _DTYPES[weight.kind]
    if data.dim() != 2 or data.dtype != dtype or data.device.type != "cpu" or not data.is_contiguous():
        raise UsageError(
            f"a {weight.kind} weight must be a contiguous {dtype} matrix on the CPU, not {data.dtype} "
            f"{tuple(data.shape)} strides {data.stride()} on {data.device}"
        )
    if weight.kind == "nvfp4" and scale is not None and tuple(scale.shape) != (weight.out_features,):
        raise UsageError(f"the scales beside an nvfp4 weight must be of shape {(weight.out_features,)}")
    if weight.kind in ("int8", "int4"):
        shape = (
            (weight.out_features,)
            if weight.kind == "int8"
            else (weight.out_features, weight.in_features // 32)
        )
        if (
            scale is None
            or tuple(scale.shape) != shape
            or (weight.kind == "int4" and weight.in_features % 32)
        ):
            raise UsageError(
                f"an {weight.kind} weight of {weight.out_features} rows needs scales of shape {shape}"
            )
    return weight
