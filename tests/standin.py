"""A stand-in for what runs on a GPU: the bookkeeping of draft rounds over plain torch. A replay calls what was captured.

The kernels between the steps are Triton's, interpreted; forwards are those of `EagerRunner`, and draws the native ones.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.core import ForwardBatch
from paceline.kv.cache import KVCache
from paceline.ops import native_sampling
from paceline.ops.base import ChainStart, Drawn, Graph, RoundStart, Rule, Stop
from paceline.ops.cuda import round as rounds
from paceline.ops.cuda.drawing import Drawer, Logits
from paceline.ops.cuda.places import Place, Ref
from paceline.ops.cuda.plan import Held, Staging
from paceline.ops.cuda.shape import Bucket, Layout, Step, fill, round_up
from paceline.ops.recording import RecordingOps, Symbol
from paceline.ops.reference import EagerRunner, ReferenceOps

ROWS = 16


@dataclass
class Places:
    results: list[Ref]
    givens: dict[str, Ref]


@dataclass
class Context:
    meta: Callable[[str], Tensor]


def place(symbol: Symbol) -> Ref:
    dtype = torch.int64 if symbol.integer else torch.float32
    return Ref(
        Place(symbol.width, dtype, 1, True, torch.zeros(ROWS, symbol.width, dtype=dtype)), 0, symbol.width
    )


class ReferencePlan:
    """As `ops.cuda.plan.Plan`, of plain torch. What it computes it reads from and writes to static places."""

    def __init__(self, graph: Graph) -> None:
        self.device, self.reaches = torch.device("cpu"), list[Any]()
        ops = RecordingOps()
        results = graph(ops)
        self.graph, self.replays, self.captures = graph, 0, 0
        self.lowered = Places([place(s) for s in results], {name: place(s) for name, s in ops.givens.items()})
        self.staging = Staging(self.device)
        self._meta = torch.zeros(Layout(ROWS, 0).size(0), dtype=torch.int32)
        self._held: dict[Bucket, Held] = {}

    def load(self, rows: ForwardBatch, cache: KVCache | None) -> Bucket:
        self.cache, self.layout = cache, Layout(round_up(rows.count), 0)
        assert rows.numbers is not None
        host = self.staging.take(self.layout.size(0))
        bucket = fill(host.numpy(), self.layout, Step(rows.numbers, rows.starts), [])
        self.staging.send(self._meta, self.layout.size(0))
        return bucket

    def held(self, bucket: Bucket) -> Held:
        layout = Layout(bucket.rows, 0)
        context = Context(lambda name: self._meta[layout.field(name) :])
        return self._held.setdefault(bucket, Held(context))  # type: ignore[arg-type]

    def launch(self, bucket: Bucket) -> None:
        count = int(self._meta[0])  # of padding nothing is computed, as no kernel stores it
        meta = self._held[bucket].context.meta
        rows = ForwardBatch(
            meta("tokens")[:count].long(), meta("positions")[:count].clone(), meta("slots")[:count].clone(),
            list(range(count + 1)),
        )  # fmt: skip
        given = {name: ref.rows(count) for name, ref in self.lowered.givens.items()}
        with torch.no_grad():
            out = self.graph(ReferenceOps(rows, self.cache, given, torch.float32))
        for ref, value in zip(self.lowered.results, out, strict=True):
            ref.rows(count).copy_(value)

    def captured(self, launch: Callable[[], None], what: str) -> Callable[[], None]:
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            launch()

        return replay


class NativeDrawer(Drawer):
    """Draws where the kernels would."""

    def enqueue(
        self, logits: Logits, rules: Tensor, purpose: int = 0, confidence: bool = True, plain: bool = False
    ) -> None:
        x, ids = logits.x.contiguous(), logits.ids
        own = None if ids is None else ids.expand(len(x), -1).contiguous()
        decoded: list[Rule] = []
        for words in rules.numpy():
            factor, top_k, seed, position, top_p, least, _ = struct.unpack("=fiQqdfi", words.tobytes())
            decoded.append((factor, seed, position, top_k, top_p, least))
        tokens, sure = native_sampling.draw(x, own, decoded[: len(x)], purpose, True)
        self.tokens[: len(x)] = torch.tensor(tokens, dtype=torch.int32)
        self.confidence[: len(x)] = torch.tensor(sure)


class StandInRunner(EagerRunner):
    """Plain torch whose draft rounds are those of a GPU."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.rounds: dict[Graph, rounds.Round] = {}
        self.chains: dict[Graph, rounds.Chain] = {}
        self.plans: dict[Graph, ReferencePlan] = {}
        self.drawn: list[Drawn] = []

    def draft_round(
        self,
        graph: Graph,
        start: RoundStart,
        cache: KVCache,
        states: Tensor,
        rules: list[Rule],
        stops: list[Stop],
    ) -> Drawn | None:
        plan = self.plans.setdefault(graph, ReferencePlan(graph))
        if not rounds.fits(plan, start):  # type: ignore[arg-type]
            return None
        if graph not in self.rounds:
            self.rounds[graph] = rounds.Round(plan, start.moves, start.ids)  # type: ignore[arg-type]
        self.drawn.append(self.rounds[graph].run(start, cache, states, rules, stops))
        return self.drawn[-1]

    def chain_round(
        self, graph: Graph, start: ChainStart, rules: list[Rule], stops: list[Stop]
    ) -> Drawn | None:
        if graph not in self.chains:
            plan = self.plans.setdefault(graph, ReferencePlan(graph))
            self.chains[graph] = rounds.Chain(plan, start)  # type: ignore[arg-type]
        self.drawn.append(self.chains[graph].chain(start, rules, stops))
        return self.drawn[-1]
