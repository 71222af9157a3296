"""A record in the order in which the C++ program reads it: whole numbers, addresses of vectors, and one float.

What is where is said by `native/program.cpp`, where each operation is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from paceline.ops import records
from paceline.ops.recording import GATED
from paceline.ops.records import Record

Words = list[int | Tensor | None]  # of a tensor its address, None is address 0


@dataclass(frozen=True, slots=True)
class Operands:
    words: Words = field(default_factory=list)
    number: float = 0.0


def operands(record: Record | None) -> Operands:
    """Of one operation."""
    match record:
        case None:
            return Operands()
        case records.Embed():
            return Operands(number=record.scale)
        case records.Adapt():
            return _adapt(record)
        case records.Factor():
            return Operands(number=record.factor)
        case records.Bias():
            return Operands([record.vector])
        case records.Norm():
            return _norm(record)
        case records.Rotary():
            return _rotary(record)
        case records.Store():
            return Operands([record.layer])
        case records.Attention():
            window = -1 if record.window is None else record.window
            words: Words = [record.layer, record.heads, window, int(record.sees), record.sinks]
            return Operands(words, record.softcap or 0.0)  # 0: scores stay
        case records.Delta():
            return _delta(record)
        case records.BlockConv():
            return Operands([len(record.base), record.base])
        case records.Convolve():
            return Operands([record.layer, len(record.taps), record.taps, record.bias])
        case records.Route():
            return _route(record)
        case records.ExpertMatrix():
            gate = 0 if record.gate is None else int(GATED[record.gate])
            return Operands([record.top_k, record.columns, gate, record.bias])
        case records.Mix():
            return Operands([record.top_k])
        case records.TopClusters():
            return Operands([record.ordering, record.size])
        case records.Gather():
            return Operands([record.size, record.top_k])


def _adapt(record: records.Adapt) -> Operands:
    words: Words = []
    for adapter in record.adapters:
        words += [0, None, None] if adapter is None else [adapter.rank, adapter.a, adapter.b]
    return Operands(words)


def _norm(record: records.Norm) -> Operands:
    return Operands([record.groups, record.weight, int(record.centered), int(record.own)], record.eps)


def _rotary(record: records.Rotary) -> Operands:
    words: Words = [record.heads, record.frequencies, 2 * len(record.frequencies)]
    if record.growth is not None:
        words += [record.growth.every, record.growth.factors, len(record.growth.factors)]
    return Operands(words, record.factor)


def _delta(record: records.Delta) -> Operands:
    rule = record.rule
    sizes: Words = [
        record.layer,
        rule.key_heads,
        rule.value_heads,
        rule.key_dim,
        rule.value_dim,
        len(rule.conv),
    ]
    vectors: Words = [rule.conv, rule.dt_bias, rule.decay]
    return Operands([*sizes, *vectors, int(rule.tiled), int(rule.plain), rule.conv_bias, rule.skip])


def _route(record: records.Route) -> Operands:
    e = record.experts
    words: Words = [
        e.top_k, e.router_scale, e.expert_scale, int(e.renormalize), e.choice_bias, e.groups, e.kept_groups,
        e.router_bias, int(e.softmax),
    ]  # fmt: skip
    return Operands(words, -1.0 if e.eps is None else e.eps)
