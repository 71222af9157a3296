"""Multi-head latent attention (DeepSeek-V3) in its absorbed form: one cached head [normed latent | rotated key] for all.

A head's key of a position is W_UK latent, and its value W_UV latent: so a query is multiplied with W_UK once instead, and
the mixed latents with W_UV. Source of truth: transformers' models/deepseek_v3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.checkpoints.loading import Shapes, Weights
from paceline.models.layers.decoder_config import DecoderConfig, Latent
from paceline.ops.base import Ops, Value, Weight

if TYPE_CHECKING:
    from paceline.models.layers.linear import Linear

EPS = 1e-6  # of the norms within, whatever rms_norm_eps says
DOWN, KEPT = "kv_a_proj_with_mqa", "kv_b_proj"  # KEPT is never quantized: it is read transposed


@dataclass(frozen=True, slots=True, eq=False)
class LatentAttention:
    squeeze: Linear | None  # H -> q_rank
    squeeze_norm: Tensor | None
    q: Linear  # -> what is not rotated of all heads, then what is
    down: Linear  # -> latent, then the key that is rotated
    norm: Tensor  # [rank]
    absorb: tuple[Weight, ...]  # of each head [rank, plain]
    expand: tuple[Weight, ...]  # of each head [value, rank]
    o: Linear
    inv_freq: Tensor  # [rotated / 2]
    storage: int


def latent_shapes(config: DecoderConfig, latent: Latent) -> tuple[Shapes, Shapes]:
    """(matrices, whose biases the config knows; norms), named as within `self_attn`."""
    hidden, heads = config.hidden_size, config.heads
    wide = heads * (latent.plain + config.head_dim)
    matrices: Shapes = {
        DOWN: (latent.rank + config.head_dim, hidden),
        KEPT: (heads * (latent.plain + latent.value), latent.rank),
        "o_proj": (hidden, heads * latent.value),
    }
    norms: Shapes = {"kv_a_layernorm": (latent.rank,)}
    if latent.q_rank is None:
        return matrices | {"q_proj": (wide, hidden)}, norms
    matrices |= {"q_a_proj": (latent.q_rank, hidden), "q_b_proj": (wide, latent.q_rank)}
    return matrices, norms | {"q_a_layernorm": (latent.q_rank,)}


def read_latent(
    weights: Weights, at: str, config: DecoderConfig, linear: Callable[[str], Linear], inv_freq: Tensor
) -> LatentAttention:
    """The attention at `layers.N.self_attn`."""
    latent = config.latent
    assert latent is not None
    squeezed = latent.q_rank is not None
    both = weights.unpacked(f"{at}.{KEPT}")
    by_head = both.data.view(config.heads, latent.plain + latent.value, latent.rank)
    ups, outs = by_head[:, : latent.plain].transpose(1, 2), by_head[:, latent.plain :]
    size = latent.plain + config.head_dim
    heads = torch.arange(config.heads)[:, None] * size
    turned = latent.plain + halves(latent, config.head_dim)
    order = torch.cat(((heads + torch.arange(latent.plain)).flatten(), (heads + turned).flatten()))
    columns = torch.cat((torch.arange(latent.rank), latent.rank + halves(latent, config.head_dim)))
    return LatentAttention(
        squeeze=linear("q_a_proj") if squeezed else None,
        squeeze_norm=weights.norm(f"{at}.q_a_layernorm") if squeezed else None,
        q=linear("q_b_proj" if squeezed else "q_proj").rows(order),
        down=linear(DOWN).rows(columns),
        norm=weights.norm(f"{at}.kv_a_layernorm"),
        absorb=tuple(Weight(part.contiguous(), both.kind) for part in ups),
        expand=tuple(Weight(part.contiguous(), both.kind) for part in outs),
        o=linear("o_proj"),
        inv_freq=inv_freq,
        storage=int(at.split(".")[1]),
    )


def halves(latent: Latent, width: int) -> Tensor:
    """The order in which pairs (i, i + width / 2) rotate, of columns that may be stored pair by pair."""
    columns = torch.arange(width)
    return columns.view(-1, 2).T.flatten() if latent.interleaved else columns


def attend_latent(ops: Ops, h: Value, a: LatentAttention, config: DecoderConfig) -> Value:
    """What a layer's attention adds to the row, of its normed input."""
    latent, heads = config.latent, config.heads
    assert latent is not None
    if a.squeeze is not None:
        q = a.q(ops, ops.rms_norm(a.squeeze(ops, h), a.squeeze_norm, EPS))
    else:
        q = a.q(ops, h)
    q, plain = ops.scale(q, latent.scale), heads * latent.plain
    stretch = config.rotary.attention
    turned = ops.rotary(ops.columns(q, plain, plain + heads * config.head_dim), a.inv_freq, heads, stretch)
    down = a.down(ops, h)
    normed = ops.rms_norm(ops.columns(down, 0, latent.rank), a.norm, EPS)
    key = ops.rotary(ops.columns(down, latent.rank, latent.rank + config.head_dim), a.inv_freq, 1, stretch)
    ops.store_kv(a.storage, ops.concat(normed, key), None)
    q = ops.per_head(ops.columns(q, 0, plain), a.absorb, turned)
    mixed = ops.attention(q, a.storage, heads, None, sees_itself=True, latent=latent.rank)
    return a.o(ops, ops.per_head(mixed, a.expand))
