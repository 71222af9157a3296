"""Nemotron-H: each layer has one part behind one norm: Mamba 2, attention without rotary embeddings, an MLP by squares of
ReLU, or experts of that kind beside one that all rows pass (Nemotron 3). Source of truth for the arithmetic:
transformers' models/nemotron_h.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoints.loading import Shapes, Weights
from paceline.errors import ConfigError
from paceline.kv.layout import LayerKV, Layout
from paceline.models.families import ModelSpec
from paceline.models.families.deepseek_v3 import with_routing
from paceline.models.fields import Fields, shown
from paceline.models.layers.attention import Attention, attend, attention_shapes
from paceline.models.layers.decoder_config import DecoderConfig, MambaConfig, parse_decoder
from paceline.models.layers.delta_net import LINEAR, MOST_KERNEL
from paceline.models.layers.linear import Linear, read_linear, read_norm
from paceline.models.layers.mamba import Mamba, mamba_shapes, read_mamba, scan
from paceline.models.layers.mlp import CHOICE_BIAS
from paceline.models.spec import FULL
from paceline.models.target import GraphTarget
from paceline.ops.base import Experts, Ops, Runner, Value

MLP, MOE = "mlp", "moe"
KINDS = {  # as configs name them, also in letters
    "mamba": LINEAR, LINEAR: LINEAR, "M": LINEAR, "attention": FULL, FULL: FULL, "*": FULL, MLP: MLP, "-": MLP, MOE: MOE,
    "E": MOE,
}  # fmt: skip
INWARD, OUTWARD = "fc1_latent_proj", "fc2_latent_proj"


@dataclass(frozen=True, slots=True, eq=False)
class SquaredMlp:
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    experts: Experts
    shared: SquaredMlp
    inward: Linear | None  # experts read and give rows of another width
    outward: Linear | None


Part = Mamba | Attention | SquaredMlp | Mixture


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    norm: Tensor  # [H]
    part: Part


def parse_nemotron(raw: Mapping[str, Any]) -> DecoderConfig:
    """Of type `nemotron_h`. Raises ConfigError."""
    fields = Fields(raw, "nemotron_h")
    fields.refuse("mlp_hidden_act", (None, "relu2"), "Nemotron-H uses relu2")
    fields.refuse("mamba_hidden_act", (None, "silu"), "its layers of Mamba use silu")
    fields.refuse("attention_bias", (None, False), "its attention has no biases")
    kinds = _kinds(fields)
    plain = {
        **raw,
        "num_hidden_layers": len(kinds),
        "rms_norm_eps": fields.number("layer_norm_epsilon", 1e-5),
        "head_dim": raw.get("head_dim", raw.get("attention_head_dim")),
    }
    config = parse_decoder(plain, kinds)
    heads, groups = fields.size("mamba_num_heads", 128), fields.size("n_groups", 8)
    kernel = fields.size("conv_kernel", 4, least=2)
    if heads % groups or kernel > MOST_KERNEL:
        raise ConfigError(
            f"nemotron_h: {heads} Mamba heads are no {groups} groups, or conv_kernel={kernel} is above {MOST_KERNEL}: "
            "download config.json again"
        )
    mamba = MambaConfig(
        heads, fields.size("mamba_head_dim", 64), groups, fields.size("ssm_state_size", 128), kernel,
        conv_bias=bool(raw.get("use_conv_bias", True)), biases=bool(raw.get("use_bias", False)), norm_groups=groups,
        decayed=bool(raw.get("gguf_layout")),
    )  # fmt: skip
    biases = frozenset(("up_proj", "down_proj", INWARD, OUTWARD) if raw.get("mlp_bias") else ())
    config = replace(config, delta=mamba, biases=biases, unturned=frozenset(range(len(kinds))))
    return _with_experts(config, raw) if MOE in kinds else config


def _with_experts(config: DecoderConfig, raw: Mapping[str, Any]) -> DecoderConfig:
    """Where layers have them; what a config leaves out is what transformers has in its place."""
    usual = {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0}
    fields = Fields({**usual, **raw, "n_shared_experts": 0, "first_k_dense_replace": 0}, "nemotron_h")
    config = with_routing(config, fields)
    assert config.moe is not None
    width = fields.size("moe_latent_size") if raw.get("moe_latent_size") is not None else None
    return replace(
        config,
        moe=replace(config.moe, width=width),
        sparse=frozenset(i for i, kind in enumerate(config.kinds) if kind == MOE),
        shared_expert=fields.size("moe_shared_expert_intermediate_size"),
    )


def _kinds(fields: Fields) -> tuple[str, ...]:
    """What each layer is, as listed or as letters."""
    given = fields.raw.get("layers_block_type", fields.raw.get("layer_types"))
    given = list(fields.raw.get("hybrid_override_pattern") or "") if given is None else given
    known = isinstance(given, list) and all(isinstance(kind, str) and kind in KINDS for kind in given)
    kinds = tuple(KINDS[kind] for kind in given) if known else ()
    if not {LINEAR, FULL} <= {*kinds}:
        raise ConfigError(
            f"nemotron_h: layers of {shown(given)} are not run, only of mamba, attention, mlp and moe, and the first two "
            "are needed: download config.json again"
        )
    return kinds


def nemotron_shapes(config: DecoderConfig) -> Shapes:
    """Name and shape of every tensor."""
    hidden, vocab, inner = config.hidden_size, config.vocab_size, config.intermediate_size
    assert isinstance(config.delta, MambaConfig)
    shapes: Shapes = {"embed_tokens.weight": (vocab, hidden), "norm.weight": (hidden,)}
    if not config.tied:
        shapes["lm_head.weight"] = (vocab, hidden)
    for i, kind in enumerate(config.kinds):
        at = f"layers.{i}.mixer"
        shapes[f"layers.{i}.norm.weight"] = (hidden,)
        if kind == LINEAR:
            shapes |= mamba_shapes(config.delta, hidden, at)
        elif kind == FULL:
            shapes |= {f"{at}.{name}.weight": shape for name, shape in attention_shapes(config)[0].items()}
        elif kind == MOE:
            shapes |= _mixture_shapes(config, at)
        else:
            shapes |= _squared_shapes(config, at, inner)
    return shapes


def _squared_shapes(config: DecoderConfig, at: str, inner: int) -> Shapes:
    hidden = config.hidden_size
    return _with_biases(config, at, {"up_proj": (inner, hidden), "down_proj": (hidden, inner)})


def _with_biases(config: DecoderConfig, at: str, matrices: Shapes) -> Shapes:
    biases = {f"{at}.{name}.bias": shape[:1] for name, shape in matrices.items() if name in config.biases}
    return {f"{at}.{name}.weight": shape for name, shape in matrices.items()} | biases


def _mixture_shapes(config: DecoderConfig, at: str) -> Shapes:
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None
    width = moe.width or hidden
    shapes: Shapes = {
        f"{at}.gate.weight": (moe.experts, hidden),
        f"{at}.gate.{CHOICE_BIAS}": (moe.experts,),
        f"{at}.experts.up_proj": (moe.experts, moe.intermediate_size, width),
        f"{at}.experts.down_proj": (moe.experts, width, moe.intermediate_size),
    }
    if moe.width is not None:
        shapes |= _with_biases(config, at, {INWARD: (width, hidden), OUTWARD: (hidden, width)})
    return shapes | _squared_shapes(config, f"{at}.shared_experts", config.shared_expert)


def nemotron_layout(config: DecoderConfig) -> Layout:
    """A storage layer for each one of attention, a state for each one of Mamba."""
    assert isinstance(config.delta, MambaConfig)
    layer = LayerKV(FULL, config.kv_heads, config.head_dim)
    states = (config.delta.storage,) * config.kinds.count(LINEAR)
    return Layout((layer,) * config.kinds.count(FULL), {FULL: None}, states)


class NemotronTarget(GraphTarget):
    """A loaded model."""

    def __init__(self, config: DecoderConfig, weights: Weights, runner: Runner, dtype: torch.dtype) -> None:
        super().__init__(config, weights, runner, dtype)
        self.config = config
        self.blocks = tuple(_read_block(weights, config, i) for i in range(len(config.kinds)))
        outputs = [block.part.o.weight for block in self.blocks if isinstance(block.part, Attention)]
        self._set_layout(nemotron_layout(config), outputs)

    def _hidden(self, ops: Ops) -> tuple[Value, ...]:
        config = self.config
        x = ops.embed(ops.tokens(), self.embedding, 1.0)
        taps = [x] if 0 in self.tapped else []
        for i, block in enumerate(self.blocks):
            x = ops.add(x, _part(ops, ops.rms_norm(x, block.norm, config.eps), block.part, config))
            if i + 1 in self.tapped:
                taps.append(x)
        return (ops.rms_norm(x, self.norm, config.eps), *taps)

    def _logits(self, ops: Ops) -> tuple[Value]:
        return (ops.linear(ops.given("hidden", self.hidden_size), self.head),)


def _part(ops: Ops, h: Value, part: Part, config: DecoderConfig) -> Value:
    if isinstance(part, Mamba):
        return scan(ops, h, part, config.eps)
    if isinstance(part, Attention):
        return attend(ops, h, part, config)
    if isinstance(part, Mixture):
        inner = h if part.inward is None else part.inward(ops, h)
        mixed = ops.moe(h, inner, part.experts)
        mixed = mixed if part.outward is None else part.outward(ops, mixed)
        return ops.add(mixed, _squared(ops, h, part.shared))
    return _squared(ops, h, part)


def _squared(ops: Ops, h: Value, mlp: SquaredMlp) -> Value:
    up = mlp.up(ops, h)
    return mlp.down(ops, ops.gated(up, up, "relu"))


def _read_block(weights: Weights, config: DecoderConfig, index: int) -> Block:
    at, kind = f"layers.{index}.mixer", config.kinds[index]
    norm, storage = read_norm(weights, config, f"layers.{index}.norm"), config.kinds[:index].count(kind)
    if kind == LINEAR:
        assert isinstance(config.delta, MambaConfig)
        return Block(norm, read_mamba(weights, config.delta, at, storage))
    if kind == MLP:
        return Block(norm, _read_squared(weights, config, at))
    if kind == MOE:
        return Block(norm, _read_mixture(weights, config, at))
    q, k, v, o = (read_linear(weights, config, f"{at}.{name}_proj") for name in "qkvo")
    return Block(norm, Attention(q, k, v, o, None, None, None, storage, None))


def _read_squared(weights: Weights, config: DecoderConfig, at: str) -> SquaredMlp:
    up, down = (read_linear(weights, config, f"{at}.{name}_proj") for name in ("up", "down"))
    return SquaredMlp(up, down)


def _read_mixture(weights: Weights, config: DecoderConfig, at: str) -> Mixture:
    moe, routing = config.moe, config.routing
    assert moe is not None
    assert routing is not None
    bias = weights.exact(f"{at}.gate.{CHOICE_BIAS}").view(-1)
    experts = Experts(
        weights.matrix(f"{at}.gate"), weights.stack(f"{at}.experts.up_proj"), weights.stack(f"{at}.experts.down_proj"),
        moe.top_k, "squared", config.renormalize, choice_bias=bias, groups=routing.groups, kept_groups=routing.kept,
        expert_scale=torch.full_like(bias, routing.factor),
    )  # fmt: skip
    ways = [
        None if moe.width is None else read_linear(weights, config, f"{at}.{name}")
        for name in (INWARD, OUTWARD)
    ]
    return Mixture(experts, _read_squared(weights, config, f"{at}.shared_experts"), *ways)


SPEC = ModelSpec(parse_nemotron, nemotron_shapes, nemotron_layout, NemotronTarget)
