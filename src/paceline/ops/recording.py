"""A graph written down: which op reads and writes which symbol, in the order that steps can run.

`RecordingOps` is handed to a graph in place of tensors. `schedule` then cuts the ops into steps: everything that
works on one row at a time and is ready joins one step, as do all linears whose inputs are ready, so that a thread pool
meets few barriers; buffers are reused once their last reader is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import IntEnum

import torch

from paceline.errors import UsageError
from paceline.ops import records
from paceline.ops.base import DeltaRule, Experts, Gate, Growth, Value, Weight
from paceline.ops.records import Record, Sees


class Code(IntEnum):
    """Op codes, as in native/program.h. All before LINEAR work on one row, and GATED_RELU."""

    EMBED, NORM, ROTARY, STORE, ADD, MUL, SCALE, GELU, GATED_GELU, GATED_SILU, BIAS, SOFTCAP, COPY = range(13)
    ROUTE, MIX, TOP_CLUSTERS, GATED_SIGMOID, KEEP, ADAPT, LINEAR, ATTENTION, EXPERTS, GATHER, DELTA = range(
        13, 24
    )
    REDUCE = 24  # between programs: see NativeRunner
    GATED_CLAMPED = 25  # only what experts' gate and value go through
    BLOCK_CONV = 26  # reads rows before its own
    CONVOLVE = 27
    GATED_RELU = 28  # works on one row, too


GATED: Mapping[str, Code] = {
    "gelu": Code.GATED_GELU, "silu": Code.GATED_SILU, "sigmoid": Code.GATED_SIGMOID, "clamped": Code.GATED_CLAMPED,
    "relu": Code.GATED_RELU,
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Symbol:
    """`width` columns of `base` from `column`; a base is its own base. `given`: handed in by name at each run."""

    width: int
    base: Symbol | None = None
    column: int = 0
    given: str | None = None
    integer: bool = False  # int64 instead of float32

    @property
    def root(self) -> Symbol:
        return self if self.base is None else self.base


@dataclass(slots=True, eq=False)
class Node:
    """One op."""

    code: Code
    inputs: list[Symbol]
    outputs: list[Symbol]
    weights: list[Weight] = field(default_factory=list)
    record: Record | None = None
    after: list[Node] = field(default_factory=list)  # ops that must run first though no symbol says so


class RecordingOps:
    """Implements `Ops` by writing nodes down."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.givens: dict[str, Symbol] = {}
        self._tokens = Symbol(1, integer=True)
        self._stores: dict[int, Node] = {}

    def _note(self, code: Code, inputs: list[Symbol], widths: list[int], **rest: object) -> list[Symbol]:
        outputs = [Symbol(width) for width in widths]
        self.nodes.append(Node(code, inputs, outputs, **rest))  # type: ignore[arg-type]
        return outputs

    def tokens(self) -> Value:
        return self._tokens

    def given(self, name: str, width: int) -> Value:
        return self.givens.setdefault(name, Symbol(width, given=name))

    def embed(self, tokens: Value, table: Weight, scale: float) -> Value:
        assert tokens is self._tokens, "only the rows' own tokens can be embedded"
        return self._note(Code.EMBED, [], [table.in_features], weights=[table], record=records.Embed(scale))[
            0
        ]

    def linear(self, x: Value, weight: Weight, bias: torch.Tensor | None = None) -> Value:
        assert x.width == weight.in_features, f"{x.width} columns for a weight of {weight.in_features}"
        (y,) = self._note(Code.LINEAR, [x], [weight.out_features], weights=[weight])
        if weight.adapted:
            product = self.nodes[-1]
            adding = records.Adapt(weight.adapted)
            self.nodes.append(Node(Code.ADAPT, [x], [y], record=adding, after=[product]))
        y = self._reduce(y, weight)
        if bias is None:
            return y
        assert bias.numel() == y.width, f"{y.width} columns for a bias of {bias.numel()}"
        return self._note(Code.BIAS, [y], [y.width], record=records.Bias(bias))[0]

    def _reduce(self, y: Symbol, weight: Weight) -> Symbol:
        return self._note(Code.REDUCE, [y], [y.width])[0] if weight.partial else y

    def rms_norm(self, x: Value, weight: torch.Tensor | None, eps: float, groups: int = 1) -> Value:
        own = groups > 1 and weight is not None and len(weight) == x.width
        return self._note(Code.NORM, [x], [x.width], record=records.Norm(groups, weight, eps, own=own))[0]

    def layer_norm(self, x: Value, weight: torch.Tensor, eps: float) -> Value:
        return self._note(Code.NORM, [x], [x.width], record=records.Norm(1, weight, eps, centered=True))[0]

    def rotary(
        self,
        x: Value,
        inv_freq: torch.Tensor,
        heads: int,
        factor: float = 1.0,
        growth: Growth | None = None,
    ) -> Value:
        record = records.Rotary(heads, inv_freq, factor, growth)
        return self._note(Code.ROTARY, [x], [x.width], record=record)[0]

    def store_kv(self, layer: int, k: Value, v: Value | None) -> None:
        self._note(Code.STORE, [k] if v is None else [k, v], [], record=records.Store(layer))
        self._stores[layer] = self.nodes[-1]

    def attention(
        self,
        q: Value,
        layer: int,
        heads: int,
        window: int | None,
        sees_itself: bool,
        latent: int | None = None,
        softcap: float | None = None,
    ) -> Value:
        width = q.width if latent is None else heads * latent
        sees = Sees.ITSELF if sees_itself else Sees.BEFORE
        return self._attend(q, width, records.Attention(layer, heads, window, sees, softcap=softcap))

    def sink_attention(self, q: Value, layer: int, window: int | None, sinks: torch.Tensor) -> Value:
        record = records.Attention(layer, len(sinks), window, Sees.ITSELF, sinks.float())
        return self._attend(q, q.width, record)

    def block_attention(self, q: Value, layer: int, heads: int, window: int | None = None) -> Value:
        return self._attend(q, q.width, records.Attention(layer, heads, window, Sees.RUN))

    def _attend(self, q: Value, width: int, record: records.Attention) -> Value:
        after = [self._stores[record.layer]] if record.layer in self._stores else []
        return self._note(Code.ATTENTION, [q], [width], record=record, after=after)[0]

    def add(self, x: Value, y: Value) -> Value:
        return self._note(Code.ADD, [x, y], [x.width])[0]

    def mul(self, x: Value, y: Value) -> Value:
        return self._note(Code.MUL, [x, y], [x.width])[0]

    def scale(self, x: Value, factor: float) -> Value:
        return self._note(Code.SCALE, [x], [x.width], record=records.Factor(factor))[0]

    def gelu(self, x: Value) -> Value:
        return self._note(Code.GELU, [x], [x.width])[0]

    def gated(self, gate: Value, up: Value, activation: Gate) -> Value:
        assert gate.width == up.width or (gate.width == 1 and activation == "sigmoid")
        return self._note(GATED[activation], [gate, up], [up.width])[0]

    def delta_rule(self, qkv: Value, b: Value, a: Value, layer: int, rule: DeltaRule) -> Value:
        width = rule.value_heads * rule.value_dim
        (out,) = self._note(Code.DELTA, [qkv, b, a], [width], record=records.Delta(layer, rule))
        store = records.Store(layer)
        self.nodes.append(Node(Code.KEEP, [qkv, b, a], [], record=store, after=[self.nodes[-1]]))
        return out

    def block_conv(self, x: Value, mix: Value, base: torch.Tensor) -> Value:
        return self._note(Code.BLOCK_CONV, [x, mix], [x.width], record=records.BlockConv(base))[0]

    def short_conv(self, x: Value, layer: int, taps: torch.Tensor, bias: torch.Tensor | None) -> Value:
        self.store_kv(layer, x, None)
        record, after = records.Convolve(layer, taps, bias), [self._stores[layer]]
        return self._note(Code.CONVOLVE, [], [x.width], record=record, after=after)[0]

    def softcap(self, x: Value, cap: float) -> Value:
        return self._note(Code.SOFTCAP, [x], [x.width], record=records.Factor(cap))[0]

    def columns(self, x: Value, start: int, stop: int) -> Value:
        assert 0 <= start < stop <= x.width
        return Symbol(stop - start, x.root, x.column + start)

    def concat(self, x: Value, y: Value) -> Value:
        whole = Symbol(x.width + y.width)
        for part, column in ((x, 0), (y, x.width)):
            self.nodes.append(Node(Code.COPY, [part], [Symbol(part.width, whole, column)]))
        return whole

    def _repeated(self, x: Value, times: int) -> Value:
        """Its columns so many times, side by side."""
        whole = Symbol(times * x.width)
        for i in range(times):
            self.nodes.append(Node(Code.COPY, [x], [Symbol(x.width, whole, i * x.width)]))
        return whole

    def moe(self, router_input: Value, expert_input: Value, experts: Experts) -> Value:
        top_k, hidden = experts.top_k, expert_input.width
        inner = experts.down[0].in_features
        (route,) = self._note(
            Code.ROUTE, [router_input], [2 * top_k], weights=[experts.router], record=records.Route(experts)
        )
        gate, columns = experts.activation, 0
        if gate == "squared":  # a matrix without gates has its input once for each choice
            expert_input, columns = self._repeated(expert_input, top_k), hidden
        up = self._note(
            Code.EXPERTS,
            [route, expert_input],
            [top_k * inner],
            weights=list(experts.gate_up),
            record=records.ExpertMatrix(top_k, columns, None if columns else gate, experts.gate_up_bias),
        )[0]
        up = self.gated(up, up, "relu") if columns else up
        down = self._note(
            Code.EXPERTS,
            [route, up],
            [top_k * hidden],
            weights=list(experts.down),
            record=records.ExpertMatrix(top_k, inner, None, experts.down_bias),
        )[0]
        (mixed,) = self._note(Code.MIX, [route, down], [hidden], record=records.Mix(top_k))
        return self._reduce(mixed, experts.down[0])

    def per_head(self, x: Value, weights: Seq[Weight], beside: Value | None = None) -> Value:
        count = len(weights)
        more = 0 if beside is None else beside.width // count
        given, width = x.width // count, weights[0].out_features
        whole = Symbol(count * (width + more))
        for h, weight in enumerate(weights):
            column, part = h * (width + more), self.columns(x, h * given, (h + 1) * given)
            assert (part.width, width) == (weight.in_features, weight.out_features)
            self.nodes.append(Node(Code.LINEAR, [part], [Symbol(width, whole, column)], weights=[weight]))
            if beside is not None:
                own = self.columns(beside, h * more, (h + 1) * more)
                self.nodes.append(Node(Code.COPY, [own], [Symbol(more, whole, column + width)]))
        return whole

    def centroid_logits(
        self, x: Value, centroids: Weight, ordering: torch.Tensor, head: Weight, top_k: int
    ) -> tuple[Value, Value]:
        size = head.out_features // centroids.out_features
        ordering = ordering.contiguous().view(-1)
        if ordering.dtype != torch.int64 or ordering.numel() != size * centroids.out_features:
            raise UsageError("the centroid head's token ordering must be int64 with one entry per token")
        scores = self.linear(x, centroids)
        chosen, ids = Symbol(top_k), Symbol(top_k * size, integer=True)
        self.nodes.append(
            Node(Code.TOP_CLUSTERS, [scores], [chosen, ids], record=records.TopClusters(ordering, size))
        )
        (logits,) = self._note(
            Code.GATHER, [x, chosen], [top_k * size], weights=[head], record=records.Gather(size, top_k)
        )
        return ids, logits


