"""The decoder layer that Gemma 4 targets and their MTP drafters share, as a graph over `Ops`.

A layer either owns K/V (storage index, writes before it reads) or reads another layer's. A drafter's layers
read the target's and see committed keys only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.checkpoints.loading import Shapes, Weights
from paceline.kv.layout import LayerKV, Layout
from paceline.models.families.gemma4.config import GemmaConfig, LayerConfig
from paceline.models.spec import FULL, SLIDING, MoeConfig, Split
from paceline.models.towers.base import BUDGETS
from paceline.ops.base import Experts, Ops, Value, Weight


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    q: Weight
    o: Weight
    q_norm: Tensor  # [head_dim]
    k: Weight | None  # None: no K/V of its own
    v: Weight | None  # None beside k: values are the raw keys
    k_norm: Tensor | None  # [head_dim]
    inv_freq: Tensor  # [head_dim / 2]
    storage: int  # storage layer that is read, and written if k is given
    heads: int
    kv_heads: int
    window: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Moe:
    experts: Experts
    post_dense: Tensor  # norm of the dense branch [H]
    pre: Tensor  # [H]
    post: Tensor  # [H]


@dataclass(frozen=True, slots=True, eq=False)
class PerLayerEmbeddings:
    """How one layer takes in its per-layer embedding of width P."""

    gate: Weight  # [P, H]
    projection: Weight  # [H, P]
    norm: Tensor  # [H]


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    attention: Attention
    gate: Weight
    up: Weight
    down: Weight
    norm_in: Tensor  # norms are float32 [H]
    norm_attention: Tensor
    norm_pre: Tensor
    norm_post: Tensor
    scalar: float
    moe: Moe | None
    ple: PerLayerEmbeddings | None


def layout_of(config: GemmaConfig) -> Layout:
    owners = [layer for layer in config.layers if not layer.shared]
    return Layout(
        tuple(LayerKV(layer.kind, layer.kv_heads, layer.head_dim) for layer in owners),
        {kind: config.window_of(kind) for kind in (SLIDING, FULL)},
        run=max(BUDGETS) if config.bidirectional and "vision" in config.modalities else 0,
    )


def split_gemma(config: GemmaConfig) -> Split:
    """What of it can be sharded among ranks."""
    inner = [layer.intermediate_size for layer in config.layers]
    if config.moe is not None:
        inner.append(config.moe.intermediate_size)

    def local(heads: int, kv_heads: tuple[int, ...]) -> GemmaConfig:
        layers = [replace(layer, kv_heads=kv) for layer, kv in zip(config.layers, kv_heads, strict=True)]
        return replace(config, heads=heads, layers=tuple(layers))

    return Split(config.heads, tuple(layer.kv_heads for layer in config.layers), tuple(inner), local)


def inverse_frequencies(config: GemmaConfig, layer: LayerConfig) -> Tensor:
    """Radians per position of each pair of a head, float32 [head_dim / 2]; 0 for pairs that do not rotate."""
    rope = config.rope[layer.kind]
    turning = int(rope.partial * layer.head_dim // 2)
    exponent = torch.arange(0, 2 * turning, 2, dtype=torch.float32) / layer.head_dim
    still = torch.zeros(layer.head_dim // 2 - turning)
    return torch.cat((1.0 / rope.theta**exponent, still)) / rope.factor


def decoder_layer(
    ops: Ops, x: Value, layer: Layer, eps: float, ple: Value | None, *, sees_itself: bool | None = True
) -> Value:
    """x [N, H], ple [N, P] or None -> [N, H]. `sees_itself`: rows see themselves; False: committed keys only; None: all
    rows of a run see each other.
    """
    h = ops.rms_norm(x, layer.norm_in, eps)
    h = _attend(ops, h, layer.attention, eps, sees_itself)
    x = ops.add(x, ops.rms_norm(h, layer.norm_attention, eps))
    h = ops.rms_norm(x, layer.norm_pre, eps)
    h = ops.linear(ops.gated(ops.linear(h, layer.gate), ops.linear(h, layer.up), "gelu"), layer.down)
    if layer.moe is not None:
        dense = ops.rms_norm(h, layer.moe.post_dense, eps)
        sparse = ops.moe(x, ops.rms_norm(x, layer.moe.pre, eps), layer.moe.experts)
        h = ops.add(dense, ops.rms_norm(sparse, layer.moe.post, eps))
    x = ops.add(x, ops.rms_norm(h, layer.norm_post, eps))
    if layer.ple is not None:
        assert ple is not None
        h = ops.mul(ops.gelu(ops.linear(x, layer.ple.gate)), ple)
        x = ops.add(x, ops.rms_norm(ops.linear(h, layer.ple.projection), layer.ple.norm, eps))
    return x if layer.scalar == 1.0 else ops.scale(x, layer.scalar)


def _attend(ops: Ops, h: Value, a: Attention, eps: float, sees_itself: bool | None) -> Value:
    q = ops.rotary(ops.rms_norm(ops.linear(h, a.q), a.q_norm, eps, a.heads), a.inv_freq, a.heads)
    store(ops, h, a, eps)
    if sees_itself is None:
        return ops.linear(ops.block_attention(q, a.storage, a.heads, a.window), a.o)
    return ops.linear(ops.attention(q, a.storage, a.heads, a.window, sees_itself), a.o)


def store(ops: Ops, h: Value, a: Attention, eps: float) -> None:
    """Write the row's K and V, of its normed input, where the layer has some of its own."""
    if a.k is not None:
        raw = ops.linear(h, a.k)
        k = ops.rotary(ops.rms_norm(raw, a.k_norm, eps, a.kv_heads), a.inv_freq, a.kv_heads)
        v = ops.rms_norm(raw if a.v is None else ops.linear(h, a.v), None, eps, a.kv_heads)
        ops.store_kv(a.storage, k, v)


