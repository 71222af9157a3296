"""When to write some plain steps amid drafts, to see whether drafts still pay.

While every step checks drafts, a slow machine and a dear draft look the same. A few plain steps now and then tell: often
where a plan promises little, which costs next to nothing there, rarely where it promises much.
"""

from __future__ import annotations

from math import log

from paceline.engine.costs import FRESH, Costs

AUDIT = 6  # steps of an audit: the first ones after drafts find the caches cold
CLEAR = 1.4  # what a plan promises over none from which on an error will hardly turn it around
SAME = 0.05  # change of the drag, as a logarithm, that confirms what was known
RAREST = 512  # steps with drafts between two audits that confirm each other, at most


class Audit:
    """Audits become rarer while they find what was known already."""

    def __init__(self) -> None:
        self._every, self._drag = FRESH, 1.0

    def due(self, costs: Costs, gain: float) -> bool:
        """Whether to begin one, where drafts promise `gain` times the speed of none."""
        if gain <= 1.0 or costs.stale < (self._every if gain < CLEAR else RAREST):
            return False
        same = abs(log(costs.drag / self._drag)) < SAME
        self._every = min(2 * self._every, RAREST) if same else FRESH
        self._drag = costs.drag
        return True
