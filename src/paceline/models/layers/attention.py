"""Grouped attention of a decoder layer, and which kind of attention a layer has: grouped, latent or linear,
or a short convolution."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.checkpoints.loading import Shapes, Weights
from paceline.models.layers.decoder_config import DecoderConfig, MambaConfig
from paceline.models.layers.delta_net import LINEAR, DeltaNet, read_delta, recur
from paceline.models.layers.latent import LatentAttention, attend_latent, latent_shapes, read_latent
from paceline.models.layers.linear import Linear, read_linear, read_norm
from paceline.models.layers.mamba import Mamba, read_mamba, scan
from paceline.models.layers.short_conv import ShortConv, convolve, read_conv
from paceline.models.spec import CONV, SLIDING
from paceline.ops.base import Growth, Ops, Value


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    q_norm: Tensor | None  # [head_dim], or of all heads
    k_norm: Tensor | None
    inv_freq: (
        Tensor | None
    )  # [columns that are rotated / 2], one tensor for all layers; None: nothing is rotated
    storage: int
    window: int | None
    stretch: float = 1.0  # what rotated q and k are multiplied with, each
    sinks: Tensor | None = None  # [heads]
    growth: Growth | None = None  # of queries
    gate: Linear | None = None  # of the result, where it is a projection of its own


def attention_shapes(config: DecoderConfig) -> tuple[Shapes, Shapes]:
    """(matrices; norms), named as within `self_attn`, of a layer that is not linear."""
    if config.latent is not None:
        return latent_shapes(config, config.latent)
    hidden = config.hidden_size
    wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim
    if "qkv" in config.fused:
        return {"qkv_proj": (wide + 2 * narrow, hidden), "o_proj": (hidden, wide)}, {}
    matrices: Shapes = {
        "q_proj": (2 * wide if config.gated else wide, hidden),
        "k_proj": (narrow, hidden),
        "v_proj": (narrow, hidden),
        "o_proj": (hidden, wide),
    }
    if config.gate_apart:
        matrices["gate_proj"] = (wide, hidden)
    if config.plain_head_norms:
        return matrices, {}
    sizes = (wide, narrow) if config.wide_norms else (config.head_dim, config.head_dim)
    return matrices, {name: (size,) for name, size in zip(("q_norm", "k_norm"), sizes) if config.head_norms}


Mixer = Attention | LatentAttention | DeltaNet | ShortConv | Mamba


def attend(ops: Ops, h: Value, a: Mixer, config: DecoderConfig) -> Value:
    """What a layer's attention, or what stands in its place, adds to the row, of its normed input."""
    if isinstance(a, DeltaNet):
        return recur(ops, h, a, config.eps)
    if isinstance(a, Mamba):
        return scan(ops, h, a, config.eps)
    if isinstance(a, ShortConv):
        return convolve(ops, h, a)
    if isinstance(a, LatentAttention):
        return attend_latent(ops, h, a, config)
    wide = config.heads * config.head_dim
    both, k, v = a.q(ops, h), a.k(ops, h), a.v(ops, h)
    q = ops.columns(both, 0, wide) if config.gated else both
    q = _turned(ops, q, a.q_norm, a, config, config.heads, a.growth)
    scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    ops.store_kv(a.storage, _turned(ops, k, a.k_norm, a, config, config.kv_heads), v)
    q = ops.scale(q, scale)
    if a.sinks is None:
        y = ops.attention(
            q, a.storage, config.heads, a.window, sees_itself=True, softcap=config.attention_softcap
        )
    else:
        y = ops.sink_attention(q, a.storage, a.window, a.sinks)
    if a.gate is not None:
        return a.o(ops, ops.gated(a.gate(ops, h), y, "sigmoid"))
    return a.o(ops, ops.gated(ops.columns(both, wide, 2 * wide), y, "sigmoid") if config.gated else y)


def store(ops: Ops, h: Value, a: Attention, config: DecoderConfig) -> None:
    """Write the row's K and V, of its normed input, and nothing else."""
    k, v = a.k(ops, h), a.v(ops, h)
    ops.store_kv(a.storage, _turned(ops, k, a.k_norm, a, config, config.kv_heads), v)