def read_layers(weights: Weights, config: GemmaConfig, layout: Layout) -> tuple[Layer, ...]:
    """All layers of `config`. `layout`: the K/V storage that they read, for a drafter the target's."""
    turns: dict[
        tuple[str, int], Tensor
    ] = {}  # one tensor per kind: what depends on it is shared by its layers
    layers, owned = [], 0
    for i, spec in enumerate(config.layers):
        key = (spec.kind, spec.head_dim)
        if key not in turns:
            turns[key] = inverse_frequencies(config, spec).to(weights.device)
        storage = layout.last_of(spec.kind) if spec.shared else owned
        owned += not spec.shared
        layers.append(_read_layer(weights, config, i, turns[key], storage))
    return tuple(layers)


def _read_layer(weights: Weights, config: GemmaConfig, index: int, inv_freq: Tensor, storage: int) -> Layer:
    at, spec = f"layers.{index}", config.layers[index]
    norm, matrix = weights.norm, weights.matrix
    own = not spec.shared
    attention = Attention(
        q=matrix(f"{at}.self_attn.q_proj"),
        o=matrix(f"{at}.self_attn.o_proj"),
        q_norm=norm(f"{at}.self_attn.q_norm"),
        k=matrix(f"{at}.self_attn.k_proj") if own else None,
        v=matrix(f"{at}.self_attn.v_proj") if own and not spec.k_eq_v else None,
        k_norm=norm(f"{at}.self_attn.k_norm") if own else None,
        inv_freq=inv_freq,
        storage=storage,
        heads=config.heads,
        kv_heads=spec.kv_heads,
        window=config.window_of(spec.kind),
    )
    ple = None
    if config.ple_size:
        ple = PerLayerEmbeddings(
            matrix(f"{at}.per_layer_input_gate"),
            matrix(f"{at}.per_layer_projection"),
            norm(f"{at}.post_per_layer_input_norm"),
        )
    return Layer(
        attention=attention,
        gate=matrix(f"{at}.mlp.gate_proj"),
        up=matrix(f"{at}.mlp.up_proj"),
        down=matrix(f"{at}.mlp.down_proj"),
        norm_in=norm(f"{at}.input_layernorm"),
        norm_attention=norm(f"{at}.post_attention_layernorm"),
        norm_pre=norm(f"{at}.pre_feedforward_layernorm"),
        norm_post=norm(f"{at}.post_feedforward_layernorm"),
        scalar=float(weights.vector(f"{at}.layer_scalar")),
        moe=_read_moe(weights, config, at) if config.moe else None,
        ple=ple,
    )


