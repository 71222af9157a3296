"""Mamba 2: a layer whose memory of a text is a state of one size, as that of linear attention (delta_net.py) by a plainer
rule. The state, and what rows hold that it is brought on from, are those of kv/states.py.

Source of truth for the arithmetic: transformers' models/mamba2, granitemoehybrid and nemotron_h.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.checkpoints.loading import Shapes, Weights
from paceline.models.layers.decoder_config import MambaConfig
from paceline.models.layers.linear import Linear
from paceline.ops.base import DeltaRule, Ops, Value


@dataclass(frozen=True, slots=True, eq=False)
class Mamba:
    """Projections: C, B and x, in the place of q, k and v; the gate of the output; the step of time."""

    qkv: Linear
    z: Linear
    dt: Linear
    rule: DeltaRule
    norm: Tensor  # [inner]
    o: Linear
    storage: int
    norm_groups: int


def mamba_shapes(config: MambaConfig, hidden: int, at: str) -> Shapes:
    """Name and shape of every tensor of a layer."""
    single, row = ((1,), ()) if config.decayed else ((), (1,))
    groups = (config.groups, config.inner // config.groups) if config.decayed else (config.inner,)
    shapes: Shapes = {
        f"{at}.in_proj.weight": (config.inner + config.channels + config.heads, hidden),
        f"{at}.conv1d.weight": (config.channels, *row, config.kernel),
        f"{at}.dt_bias": (config.heads,),
        f"{at}.A_log": (config.heads, *single),
        f"{at}.D": (config.heads, *single),
        f"{at}.norm.weight": groups,
        f"{at}.out_proj.weight": (hidden, config.inner),
    }
    if config.conv_bias:
        shapes[f"{at}.conv1d.bias"] = (config.channels,)
    if config.biases:
        shapes |= {f"{at}.{name}.bias": shapes[f"{at}.{name}.weight"][:1] for name in ("in_proj", "out_proj")}
    return shapes


def read_mamba(weights: Weights, config: MambaConfig, at: str, storage: int) -> Mamba:
    """A layer of a loaded model. Files have the gate, then x, B and C, then the steps."""

    def linear(name: str) -> Linear:
        bias = weights.vector(f"{at}.{name}.bias") if config.biases else None
        return Linear(weights.matrix(f"{at}.{name}"), bias)

    inner, keys = config.inner, config.groups * config.state
    x, b, c = torch.split(torch.arange(config.channels), [inner, keys, keys])
    order, whole = torch.cat((c, b, x)), linear("in_proj")
    conv = weights.vector(f"{at}.conv1d.weight").view(config.channels, -1)[order.to(weights.device)]
    bias = weights.vector(f"{at}.conv1d.bias")[order.to(weights.device)] if config.conv_bias else None
    decay = weights.vector(f"{at}.A_log").view(-1)
    rule = DeltaRule(
        config.groups, config.heads, config.state, config.head_dim, conv.T.contiguous(),
        weights.vector(f"{at}.dt_bias"), decay if config.decayed else -decay.exp(), plain=True, conv_bias=bias,
        skip=weights.vector(f"{at}.D").view(-1),
    )  # fmt: skip
    return Mamba(
        qkv=whole.rows(inner + order),
        z=whole.rows(torch.arange(inner)),
        dt=whole.rows(torch.arange(inner + config.channels, whole.weight.out_features)),
        rule=rule,
        norm=weights.norm(f"{at}.norm").view(-1),
        o=linear("out_proj"),
        storage=storage,
        norm_groups=config.norm_groups,
    )


def scan(ops: Ops, h: Value, net: Mamba, eps: float) -> Value:
    """What such a layer adds to the row, of its normed input."""
    step = net.dt(ops, h)
    y = ops.delta_rule(net.qkv(ops, h), step, step, net.storage, net.rule)
    y = ops.gated(net.z(ops, h), y, "silu")
    return net.o(ops, ops.rms_norm(y, net.norm, eps, net.norm_groups))
