"""A drafter of slots (P-EAGLE): the rows that were kept, and behind them a slot for each further token, in one forward.

A slot is a row whose token is a mask and whose states are learned. It sees what is before it, so how many there are
changes no token.
"""

from __future__ import annotations

from paceline.core import Draft
from paceline.drafters.base import DraftContext
from paceline.drafters.states import EntryDrafter, joined
from paceline.models.base import rows_of
from paceline.models.drafters.base import SlotsNet


class SlotsDrafter(EntryDrafter):
    net: SlotsNet

    def _ahead(self, limit: int) -> int:
        return limit - 1

    def draft(self, context: DraftContext) -> Draft:
        context, picker = self._capped(context), context.picker
        active = self._with_room(context)
        if not active:
            return picker.draft(self.name)
        texts = [context.sequences[b] for b in active]
        ahead = [context.limits[b] - 1 for b in active]
        masks = self.net.mask_states
        states = joined(
            [
                part
                for s, count in zip(texts, ahead, strict=True)
                for part in (
                    self._texts[s.id].waiting.all(),
                    masks.to(self._texts[s.id].waiting.all()).expand(count, -1),
                )
            ]
        )
        entries = [self._next(s) for s in texts]
        tail = self.cache.tail(
            [(s.id, own + [self.net.mask] * n) for s, own, n in zip(texts, entries, ahead, strict=True)]
        )
        rows = tail.rows(self.net.device)
        normed = self.net.look(rows, states, self.cache)
        tail.commit([len(own) - 1 for own in entries])
        for s in texts:
            self._texts[s.id].waiting.keep(1)
        last = {b: start + len(own) - 1 for b, start, own in zip(active, rows.starts, entries, strict=False)}
        wanted = [last[b] + step for b in active for step in range(context.limits[b])]
        place = {row: i for i, row in enumerate(wanted)}
        logits = self.net.logits(rows_of(normed, wanted))
        for step in range(max(context.limits[b] for b in active)):
            scores = rows_of(logits, [place[last[b] + step] for b in active])
            picker.pick(active, step, scores, self._candidates(len(active)))
            active = picker.go_on([b for b in active if step + 1 < context.limits[b]], step)
            if not active:
                break
        return picker.draft(self.name)
