"""Make room for a step before it runs: give up drafts first, then the newest texts, then a text that can never fit."""

from __future__ import annotations

from paceline.control.reasons import NoDraftReason
from paceline.core import Draft
from paceline.engine.scheduler import ScheduledChunk
from paceline.engine.state import EngineState
from paceline.errors import CapacityError
from paceline.kv.pages import OutOfPages
from paceline.kv.tail import Tail
from paceline.tree import trunk


def reserve(
    state: EngineState, work: list[ScheduledChunk], draft: Draft
) -> tuple[list[ScheduledChunk], Draft, Tail | None]:
    """(work, draft, tail) for what fits; the tail is None when nothing is left to do."""
    while work:
        items = [
            (w.sequence.id, w.sequence.tokens[w.sequence.committed : w.sequence.committed + w.count] + tokens)
            for w, tokens in zip(work, draft.tokens, strict=True)
        ]
        sure = [w.count - w.last for w in work]  # a text that cannot go on does not keep its last token
        try:
            return work, draft, state.cache.tail(items, draft.parents, sure)
        except OutOfPages as error:
            if draft.parents is not None and any(draft.parents):
                _cut_to_chains(draft, draft.parents)
            elif any(draft.tokens):
                draft = _without_drafts(draft)
            elif len(state.scheduler.running) > 1:
                victim = state.scheduler.running[-1]
                state.preempt(victim)
                work, draft = _without(work, draft, victim.id)
            else:
                request = state.requests[work[0].sequence.id]
                state.fail(request, f"{error}")
                work, draft = _without(work, draft, work[0].sequence.id)
        except CapacityError as error:
            state.fail(state.requests[work[0].sequence.id], f"{error}")
            work, draft = _without(work, draft, work[0].sequence.id)
    return work, draft, None


def _cut_to_chains(draft: Draft, parents: list[list[int] | None]) -> None:
    """Leave of each tree its first branch."""
    for i, tree in enumerate(parents):
        if tree is not None:
            draft.select(i, range(trunk(tree)))


def _without_drafts(draft: Draft) -> Draft:
    reasons = [
        NoDraftReason.MEMORY.value if t else r for t, r in zip(draft.tokens, draft.reasons, strict=True)
    ]
    empty = Draft.empty(len(draft.tokens), NoDraftReason.MEMORY.value)
    empty.reasons, empty.q = reasons, [None] * len(reasons)
    return empty


def _without(
    work: list[ScheduledChunk], draft: Draft, sequence_id: int
) -> tuple[list[ScheduledChunk], Draft]:
    keep = [i for i, w in enumerate(work) if w.sequence.id != sequence_id]
    q, parents = draft.q, draft.parents
    return [work[i] for i in keep], Draft(
        [draft.tokens[i] for i in keep],
        [draft.confidence[i] for i in keep],
        [q[i] for i in keep] if q is not None else None,
        [draft.reasons[i] for i in keep],
        [draft.drafter[i] for i in keep],
        [parents[i] for i in keep] if parents is not None else None,
    )
