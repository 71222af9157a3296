"""Float weights -> int8 (symmetric, one scale per output) or int4 (one scale per 32 inputs of an output).

Rows are quantized apart from each other. int4 tries several scales per group and keeps the one with the least squared
error. Embeddings and the head stay int8 under int4, routers and centroids stay as they are: small, and they steer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.ops.base import Weight

QuantKind = Literal["int8", "int4"]
GROUP = 32
_SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8)  # scales tried, as shares of the one that clips nothing
_PIECE = 1 << 22  # values quantized at a time
_KEEP = (
    "router",
    "centroids",
    "shared_expert_gate",
    "kv_b_proj",
)  # the last is read transposed, see models/layers/latent.py
_ROUTER = ".mlp.gate"  # of experts; the gate of an MLP is .gate_proj
_INT8_AT_MOST = ("embed_tokens", "lm_head")


def kind_for(name: str, in_features: int, wanted: QuantKind) -> QuantKind | None:
    """What the matrix `name` becomes when the model is quantized to `wanted`; None: it stays as it is."""
    if any(part in name for part in _KEEP) or name.removesuffix(".weight").endswith(_ROUTER):
        return None
    if any(part in name for part in _INT8_AT_MOST) or in_features % GROUP:
        return "int8"
    return wanted


def quantizer(kind: QuantKind) -> Callable[[str, Weight], Weight]:
    """A `Transform` for loading: quantizes each matrix by its name. A weight that already is of the kind is kept."""

    def transform(name: str, weight: Weight) -> Weight:
        wanted = kind_for(name, weight.in_features, kind)
        if wanted is None or weight.kind == wanted:
            return weight
        if weight.kind in ("int8", "int4"):
            raise UsageError(
                f"these weights are stored as {weight.kind} already: load them without quantize={kind!r}"
            )
        return quantize(weight.data, wanted, name)

    return transform


def quantize(data: Tensor, kind: QuantKind, name: str = "a weight") -> Weight:
    """[out, in] of any float type -> Weight; `name` is for messages.

    Raises UsageError for int4 unless `in` is a multiple of 32, and for NaN.
    """
    if kind == "int4" and data.shape[1] % GROUP:
        raise UsageError(f"int4 needs a multiple of {GROUP} inputs, not {data.shape[1]}: use int8")
    rows = max(1, _PIECE // data.shape[1])
    step = _int8 if kind == "int8" else _int4
    parts = [step(data[i : i + rows].float()) for i in range(0, len(data), rows)]
    packed, scale = (torch.cat(some) for some in zip(*parts))
    if not bool(scale.isfinite().all()):
        raise UsageError(
            f"{name} has values that are not finite: the checkpoint is damaged, download it again"
        )
    return Weight(packed.contiguous(), kind, scale.contiguous())


def _int8(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1) / 127  # [out]
    safe = scale.clamp(min=torch.finfo(torch.float32).tiny)
    return (x / safe[:, None]).round_().clamp_(-127, 127).to(torch.int8), scale


def _int4(x: Tensor) -> tuple[Tensor, Tensor]:
    groups = x.view(x.shape[0], -1, GROUP)  # [out, in / 32, 32]
    largest = groups.gather(
        -1, groups.abs().argmax(-1, keepdim=True)
    )  # with its sign, which takes the value -8
    best = torch.full_like(largest, torch.inf)
    values, scale = torch.zeros_like(groups), torch.zeros_like(largest)
    for share in _SHRINK:
        tried = largest * (share / -8)
        q = (groups / torch.where(tried == 0, 1.0, tried)).round().clamp(-8, 7)
        error = (groups - q * tried).square().sum(-1, keepdim=True)
        better = error < best
        best, scale = torch.where(better, error, best), torch.where(better, tried, scale)
        values = torch.where(better, q, values)
    scale = torch.where(largest.isfinite(), scale, largest)
    nibbles = (values.flatten(1) + 8).to(torch.uint8)  # [out, in]
    return nibbles[:, 0::2] | nibbles[:, 1::2] << 4, scale[..., 0]
