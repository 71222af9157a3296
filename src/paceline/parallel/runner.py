"""Rank 0's runner: what of a graph is sharded, the other ranks compute along."""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core import ForwardBatch
from paceline.kv.cache import KVCache
from paceline.kv.layout import Layout
from paceline.ops.base import ChainStart, Drawn, Graph, RoundStart, Rule, Runner, Stop
from paceline.ops.recording import Code, RecordingOps
from paceline.parallel.messages import Forward, NewCache


class Others(Protocol):
    def send(self, forward: Forward) -> None: ...

    def lose(self, error: BaseException) -> BaseException:
        """They are out of step from now on; the error that says what happened."""
        ...


@dataclass(slots=True)
class _Mirror:
    """What the other ranks know of a cache."""

    key: int
    tables: dict[str, NDArray[np.int32]]


class SharedRunner:
    """Implements `Runner`: graphs without a sum over the ranks run here alone."""

    def __init__(self, inner: Runner, others: Others) -> None:
        self._inner, self._others = inner, others
        self._graphs: dict[Graph, int] = {}
        self._mirrors: weakref.WeakKeyDictionary[KVCache, _Mirror] = weakref.WeakKeyDictionary()
        self._caches, self._dropped = 0, list[int]()

    @property
    def reads_blocks(self) -> bool:
        return self._inner.reads_blocks

    @property
    def activations(self) -> torch.dtype | None:
        return self._inner.activations

    def packs(self, layout: Layout) -> bool:
        return self._inner.packs(layout)

    def quantizes(self, layout: Layout) -> bool:
        return self._inner.quantizes(layout)

    def prepare(self, graphs: Seq[Graph]) -> None:
        for graph in shared(graphs):
            self._graphs.setdefault(graph, len(self._graphs))
        self._inner.prepare(graphs)

    def run(
        self, graph: Graph, rows: ForwardBatch, cache: KVCache | None, given: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        number = self._graphs.get(graph)
        if number is None:
            return self._inner.run(graph, rows, cache, given)
        assert cache is not None, "what is sharded reads K/V"
        with undisturbed():
            try:
                self._others.send(self._forward(number, rows, cache, given))
                return self._inner.run(graph, rows, cache, given)
            except BaseException as error:
                raise self._others.lose(error) from error

    def draft_round(
        self,
        graph: Graph,
        start: RoundStart,
        cache: KVCache,
        states: torch.Tensor,
        rules: list[Rule],
        stops: list[Stop],
    ) -> Drawn | None:
        """None where each step needs the other ranks: then it goes step by step."""
        lead = start.lead
        if graph in self._graphs or (lead and (lead.graph in self._graphs or lead.head in self._graphs)):
            return None
        return self._inner.draft_round(graph, start, cache, states, rules, stops)

    def chain_round(
        self, graph: Graph, start: ChainStart, rules: list[Rule], stops: list[Stop]
    ) -> Drawn | None:
        return None if graph in self._graphs else self._inner.chain_round(graph, start, rules, stops)

    def _forward(
        self, graph: int, rows: ForwardBatch, cache: KVCache, given: Mapping[str, torch.Tensor]
    ) -> Forward:
        numbers = rows.numbers or (rows.tokens.tolist(), rows.positions.tolist(), rows.slots.tolist())
        values = {name: _array(value[: rows.count]) for name, value in given.items()}
        mirror, new = self._mirrors.get(cache), None
        if mirror is None:
            mirror = self._mirrors[cache] = _Mirror(self._caches, {})
            weakref.finalize(cache, self._dropped.append, self._caches)
            self._caches += 1
            cache.scrubbed = []
            pages = {kind: pool.count for kind, pool in cache.pools.items()}
            new = NewCache(pages, cache.max_sequences, cache.max_tokens, cache.kind, cache.branches)
            mirror.tables = {kind: np.zeros(table.shape, np.int32) for kind, table in cache.tables.items()}
        scrubbed, cache.scrubbed = cache.scrubbed or [], []
        dropped = [self._dropped.pop() for _ in range(len(self._dropped))]
        slots, trees = set(numbers[2]), rows.branches
        if trees is not None:
            slots.update(slot for _, slot in trees.further)
            slots.update(slot for copy in trees.copies for slot in copy[:2])
        tables = _changes(cache, mirror, sorted(slots))
        return Forward(
            graph,
            mirror.key,
            numbers,
            rows.starts,
            values,
            trees,
            rows.adapters,
            tables,
            scrubbed,
            new,
            dropped,
        )


def shared(graphs: Seq[Graph]) -> list[Graph]:
    """Those of `graphs` in which something is added up over the ranks."""
    tensors = []
    for graph in graphs:
        graph(ops := RecordingOps())
        if any(node.code is Code.REDUCE for node in ops.nodes):
            tensors.append(graph)
    return tensors


def _changes(
    cache: KVCache, mirror: _Mirror, slots: list[int]
) -> list[tuple[str, list[int], NDArray[np.int32]]]:
    """Rows of the page tables that the others do not have yet, noted as sent."""
    out = []
    for kind, table in cache.tables.items():
        now = table.numpy() if table.is_cpu else table.cpu().numpy()
        known = mirror.tables[kind]
        news = [slot for slot in slots if not np.array_equal(now[slot], known[slot])]
        if news:
            known[news] = now[news]
            out.append((kind, news, now[news]))
    return out


def _array(value: torch.Tensor) -> NDArray[np.generic]:
    value = value.float() if value.dtype == torch.bfloat16 else value
    array: NDArray[np.generic] = value.cpu().contiguous().numpy()
    return array


@contextmanager
def undisturbed() -> Iterator[None]:
    """A Ctrl-C waits for the end of what is inside: a forward left in its middle would leave the ranks out of step."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    seen: list[tuple[int, object]] = []
    note: Callable[..., None] = lambda *signal: seen.append(signal)  # noqa: E731
    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if seen:
            handler(*seen[0])  # type: ignore[arg-type]
