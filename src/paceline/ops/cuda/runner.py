"""Forwards on a CUDA device: a graph is recorded and lowered once, and a step is one replay of what was captured.

A row's bits depend on its token, position, sequence and weights, and on the card and the version of Triton: not on the
number of rows, their place, how a text is cut into chunks, or what stands beside it. Activations are float32 between
operations; what is multiplied with bfloat16, int8 and int4 weights is rounded to bfloat16 first, with sums in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from itertools import pairwise

import torch
from torch import Tensor

from paceline.core import ForwardBatch
from paceline.kv.cache import KVCache
from paceline.kv.layout import Layout
from paceline.ops.base import ChainStart, Drawn, Graph, RoundStart, Rule, Stop, Weight
from paceline.ops.cuda.emitter import Unsupported
from paceline.ops.cuda.lowering import lower
from paceline.ops.cuda.plan import Captured, Device, Plan, Staging
from paceline.ops.cuda.round import Chain, Round, fits
from paceline.ops.cuda.selftest import failures
from paceline.ops.cuda.weights import Matrix, Order, kind_of, pack
from paceline.ops.recording import Code, RecordingOps, Symbol
from paceline.ops.reference import EagerRunner


class CudaRunner:
    """Implements `Runner`. Results are views of the plan's own places, valid until the next run of the same graph."""

    reads_blocks = True
    activations = torch.float32

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
        *,
        capture: bool = True,
        trusted: bool = False,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`dtype`: what int8 and int4 weights are multiplied in. `note` gets a line where something is done the slow way.

        `trusted`: no self-test before the first graphs.
        """
        self.device, self._low, self._note = device, dtype, note
        taken = Capture(device) if capture and device.type == "cuda" else None
        self._shared = Device(device, Staging(device), taken, note)
        self._plans: dict[Graph, Plan | None] = {}
        self._packed: dict[
            tuple[object, ...], tuple[Seq[Weight], Matrix]
        ] = {}  # the weights stay alive: ids are theirs
        self._rounds: dict[Graph, Round] = {}
        self._chains: dict[Graph, Chain] = {}
        self._eager = EagerRunner(torch.float32)
        self._tested: set[str] | None = None if trusted else set()  # kinds of weights; None: not at all
        self._broken = False

    def prepare(self, graphs: Seq[Graph]) -> None:
        """Lower `graphs` and bring their weights into the form that kernels read; others are let go of as loaded."""
        recordings = []
        for graph in graphs:
            ops = RecordingOps()
            recordings.append((graph, ops, graph(ops)))
        counts: dict[int, int] = {}
        for _, ops, _ in recordings:
            for node in ops.nodes:
                for weight in node.weights:
                    counts[id(weight)] = counts.get(id(weight), 0) + (2 if node.code is Code.EMBED else 1)
        own = {key for key, count in counts.items() if count == 1}
        self._test([ops for _, ops, _ in recordings])
        for graph, ops, results in recordings:
            if graph not in self._plans:
                self._plans[graph] = None if self._broken else self._lower(ops, results, own)

    def _test(self, recordings: Seq[RecordingOps]) -> None:
        """Have the card show that its results are right and depend on no other row, for each kind of weight, once."""
        kinds = {kind_of(weight) for ops in recordings for node in ops.nodes for weight in node.weights}
        wanted = {kind if kind in ("int8", "int4", "mxfp4") else "float" for kind in kinds}
        if self._tested is None or self._broken or wanted <= self._tested:
            return
        self._tested |= wanted
        other = CudaRunner(self.device, self._low, capture=False, trusted=True)
        if wrong := failures(other, wanted, self.device, self._low):
            self._broken = True
            self._note(
                f"the kernels failed their self-test on {self.device} ({wrong[0]}): plain torch runs instead, slower. "
                "Please report it with what `paceline self-test` prints"
            )

    def _lower(self, ops: RecordingOps, results: Seq[Symbol], own: set[int]) -> Plan | None:
        """None where plain torch has to run a graph, which is said."""

        def packed(weights: Seq[Weight], order: Order) -> Matrix:
            return self._pack(weights, order, release=all(id(weight) in own for weight in weights))

        try:
            _supported(ops)
            lowered = lower(ops, results, packed, own, self._low)
        except Unsupported as error:
            self._note(f"{error} has no kernel of its own on {self.device} and is run by plain torch, slower")
            return None
        return Plan(lowered, self._shared)

    def _pack(self, weights: Seq[Weight], order: Order, *, release: bool) -> Matrix:
        key = (order, *(id(weight) for weight in weights))
        if key not in self._packed:
            matrix = pack(weights, self._low, order)
            self._packed[key] = tuple(weights), matrix
            if release:
                for weight in weights:
                    weight.release()
        return self._packed[key][1]

    def packs(self, layout: Layout) -> bool:
        """Never: pages lie as they are."""
        return False

    def quantizes(self, layout: Layout) -> bool:
        """Never."""
        return False

    def run(
        self, graph: Graph, rows: ForwardBatch, cache: KVCache | None, given: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        plan = self.plan(graph)
        if plan is None:
            return self._eager.run(graph, rows, cache, given)
        out = plan.run(rows, cache, given)
        if plan.lowered.recurs and cache is not None and cache.states is not None:
            slots = rows.slots.tolist() if rows.numbers is None else rows.numbers[2]
            cache.states.settle([slots[start] for start, end in pairwise(rows.starts) if start < end])
        return out

    def plan(self, graph: Graph) -> Plan | None:
        """The lowered recording of `graph`, made now if it was not prepared; None: plain torch runs it."""
        if graph not in self._plans:
            ops = RecordingOps()
            results = graph(ops)
            self._plans[graph] = None if self._broken else self._lower(ops, results, set())
        return self._plans[graph]

    def draft_round(
        self,
        graph: Graph,
        start: RoundStart,
        cache: KVCache,
        states: Tensor,
        rules: list[Rule],
        stops: list[Stop],
    ) -> Drawn | None:
        """All steps on the device, draws included; the host reads one small tensor, or one for each `PIECE` of steps."""
        plan = self.plan(graph)
        if plan is None or not fits(plan, start) or states.device.type != self.device.type:
            return None
        if graph not in self._rounds:
            self._rounds[graph] = Round(plan, start.moves, start.ids)
        return self._rounds[graph].run(start, cache, states, rules, stops)

    def chain_round(
        self, graph: Graph, start: ChainStart, rules: list[Rule], stops: list[Stop]
    ) -> Drawn | None:
        """As `draft_round`, of a graph without K/V."""
        plan = self.plan(graph)
        if plan is None or not plan.lowered.reads_rows:
            return None
        if graph not in self._chains:
            self._chains[graph] = Chain(plan, start)
        return self._chains[graph].chain(start, rules, stops)


class Capture:
    """Captures launches into CUDA graphs, which share their memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, launch: Callable[[], None]) -> Captured:
        """What enqueues all of `launch` at once. Raises RuntimeError where it cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            launch()
        return graph.replay


def _supported(ops: RecordingOps) -> None:
    """Raise Unsupported before any weight is taken for a graph that cannot be lowered."""
    for node in ops.nodes:
        if node.code is Code.REDUCE:
            raise Unsupported("a target over several processes")
