"""A drafter of several stages, one for each token of a draft: for models with several modules for multi-token prediction.

Stage k reads token p + k at row p: so the last rows of a text are computed anew by the later stages in each round, with
the tokens just drafted. A row is kept once all of its tokens belong to the text.
"""

from __future__ import annotations

import torch

from paceline.core import Draft, Sequence
from paceline.drafters.base import DraftContext
from paceline.drafters.states import MemoryDrafter, joined
from paceline.kv.cache import KVCache
from paceline.models.base import rows_of
from paceline.models.drafters.base import ChainNet


class ChainDrafter(MemoryDrafter):
    def __init__(self, name: str, net: ChainNet, cache: KVCache) -> None:
        super().__init__(name, net, cache, net.shift)
        self.net = net

    def _absorb(self, sequence: Sequence, states: torch.Tensor) -> None:
        for depth in range(self.net.shift):
            states = self._stage(depth, [(sequence, [])], [len(states)], states)[0]

    def _ahead(self, limit: int) -> int:
        return 0

    def draft(self, context: DraftContext) -> Draft:
        context, picker = self._capped(context), context.picker
        for sequence in context.sequences:
            if self.lacks(sequence) is None:
                self._catch_up(self._texts[sequence.id])
        active = self._with_room(context)
        drafted: dict[int, list[int]] = {b: [] for b in active}
        waiting = [self._texts[context.sequences[b].id].waiting.all() for b in active]
        states = joined(waiting) if active else torch.empty(0)
        for depth in range(max((context.limits[b] for b in active), default=0)):
            texts = [(context.sequences[b], drafted[b]) for b in active]
            counts = [self._waiting(sequence) for sequence, _ in texts]
            states, last = self._stage(depth, texts, counts, states)
            logits = self.net.stage_logits(depth, rows_of(states, last))
            for b, token in zip(
                active, picker.pick(active, depth, logits, self._candidates(len(active))), strict=True
            ):
                drafted[b].append(token)
            left = set(picker.go_on([b for b in active if depth + 1 < context.limits[b]], depth))
            rows_left = [row for b, end, count in zip(active, last, counts, strict=True) if b in left
                    for row in range(end + 1 - count, end + 1)]  # fmt: skip
            active = [b for b in active if b in left]
            if not active:
                break
            states = rows_of(states, rows_left)
        return picker.draft(self.name)

    def _stage(
        self, depth: int, texts: list[tuple[Sequence, list[int]]], counts: list[int], states: torch.Tensor
    ) -> tuple[torch.Tensor, list[int]]:
        """What a stage gives for the next rows of some texts with their drafts, and the place of each text's last row."""
        items = []
        for (sequence, drafted), count in zip(texts, counts, strict=True):
            first = self.cache.committed(sequence.id) + 1 + depth
            items.append((sequence.id, [*sequence.tokens, *drafted][first : first + count]))
        rows = self.cache.tail(items).rows(self.net.device)
        return self.net.stage(depth, rows, states, self.cache), [end - 1 for end in rows.starts[1:]]