def _read_moe(weights: Weights, config: GemmaConfig, at: str) -> Moe:
    assert config.moe is not None
    experts = Experts(
        router=weights.matrix(f"{at}.router.proj"),
        router_scale=weights.vector(f"{at}.router.scale") * config.hidden_size**-0.5,
        expert_scale=weights.vector(f"{at}.router.per_expert_scale"),
        gate_up=weights.stack(f"{at}.experts.gate_up_proj"),
        down=weights.stack(f"{at}.experts.down_proj"),
        top_k=config.moe.top_k,
        activation="gelu",
        eps=config.eps,
    )
    return Moe(
        experts,
        weights.norm(f"{at}.post_feedforward_layernorm_1"),
        weights.norm(f"{at}.pre_feedforward_layernorm_2"),
        weights.norm(f"{at}.post_feedforward_layernorm_2"),
    )


def layer_shapes(config: GemmaConfig) -> Shapes:
    """Name and shape of every tensor that `read_layers` takes."""
    shapes: Shapes = {}
    hidden, p = config.hidden_size, config.ple_size
    for i, spec in enumerate(config.layers):
        at, d, wide = f"layers.{i}", spec.head_dim, spec.intermediate_size
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            shapes[f"{at}.{name}_layernorm.weight"] = (hidden,)
        shapes[f"{at}.layer_scalar"] = (1,)
        shapes[f"{at}.mlp.gate_proj.weight"] = shapes[f"{at}.mlp.up_proj.weight"] = (wide, hidden)
        shapes[f"{at}.mlp.down_proj.weight"] = (hidden, wide)
        shapes[f"{at}.self_attn.q_proj.weight"] = (config.heads * d, hidden)
        shapes[f"{at}.self_attn.o_proj.weight"] = (hidden, config.heads * d)
        shapes[f"{at}.self_attn.q_norm.weight"] = (d,)
        if not spec.shared:
            shapes[f"{at}.self_attn.k_norm.weight"] = (d,)
            shapes[f"{at}.self_attn.k_proj.weight"] = (spec.kv_heads * d, hidden)
            if not spec.k_eq_v:
                shapes[f"{at}.self_attn.v_proj.weight"] = (spec.kv_heads * d, hidden)
        if p:
            shapes[f"{at}.per_layer_input_gate.weight"] = (p, hidden)
            shapes[f"{at}.per_layer_projection.weight"] = (hidden, p)
            shapes[f"{at}.post_per_layer_input_norm.weight"] = (hidden,)
        if config.moe is not None:
            shapes |= _moe_shapes(at, hidden, config.moe)
    return shapes


def _moe_shapes(at: str, hidden: int, moe: MoeConfig) -> Shapes:
    norms = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
    return {f"{at}.{name}.weight": (hidden,) for name in norms} | {
        f"{at}.router.proj.weight": (moe.experts, hidden),
        f"{at}.router.scale": (hidden,),
        f"{at}.router.per_expert_scale": (moe.experts,),
        f"{at}.experts.gate_up_proj": (moe.experts, 2 * moe.intermediate_size, hidden),
        f"{at}.experts.down_proj": (moe.experts, hidden, moe.intermediate_size),
    }
