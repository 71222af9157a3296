"""When a draft ends: a row goes on while its next token gains more than it costs, as the plan's stop rule says."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

from paceline.control.allocation import should_continue
from paceline.control.confidence import worth_of
from paceline.ops.base import Stop


class RoundStops:
    """Of one draft round, by row: how far each may go, and the chance that all of its draft so far is kept."""

    def __init__(self, stops: list[Stop]) -> None:
        self.stops = stops
        self._alive = [1.0] * len(stops)

    def most(self, row: int) -> int:
        """Tokens that a row may draft."""
        return self.stops[row].most

    def after(self, row: int, drafted: int) -> Stop:
        """What is left of a row's rule once it has drafted so many tokens."""
        stop = self.stops[row]
        if not drafted:
            return stop
        chance = tuple([self._alive[row] * chance for chance in stop.chance[drafted:]])
        most = stop.most - drafted if chance or not stop.chance else min(stop.most - drafted, 1)
        return stop._replace(most=most, chance=chance)

    def go_on(self, rows: Seq[int], step: int, confidence: Seq[float]) -> list[int]:
        """Those of `rows` for which a token after that of `step`, drafted with `confidence` [rows], is worth its cost."""
        call = max([self.stops[row].step for row in rows], default=0.0)
        gains = [self._gain(row, step, sure) for row, sure in zip(rows, confidence, strict=True)]
        return [row for row, more in zip(rows, should_continue(gains, call), strict=True) if more]

    def _gain(self, row: int, step: int, confidence: float) -> float:
        """Tokens that another one gains after that of `step`, net of its price."""
        most, chance, worth, price, _ = self.stops[row]
        if step + 1 >= most:
            return -math.inf
        if not chance:
            return math.inf
        self._alive[row] *= worth_of(worth, confidence)
        return self._alive[row] * chance[step] - price if step < len(chance) else -math.inf
