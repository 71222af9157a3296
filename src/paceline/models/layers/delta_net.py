"""Gated delta net: a layer of linear attention, whose memory of a text is a state of one size however long it is.

Source of truth for the arithmetic: transformers' models/qwen3_next and qwen3_5, GatedDeltaNet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.checkpoints.loading import Shapes, Weights
from paceline.errors import ConfigError
from paceline.kv.layout import LayerState
from paceline.models.fields import Fields
from paceline.ops.base import DeltaRule, Ops, Value, Weight

LINEAR = "linear_attention"
MOST_KERNEL = 8


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """Sizes of such layers. `grouped`: projections lie side by side for each key head, as Qwen3-Next has them. `decayed`:
    as llama.cpp writes them, A_log holds the decay itself, and of grouped ones those of the rates alone are so. `tiled`:
    value head v reads key head v mod key_heads."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    grouped: bool = False
    tiled: bool = False
    decayed: bool = False

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Columns that the convolution goes over: queries, keys, values."""
        return 2 * self.keys + self.values

    @property
    def storage(self) -> LayerState:
        width = self.channels + 2 * self.value_heads
        return LayerState(self.value_heads, self.key_dim, self.value_dim, width, self.kernel - 1)


@dataclass(frozen=True, slots=True, eq=False)
class DeltaNet:
    """Projections: q, k and v; gate of the output; rate of change; rate of decay."""

    qkv: Weight
    z: Weight
    b: Weight
    a: Weight
    rule: DeltaRule
    norm: Tensor  # [value_dim]
    o: Weight
    storage: int


def parse_delta(fields: Fields, grouped: bool, decayed: bool) -> DeltaConfig:
    """llama.cpp tiles the heads of models whose projections are not grouped. Raises ConfigError."""
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    keys, values, key_dim, value_dim = (fields.size(name) for name in names)
    kernel = fields.size("linear_conv_kernel_dim", least=2)
    if values % keys or kernel > MOST_KERNEL:
        raise ConfigError(
            f"{fields.where}: linear attention of {values} value heads over {keys} key heads with a convolution over "
            f"{kernel} rows is not possible: value heads are a multiple of key heads, rows at most {MOST_KERNEL}"
        )
    return DeltaConfig(keys, values, key_dim, value_dim, kernel, grouped, decayed and not grouped, decayed)


def delta_shapes(config: DeltaConfig, hidden: int, at: str) -> Shapes:
    """Name and shape of every tensor of a layer."""
    heads = config.value_heads
    inputs = {
        "in_proj_qkv": config.channels,
        "in_proj_z": config.values,
        "in_proj_b": heads,
        "in_proj_a": heads,
    }
    if config.grouped:
        whole = {"in_proj_qkvz": config.channels + config.values}
        apart = {"in_proj_qkv": config.channels, "in_proj_z": config.values}
        inputs = (apart if config.decayed else whole) | {"in_proj_ba": 2 * heads}
    shapes: Shapes = {f"{at}.{name}.weight": (width, hidden) for name, width in inputs.items()}
    return shapes | {
        f"{at}.conv1d.weight": (config.channels, *(() if config.decayed else (1,)), config.kernel),
        f"{at}.dt_bias": (heads,),
        f"{at}.A_log": (heads,),
        f"{at}.norm.weight": (config.value_dim,),
        f"{at}.out_proj.weight": (hidden, config.values),
    }


def read_delta(weights: Weights, config: DeltaConfig, at: str, storage: int) -> DeltaNet:
    """A layer of a loaded model."""
    if config.grouped:
        b, a = _rates(weights.matrix(f"{at}.in_proj_ba"), config)
        if config.decayed:
            qkv, z = weights.matrix(f"{at}.in_proj_qkv"), weights.matrix(f"{at}.in_proj_z")
        else:
            qkv, z = _ungrouped(weights.matrix(f"{at}.in_proj_qkvz"), config)
    else:
        qkv, z, b, a = (weights.matrix(f"{at}.in_proj_{name}") for name in ("qkv", "z", "b", "a"))
    decay = weights.vector(f"{at}.A_log")
    rule = DeltaRule(
        config.key_heads,
        config.value_heads,
        config.key_dim,
        config.value_dim,
        weights.vector(f"{at}.conv1d.weight").view(config.channels, -1).T.contiguous(),
        weights.vector(f"{at}.dt_bias"),
        decay if config.decayed else -decay.exp(),
        config.tiled,
    )
    return DeltaNet(qkv, z, b, a, rule, weights.norm(f"{at}.norm"), weights.matrix(f"{at}.out_proj"), storage)


def _ungrouped(qkvz: Weight, config: DeltaConfig) -> tuple[Weight, Weight]:
    """The projections one after the other, of those that lie side by side for each key head."""
    per = config.value_heads // config.key_heads
    sizes = [config.key_dim] * 2 + [per * config.value_dim] * 2
    wide = torch.arange(qkvz.out_features).view(config.key_heads, -1)
    q, k, v, z = (part.flatten() for part in torch.split(wide, sizes, dim=1))
    return qkvz.rows(torch.cat((q, k, v))), qkvz.rows(z)


def _rates(ba: Weight, config: DeltaConfig) -> tuple[Weight, Weight]:
    b, a = (
        part.flatten() for part in torch.arange(ba.out_features).view(config.key_heads, -1).chunk(2, dim=1)
    )
    return ba.rows(b), ba.rows(a)


def recur(ops: Ops, h: Value, net: DeltaNet, eps: float) -> Value:
    """What such a layer adds to the row, of its normed input."""
    qkv, z = ops.linear(h, net.qkv), ops.linear(h, net.z)
    y = ops.delta_rule(qkv, ops.linear(h, net.b), ops.linear(h, net.a), net.storage, net.rule)
    y = ops.rms_norm(y, net.norm, eps, net.rule.value_heads)
    return ops.linear(ops.gated(z, y, "silu"), net.o)
