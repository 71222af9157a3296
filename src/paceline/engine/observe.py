"""What became of a step, for the policy to learn from."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

from paceline.control.base import RowOutcome, StepOutcome
from paceline.engine.plan import Found, StepPlan, StepResult
from paceline.tree import depths, products, trunk


def outcome_of(plan: StepPlan, result: StepResult, seconds: float, *, timed: bool) -> StepOutcome:
    """Of a step that took so many seconds in all."""
    draft, rows = plan.draft, []
    for b in plan.decoding:
        verdict = result.verdicts[b]
        if verdict is None:
            continue
        id, own, places = plan.requests[b].sequence.id, draft.tokens[b], verdict.places
        unused: tuple[float, ...] = ()
        agreed = 0
        if b in plan.lookups:
            written = [*[own[place] for place in places], verdict.next_token]
            unused, agreed = _compared(plan.lookups[b], written)
        drafter, confidence, tree = draft.drafter[b] if own else None, draft.confidence[b], draft.tree(b)
        if tree is None:
            rows.append(
                RowOutcome(id, drafter, len(own), verdict.accepted, tuple(confidence), unused, agreed)
            )
            continue
        deep = trunk(tree)
        right = next((j for j, place in enumerate(places) if place != j), len(places))
        chances = products(tree, confidence)
        order = sorted(range(len(own)), key=lambda place: -chances[place])
        row = RowOutcome(id, drafter, deep, right, tuple(confidence[:deep]), unused, agreed)
        rows.append(
            replace(row, likeliest=tuple([place in places for place in order]), levels=max(depths(tree)))
        )
    drafting = sum(plan.seconds.values())
    return StepOutcome(tuple(rows), seconds - drafting, plan.seconds, plan.prefill_rows, timed)


def _compared(lookup: Found, written: Seq[int]) -> tuple[tuple[float, ...], int]:
    """(confidences of the looked-up tokens that reach into the written text, how many of them equal it)"""
    tokens, confidence = lookup
    compared = min(len(tokens), len(written))
    agreed = 0
    while agreed < compared and tokens[agreed] == written[agreed]:
        agreed += 1
    return tuple(confidence[:compared]), agreed
