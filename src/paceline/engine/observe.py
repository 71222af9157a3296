"""What became of a step, as the policy is told."""

from __future__ import annotations

from dataclasses import replace

from paceline.control.base import RowOutcome, StepOutcome
from paceline.core import Draft
from paceline.engine.propose import Proposed
from paceline.engine.scheduler import ScheduledChunk
from paceline.engine.verify import Verified
from paceline.tree import depths, products, trunk


def outcome_of(
    work: list[ScheduledChunk],
    draft: Draft,
    verified: Verified,
    proposed: Proposed,
    seconds: float,
    *,
    timed: bool,
) -> StepOutcome:
    """Of a step that took so many seconds in all."""
    rows = []
    for i, w in enumerate(work):
        verdict = verified.verdicts[i]
        if verdict is None or not (w.count == 1 and w.last):
            continue
        own, agreed = draft.tokens[i], 0
        kept = list(verdict.places)
        tree = draft.tree(i)
        deep = len(own) if tree is None else trunk(tree)
        right = next((j for j, place in enumerate(kept) if place != j), len(kept))
        unused: tuple[float, ...] = ()
        found = proposed.unused.get(w.sequence.id)
        if found is not None:
            tokens, confidence = found
            written = [*(own[place] for place in kept), verdict.next_token]
            compared = min(len(tokens), len(written))
            while agreed < compared and tokens[agreed] == written[agreed]:
                agreed += 1
            unused = tuple(confidence[:compared])
        drafter = draft.drafter[i] if own else None
        confidence = draft.confidence[i]
        row = RowOutcome(w.sequence.id, drafter, deep, right, tuple(confidence[:deep]), unused, agreed)
        if tree is not None:
            chances = products(tree, confidence)
            order = sorted(range(len(own)), key=lambda place: -chances[place])
            likeliest = tuple([place in kept for place in order])
            row = replace(row, likeliest=likeliest, levels=max(depths(tree)))
        rows.append(row)
    drafting = sum(proposed.seconds.values())
    return StepOutcome(tuple(rows), seconds - drafting, proposed.seconds, proposed.prefill_rows, timed)
