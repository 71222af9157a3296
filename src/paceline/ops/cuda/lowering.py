"""From a recorded graph to launches of kernels: what is read together is computed together.

What becomes one launch: products of the same rows; gate, value and the activation between them; heads of q,
k and v with
their norms, rotation and the write to the cache; norm, residual, factor and the norm after it. All other nodes are a
launch each. Nothing here depends on a model: patterns are found in the recording.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from paceline.ops.base import Weight
from paceline.ops.cuda import launch
from paceline.ops.cuda.context import Keys, Launch
from paceline.ops.cuda.places import Place, Places, Ref, Use
from paceline.ops.cuda.weights import Matrix, kind_of
from paceline.ops.recording import Code, Node, Symbol

GATES = {Code.GATED_GELU: 1, Code.GATED_SILU: 2, Code.GATED_SIGMOID: 3}
SINGLE = {Code.COPY: 0, Code.ADD: 1, Code.MUL: 2, Code.SCALE: 3, Code.GELU: 4, Code.SOFTCAP: 5, Code.BIAS: 6}
ROW_OPS = (Code.NORM, Code.ROTARY, Code.SCALE, Code.GELU, Code.BIAS, Code.COPY)


class Unsupported(Exception):
    """A graph has an operation that no kernel of this room computes; it says which, in words for users."""


Pack = Callable[[Seq[Weight], bool], Matrix]


@dataclass(slots=True)
class Lowered:
    launches: list[Launch]
    uses: list[Use]
    results: list[Ref]
    givens: dict[str, Ref]
    attends: list[Keys]
    reads_rows: bool
    names: list[str] = field(default_factory=list)  # what each launch is, for people


class _Graph:
    """Who writes and who reads each symbol."""

    def __init__(self, nodes: Seq[Node], results: Seq[Symbol]) -> None:
        self.nodes = nodes
        self.results = {symbol.root for symbol in results}
        self.readers: dict[Symbol, list[Node]] = {}
        self.writer: dict[Symbol, list[Node]] = {}
        for node in nodes:
            for symbol in node.inputs:
                self.readers.setdefault(symbol.root, []).append(node)
            for symbol in node.outputs:
                self.writer.setdefault(symbol.root, []).append(node)

    def only_reader(self, symbol: Symbol) -> Node | None:
        """The one node that reads a whole symbol, None if there are others, or it is a result."""
        readers = self.readers.get(symbol.root, [])
        return readers[0] if len(readers) == 1 and symbol.root not in self.results else None

    def source(self, symbol: Symbol, code: Code) -> Node | None:
        """The node of that code which wrote `symbol` for this reader alone, if it wrote just that."""
        writers = self.writer.get(symbol.root, [])
        if symbol.base is None and len(writers) == 1 and writers[0].code is code and self.only_reader(symbol):
            return writers[0]
        return None


class Lowering:
    """Builds a `Lowered`. Raises Unsupported."""

    def __init__(
        self,
        nodes: Seq[Node],
        results: Seq[Symbol],
        givens: Mapping[str, Symbol],
        pack: Pack,
        own: set[int],
        low: torch.dtype,
    ) -> None:
        """`own`: ids of weights that no other graph and no table reads,
        so that they may be joined with others. `low`: what
        int8 and int4 weights are multiplied in."""
        self.graph, self._pack, self._own, self._low = _Graph(nodes, results), pack, own, low
        self.places = Places()
        self.out = Lowered([], [], [], {}, [], False)
        self._done: set[int] = set()
        self._at: dict[int, Callable[[], None]] = {}  # what is emitted in place of a node, by its id
        for name, symbol in givens.items():
            self.out.givens[name] = self.places.define(symbol, torch.float32, fixed=True)
        self._find_heads()
        self._find_gates()
        self._find_gelus()
        self._find_products()
        self._find_norms()
        for node in nodes:
            if id(node) in self._at:
                self._at[id(node)]()
            elif id(node) not in self._done:
                self._single(node)
        for symbol in results:
            ref = self._whole(symbol)
            ref.place.fixed = True
            self.out.results.append(ref)

    # -- places ------------------------------------------------------------------------------------------------

    def _emit(self, name: str, make: Launch, reads: Seq[Ref], writes: Seq[Ref]) -> None:
        self.out.launches.append(make)
        self.out.names.append(name)
        self.out.uses.append(Use([ref.place for ref in reads], [ref.place for ref in writes]))

    def _dtype(self, symbol: Symbol) -> torch.dtype:
        """What a symbol is kept in: the type of the products that read it if nobody else does, else float32."""
        root = symbol.root
        if root.integer:
            return torch.int64
        readers = self.graph.readers.get(root, [])
        products = all((node.code in (Code.LINEAR, Code.EXPERTS, Code.GATHER) and node.inputs[-1].root is root) or
                       node.code in (Code.LINEAR, Code.GATHER) for node in readers)  # fmt: skip
        if root in self.graph.results or not readers or not products:
            return torch.float32
        kinds = {self._multiplied_in(weight) for node in readers for weight in node.weights}
        return kinds.pop() if len(kinds) == 1 else torch.float32

    def _multiplied_in(self, weight: Weight) -> torch.dtype:
        kind = kind_of(weight)
        return self._low if kind in ("int8", "int4") else getattr(torch, kind)

    def _define(self, symbol: Symbol, splits: int = 1) -> Ref:
        dtype = torch.float32 if splits > 1 else self._dtype(symbol)
        return self.places.define(symbol, dtype, splits)

    def _whole(self, symbol: Symbol) -> Ref:
        """Where a symbol lies with its parts added up."""
        ref = self.places[symbol]
        if ref.splits == 1:
            return ref
        to = Ref(Place(ref.width, torch.float32), 0, ref.width)
        self._emit("sum", launch.add_parts(ref, to), [ref], [to])
        if symbol.base is None:
            self.places.alias(symbol, to.place, 0)
        return to

    # -- patterns ----------------------------------------------------------------------------------------------

    def _find_products(self) -> None:
        """Products of the same rows become one, at the place of the first."""
        groups: dict[tuple[object, ...], list[Node]] = {}
        for node in self.graph.nodes:
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
        matrix = self._pack([node.weights[0] for node in group], False)
        x = self._whole(group[0].inputs[0])
        biases = [self._bias_of(node) for node in group]
        outputs = [node.outputs[0] if bias is None else bias.outputs[0] for node, bias in zip(group, biases)]
        vector = None
        if any(bias is not None for bias in biases):
            parts = [torch.zeros(node.weights[0].out_features,
            device=matrix.data.device) if bias is None else _tensor(bias)
                     for node, bias in zip(group, biases)]  # fmt: skip
            vector = torch.cat(parts)
        if len(group) == 1:
            ref = self._product_alone(outputs[0], matrix)
        else:
            ref = Ref(Place(matrix.outputs, torch.float32, matrix.splits), 0, matrix.outputs)
            column = 0
            for output in outputs:
                self.places.alias(output, ref.place, column)
                column += output.width
        self._emit("linear", launch.linear(matrix, x, ref, vector, 0), [x], [ref])

    def _product_alone(self, output: Symbol, matrix: Matrix) -> Ref:
        if output.base is None:
            return self._define(output, matrix.splits)
        if matrix.splits > 1:  # a slice of a row that others write, too
            raise Unsupported("a split product that is one slice of a row")
        return self._define(output)

    def _bias_of(self, node: Node) -> Node | None:
        """The addition of a bias to a product, if that is all that becomes of it."""
        reader = self.graph.only_reader(node.outputs[0]) if node.outputs[0].base is None else None
        if reader is None or reader.code is not Code.BIAS or reader.outputs[0].base is not None:
            return None
        self._done.add(id(reader))
        return reader

    def _find_gates(self) -> None:
        """act(gate) * value where both are products of the same rows: one product with both, output by output."""
        for node in self.graph.nodes:
            if node.code not in GATES or node.inputs[0].width != node.inputs[1].width:
                continue
            gate, value = (self.graph.source(symbol, Code.LINEAR) for symbol in node.inputs)
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
        x, out = self._whole(gate.inputs[0]), self._define(node.outputs[0])
        self._emit(
            "gated linear",
            launch.linear(self._pack(weights, True), x, out, None, GATES[node.code]),
            [x],
            [out],
        )

    def _find_gelus(self) -> None:
        """gelu(x) * y, where nobody else reads the gelu."""
        for node in self.graph.nodes:
            gelu = self.graph.source(node.inputs[0], Code.GELU) if node.code is Code.MUL else None
            if gelu is not None:
                self._done.add(id(gelu))
                self._at[id(node)] = partial(self._gelu, node, gelu)

    def _gelu(self, node: Node, gelu: Node) -> None:
        gate, value = self.places[gelu.inputs[0]], self.places[node.inputs[1]]
        out = self._define(node.outputs[0])
        self._emit("gate", launch.gated(gate, value, out, GATES[Code.GATED_GELU]), [gate, value], [out])

    def _find_norms(self) -> None:
        """residual + norm(x), times a factor, and the norm of that."""
        for node in self.graph.nodes:
            if node.code is Code.ADD and id(node) not in self._done:
                self._find_norm(node)
        for node in self.graph.nodes:
            if (
                node.code is Code.NORM
                and node.integers[0] == 1
                and id(node) not in self._done
                and id(node) not in self._at
            ):
                self._at[id(node)] = partial(self._norm, node.inputs[0], None, None, None, node)

    def _find_norm(self, node: Node) -> None:
        post, residual = None, 0
        for i, symbol in enumerate(node.inputs):
            found = self.graph.source(symbol, Code.NORM)
            if found is not None and found.integers[0] == 1 and id(found) not in self._done:
                post, residual = found, 1 - i
        if post is not None:
            self._done.add(id(post))
        else:  # the operand that is the result of a product may be in parts
            residual = 1 if self._written_by(node.inputs[0], Code.LINEAR) else 0
        last = node
        scale = self.graph.only_reader(node.outputs[0])
        if scale is not None and scale.code is Code.SCALE and node.outputs[0].base is None:
            self._done.add(id(scale))
            last = scale
        pre = next(
            (reader for reader in self.graph.readers.get(last.outputs[0].root, [])
             if reader.code is Code.NORM and reader.integers[0] == 1 and reader.inputs[0] is last.outputs[0]
             and id(reader) not in self._done), None,
        )  # fmt: skip
        if pre is not None:
            self._done.add(id(pre))
        x = node.inputs[1 - residual] if post is None else post.inputs[0]
        self._at[id(node)] = partial(self._norm, x, post, node.inputs[residual], last, pre)

    def _written_by(self, symbol: Symbol, code: Code) -> bool:
        return any(node.code is code for node in self.graph.writer.get(symbol.root, []))

    def _norm(
        self, x: Symbol, post: Node | None, residual: Symbol | None, last: Node | None, pre: Node | None
    ) -> None:
        """`last`: whose output the sum is, a SCALE if there is a factor; None: there is no sum, only the norm `pre`."""
        source = self.places[x]
        beside = None if residual is None else self._whole(residual)
        kept = pre is None or last is None or self.graph.only_reader(last.outputs[0]) is not pre
        y = None if last is None or not kept else self._define(last.outputs[0])
        z = None if pre is None else self._define(pre.outputs[0])
        norm = launch.Norm(
            source, beside, y, z, _pair(post), _pair(pre),
            last.number if last is not None and last.code is Code.SCALE else None,
        )  # fmt: skip
        name = "+".join(
            part for part, there in (("norm", post), ("add", residual), ("norm", pre)) if there is not None
        )
        self._emit(
            name, launch.norm(norm), [ref for ref in (source, beside) if ref], [ref for ref in (y, z) if ref]
        )

    def _find_heads(self) -> None:
        """q, k and v on their way into attention."""
        for node in self.graph.nodes:
            if node.code is not Code.ATTENTION:
                continue
            q = self._chain(node.inputs[0], (Code.SCALE, Code.ROTARY, Code.NORM))
            stores = [other for other in node.after if id(other) not in self._done and len(other.inputs) == 2]
            if Code.ROTARY not in q.ops:
                continue
            k = self._chain(stores[0].inputs[0], (Code.ROTARY, Code.NORM)) if stores else None
            v = self._chain(stores[0].inputs[1], (Code.NORM,)) if stores else None
            if k is not None and (
                Code.ROTARY not in k.ops
                or k.ops[Code.ROTARY].integers[1] is not q.ops[Code.ROTARY].integers[1]
            ):
                continue
            for chain in (q, k, v):
                self._done |= {id(op) for op in chain.ops.values()} if chain is not None else set()
            self._done |= {id(store) for store in stores}
            self._at[id(node)] = partial(self._heads, node, q, k, v)

    def _chain(self, symbol: Symbol, codes: Seq[Code]) -> _Chain:
        """The operations of `codes`, at most one each and in that order, that lead to `symbol` alone, last first."""
        ops: dict[Code, Node] = {}
        for code in codes:
            node = self.graph.source(symbol, code)
            if node is not None:
                ops[code], symbol = node, node.inputs[0]
        return _Chain(symbol, ops)

    def _heads(self, node: Node, q: _Chain, k: _Chain | None, v: _Chain | None) -> None:
        parts = [None if chain is None else self.places[chain.symbol] for chain in (q, k, v)]
        assert parts[0] is not None
        to = Ref(Place(parts[0].width, torch.float32), 0, parts[0].width)
        turn = q.ops[Code.ROTARY]
        scale = q.ops.get(Code.SCALE)
        heads = launch.Heads(
            parts, [None if chain is None else _pair(chain.ops.get(Code.NORM)) for chain in (q, k, v)], to,
            _number(node, 0), _number(node, 1), _tensor(turn), turn.number, 1.0 if scale is None else scale.number,
        )  # fmt: skip
        self.out.reads_rows = True
        self._emit("heads", launch.heads(heads), [ref for ref in parts if ref is not None], [to])
        self._attend(node, to)

    def _attend(self, node: Node, q: Ref) -> None:
        layer, heads, window, sees = (_number(node, i) for i in range(4))
        out = self._define(node.outputs[0])
        self.out.reads_rows = True
        if out.width != q.width:
            raise Unsupported("latent attention")
        if (keys := Keys(layer, heads, window, sees)) not in self.out.attends:
            self.out.attends.append(keys)
        self._emit("attention", launch.attention(launch.Attend(q, out, keys)), [q], [out])

    # -- single nodes ------------------------------------------------------------------------------------------

    def _single(self, node: Node) -> None:
        code = node.code
        if code is Code.EMBED:
            self._embed(node)
        elif code in SINGLE:
            self._elementwise(node)
        elif code in GATES:
            gate, value = (self.places[symbol] for symbol in node.inputs)
            out = self._define(node.outputs[0])
            self._emit("gate", launch.gated(gate, value, out, GATES[code]), [gate, value], [out])
        elif code is Code.NORM:
            x, out = self.places[node.inputs[0]], self._define(node.outputs[0])
            self._emit("norms", launch.group_norm(x, out, _number(node, 0), _pair(node)), [x], [out])
        elif code is Code.ROTARY:
            x, out = self.places[node.inputs[0]], self._define(node.outputs[0])
            self.out.reads_rows = True
            self._emit(
                "rotary", launch.rotary(x, out, _number(node, 0), _tensor(node), node.number), [x], [out]
            )
        elif code is Code.STORE:
            self.out.reads_rows = True
            parts = [self.places[symbol] for symbol in node.inputs]
            self._emit("store", launch.store(parts, _number(node, 0)), parts, [])
        elif code is Code.ATTENTION:
            self._attend(node, self._whole(node.inputs[0]))
        else:
            self._mixture(node)

    def _embed(self, node: Node) -> None:
        table, out = self._pack(node.weights, False), self._define(node.outputs[0])
        if table.kind == 2:
            raise Unsupported("an embedding in int4")
        self.out.reads_rows = True
        self._emit("embed", launch.embed(table, out, node.number), [], [out])

    def _elementwise(self, node: Node) -> None:
        x = self.places[node.inputs[0]]
        y = self.places[node.inputs[1]] if len(node.inputs) > 1 else None
        out = self._define(node.outputs[0])
        vector = _tensor(node) if node.code is Code.BIAS else None
        made = launch.single(SINGLE[node.code], x, y, out, node.number, vector)
        self._emit(node.code.name.lower(), made, [x] if y is None else [x, y], [out])

    def _mixture(self, node: Node) -> None:
        code = node.code
        if code is Code.ROUTE:
            self._route(node)
        elif code is Code.EXPERTS:
            route, x = self.places[node.inputs[0]], self._whole(node.inputs[1])
            act = GATES.get(Code(_number(node, 2)), 0) if node.integers[2] else 0
            out = self._define(node.outputs[0])
            stack = self._stack(node.weights, act > 0)
            made = launch.experts(
                stack, len(node.weights), route, x, out, _number(node, 0), _number(node, 1), act
            )
            self._emit("experts", made, [route, x], [out])
        elif code is Code.MIX:
            route, x = (self.places[symbol] for symbol in node.inputs)
            out = self._define(node.outputs[0])
            self._emit("mix", launch.mix(route, x, out, _number(node, 0)), [route, x], [out])
        elif code is Code.TOP_CLUSTERS:
            scores = self.places[node.inputs[0]]
            chosen = self.places.define(node.outputs[0], torch.float32)
            ids = self.places.define(node.outputs[1], torch.int64)
            ordering = node.integers[0]
            assert isinstance(ordering, Tensor)
            made = launch.clusters(scores, chosen, ids, ordering, _number(node, 1))
            self._emit("clusters", made, [scores], [chosen, ids])
        elif code is Code.GATHER:
            x, chosen = self._whole(node.inputs[0]), self.places[node.inputs[1]]
            out = self._define(node.outputs[0])
            made = launch.gather(
                self._pack(node.weights, False), x, chosen, out, _number(node, 0), _number(node, 1)
            )
            self._emit("gather", made, [x, chosen], [out])
        else:
            raise Unsupported({Code.DELTA: "linear attention", Code.KEEP: "linear attention",
                               Code.REDUCE: "a target over several processes"}.get(code,
                               code.name.lower()))  # fmt: skip

    def _stack(self, weights: Seq[Weight], paired: bool) -> Matrix:
        if kind_of(weights[0]) == "int4":
            raise Unsupported("experts in int4")
        return self._pack(weights, paired)

    def _route(self, node: Node) -> None:
        _, scale, expert_scale, renorm, bias, _, _ = node.integers
        x = self.places[node.inputs[0]]
        matrix = self._pack(node.weights, False)
        if node.number < 0 and scale is not None:
            raise Unsupported("a router that scales its input without a norm")
        if node.number >= 0:
            assert scale is None or isinstance(scale, Tensor)
            normed = Ref(Place(x.width, matrix.dtype), 0, x.width)
            made = launch.norm(launch.Norm(x, None, None, normed, None, (scale, node.number), None))
            self._emit("norm", made, [x], [normed])
            x = normed
        else:
            x = self._whole(node.inputs[0])
        scores = Ref(Place(matrix.outputs, torch.float32, matrix.splits), 0, matrix.outputs)
        self._emit("linear", launch.linear(matrix, x, scores, None, 0), [x], [scores])
        out = self.places.define(node.outputs[0], torch.float32)
        spec = launch.Router(
            scores,
            out,
            _number(node, 0),
            bool(renorm),
            _vector(expert_scale),
            _vector(bias),
            _number(node, 5),
            _number(node, 6),
        )
        self._emit("route", launch.route(spec), [scores], [out])


@dataclass(frozen=True, slots=True)
class _Chain:
    symbol: Symbol  # where it begins
    ops: dict[Code, Node]


def _number(node: Node, index: int) -> int:
    value = node.integers[index]
    assert isinstance(value, int)
    return value


def _vector(value: int | Tensor | None) -> Tensor | None:
    assert not isinstance(value, int)
    return value


def _tensor(node: Node) -> Tensor:
    """The vector that a node reads: a bias, or frequencies."""
    return next(value for value in node.integers if isinstance(value, Tensor))


def _pair(node: Node | None) -> tuple[Tensor | None, float] | None:
    """(weight, epsilon) of a norm."""
    if node is None:
        return None
    weight = node.integers[1]
    assert not isinstance(weight, int)
    return weight, node.number
