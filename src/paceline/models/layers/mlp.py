"""What a layer adds to a row after attention: a gated MLP, experts, or experts beside one that every row passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from paceline.checkpoints.loading import Shapes, Weights
from paceline.models.layers.decoder_config import DecoderConfig, Routing
from paceline.models.layers.linear import Linear, read_linear
from paceline.ops.base import Activation, Experts, Ops, Value, Weight

CHOICE_BIAS, SHARED_GATE = "e_score_correction_bias", "shared_expert_gate"
# fields of `Experts` -> tensors within `mlp`
EXPERT_BIASES = {
    "router_bias": "gate.bias", "gate_up_bias": "experts.gate_up_bias", "down_bias": "experts.down_bias",
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Mlp:
    gate: Linear
    up: Linear
    down: Linear
    activation: Activation = "silu"


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    """Experts beside one that every row passes."""

    experts: Experts
    shared: Mlp
    gate: Weight | None  # [1, H], of the shared one


def _shared_name(config: DecoderConfig) -> str:
    """Families have it in two spellings."""
    return "shared_expert" if config.shared_gate else "shared_experts"


def _dense_shapes(hidden: int, inner: int) -> Shapes:
    return {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}


def mlp_shapes(config: DecoderConfig, index: int) -> tuple[Shapes, Shapes]:
    """(matrices of layer `index`, which may have biases; tensors named in full), named as within `mlp`."""
    hidden = config.hidden_size
    if index not in config.sparse:
        inner = config.intermediate_size
        if "gate_up" in config.fused:
            return {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}, {}
        return _dense_shapes(hidden, inner), {}
    if "gate_up" in config.fused and config.shared_expert:  # named as an MLP alone
        inner = config.shared_expert
        return {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}, _expert_shapes(config)
    shared = _dense_shapes(hidden, config.shared_expert) if config.shared_expert else {}
    matrices: Shapes = {f"{_shared_name(config)}.{name}": shape for name, shape in shared.items()}
    return matrices | ({SHARED_GATE: (1, hidden)} if config.shared_gate else {}), _expert_shapes(config)


def _expert_shapes(config: DecoderConfig) -> Shapes:
    assert config.moe is not None
    count, inner, hidden = config.moe.experts, config.moe.intermediate_size, config.hidden_size
    routing = config.routing
    bias: Shapes = {}
    if routing is not None:
        bias[f"gate.{CHOICE_BIAS}"] = (1, count) if routing.softmax else (count,)
    if config.biased_experts:
        sizes = (count,), (count, 2 * inner), (count, hidden)
        bias |= dict(zip(EXPERT_BIASES.values(), sizes))
    return bias | {
        "gate.weight": (count, hidden),
        "experts.gate_up_proj": (count, 2 * inner, hidden),
        "experts.down_proj": (count, hidden, inner),
    }


def feed(ops: Ops, h: Value, mlp: Mlp | Experts | Mixture) -> Value:
    """What a layer's MLP, or its experts, add to the row."""
    if isinstance(mlp, Mixture):
        shared = feed(ops, h, mlp.shared)
        if mlp.gate is not None:
            shared = ops.gated(ops.linear(h, mlp.gate), shared, "sigmoid")
        return ops.add(ops.moe(h, h, mlp.experts), shared)
    if isinstance(mlp, Experts):
        return ops.moe(h, h, mlp)
    return mlp.down(ops, ops.gated(mlp.gate(ops, h), mlp.up(ops, h), mlp.activation))


def read_mlp(weights: Weights, config: DecoderConfig, index: int, at: str) -> Mlp | Experts | Mixture:
    """The MLP of layer `index`, whose tensors are named `at`.*"""

    def dense(name: str) -> Mlp:
        gate, up, down = (
            read_linear(weights, config, f"{name}.{part}_proj") for part in ("gate", "up", "down")
        )
        return Mlp(gate, up, down, config.activation)

    def fused() -> Mlp:
        both, down = (read_linear(weights, config, f"{at}.{part}_proj") for part in ("gate_up", "down"))
        inner = both.weight.out_features // 2
        return Mlp(both.rows(slice(0, inner)), both.rows(slice(inner, 2 * inner)), down, config.activation)

    if index not in config.sparse:
        return fused() if "gate_up" in config.fused else dense(at)
    experts = _read_experts(weights, config, at)
    if not config.shared_expert:
        return experts
    if "gate_up" in config.fused:
        return Mixture(experts, fused(), None)
    gate = weights.matrix(f"{at}.{SHARED_GATE}") if config.shared_gate else None
    return Mixture(experts, dense(f"{at}.{_shared_name(config)}"), gate)


def _read_experts(weights: Weights, config: DecoderConfig, at: str) -> Experts:
    assert config.moe is not None
    return Experts(
        router=weights.matrix(f"{at}.gate"),
        gate_up=weights.stack(f"{at}.experts.gate_up_proj"),
        down=weights.stack(f"{at}.experts.down_proj"),
        top_k=config.moe.top_k,
        activation="clamped" if config.biased_experts else "silu",
        renormalize=config.renormalize,
        **_routing(weights, config.routing, f"{at}.gate.{CHOICE_BIAS}"),
        **_biases(weights, config, at),
    )


def _biases(weights: Weights, config: DecoderConfig, at: str) -> dict[str, Any]:
    names = EXPERT_BIASES if config.biased_experts else {}
    return {field: weights.vector(f"{at}.{name}") for field, name in names.items()}


def _routing(weights: Weights, routing: Routing | None, name: str) -> dict[str, Any]:
    if routing is None:
        return {}
    bias = weights.exact(name).view(-1)
    scale = torch.full_like(bias, routing.factor)
    return {
        "choice_bias": bias,
        "groups": routing.groups,
        "kept_groups": routing.kept,
        "expert_scale": scale,
        "softmax": routing.softmax,
    }
