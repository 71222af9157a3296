"""The tokens of one step: reserved by `KVCache.tail`, kept in part by `commit`."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from types import TracebackType

import torch

from paceline.core import ForwardBatch, Numbers, Tensors
from paceline.kv.fork import Fork
from paceline.kv.pages import OutOfPages
from paceline.kv.store import PageStore
from paceline.tree import Branches


class Tail:
    """Reserved space for one step. `commit` keeps a prefix of each row's tokens; leaving without it keeps nothing."""

    def __init__(
        self,
        cache: PageStore,
        items: Seq[tuple[int, list[int]]],
        trees: dict[int, list[int]],
        advance: Callable[[int, list[int]], None],
    ) -> None:
        """`trees`: parents of the last tokens of some items. `advance`(sequence id, tokens) commits them."""
        self._cache, self._advance = cache, advance
        self._items = items
        self._forks: dict[int, Fork] = {}
        try:
            for i, parents in trees.items():
                self._forks[i] = Fork(cache, items[i][0], len(items[i][1]) - len(parents), parents)
        except OutOfPages:
            self._end_forks()
            raise
        cache.sync()

    def rows(self, device: torch.device | str = "cpu", skip: Seq[int] | None = None) -> ForwardBatch:
        """The rows of a forward: all tokens of all sequences, flattened; `skip` [B] leaves out that many first ones,

        whose K/V an earlier forward of the same round has already written.
        """
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        branches = Branches([], [], []) if self._forks else None
        for i, (sequence_id, new) in enumerate(self._items):
            entry = self._cache.entries[sequence_id]
            first = skip[i] if skip is not None else 0
            if branches is not None:
                branches.runs.append(len(tokens))
            if branches is not None and i in self._forks:
                self._forks[i].place(len(tokens), first, positions, slots, branches)
            else:
                positions += range(entry.committed + first, entry.committed + len(new))
                slots += [entry.slot] * (len(new) - first)
            tokens += new[first:]
            starts.append(len(tokens))
        rows = ForwardBatch.of((tokens, positions, slots), starts, partial(tensors_of, device))
        if branches is not None:
            branches.runs.append(len(tokens))
            rows.branches = branches
        return rows

    def commit(self, keep: Seq[int], paths: Seq[list[int] | None] | None = None) -> None:
        """keep [B]: how many of each row's tokens become part of its committed prefix; of a tree, those before it and the
        tokens `paths` [B] of it.
        """
        for i, ((sequence_id, tokens), count) in enumerate(zip(self._items, keep, strict=True)):
            assert 0 <= count <= len(tokens), "a tail cannot keep more than it holds"
            committed = tokens[:count]
            if i in self._forks:
                fork, path = self._forks.pop(i), (paths[i] if paths is not None else None) or []
                before = len(tokens) - len(fork.depth)
                committed = committed[:before] + [tokens[before + node] for node in path]
                fork.end(path)
            if count:
                self._advance(sequence_id, committed)

    def _end_forks(self) -> None:
        while self._forks:
            self._forks.popitem()[1].end([])

    def __enter__(self) -> Tail:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_forks()


def tensors_of(device: torch.device | str, numbers: Numbers) -> Tensors:
    tokens, positions, slots = numbers
    return (
        torch.tensor(tokens, dtype=torch.int64, device=device),
        torch.tensor(positions, dtype=torch.int32, device=device),
        torch.tensor(slots, dtype=torch.int32, device=device),
    )
