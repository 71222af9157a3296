"""Llama and its relatives: two norms a layer, grouped attention, a gated MLP or experts, as graphs over `Ops`.

What differs from family to family is data of `DecoderConfig`: biases, norms of q and k, windows, experts. Source of truth
for the arithmetic: transformers' models/llama, mistral, qwen2, qwen3, qwen3_moe, deepseek_v3 and glm4_moe.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.kv.layout import LayerKV, Layout
from paceline.models.config import SLIDING
from paceline.models.decoder_config import DecoderConfig, Rotary, Routing
from paceline.models.delta_net import LINEAR, DeltaNet, delta_shapes, read_delta, recur
from paceline.models.latent import LatentAttention, attend_latent, latent_shapes, read_latent
from paceline.models.loading import Shapes, Weights
from paceline.models.target import GraphTarget
from paceline.ops.base import Experts, Ops, Runner, Value, Weight

CHOICE_BIAS, SHARED_GATE = "e_score_correction_bias", "shared_expert_gate"


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    weight: Weight
    bias: Tensor | None

    def __call__(self, ops: Ops, x: Value) -> Value:
        return ops.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    inv_freq: Tensor  # [columns that are rotated / 2], one tensor for all layers
    storage: int
    window: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Mlp:
    gate: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    """Experts beside one that every row passes."""

    experts: Experts
    shared: Mlp
    gate: Weight | None  # [1, H], of the shared one


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    attention: Attention | LatentAttention | DeltaNet
    mlp: Mlp | Experts | Mixture
    norm_in: Tensor  # [H]
    norm_post: Tensor  # [H]


def decoder_shapes(config: DecoderConfig) -> Shapes:
    """Name and shape of every tensor."""
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: Shapes = {"embed_tokens.weight": (vocab, hidden), "norm.weight": (hidden,)}
    if not config.tied:
        shapes["lm_head.weight"] = (vocab, hidden)
    attention, norms = _attention_shapes(config)
    mlp = _mlp_shapes(hidden, config.intermediate_size)
    for i, kind in enumerate(config.kinds):
        at = f"layers.{i}"
        shapes[f"{at}.input_layernorm.weight"] = shapes[f"{at}.post_attention_layernorm.weight"] = (hidden,)
        matrices: Shapes = {}
        if kind == LINEAR:
            assert config.delta is not None
            shapes |= delta_shapes(config.delta, hidden, f"{at}.linear_attn")
        else:
            matrices |= {f"{at}.self_attn.{name}": shape for name, shape in attention.items()}
            shapes |= {f"{at}.self_attn.{name}.weight": shape for name, shape in norms.items()}
        if i in config.sparse:
            shapes |= _expert_shapes(config, f"{at}.mlp")
            shared = _mlp_shapes(hidden, config.shared_expert) if config.shared_expert else {}
            matrices |= {f"{at}.mlp.{_shared(config)}.{name}": shape for name, shape in shared.items()}
            matrices |= {f"{at}.mlp.{SHARED_GATE}": (1, hidden)} if config.shared_gate else {}
        else:
            matrices |= {f"{at}.mlp.{name}": shape for name, shape in mlp.items()}
        for name, shape in matrices.items():
            shapes[f"{name}.weight"] = shape
            if name.rpartition(".")[2] in config.biases:
                shapes[f"{name}.bias"] = shape[:1]
    return shapes


def _attention_shapes(config: DecoderConfig) -> tuple[Shapes, Shapes]:
    """(matrices; norms)"""
    if config.latent is not None:
        return latent_shapes(config, config.latent)
    hidden = config.hidden_size
    wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim
    matrices: Shapes = {
        "q_proj": (2 * wide if config.gated else wide, hidden),
        "k_proj": (narrow, hidden),
        "v_proj": (narrow, hidden),
        "o_proj": (hidden, wide),
    }
    return matrices, {name: (config.head_dim,) for name in ("q_norm", "k_norm") if config.head_norms}


def _shared(config: DecoderConfig) -> str:
    """Families have it in two spellings."""
    return "shared_expert" if config.shared_gate else "shared_experts"


def _mlp_shapes(hidden: int, inner: int) -> Shapes:
    return {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}


def _expert_shapes(config: DecoderConfig, at: str) -> Shapes:
    assert config.moe is not None
    count, inner, hidden = config.moe.experts, config.moe.intermediate_size, config.hidden_size
    bias: Shapes = {} if config.routing is None else {f"{at}.gate.{CHOICE_BIAS}": (count,)}
    return bias | {
        f"{at}.gate.weight": (count, hidden),
        f"{at}.experts.gate_up_proj": (count, 2 * inner, hidden),
        f"{at}.experts.down_proj": (count, hidden, inner),
    }


def decoder_layout(config: DecoderConfig) -> Layout:
    """A storage layer for each layer, of keys and values or of a recurrent state."""
    heads, size, latent = config.kv_heads, config.head_dim, None
    if config.latent is not None:
        heads, size, latent = 1, config.latent.rank + config.head_dim, config.latent.rank
    kinds = [kind for kind in config.kinds if kind != LINEAR]
    layers = tuple(LayerKV(kind, heads, size, latent) for kind in kinds)
    windows = {kind: config.window if kind == SLIDING else None for kind in dict.fromkeys(kinds)}
    states = () if config.delta is None else (config.delta.storage,) * (len(config.kinds) - len(kinds))
    return Layout(layers, windows, states)


def storage_of(kinds: tuple[str, ...], index: int) -> int:
    """The number of a layer among those that keep what it keeps."""
    return [(kind == LINEAR) == (kinds[index] == LINEAR) for kind in kinds[:index]].count(True)


def inverse_frequencies(rotary: Rotary, head_dim: int) -> Tensor:
    """Radians per position of each pair of a head, float32 [head_dim / 2]; source: transformers' modeling_rope_utils."""
    turn = 1.0 / rotary.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rotary.kind == "linear":
        return turn / rotary.factor
    if rotary.kind == "yarn":
        first, last = (
            head_dim * math.log(rotary.original / (turns * 2 * math.pi)) / (2 * math.log(rotary.theta))
            for turns in (rotary.high, rotary.low)
        )  # the pairs that make so many turns
        begin, end = max(math.floor(first), 0), min(math.ceil(last), head_dim - 1)
        share = (torch.arange(head_dim // 2, dtype=torch.float32) - begin) / ((end - begin) or 0.001)
        share = share.clamp(0, 1)
        return turn / rotary.factor * share + turn * (1 - share)
    if rotary.kind != "llama3":
        return turn
    length = 2 * math.pi / turn  # of a wave, in positions
    smooth = (rotary.original / length - rotary.low) / (rotary.high - rotary.low)
    between = (1 - smooth) * turn / rotary.factor + smooth * turn
    scaled = torch.where(length > rotary.original / rotary.low, turn / rotary.factor, between)
    return torch.where(length < rotary.original / rotary.high, turn, scaled)


class DecoderTarget(GraphTarget):
    """A loaded model of one of these families."""

    def __init__(self, config: DecoderConfig, weights: Weights, runner: Runner, dtype: torch.dtype) -> None:
        super().__init__(config, weights, runner, dtype)
        self.config = config
        inv_freq = inverse_frequencies(config.rotary, config.rotated or config.head_dim).to(weights.device)
        self.layers = tuple(read_layer(weights, config, i, inv_freq) for i in range(len(config.kinds)))
        self.norm = self.norm + config.norm_shift
        self._set_layout(decoder_layout(config), attention_outputs(self.layers))

    def _hidden(self, ops: Ops) -> tuple[Value, ...]:
        x = ops.embed(ops.tokens(), self.embedding, self.embedding_scale)
        kept = [x] if 0 in self.tapped else []
        for i, layer in enumerate(self.layers):
            h = ops.rms_norm(x, layer.norm_in, self.config.eps)
            x = ops.add(x, attend(ops, h, layer.attention, self.config))
            h = ops.rms_norm(x, layer.norm_post, self.config.eps)
            x = ops.add(x, feed(ops, h, layer.mlp))
            if i + 1 in self.tapped:
                kept.append(x)
        return (ops.rms_norm(x, self.norm, self.config.eps), *kept)

    def _logits(self, ops: Ops) -> tuple[Value]:
        return (ops.linear(ops.given("hidden", self.hidden_size), self.head),)


def attention_outputs(layers: Iterable[Layer]) -> list[Weight]:
    """What the results of attention are multiplied with."""
    return [layer.attention.o.weight for layer in layers if not isinstance(layer.attention, DeltaNet)]


def attend(ops: Ops, h: Value, a: Attention | LatentAttention | DeltaNet, config: DecoderConfig) -> Value:
    """What a layer's attention adds to the row, of its normed input."""
    if isinstance(a, DeltaNet):
        return recur(ops, h, a, config.eps)
    if isinstance(a, LatentAttention):
        return attend_latent(ops, h, a, config)
    wide = config.heads * config.head_dim
    both, k, v = a.q(ops, h), a.k(ops, h), a.v(ops, h)
    q = ops.columns(both, 0, wide) if config.gated else both
    if a.q_norm is not None:
        q = ops.rms_norm(q, a.q_norm, config.eps, config.heads)
        k = ops.rms_norm(k, a.k_norm, config.eps, config.kv_heads)
    stretch = config.rotary.attention
    q = ops.scale(ops.rotary(q, a.inv_freq, config.heads, stretch), config.head_dim**-0.5)
    ops.store_kv(a.storage, ops.rotary(k, a.inv_freq, config.kv_heads, stretch), v)
    y = ops.attention(q, a.storage, config.heads, a.window, sees_itself=True)
    return a.o(ops, ops.gated(ops.columns(both, wide, 2 * wide), y, "sigmoid") if config.gated else y)


def store(ops: Ops, h: Value, a: Attention, config: DecoderConfig) -> None:
    """Write the row's K and V, of its normed input, and nothing else."""
    k, v = a.k(ops, h), a.v(ops, h)
    if a.k_norm is not None:
        k = ops.rms_norm(k, a.k_norm, config.eps, config.kv_heads)
    ops.store_kv(a.storage, ops.rotary(k, a.inv_freq, config.kv_heads, config.rotary.attention), v)


def feed(ops: Ops, h: Value, mlp: Mlp | Experts | Mixture) -> Value:
    """What a layer's MLP, or its experts, add to the row."""
    if isinstance(mlp, Mixture):
        shared = feed(ops, h, mlp.shared)
        if mlp.gate is not None:
            shared = ops.gated(ops.linear(h, mlp.gate), shared, "sigmoid")
        return ops.add(ops.moe(h, h, mlp.experts), shared)
    if isinstance(mlp, Experts):
        return ops.moe(h, h, mlp)
    return mlp.down(ops, ops.gated(mlp.gate(ops, h), mlp.up(ops, h), "silu"))


def read_layer(
    weights: Weights, config: DecoderConfig, index: int, inv_freq: Tensor, room: str = "layers"
) -> Layer:
    """One layer of a loaded model."""
    at = f"{room}.{index}"

    def linear(name: str) -> Linear:
        biased = name.rpartition(".")[2] in config.biases
        bias = weights.vector(f"{at}.{name}.bias") if biased else None
        return Linear(weights.matrix(f"{at}.{name}"), bias)

    def of_attention(name: str) -> Linear:
        return linear(f"self_attn.{name}")

    def norm(name: str) -> Tensor | None:
        return read_norm(weights, config, f"{at}.self_attn.{name}") if config.head_norms else None

    def dense(name: str) -> Mlp:
        return Mlp(*(linear(f"{name}.{part}_proj") for part in ("gate", "up", "down")))

    attention: Attention | LatentAttention | DeltaNet
    if config.kinds[index] == LINEAR:
        assert config.delta is not None
        attention = read_delta(weights, config.delta, f"{at}.linear_attn", storage_of(config.kinds, index))
    elif config.latent is not None:
        attention = read_latent(weights, f"{at}.self_attn", config, of_attention, inv_freq)
    else:
        q = of_attention("q_proj")
        attention = Attention(
            q=_gates_last(q, config.heads) if config.gated else q,
            k=of_attention("k_proj"),
            v=of_attention("v_proj"),
            o=of_attention("o_proj"),
            q_norm=norm("q_norm"),
            k_norm=norm("k_norm"),
            inv_freq=inv_freq,
            storage=storage_of(config.kinds, index),
            window=config.window if config.kinds[index] == SLIDING else None,
        )
    mlp: Mlp | Experts | Mixture
    if index in config.sparse:
        mlp = _read_experts(weights, config, f"{at}.mlp")
        if config.shared_expert:
            gate = weights.matrix(f"{at}.mlp.{SHARED_GATE}") if config.shared_gate else None
            mlp = Mixture(mlp, dense(f"mlp.{_shared(config)}"), gate)
    else:
        mlp = dense("mlp")
    before, after = f"{at}.input_layernorm", f"{at}.post_attention_layernorm"
    return Layer(attention, mlp, read_norm(weights, config, before), read_norm(weights, config, after))


def read_norm(weights: Weights, config: DecoderConfig, name: str) -> Tensor:
    """What a normed row is multiplied with."""
    return weights.norm(name) + config.norm_shift


def _gates_last(q: Linear, heads: int) -> Linear:
    """All queries, then all gates, which lie beside each other for each head."""
    ids = torch.arange(q.weight.out_features).view(heads, 2, -1).transpose(0, 1).flatten()
    return Linear(q.weight.rows(ids), None if q.bias is None else q.bias[ids])


def _read_experts(weights: Weights, config: DecoderConfig, at: str) -> Experts:
    assert config.moe is not None
    return Experts(
        router=weights.matrix(f"{at}.gate"),
        gate_up=weights.stack(f"{at}.experts.gate_up_proj"),
        down=weights.stack(f"{at}.experts.down_proj"),
        top_k=config.moe.top_k,
        activation="silu",
        renormalize=config.renormalize,
        **_routing(weights, config.routing, f"{at}.gate.{CHOICE_BIAS}"),
    )


def _routing(weights: Weights, routing: Routing | None, name: str) -> dict[str, Any]:
    if routing is None:
        return {}
    bias = weights.exact(name)
    scale = torch.full_like(bias, routing.factor)
    return {"choice_bias": bias, "groups": routing.groups, "kept_groups": routing.kept, "expert_scale": scale}
