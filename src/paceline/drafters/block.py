"""A drafter of whole blocks: the text's last token and masks behind it, all tokens of a draft from one forward (DFlash).

The block has its full length whatever is wanted, since its rows see each other: a shorter one would draft other tokens.
"""

from __future__ import annotations

import torch

from paceline.core import MAX_DRAFT_TOKENS, Draft, Sequence
from paceline.drafters.base import DraftContext
from paceline.drafters.states import MemoryDrafter, joined
from paceline.kv.cache import KVCache
from paceline.models.base import rows_of
from paceline.models.drafters.base import BlockNet


class BlockDrafter(MemoryDrafter):
    blind = False  # its entries hold states alone

    def __init__(self, name: str, net: BlockNet, cache: KVCache) -> None:
        super().__init__(name, net, cache, min(net.block - net.first, MAX_DRAFT_TOKENS))
        self.net = net

    def _absorb(self, sequence: Sequence, states: torch.Tensor) -> None:
        first = self.cache.committed(sequence.id)
        tail = self.cache.tail([(sequence.id, sequence.tokens[first : first + len(states)])])
        self.net.absorb(tail.rows(self.net.device), states, self.cache)

    def _ahead(self, limit: int) -> int:
        return self.net.block

    def draft(self, context: DraftContext) -> Draft:
        context, picker = self._capped(context), context.picker
        active = self._with_room(context)
        if not active:
            return picker.draft(self.name)
        texts = [context.sequences[b] for b in active]
        self._take_in(texts)
        masks = [self.net.mask] * (self.net.block - 1)
        rows = self.cache.tail([(s.id, [s.tokens[-1], *masks]) for s in texts]).rows(self.net.device)
        begin = {b: start + self.net.first for b, start in zip(active, rows.starts, strict=False)}
        wanted = [begin[b] + step for b in active for step in range(context.limits[b])]
        place = {row: i for i, row in enumerate(wanted)}
        logits = self.net.logits(rows_of(self.net.block_states(rows, self.cache), wanted))
        for step in range(max(context.limits[b] for b in active)):
            scores = rows_of(logits, [place[begin[b] + step] for b in active])
            picker.pick(active, step, scores, self._candidates(len(active)))
            active = picker.go_on([b for b in active if step + 1 < context.limits[b]], step)
            if not active:
                break
        return picker.draft(self.name)

    def _take_in(self, texts: list[Sequence]) -> None:
        """Compute all that waits, in one forward."""
        behind = [(s, self._texts[s.id]) for s in texts if len(self._texts[s.id].waiting)]
        if not behind:
            return
        tail = self.cache.tail([(s.id, s.tokens[self.cache.committed(s.id) : -1]) for s, _ in behind])
        states = joined([text.waiting.all() for _, text in behind])
        self.net.absorb(tail.rows(self.net.device), states, self.cache)
        tail.commit([len(text.waiting) for _, text in behind])
        for _, text in behind:
            text.waiting.keep(0)
