"""From a recorded graph to launches of kernels: what is read together is computed together.

What becomes one launch: products of the same rows; gate, value and the activation between them; heads of q, k and v
with their norms, rotation and the write to the cache; norm, residual, factor and the norm after it. All other nodes are
a launch each. Nothing here depends on a model: patterns are found in the recording.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial

import torch

from paceline.ops.base import Weight
from paceline.ops.cuda import launch
from paceline.ops.cuda.emitter import Emitter, Flow, Lowered, Pack, Unsupported, norm_of
from paceline.ops.cuda.places import Place, Ref
from paceline.ops.cuda.singles import GATES, single
from paceline.ops.cuda.weights import Matrix, kind_of
from paceline.ops.recording import Code, Node, RecordingOps, Symbol
from paceline.ops.records import Attention, Bias, Factor, Norm, Rotary


def lower(ops: RecordingOps, results: Seq[Symbol], pack: Pack, own: set[int], low: torch.dtype) -> Lowered:
    """`own`: ids of weights that no other graph and no table reads, so that they may be joined with others.

    Raises Unsupported.
    """
    emitter = Emitter(Flow(ops.nodes, results), pack, low)
    return Lowering(emitter, own).run(ops.givens, results)


class Lowering:
    """Finds the patterns of a graph, then emits its launches in order."""

    def __init__(self, emitter: Emitter, own: set[int]) -> None:
        self.e, self.flow, self._own = emitter, emitter.flow, own
        self._done: set[int] = set()
        self._at: dict[int, Callable[[], None]] = {}  # what is emitted in place of a node, by its id

    def run(self, givens: Mapping[str, Symbol], results: Seq[Symbol]) -> Lowered:
        for name, symbol in givens.items():
            self.e.out.givens[name] = self.e.places.define(symbol, torch.float32, fixed=True)
        self._find_heads()
        self._find_gates()
        self._find_gelus()
        self._find_products()
        self._find_norms()
        for node in self.flow.nodes:
            if id(node) in self._at:
                self._at[id(node)]()
            elif id(node) not in self._done:
                single(self.e, node)
        for symbol in results:
            ref = self.e.whole(symbol)
            ref.place.fixed = True
            self.e.out.results.append(ref)
        return self.e.out

    def _find_products(self) -> None:
        """Products of the same rows become one, at the place of the first."""
        groups: dict[tuple[object, ...], list[Node]] = {}
        for node in self.flow.nodes:
            if node.code is Code.LINEAR and id(node) not in self._done:
                symbol, weight = node.inputs[0], node.weights[0]
                alone = id(weight) not in self._own or node.outputs[0].base is not None
                key = (
                    id(symbol.root),
                    symbol.column,
                    symbol.width,
                    kind_of(weight),
                    id(node) if alone else 0,
                )
                groups.setdefault(key, []).append(node)
        for group in groups.values():
            self._done |= {id(node) for node in group}
            self._at[id(group[0])] = partial(self._product, group)

    def _product(self, group: list[Node]) -> None:
        matrix = self.e.pack([node.weights[0] for node in group], "plain")
        x = self.e.whole(group[0].inputs[0])
        biases = [self._bias_of(node) for node in group]
        outputs = [node.outputs[0] if bias is None else bias.outputs[0] for node, bias in zip(group, biases)]
        vector = None
        if any(bias is not None for bias in biases):
            parts = [torch.zeros(node.weights[0].out_features, device=matrix.data.device) if bias is None
                     else _vector_of(bias) for node, bias in zip(group, biases)]  # fmt: skip
            vector = torch.cat(parts)
        if len(group) == 1:
            ref = self._product_alone(outputs[0], matrix)
        else:
            ref = Ref(Place(matrix.outputs, torch.float32, matrix.splits), 0, matrix.outputs)
            column = 0
            for output in outputs:
                self.e.places.alias(output, ref.place, column)
                column += output.width
        self.e.emit("linear", launch.linear(matrix, x, ref, vector, 0), [x], [ref])

    def _product_alone(self, output: Symbol, matrix: Matrix) -> Ref:
        if output.base is None:
            return self.e.define(output, matrix.splits)
        if matrix.splits > 1:  # a slice of a row that others write, too
            raise Unsupported("a split product that is one slice of a row")
        return self.e.define(output)

    def _bias_of(self, node: Node) -> Node | None:
        """The addition of a bias to a product, if that is all that becomes of it."""
        reader = self.flow.only_reader(node.outputs[0]) if node.outputs[0].base is None else None
        if reader is None or reader.code is not Code.BIAS or reader.outputs[0].base is not None:
            return None
        self._done.add(id(reader))
        return reader

    def _find_gates(self) -> None:
        """act(gate) * value where both are products of the same rows: one product with both, output by output."""
        for node in self.flow.nodes:
            if node.code not in GATES or node.inputs[0].width != node.inputs[1].width:
                continue
            gate, value = (self.flow.source(symbol, Code.LINEAR) for symbol in node.inputs)
            if gate is None or value is None or gate.inputs[0] is not value.inputs[0]:
                continue
            weights = gate.weights[0], value.weights[0]
            if kind_of(weights[0]) != kind_of(weights[1]) or not all(
                id(weight) in self._own for weight in weights
            ):
                continue
            self._done |= {id(gate), id(value)}
            self._at[id(node)] = partial(self._gate, node, gate, weights)

    def _gate(self, node: Node, gate: Node, weights: Seq[Weight]) -> None:
        x, out = self.e.whole(gate.inputs[0]), self.e.define(node.outputs[0])
        self.e.emit(
            "gated linear",
            launch.linear(self.e.pack(weights, "pair"), x, out, None, GATES[node.code]),
            [x],
            [out],
        )

    def _find_gelus(self) -> None:
        """gelu(x) * y, where nobody else reads the gelu."""
        for node in self.flow.nodes:
            gelu = self.flow.source(node.inputs[0], Code.GELU) if node.code is Code.MUL else None
            if gelu is not None:
                self._done.add(id(gelu))
                self._at[id(node)] = partial(self._gelu, node, gelu)

    def _gelu(self, node: Node, gelu: Node) -> None:
        gate, value = self.e.places[gelu.inputs[0]], self.e.places[node.inputs[1]]
        out = self.e.define(node.outputs[0])
        self.e.emit("gate", launch.gated(gate, value, out, GATES[Code.GATED_GELU]), [gate, value], [out])

    def _find_norms(self) -> None:
        """residual + norm(x), times a factor, and the norm of that."""
        for node in self.flow.nodes:
            if node.code is Code.ADD and id(node) not in self._done:
                self._find_norm(node)
        for node in self.flow.nodes:
            if _of_whole_row(node) and id(node) not in self._done and id(node) not in self._at:
                self._at[id(node)] = partial(self._norm, node.inputs[0], None, None, None, node)

    def _find_norm(self, node: Node) -> None:
        post, residual = None, 0
        for i, symbol in enumerate(node.inputs):
            source = self.flow.source(symbol, Code.NORM)
            if source is not None and _of_whole_row(source, centered=False) and id(source) not in self._done:
                post, residual = source, 1 - i
        if post is not None:
            self._done.add(id(post))
        else:  # the operand that is the result of a product may be in parts
            residual = 1 if self._written_by(node.inputs[0], Code.LINEAR) else 0
        last = node
        scale = self.flow.only_reader(node.outputs[0])
        if scale is not None and scale.code is Code.SCALE and node.outputs[0].base is None:
            self._done.add(id(scale))
            last = scale
        pre = next(
            (reader for reader in self.flow.readers.get(last.outputs[0].root, [])
             if _of_whole_row(reader) and reader.inputs[0] is last.outputs[0]
             and id(reader) not in self._done), None,
        )  # fmt: skip
        if pre is not None:
            self._done.add(id(pre))
        x = node.inputs[1 - residual] if post is None else post.inputs[0]
        self._at[id(node)] = partial(self._norm, x, post, node.inputs[residual], last, pre)

    def _written_by(self, symbol: Symbol, code: Code) -> bool:
        return any(node.code is code for node in self.flow.writer.get(symbol.root, []))

    def _norm(
        self, x: Symbol, post: Node | None, residual: Symbol | None, last: Node | None, pre: Node | None
    ) -> None:
        """`last`: whose output the sum is, a SCALE if there is a factor; None: there is no sum, only the norm `pre`."""
        source = self.e.places[x]
        beside = None if residual is None else self.e.whole(residual)
        stays = pre is None or last is None or self.flow.only_reader(last.outputs[0]) is not pre
        y = None if last is None or not stays else self.e.define(last.outputs[0])
        z = None if pre is None else self.e.define(pre.outputs[0])
        norm = launch.Norm(
            source, beside, y, z, norm_of(post), norm_of(pre),
            _factor_of(last) if last is not None and last.code is Code.SCALE else None,
        )  # fmt: skip
        name = "+".join(
            part for part, there in (("norm", post), ("add", residual), ("norm", pre)) if there is not None
        )
        self.e.emit(
            name, launch.norm(norm), [ref for ref in (source, beside) if ref], [ref for ref in (y, z) if ref]
        )

    def _find_heads(self) -> None:
        """q, k and v on their way into attention."""
        for node in self.flow.nodes:
            if node.code is not Code.ATTENTION:
                continue
            q = self._chain(node.inputs[0], (Code.SCALE, Code.ROTARY, Code.NORM))
            stores = [other for other in node.after if id(other) not in self._done and len(other.inputs) == 2]
            turn = q.turn
            if turn is None or turn.growth is not None:  # growth: by itself
                continue
            k = self._chain(stores[0].inputs[0], (Code.ROTARY, Code.NORM)) if stores else None
            v = self._chain(stores[0].inputs[1], (Code.NORM,)) if stores else None
            if k is not None and (k.turn is None or k.turn.frequencies is not turn.frequencies):
                continue
            for chain in (q, k, v):
                self._done |= {id(op) for op in chain.ops.values()} if chain is not None else set()
            self._done |= {id(store) for store in stores}
            self._at[id(node)] = partial(self._heads, node, q, k, v)

    def _chain(self, symbol: Symbol, codes: Seq[Code]) -> _Chain:
        """The operations of `codes`, at most one each and in that order, that lead to `symbol` alone, last first."""
        ops: dict[Code, Node] = {}
        for code in codes:
            node = self.flow.source(symbol, code)
            if node is not None:
                ops[code], symbol = node, node.inputs[0]
        return _Chain(symbol, ops)

    def _heads(self, node: Node, q: _Chain, k: _Chain | None, v: _Chain | None) -> None:
        parts = [None if chain is None else self.e.places[chain.symbol] for chain in (q, k, v)]
        assert parts[0] is not None
        to = Ref(Place(parts[0].width, torch.float32), 0, parts[0].width)
        turn, scale, record = q.turn, q.ops.get(Code.SCALE), node.record
        assert turn is not None
        assert isinstance(record, Attention)
        heads = launch.Heads(
            parts, [None if chain is None else norm_of(chain.ops.get(Code.NORM)) for chain in (q, k, v)], to,
            record.layer, record.heads, turn, 1.0 if scale is None else _factor_of(scale),
        )  # fmt: skip
        self.e.out.reads_rows = True
        self.e.emit("heads", launch.heads(heads), [ref for ref in parts if ref is not None], [to])
        self.e.attend(node, to)


@dataclass(frozen=True, slots=True)
class _Chain:
    symbol: Symbol  # where it begins
    ops: dict[Code, Node]

    @property
    def turn(self) -> Rotary | None:
        record = self.ops[Code.ROTARY].record if Code.ROTARY in self.ops else None
        assert record is None or isinstance(record, Rotary)
        return record


def _of_whole_row(node: Node, centered: bool = True) -> bool:
    """Whether it is a norm of whole rows, not of groups of columns. `centered`: it may be of rows less their mean."""
    norm = node.record
    return isinstance(norm, Norm) and norm.groups == 1 and (centered or not norm.centered)


def _factor_of(scale: Node) -> float:
    assert isinstance(scale.record, Factor)
    return scale.record.factor


def _vector_of(bias: Node) -> torch.Tensor:
    assert isinstance(bias.record, Bias)
    return bias.record.vector
