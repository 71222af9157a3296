"""Where the rows of a draft round end, by their stop rules; native/round.cpp has the same in C++."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

from paceline.ops.base import Drawn, Stop


class Ends:
    """Of one round, by row: how far each may go, and the chance that all of its tokens so far are kept.

    A row goes on while its next token gains more than it costs, if all rows together pay for the call of the network.
    """

    def __init__(self, stops: Seq[Stop]) -> None:
        """A stop with chances that does not say what a confidence is worth raises ValueError once its row is asked."""
        self.stops = stops
        self._alive = [1.0] * len(stops)
        self._active = list(range(len(stops)))
        self.drawn = Drawn([], [])

    def take(self, tokens: Seq[int], confidence: Seq[float]) -> bool:
        """Take in the tokens [N] of a step (-1 where a row has none), and their confidences, without what a row no longer
        asked for; whether any row goes on.
        """
        count, step = len(self.stops), len(self.drawn.tokens)
        drawn, sure = [-1] * count, [0.0] * count
        for row in self._active:
            drawn[row], sure[row] = tokens[row], confidence[row]
        self.drawn.tokens.append(drawn)
        self.drawn.confidence.append(sure)
        rows = [row for row in self._active if tokens[row] >= 0]
        self._active = self.go_on(rows, step, [confidence[row] for row in rows])
        return bool(self._active)

    def go_on(self, rows: Seq[int], step: int, confidence: Seq[float]) -> list[int]:
        """Those of `rows` for which a token after that of `step`, drafted with `confidence` [rows], is worth its cost."""
        gains = [self._gain(row, step, sure) for row, sure in zip(rows, confidence, strict=True)]
        on = [row for row, gain in zip(rows, gains, strict=True) if gain > 0.0]
        call = max([self.stops[row].step for row in on], default=0.0)
        return on if sum([gain for gain in gains if gain > 0.0]) >= call else []

    def after(self, row: int, drafted: int) -> Stop:
        """What is left of a row's rule once it has drafted so many tokens."""
        stop = self.stops[row]
        if not drafted:
            return stop
        chance = tuple([self._alive[row] * chance for chance in stop.chance[drafted:]])
        limit = stop.limit - drafted if chance or not stop.chance else min(stop.limit - drafted, 1)
        return stop._replace(limit=limit, chance=chance)

    def _gain(self, row: int, step: int, confidence: float) -> float:
        """Tokens that another one gains after that of `step`, net of its price."""
        limit, chance, worth, price, _ = self.stops[row]
        if step + 1 >= limit:
            return -math.inf
        if not chance:
            return math.inf
        if not worth:
            raise ValueError("a stop with chances has to say what a confidence is worth")
        self._alive[row] *= _worth_of(worth, confidence)
        return self._alive[row] * chance[step] - price if step < len(chance) else -math.inf


def _worth_of(worth: Seq[tuple[float, float]], confidence: float) -> float:
    """What is no probability is worth as much as 0."""
    sure = confidence if 0 <= confidence <= 1 else 0.0
    base, rise = worth[min(int(sure * len(worth)), len(worth) - 1)]
    return base + rise * sure