def _turned(
    ops: Ops,
    x: Value,
    norm: Tensor | None,
    a: Attention,
    config: DecoderConfig,
    heads: int,
    growth: Growth | None = None,
) -> Value:
    """`heads` heads of q or k, normed and rotated as the layer does."""
    if norm is not None:
        x = ops.rms_norm(x, norm, config.eps, 1 if config.wide_norms else heads)
    return x if a.inv_freq is None else ops.rotary(x, a.inv_freq, heads, a.stretch, growth)


def read_attention(weights: Weights, config: DecoderConfig, index: int, at: str, inv_freq: Tensor) -> Mixer:
    """The attention of layer `index`, whose tensors are named `at`.*"""
    storage = storage_of(config.kinds, index)
    if config.kinds[index] == LINEAR:
        return _read_recurrent(weights, config, at, storage)
    if config.kinds[index] == CONV:
        assert config.conv is not None
        return read_conv(weights, config.conv, f"{at}.conv", storage)
    at = f"{at}.self_attn"

    def linear(name: str) -> Linear:
        return read_linear(weights, config, f"{at}.{name}")

    def norm(name: str) -> Tensor | None:
        if config.plain_head_norms:
            return torch.ones(config.head_dim, device=weights.device)
        if not config.head_norms:
            return None
        scale = read_norm(weights, config, f"{at}.{name}")
        return (
            scale[_halves(1, config).to(scale.device)] if config.paired and not config.wide_norms else scale
        )

    if config.latent is not None:
        return read_latent(weights, at, config, linear, inv_freq)
    q, k, v = (
        _apart(linear("qkv_proj"), config)
        if "qkv" in config.fused
        else map(linear, ("q_proj", "k_proj", "v_proj"))
    )
    if config.paired:
        q, k = (
            part.rows(_halves(heads, config)) for part, heads in ((q, config.heads), (k, config.kv_heads))
        )
    return Attention(
        q=_gates_last(q, config.heads) if config.gated else q,
        k=k,
        v=v,
        o=linear("o_proj"),
        q_norm=norm("q_norm"),
        k_norm=norm("k_norm"),
        inv_freq=None if index in config.unturned else inv_freq,
        storage=storage,
        window=config.window if config.kinds[index] == SLIDING else None,
        stretch=config.rotary_of(config.kinds[index]).attention,
        sinks=weights.vector(f"{at}.sinks") if config.sinks else None,
        growth=_growth(config, inv_freq.device),
        gate=linear("gate_proj") if config.gate_apart else None,
    )


def _read_recurrent(weights: Weights, config: DecoderConfig, at: str, storage: int) -> Mixer:
    assert config.delta is not None
    if isinstance(config.delta, MambaConfig):
        return read_mamba(weights, config.delta, f"{at}.mamba", storage)
    return read_delta(weights, config.delta, f"{at}.linear_attn", storage)


def _growth(config: DecoderConfig, device: torch.device) -> Growth | None:
    """1 + growth * log(1 + position / original context, rounded down); source: transformers' models/ministral3."""
    if not config.query_growth:
        return None
    every = int(config.rotary.original)
    steps = torch.arange(config.max_len // every + 1, dtype=torch.float32)
    return Growth((1 + config.query_growth * torch.log(1 + steps)).to(device), every)


def storage_of(kinds: tuple[str, ...], index: int) -> int:
    """The number of a layer among those that keep what it keeps."""
    return [(kind == LINEAR) == (kinds[index] == LINEAR) for kind in kinds[:index]].count(True)


def _gates_last(q: Linear, heads: int) -> Linear:
    """All queries, then all gates, which lie beside each other for each head."""
    return q.rows(torch.arange(q.weight.out_features).view(heads, 2, -1).transpose(0, 1).flatten())


def _apart(qkv: Linear, config: DecoderConfig) -> tuple[Linear, Linear, Linear]:
    wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim
    k, v = (slice(start, start + narrow) for start in (wide, wide + narrow))
    return qkv.rows(slice(0, wide)), qkv.rows(k), qkv.rows(v)


def _halves(heads: int, config: DecoderConfig) -> Tensor:
    """The order of the rows of q or k in which pairs (i, i + half) rotate, of heads that store them side by side."""
    rotated = config.rotated or config.head_dim
    columns = torch.arange(config.head_dim)
    head = torch.cat((columns[:rotated].view(-1, 2).T.flatten(), columns[rotated:]))
    return (torch.arange(heads)[:, None] * config.head_dim + head).flatten()
