"""Recurrent states of linear attention: one for each text, at an offset of 8 n tokens, and what rows since then hold.

A state cannot be rolled back, so it never goes over a row that may be refused: a forward first brings it to the last such
place in what is sure to stay, from the kept rows, and goes on from there in a copy that is thrown away. A refused row is
written over like a key or a value.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch

from paceline.errors import CapacityError, UsageError
from paceline.kv.layout import RECENT, LayerState

GRAIN = 8  # tokens from a place where a state may stand to the next, see docs/internals/architecture.md
Zeros = Callable[[tuple[int, ...]], torch.Tensor]


class States:
    """`count` states, numbered; each slot of the cache that is in use has one of them."""

    def __init__(self, layers: Seq[LayerState], count: int, slots: int, zeros: Zeros) -> None:
        self.count = count
        self.history = max(layer.history for layer in layers)
        self.most_refused = RECENT - self.history - GRAIN + 1  # rows of a tail that need not be kept
        self.states = [zeros((count, layer.heads, layer.key_dim, layer.value_dim)) for layer in layers]
        self.recent = [
            zeros((count, RECENT, layer.width)) for layer in layers
        ]  # of a row at position % RECENT
        self.place = np.zeros(slots, dtype=np.int32)  # by slot: its state
        self.goal = np.zeros(slots, dtype=np.int32)  # by slot: where the next forward brings it
        self.folded = np.zeros(count, dtype=np.int32)  # by state: the position where it stands

    @property
    def stores(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return self.states, self.recent

    def begin(self, slot: int, place: int, source: int | None) -> None:
        """Give a slot the state `place`, as it is before any row or a copy of `source`."""
        self.place[slot] = place
        self.folded[place] = 0
        if source is not None:
            self.copy(source, place)

    def copy(self, source: int, to: int) -> None:
        """Where a state stands, with the rows that the next one reads."""
        folded = int(self.folded[source])
        rows = [position % RECENT for position in range(max(0, folded - self.history), folded)]
        for states, recent in zip(self.states, self.recent, strict=True):
            states[to].copy_(states[source])
            recent[to, rows] = recent[source, rows]
        self.folded[to] = folded

    def can_wait(self, at: int, end: int) -> bool:
        """Whether a forward up to `end` may leave a state at `at`."""
        return end - at <= RECENT - self.history

    def aim(self, slot: int, committed: int, tail: int, sure: int, stop: int | None = None) -> None:
        """Before a forward over `tail` rows from `committed` on, of which the first `sure` are going to stay.

        `stop`: a page end that the state should not go beyond yet.
        """
        folded = int(self.folded[self.place[slot]])
        goal = max((committed + sure) // GRAIN * GRAIN, folded)
        if stop is not None and folded <= stop < goal and self.can_wait(stop, committed + tail):
            goal = stop
        if not self.can_wait(goal, committed + tail):
            raise CapacityError(
                f"{tail - sure} tokens of a text may be refused, and a recurrent state can wait for {self.most_refused}: "
                "draft fewer"
            )
        self.goal[slot] = goal

    def span(self, slot: int, first: int, last: int) -> tuple[int, int, int]:
        """(its state, where that stands, where it is to be left) of a text whose rows `first` up to `last` are computed.

        Raises UsageError where the rows between are not kept any more.
        """
        place, goal = int(self.place[slot]), int(self.goal[slot])
        begin = int(self.folded[place])
        if begin > first or max(begin, goal) > last or first - min(begin, first) + self.history > RECENT:
            raise UsageError("a recurrent state stands behind the rows: reserve them with KVCache.tail")
        return place, begin, goal

    def settle(self, slots: Seq[int]) -> None:
        """After a forward: the states of `slots` stand where they should."""
        for slot in slots:
            self.folded[self.place[slot]] = self.goal[slot]