def schedule(nodes: list[Node]) -> list[list[Node]]:
    """Cut into steps. Within a step of row ops the order is that of recording; other steps' ops are independent."""
    writers: dict[Symbol, list[Node]] = {}
    for node in nodes:
        for symbol in node.outputs:
            writers.setdefault(symbol.root, []).append(node)
    waits = {id(node): _needs(node, writers) for node in nodes}
    done: set[int] = set()
    left = list(nodes)
    steps: list[list[Node]] = []

    def take(wanted: tuple[Code, ...] | None, most: int, chain: bool) -> None:
        step: list[Node] = []
        for node in left:
            alone = node.code < Code.LINEAR or node.code is Code.GATED_RELU
            fits = alone if wanted is None else node.code in wanted
            if fits and len(step) < most and waits[id(node)] <= done:
                step.append(node)
                if chain:
                    done.add(id(node))
        if step:
            done.update(id(node) for node in step)
            left[:] = [node for node in left if id(node) not in done]
            steps.append(step)

    while left:
        before = len(left)
        take(None, len(left), chain=True)
        take((Code.LINEAR,), len(left), chain=False)
        if len(left) == before:
            take((Code.ATTENTION,), len(left), chain=False)
        if len(left) == before:
            take((Code.DELTA,), len(left), chain=False)
        if len(left) == before:
            take((Code.CONVOLVE,), 1, chain=False)
        if len(left) == before:
            take((Code.EXPERTS, Code.GATHER, Code.BLOCK_CONV), 1, chain=False)
        if len(left) == before:
            take((Code.REDUCE,), 1, chain=False)
        assert len(left) < before, "a graph must not have cycles"
    return steps


