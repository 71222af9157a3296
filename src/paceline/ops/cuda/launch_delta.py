"""Launches of linear attention, see launch.py."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import triton
from torch import Tensor

from paceline.kv.layout import RECENT
from paceline.ops.base import DeltaRule
from paceline.ops.cuda.context import Context, Launch
from paceline.ops.cuda.kernels import delta as kernels
from paceline.ops.cuda.launch import ELEMENTS, parts_of, power, start
from paceline.ops.cuda.places import Ref

COLUMNS = 32  # of a state, that a program has


@dataclass(frozen=True, slots=True)
class Delta:
    held: Seq[Ref]  # qkv, b, a
    out: Ref
    layer: int
    rule: DeltaRule


def _texts(context: Context) -> dict[str, Tensor]:
    names = {"starts": "start", "counts": "rows", "places": "place"}
    return {argument: context.meta(f"text_{name}") for argument, name in names.items()}


def _of(held: Seq[Ref], context: Context) -> dict[str, int | Tensor]:
    out: dict[str, int | Tensor] = {}
    for name, parts, ref in zip(("qkv", "b", "a"), ("QKV", "RATE", "DECAY"), held, strict=True):
        out |= {name: ref.data, f"{name}_stride": ref.stride, f"{name}_split": ref.split_stride}
        out[parts] = parts_of(ref, context)
    return out


def delta(spec: Delta) -> Launch:
    """What each row reads of its text's state."""
    rule = spec.rule
    heads, value_dim = rule.value_heads, rule.value_dim

    def run(context: Context) -> None:
        assert context.cache is not None
        states = context.cache.states
        assert states is not None
        columns = min(COLUMNS, power(value_dim))
        start(kernels.delta_kernel, (context.bucket.texts, heads, triton.cdiv(value_dim, columns)))(
            state=states.states[spec.layer], recent=states.recent[spec.layer], conv=rule.conv, dt_bias=rule.dt_bias,
            decay=rule.decay,
            out=spec.out.data, begins=context.meta("text_begin"), goals=context.meta("text_goal"),
            positions=context.meta("positions"), key_heads=rule.key_heads, heads=heads, key_dim=rule.key_dim,
            value_dim=value_dim,
            channels=spec.held[0].width, scale=rule.key_dim**-0.5, out_stride=spec.out.stride, KERNEL=len(rule.conv),
            conv_bias=rule.conv if rule.conv_bias is None else rule.conv_bias, BIAS=rule.conv_bias is not None,
            skip=rule.decay if rule.skip is None else rule.skip, SKIP=rule.skip is not None, PLAIN=rule.plain,
            TILED=rule.tiled, RECENT=RECENT, K=power(rule.key_dim), V=columns, num_warps=4, **_texts(context),
            **_of(spec.held, context),
        )  # fmt: skip

    return run


def keep(held: Seq[Ref], layer: int) -> Launch:
    """Rows that later forwards may bring states on from."""
    channels, heads = held[0].width, held[1].width

    def run(context: Context) -> None:
        assert context.cache is not None
        states = context.cache.states
        assert states is not None
        start(kernels.keep_kernel, (context.bucket.texts, triton.cdiv(channels + 2 * heads, ELEMENTS)))(
            recent=states.recent[layer], positions=context.meta("positions"), channels=channels, heads=heads,
            RECENT=RECENT, B=ELEMENTS, **_texts(context), **_of(held, context),
        )  # fmt: skip

    return run
