"""Nemotron-H: each layer has one part behind one norm: Mamba 2, attention without rotary embeddings, or an MLP by squares
of ReLU. Source of truth for the arithmetic: transformers' models/nemotron_h.
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
from paceline.models.fields import Fields, shown
from paceline.models.layers.attention import Attention, attend, attention_shapes
from paceline.models.layers.decoder_config import DecoderConfig, MambaConfig, parse_decoder
from paceline.models.layers.delta_net import LINEAR, MOST_KERNEL
from paceline.models.layers.linear import Linear, read_linear, read_norm
from paceline.models.layers.mamba import Mamba, mamba_shapes, read_mamba, scan
from paceline.models.spec import FULL
from paceline.models.target import GraphTarget
from paceline.ops.base import Ops, Runner, Value

MLP = "mlp"
KINDS = {  # as configs name them, also in letters
    "mamba": LINEAR, LINEAR: LINEAR, "M": LINEAR, "attention": FULL, FULL: FULL, "*": FULL, MLP: MLP, "-": MLP,
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class SquaredMlp:
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    norm: Tensor  # [H]
    part: Mamba | Attention | SquaredMlp


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
    biases = frozenset(("up_proj", "down_proj") if raw.get("mlp_bias") else ())
    return replace(config, delta=mamba, biases=biases, unturned=frozenset(range(len(kinds))))


def _kinds(fields: Fields) -> tuple[str, ...]:
    """What each layer is, as listed or as letters."""
    given = fields.raw.get("layers_block_type", fields.raw.get("layer_types"))
    given = list(fields.raw.get("hybrid_override_pattern") or "") if given is None else given
    known = isinstance(given, list) and all(isinstance(kind, str) and kind in KINDS for kind in given)
    kinds = tuple(KINDS[kind] for kind in given) if known else ()
    if not {LINEAR, FULL} <= {*kinds}:
        raise ConfigError(
            f"nemotron_h: layers of {shown(given)} are not run, only of mamba, attention and mlp, of which the first two "
            "are needed: use a Nemotron-H without experts"
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
        else:
            matrices = {"up_proj": (inner, hidden), "down_proj": (hidden, inner)}
            shapes |= {f"{at}.{name}.weight": shape for name, shape in matrices.items()}
            shapes |= {f"{at}.{name}.bias": matrices[name][:1] for name in config.biases}
    return shapes


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


def _part(ops: Ops, h: Value, part: Mamba | Attention | SquaredMlp, config: DecoderConfig) -> Value:
    if isinstance(part, Mamba):
        return scan(ops, h, part, config.eps)
    if isinstance(part, Attention):
        return attend(ops, h, part, config)
    up = part.up(ops, h)
    return part.down(ops, ops.gated(up, up, "relu"))


def _read_block(weights: Weights, config: DecoderConfig, index: int) -> Block:
    at, kind = f"layers.{index}.mixer", config.kinds[index]
    norm, storage = read_norm(weights, config, f"layers.{index}.norm"), config.kinds[:index].count(kind)
    if kind == LINEAR:
        assert isinstance(config.delta, MambaConfig)
        return Block(norm, read_mamba(weights, config.delta, at, storage))
    if kind == MLP:
        up, down = (read_linear(weights, config, f"{at}.{name}_proj") for name in ("up", "down"))
        return Block(norm, SquaredMlp(up, down))
    q, k, v, o = (read_linear(weights, config, f"{at}.{name}_proj") for name in "qkvo")
    return Block(norm, Attention(q, k, v, o, None, None, None, storage, None))


SPEC = ModelSpec(parse_nemotron, nemotron_shapes, nemotron_layout, NemotronTarget)
