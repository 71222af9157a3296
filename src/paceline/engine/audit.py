"""When to write some plain steps amid drafts, to see whether drafts still pay, or some drafts amid plain steps.

While every step checks drafts, a slow machine and a dear draft look the same. A few plain steps now and then tell: often
where a plan promises little, which costs next to nothing there, rarely where it promises much. And while nothing is
drafted nobody sees that drafts have become cheaper than was thought: where they would pay if they were by `HOPEFUL`, they
are tried for a few steps, rarer each time that it was in vain.
"""

from __future__ import annotations

from dataclasses import replace
from math import log

from paceline.engine.costs import FRESH, Costs

AUDIT = 8  # steps of an audit: the first ones after drafts find the caches cold
CLEAR = 1.4  # what a plan promises over none from which on an error will hardly turn it around
SAME = 0.1  # change of the drag, as a logarithm, that confirms what was known
RAREST = 512  # steps with drafts between two audits that confirm each other, at most
TRIAL = 8  # steps of a trial: where it is in vain each costs half as much again as a plain one, or more
HOPEFUL = 0.85  # what steps with drafts might take, over what is thought
FIRST_TRIAL, LAST_TRIAL = 64, 2048  # steps without drafts between two trials,
RARER = 4  # so many times longer after each


class Audit:
    """For some number of texts: audits become rarer while they find what was known, trials while they are in vain."""

    def __init__(self) -> None:
        self._every, self._drag = FRESH, 1.0
        self._wait, self._next = FIRST_TRIAL, FIRST_TRIAL

    def due(self, costs: Costs, gain: float) -> bool:
        """Whether to begin an audit, where drafts promise `gain` times the speed of none."""
        drag, stale = costs.drag
        if gain <= 1.0 or stale < (self._every if gain < CLEAR else 2 * self._every):
            return False
        same = abs(log(drag / self._drag)) < SAME
        self._every = min(2 * self._every, RAREST) if same else max(self._every // 2, FRESH)
        self._drag = drag
        return True

    def may_try(self, now: int) -> bool:
        return now >= self._next

    def tried(self, now: int) -> None:
        self._wait = min(RARER * self._wait, LAST_TRIAL)
        self._next = now + self._wait

    def paid(self, now: int) -> None:
        """A plan drafts of its own accord: what that takes is seen while it does."""
        self._next = now + self._wait


def hopeful(costs: Costs) -> Costs:
    """What steps might cost if drafts were cheaper than is thought."""
    drag = costs.drag._replace(value=HOPEFUL * costs.drag.value)
    return replace(costs, drags={costs.here.texts.bit_length(): drag})
