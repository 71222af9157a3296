"""Forwards on the CPU through the C++ extension: a graph is recorded once, then each run is one native call.

A row's bits depend on its token, position, sequence and weights, and on the instruction set that `isa()` names: not on
the number of rows, their place, how a text is cut into chunks, or the number of threads. Activations are float32; what
is multiplied with int4 weights and GGUF blocks is rounded to 8 bits (16 for q6_k, q8_0), each 16 with a scale; what
is multiplied with bfloat16 weights is rounded to bfloat16 first where the CPU multiplies pairs of those (AVX512-BF16), as
models stored in it are computed everywhere, with sums in float32: twice as many products in the same time.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

import torch

from paceline import machine
from paceline.core import ForwardBatch
from paceline.errors import UsageError
from paceline.kv.cache import KVCache
from paceline.kv.layout import SCALED, Layout
from paceline.memory import Arena
from paceline.ops.base import ChainStart, Drawn, Graph, Group, RoundStart, Rule, Stop, Weight
from paceline.ops.binding import address, bind_cache, refusal
from paceline.ops.extension import extension
from paceline.ops.grids import all_grids
from paceline.ops.native_operands import operands
from paceline.ops.native_rounds import Rounds, chain_round
from paceline.ops.prefetch import Matrix, settle
from paceline.ops.recording import Code, Node, RecordingOps, Symbol, place, schedule, shared_work
from paceline.ops.records import Gather
from paceline.ops.segments import program_of
from paceline.ops.tiles import KINDS, tiles, usable

_LAYOUT = 32  # of the extension's signatures
_OF_ROWS = (
    Code.EMBED,
    Code.ROTARY,
    Code.STORE,
    Code.ATTENTION,
    Code.DELTA,
    Code.BLOCK_CONV,
)  # read tokens, positions or slots


def why_not() -> str | None:
    """None if the extension can be used, else one line that says why not and what to do."""
    try:
        _extension()
    except UsageError as error:
        return str(error)
    return None


def available() -> bool:
    return why_not() is None


def isa(exact: bool = False) -> str:
    """The instruction set: avx512-amx-bf16, avx512-bf16, avx512, avx2, neon, generic; `exact`: without `bf16_dot()`."""
    way = "" if exact else str(_extension().bf16_dot_way())
    return str(_extension().isa()) + {"": "", "registers": "-amx-bf16"}.get(way, "-bf16")


def left_out() -> str:
    """Better kernels that are not used since they compute wrongly here, and what: "" if all compute right."""
    native = extension("left_out")
    return "; ".join(f"{name} ({what})" for name, what in native.left_out()) if native else ""


def bf16_dot() -> bool:
    """Whether this CPU multiplies pairs of bfloat16: what bfloat16 weights are multiplied with is rounded to it."""
    return bool(_extension().bf16_dot())


def most_rows() -> int:
    """Of one forward."""
    return int(_extension().most_rows)


def default_threads() -> int:
    """One per processor that this process may use, by affinity and by its container's quota."""
    return machine.processors()


def set_threads(threads: int) -> None:
    """Size of the pool that all native ops of this process share, the calling thread included."""
    if not 1 <= threads <= 256:
        raise UsageError(f"threads={threads} is not possible: give 1..256")
    _extension().set_threads(threads)


def _extension() -> ModuleType:
    try:
        native = importlib.import_module("paceline._native")
    except ImportError as error:
        raise UsageError(
            f"the native CPU kernels are not usable ({error}): reinstall paceline with a C++17 compiler present, "
            "for this Python"
        ) from error
    if native.layout != _LAYOUT:
        raise UsageError("the native CPU kernels were built from another version of paceline: reinstall it")
    _give_grids(native)
    return native


@cache
def _give_grids(native: ModuleType) -> None:
    """Hand over the grids of IQ blocks, which it copies; once."""
    native.set_grids(all_grids().ctypes.data)


