"""Make room for a step before it runs: give up drafts first, then the newest texts, then a text that can never fit."""

from __future__ import annotations

from paceline.control.reasons import NoDraftReason
from paceline.engine.plan import StepPlan
from paceline.engine.state import EngineState
from paceline.errors import CapacityError
from paceline.kv.pages import OutOfPages
from paceline.kv.tail import Tail
from paceline.tree import trunk


def reserve(state: EngineState, plan: StepPlan) -> Tail | None:
    """Reserve pages for the plan and drop the rows that do not fit; None when no row is left."""
    while plan.requests:
        # a text that cannot go on does not keep its last token
        sure = [count - last for count, last in zip(plan.counts, plan.last, strict=True)]
        try:
            return state.cache.tail(plan.items(), plan.draft.parents, sure)
        except OutOfPages as error:
            if any(plan.draft.parents or ()):
                _cut_to_chains(plan)
            elif any(plan.draft.tokens):
                plan.give_up_drafts(NoDraftReason.MEMORY.value)
            elif len(state.scheduler.running) > 1:
                newest = state.scheduler.running[-1]
                state.preempt(newest)
                for row in [b for b, request in enumerate(plan.requests) if request.sequence is newest]:
                    plan.drop(row)
            else:
                state.fail(plan.requests[0], f"{error}")
                plan.drop(0)
        except CapacityError as error:
            state.fail(plan.requests[0], f"{error}")
            plan.drop(0)
    return None


def _cut_to_chains(plan: StepPlan) -> None:
    """Leave of each tree its first branch."""
    for row, parents in enumerate(plan.draft.parents or ()):
        if parents is not None:
            plan.draft.select(row, range(trunk(parents)))