def shared_work(nodes: list[Node]) -> list[Node]:
    """What a rank whose results nobody reads still has to compute: sums over ranks, and K/V, with all they need."""
    writers: dict[Symbol, list[Node]] = {}
    for node in nodes:
        for symbol in node.outputs:
            writers.setdefault(symbol.root, []).append(node)
    needed = {id(node) for node in nodes if node.code in (Code.REDUCE, Code.STORE)}
    for node in reversed(nodes):
        if id(node) in needed:
            needed |= _needs(node, writers)
    return [node for node in nodes if id(node) in needed]


def _needs(node: Node, writers: dict[Symbol, list[Node]]) -> set[int]:
    needs = {id(other) for other in node.after}
    for symbol in node.inputs:
        needs.update(id(writer) for writer in writers.get(symbol.root, ()))
    return needs


def place(steps: list[list[Node]], keep: set[Symbol]) -> dict[Symbol, int]:
    """Buffer index of every root symbol. A buffer is reused by a symbol of the same width and type after the step of
    its last reader; symbols in `keep` and given ones have buffers of their own."""
    last: dict[Symbol, int] = {}
    for i, step in enumerate(steps):
        for node in step:
            for symbol in (*node.inputs, *node.outputs):
                last[symbol.root] = i
    free: dict[tuple[int, bool], list[int]] = {}
    buffers: dict[Symbol, int] = {}
    count = 0
    for i, step in enumerate(steps):
        for node in step:
            for symbol in (*node.inputs, *node.outputs):
                root = symbol.root
                if root in buffers:
                    continue
                shelf = free.get((root.width, root.integer), [])
                if shelf and root.given is None and root not in keep:
                    buffers[root] = shelf.pop()
                else:
                    buffers[root], count = count, count + 1
        for root in {s.root for node in step for s in (*node.inputs, *node.outputs)}:
            if last[root] == i and root not in keep and root.given is None:
                free.setdefault((root.width, root.integer), []).append(buffers[root])
    return buffers