class NativeRunner:
    """Implements `Runner`. Results are views of the plan's own buffers, valid until the next run of the same graph."""

    reads_blocks = True
    activations = None

    def __init__(self, threads: int | None = None, exact: bool = False, group: Group | None = None) -> None:
        """`group` adds up what partial weights give. `exact`: bfloat16 weights are multiplied with float32 even where the
        CPU is faster with `bf16_dot()`, and so are weights in blocks, whose inputs are rounded to 8 or 16 bits else."""
        self._exact = exact
        if threads is not None:
            set_threads(threads)
        elif _extension().threads() == 1:
            set_threads(default_threads())
        self._plans: dict[Graph, Plan] = {}
        self._rounds: dict[Graph, Rounds] = {}
        self._shared = Shared(exact, group)
        self._settled = 0  # values of the weights that were there when prefetching was timed

    def run(
        self, graph: Graph, rows: ForwardBatch, cache: KVCache | None, given: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        return self._plan(graph).run(rows, cache, given)

    def _plan(self, graph: Graph) -> Plan:
        plan = self._plans.get(graph)
        if plan is None:
            plan = self._plans[graph] = Plan(graph, self._shared)
        return plan

    def prepare(self, graphs: Seq[Graph]) -> None:
        """Pack all weights, then free the originals, except those that are also read by row."""
        tables: set[int] = set()
        for graph in graphs:
            graph(ops := RecordingOps())
            tables |= {id(w) for node in ops.nodes if node.code is Code.EMBED for w in node.weights}
        for graph in graphs:
            if graph not in self._plans:
                self._plans[graph] = Plan(graph, self._shared, tables)
        matrices = [matrix for plan in self._plans.values() for matrix in plan.matrices]
        values = sum(matrix[2] * matrix[3] for matrix in matrices)
        if values >= 2 * self._settled:  # a small drafter's weights, which come later, decide nothing
            settle(_extension(), matrices)
            self._settled = values

    def packs(self, layout: Layout) -> bool:
        """Where bfloat16 is multiplied in pairs, for heads of up to 512 columns, a multiple of 32, beside a V."""
        fits = all(s.head_dim in range(32, 513, 32) and s.latent is None for s in layout.layers)
        return bf16_dot() and not self._exact and fits

    def quantizes(self, layout: Layout) -> bool:
        """Heads whose columns have whole scales, with values of their own."""
        return all(s.head_dim % SCALED == 0 and s.latent is None for s in layout.layers)

    def draft_round(
        self,
        graph: Graph,
        start: RoundStart,
        cache: KVCache,
        states: torch.Tensor,
        rules: list[Rule],
        stops: list[Stop],
    ) -> Drawn | None:
        """All steps of a draft round, draws included, in one native call."""
        if graph not in self._rounds:
            self._rounds[graph] = Rounds(self._plan, graph)
        return self._rounds[graph].run(start, cache, states, rules, stops)

    def chain_round(
        self, graph: Graph, start: ChainStart, rules: list[Rule], stops: list[Stop]
    ) -> Drawn | None:
        """All steps of a chain, draws included, in one native call."""
        return chain_round(self._plan(graph), start, rules, stops)

    def plan(self, graph: Graph) -> Plan | None:
        """The recording of `graph`, None before its first run."""
        return self._plans.get(graph)


@dataclass(slots=True)
class Shared:
    """What the plans of a runner have in common: a weight that several graphs read is packed once."""

    exact: bool
    group: Group | None = None
    arena: Arena = field(default_factory=Arena)
    packed: dict[tuple[int, int], tuple[Weight, torch.Tensor, int]] = field(
        default_factory=dict
    )  # panels and kind, by the weight's id and cluster


class Plan:
    """One recorded graph: the native program, and the tensors that it computes in."""

    def __init__(self, graph: Graph, shared: Shared, tables: set[int] | None = None) -> None:
        """`tables`: ids of weights that are also read by row. Where it is given, all others are freed once packed."""
        ops = RecordingOps()
        self._results: tuple[Symbol, ...] = graph(ops)
        self._givens = ops.givens
        if shared.group is not None and shared.group.rank:  # the results are rank 0's
            self._results, ops.nodes = (), shared_work(ops.nodes)
        self.steps = schedule(ops.nodes)
        self._buffers = place(self.steps, {symbol.root for symbol in self._results})
        self._read = [symbol for symbol in self._givens.values() if symbol in self._buffers]
        self._bound: dict[
            str, tuple[torch.Tensor | None, int, torch.Tensor]
        ] = {}  # given, its rows, what is read
        self._reads_rows = any(node.code in _OF_ROWS for step in self.steps for node in step)
        self._alive: list[torch.Tensor] = []  # everything whose address the program holds
        self._shared, self._tables = shared, tables
        self.matrices: list[Matrix] = []  # of linears, in the order in which a forward reads them
        self.program: Any = program_of(_extension().Program, shared.group, self._add_up)
        for step in self.steps:
            if step[0].code is Code.REDUCE:
                self.program.cut(*step[0].inputs, *step[0].outputs)
                continue
            self.program.begin_step()
            for node in step:
                self._add(node)
        self.capacity = 0
        self._tensors: dict[Symbol, torch.Tensor] = {}
        self._views: dict[int, tuple[torch.Tensor, ...]] = {}  # results, by number of rows
        self._cache: weakref.ref[KVCache] | None = None

    def _add(self, node: Node) -> None:
        values = [(self._buffers[s.root], s.column, s.width) for s in (*node.inputs, *node.outputs)]
        matrices = [self._matrix(node, weight) for weight in node.weights]
        if node.code is Code.LINEAR:
            self.matrices += matrices
        given = operands(node.record)
        words = [word if isinstance(word, int) else self._vector(word) for word in given.words]
        self.program.add(int(node.code), values, matrices, words, given.number)

    def _matrix(self, node: Node, loaded: Weight) -> Matrix:
        shape = loaded.out_features, loaded.in_features
        if node.code is Code.EMBED:  # a table is read by rows, all others in tiles: see native/linear.h
            weight = usable(loaded)
            self._alive.append(weight.data)
            return weight.data.data_ptr(), self._vector(weight.scale), *shape, KINDS[weight.kind]
        cluster = node.record.size if isinstance(node.record, Gather) else 0
        shared, key = self._shared, (id(loaded), cluster)
        if key not in shared.packed:
            packed = tiles(_extension(), loaded, cluster, shared.arena, shared.exact)
            shared.packed[key] = (loaded, *packed)
            if self._tables is not None and id(loaded) not in self._tables:
                loaded.release()
        _, data, kind = shared.packed[key]
        return data.data_ptr(), 0, *shape, kind

    def _vector(self, tensor: torch.Tensor | None) -> int:
        if tensor is None:
            return 0
        if tensor.dtype != torch.int64:
            tensor = tensor.float()
        tensor = tensor.contiguous()
        if tensor.device.type != "cpu":
            raise UsageError(f"native ops need their tensors on the CPU, not on {tensor.device}")
        self._alive.append(tensor)
        return tensor.data_ptr()

    # -- running -----------------------------------------------------------------------------------------------

    def run(
        self, rows: ForwardBatch, cache: KVCache | None, given: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        count = rows.count
        self.ready(count, cache)
        self.give(given, count)
        if rows.branches is not None:
            self.program.branch(rows.branches.further, rows.branches.copies)
        if rows.media is not None and rows.media.reach is not None:
            self.program.reach(rows.media.reach)
        if rows.adapters is not None:
            self.program.adapt(rows.adapters.starts, rows.adapters.texts)
        if status := self._run(rows, count):
            raise UsageError(refusal("forward", status))
        views = self._views.get(count)
        if views is None:
            views = self._views[count] = tuple(
                self._tensors[s.root][:count, s.column : s.column + s.width] for s in self._results
            )
        return views

    def _add_up(self, group: Group, mine: Symbol, whole: Symbol, count: int) -> None:
        out = self._tensors[whole.root][:count, : whole.width]
        out.copy_(self._tensors[mine.root][:count, : mine.width])
        group.add(out)

    def _run(self, rows: ForwardBatch, count: int) -> int:
        if not self._reads_rows or not count:
            return self.program.run(count, 0, 0, 0) if count else 0
        if rows.numbers is not None:
            return self.program.run_numbers(*rows.numbers)  # type: ignore[no-any-return]
        return self.program.run(  # type: ignore[no-any-return]
            count,
            address(rows.tokens, torch.int64, count, "rows.tokens"),
            address(rows.positions, torch.int32, count, "rows.positions"),
            address(rows.slots, torch.int32, count, "rows.slots"),
        )

    def ready(self, count: int, cache: KVCache | None) -> None:
        """Make room for so many rows, and bind the cache."""
        if count > self.capacity:
            self._grow(count)
        if cache is not None and (self._cache is None or self._cache() is not cache):
            self._bind_cache(cache)

    def give(self, given: Mapping[str, torch.Tensor], count: int) -> None:
        """Bind the inputs of a run of so many rows."""
        for symbol in self._read:
            self._bind_given(symbol, given, count)

    def input(self, name: str) -> tuple[int, int] | None:
        """(buffer, columns) of the graph's one input, which native code may bind; None if it has another or more."""
        return self.inputs()[name] if set(self._givens) == {name} else None

    def inputs(self) -> dict[str, tuple[int, int]]:
        """(buffer, columns) of all inputs, which native code is about to bind."""
        self._bound.clear()
        return {name: (self._buffers[symbol], symbol.width) for name, symbol in self._givens.items()}

    def places(self) -> list[tuple[int, int, int]]:
        """(address of the first row, elements between rows, columns) of each result, until the capacity grows."""
        results = [(s, self._tensors[s.root]) for s in self._results]
        return [(t.data_ptr() + s.column * t.element_size(), t.stride(0), s.width) for s, t in results]

    def _grow(self, count: int) -> None:
        self.capacity = max(8, 1 << (count - 1).bit_length())
        self._views.clear()
        results = {symbol.root for symbol in self._results}
        by_index: dict[int, torch.Tensor] = {}
        for symbol, index in self._buffers.items():
            if symbol.given is None:
                dtype = torch.int64 if symbol.integer else torch.float32
                if index not in by_index:
                    stride = symbol.width if symbol in results else apart(symbol.width)
                    by_index[index] = torch.zeros(self.capacity, stride, dtype=dtype)
                    self.program.bind(index, by_index[index].data_ptr(), stride)
                self._tensors[symbol] = by_index[index]

    def _bind_given(self, symbol: Symbol, given: Mapping[str, torch.Tensor], count: int) -> None:
        assert symbol.given is not None
        value = given.get(symbol.given)
        bound = self._bound.get(symbol.given)
        if bound is not None and bound[0] is value and bound[1] >= count:
            return  # often the result of another plan, the same tensor at every step
        if value is None or value.dim() != 2 or value.shape[0] < count or value.shape[1] != symbol.width:
            shape = None if value is None else tuple(value.shape)
            raise UsageError(f"input {symbol.given!r} must be [{count}, {symbol.width}], not {shape}")
        read = value
        if value.dtype != torch.float32 or value.device.type != "cpu" or value.stride(1) != 1:
            read = value.to("cpu", torch.float32).contiguous()
        self.program.bind(self._buffers[symbol], read.data_ptr(), read.stride(0))
        self._bound[symbol.given] = (value if read is value else None, read.shape[0], read)

    def _bind_cache(self, cache: KVCache) -> None:
        if cache.packed and not bf16_dot():
            raise UsageError("this CPU cannot read a packed K/V cache: make one of float32")
        bind_cache(self.program, cache)
        self._cache = weakref.ref(cache)


def apart(width: int) -> int:
    """Elements from a row of activations to the next. Rows that lie 2 or 4 KB apart share the same few lines of the
    first-level cache, and twelve of them push each other out: they are kept a line further apart."""
    return width + 16 if width % 512 == 0 else width


def measure_read(data: torch.Tensor) -> float:
    """Read all of a float32 tensor once with all threads; its sum."""
    return float(_extension().read_memory(address(data, torch.float32, 0, "data"), data.numel()))


def measure_peak(turns: int) -> float:
    """Do multiply-adds with all threads; how many floating-point operations they were."""
    return float(_extension().burn(turns))
