"""A drafter of parallel heads: all tokens of a draft from one forward over the rows that were kept.

No head depends on a drafted token, so a draft has as many tokens as there are heads, and nothing is written behind the
text. The heads of a draft that is wanted shorter are computed all the same: their K/V are needed.
"""

from __future__ import annotations

from paceline.core import MAX_DRAFT_TOKENS, Draft
from paceline.drafters.base import DraftContext
from paceline.drafters.states import EntryDrafter, joined
from paceline.kv.cache import KVCache
from paceline.models.base import rows_of
from paceline.models.drafters.base import ParallelNet


class HeadsDrafter(EntryDrafter):
    blind = False  # its entries hold states alone
    net: ParallelNet

    def __init__(self, name: str, net: ParallelNet, cache: KVCache) -> None:
        super().__init__(name, net, cache, min(net.parallel, MAX_DRAFT_TOKENS))

    def _ahead(self, limit: int) -> int:
        return 0

    def draft(self, context: DraftContext) -> Draft:
        context, picker = self._capped(context), context.picker
        active = self._with_room(context)
        if not active:
            return picker.draft(self.name)
        heads, last = self._look([context.sequences[b] for b in active], self.net.look)
        at = dict(zip(active, last, strict=True))
        wanted = [step * len(heads[0]) + at[b] for b in active for step in range(context.limits[b])]
        place = {row: i for i, row in enumerate(wanted)}
        logits = self.net.logits(rows_of(joined(heads), wanted))
        for step in range(max(context.limits[b] for b in active)):
            scores = rows_of(logits, [place[step * len(heads[0]) + at[b]] for b in active])
            picker.pick(active, step, scores, self._candidates(len(active)))
            active = picker.go_on([b for b in active if step + 1 < context.limits[b]], step)
            if not active:
                break
        return picker.draft(self.name)
