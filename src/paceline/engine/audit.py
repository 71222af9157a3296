"""When to write some plain steps amid drafts, to see whether drafts still pay, or some drafts amid plain steps.

While every step checks drafts, a slow machine and a dear draft look the same. A few plain steps now and then tell: often
where a plan promises little, which costs next to nothing there, rarely where it promises much. And while nothing is
drafted nobody sees that drafts have become cheaper than was thought: where they would pay if they were by `HOPEFUL`, they
are tried for a few steps, rarer each time that it was in vain.
"""

from __future__ import annotations

from dataclasses import replace
from math import log

from paceline.engine.costs import Costs

COLD = 8  # plain steps after drafts until the caches hold the target's weights again: they tell nothing
# steps of an audit where a plan promises much, and else: until all is warm takes a few dozen
AUDIT = (COLD + 4, 48)
CLEAR = 1.4  # what a plan promises over none from which on an error will hardly turn it around
SAME = 0.1  # change of the drag, as a logarithm, that confirms what was known
FIRST_AUDIT = 64  # steps with drafts until the first audit,
SOONEST, RAREST = 128, 1024  # and between two: the more, the longer they agree,
SPENT = 0.015  # and the more a plan promises: of what drafts bring no more than such a share of the time may be lost
# steps of a trial, of greedy and of sampled texts: the first `WARM` of them tell nothing yet
TRIAL = 32, 20
HOPEFUL = 0.85  # what steps with drafts might take, over what is thought
# Steps of such texts without drafts until a trial, of greedy and of sampled ones, times the bits of their number: the
# more they are the more is lost by one that is in vain,
FIRST_TRIAL = 64, 128
LAST_TRIAL = 2048, 8192  # and between two trials at most
RARER = 4  # times as many after each


class Audit:
    """For some number of texts: audits become rarer while they find what was known, trials while they are in vain."""

    def __init__(self, sampled: bool = False, size: int = 1) -> None:
        """`sampled`: all of them are, where there is less to be found by a trial. `size`: bits of their number."""
        self._every, self._drag = FIRST_AUDIT, 1.0
        self._first = self._wait = FIRST_TRIAL[sampled] * size
        self._longest = LAST_TRIAL[sampled]
        self.next = self._wait  # the step from which a trial may be made
        self._away: int | None = 0  # the step since which others were written

    def away(self, now: int) -> None:
        """Others are written from now on: what passes meanwhile does not count."""
        self._away = now

    def back(self, now: int) -> None:
        if self._away is not None:
            self.next, self._away = self.next + now - self._away, None

    def due(self, costs: Costs, gain: float) -> bool:
        """Whether to begin an audit, where drafts promise `gain` times the speed of none."""
        drag, stale = costs.drag, costs.unseen
        least = float(self._every if gain < CLEAR else 2 * self._every)
        if self._every > FIRST_AUDIT:
            least = max(least, self.steps(gain) * (gain - 1.0) / SPENT)
        if gain <= 1.0 or stale < least:
            return False
        same = abs(log(drag / self._drag)) < SAME
        self._every = min(2 * self._every, RAREST) if same else max(self._every // 2, SOONEST)
        self._drag = drag
        return True

    def steps(self, gain: float) -> int:
        """Plain ones, where drafts promise so much: the last of them tell; the less drafts gain the less they cost."""
        return AUDIT[gain < CLEAR]

    def tried(self, now: int) -> None:
        self._wait = min(RARER * self._wait, self._longest)
        self.next = now + self._wait

    def paid(self, now: int) -> None:
        """A plan drafts of its own accord: what that takes is seen while it does."""
        self._wait = min(self._wait, RARER * self._first)
        self.next = now + self._wait


def hopeful(costs: Costs) -> Costs:
    """What steps might cost if drafts were cheaper than is thought."""
    return replace(costs, tempo=costs.tempo.dearer(costs.here.texts.bit_length(), HOPEFUL))
