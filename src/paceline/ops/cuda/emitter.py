"""Builds the launches of a graph one after the other, and says where each value lies."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from paceline.ops.base import Weight
from paceline.ops.cuda import launch
from paceline.ops.cuda.context import Keys, Launch
from paceline.ops.cuda.places import Place, Places, Ref, Use
from paceline.ops.cuda.weights import Matrix, Order, kind_of
from paceline.ops.recording import Code, Node, Symbol
from paceline.ops.records import Attention, Norm

Pack = Callable[[Seq[Weight], Order], Matrix]


class Unsupported(Exception):
    """A graph has an operation that no kernel of this room computes; it says which, in words for users."""


@dataclass(slots=True)
class Lowered:
    launches: list[Launch]
    uses: list[Use]
    results: list[Ref]
    givens: dict[str, Ref]
    attends: list[Keys]
    reads_rows: bool
    recurs: bool = False  # it brings on recurrent states
    names: list[str] = field(default_factory=list)  # what each launch is, for people


class Flow:
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


class Emitter:
    """What lowering has made so far. Raises Unsupported."""

    def __init__(self, flow: Flow, pack: Pack, low: torch.dtype) -> None:
        """`low`: what int8 and int4 weights are multiplied in."""
        self.flow, self.pack, self._low = flow, pack, low
        self.places = Places()
        self.out = Lowered([], [], [], {}, [], False)

    def emit(self, name: str, make: Launch, reads: Seq[Ref], writes: Seq[Ref]) -> None:
        self.out.launches.append(make)
        self.out.names.append(name)
        self.out.uses.append(Use([ref.place for ref in reads], [ref.place for ref in writes]))

    def _dtype(self, symbol: Symbol) -> torch.dtype:
        """What a symbol is kept in: the type of the products that read it if nobody else does, else float32."""
        root = symbol.root
        if root.integer:
            return torch.int64
        readers = self.flow.readers.get(root, [])
        products = all((node.code in (Code.LINEAR, Code.EXPERTS, Code.GATHER) and node.inputs[-1].root is root) or
                       node.code in (Code.LINEAR, Code.GATHER) for node in readers)  # fmt: skip
        if root in self.flow.results or not readers or not products:
            return torch.float32
        kinds = {self._multiplied_in(weight) for node in readers for weight in node.weights}
        return kinds.pop() if len(kinds) == 1 else torch.float32

    def _multiplied_in(self, weight: Weight) -> torch.dtype:
        kind = kind_of(weight)
        return self._low if kind in ("int8", "int4", "mxfp4") else getattr(torch, kind)

    def define(self, symbol: Symbol, splits: int = 1) -> Ref:
        dtype = torch.float32 if splits > 1 else self._dtype(symbol)
        return self.places.define(symbol, dtype, splits)

    def whole(self, symbol: Symbol) -> Ref:
        """Where a symbol lies with its parts added up."""
        ref = self.places[symbol]
        if ref.splits == 1:
            return ref
        to = Ref(Place(ref.width, torch.float32), 0, ref.width)
        self.emit("sum", launch.add_parts(ref, to), [ref], [to])
        if symbol.base is None:
            self.places.alias(symbol, to.place, 0)
        return to

    def attend(self, node: Node, q: Ref) -> None:
        record = node.record
        assert isinstance(record, Attention)
        out = self.define(node.outputs[0])
        self.out.reads_rows = True
        window = -1 if record.window is None else record.window
        if (keys := Keys(record.layer, record.heads, window, int(record.sees))) not in self.out.attends:
            self.out.attends.append(keys)
        spec = launch.Attend(q, out, keys, record.sinks, record.softcap)
        self.emit("attention", launch.attention(spec), [q], [out])


def norm_of(node: Node | None) -> Norm | None:
    """What a norm is given."""
    record = None if node is None else node.record
    assert record is None or isinstance(record, Norm)
    return record
