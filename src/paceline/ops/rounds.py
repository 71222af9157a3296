"""Where the rows of a draft round end, by their stop rules, for rounds drawn elsewhere than in native/round.cpp."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

from paceline.ops.base import Drawn, Stop


class Ends:
    """Takes in one step of all rows after the other, and leaves out what a row no longer asked for."""

    def __init__(self, stops: Seq[Stop]) -> None:
        """Raises ValueError for a stop with chances and nothing that says what a confidence is worth."""
        if any(stop.chance and not stop.worth for stop in stops):
            raise ValueError("a stop with chances has to say what a confidence is worth")
        self._stops = stops
        self._alive = [1.0] * len(stops)  # chance that all of a row's tokens so far are kept
        self._active = list(range(len(stops)))
        self.drawn = Drawn([], [])

    def take(self, tokens: Seq[int], confidence: Seq[float]) -> bool:
        """The tokens [N] of a step (-1 where a row has none), and their confidences; whether any row goes on."""
        count, step = len(self._stops), len(self.drawn.tokens)
        found, sure = [-1] * count, [0.0] * count
        gains: dict[int, float] = {}
        for row in self._active:
            found[row], sure[row] = tokens[row], confidence[row]
            gain = self._gain(row, step, confidence[row]) if tokens[row] >= 0 else -1.0
            if gain > 0:
                gains[row] = gain
        self.drawn.tokens.append(found)
        self.drawn.confidence.append(sure)
        takes = max([self._stops[row].step for row in gains], default=0.0)
        self._active = list(gains) if sum(gains.values()) >= takes else []
        return bool(self._active)

    def _gain(self, row: int, step: int, confidence: float) -> float:
        """Tokens that another one gains, net of its price."""
        most, chance, worth, price, _ = self._stops[row]
        if step + 1 >= most:
            return -math.inf
        if not chance:
            return math.inf
        self._alive[row] *= _worth_of(worth, confidence)
        return self._alive[row] * chance[step] - price if step < len(chance) else -math.inf


def _worth_of(worth: Seq[tuple[float, float]], confidence: float) -> float:
    """What is no probability is worth as much as 0."""
    sure = confidence if 0 <= confidence <= 1 else 0.0
    base, rise = worth[min(int(sure * len(worth)), len(worth) - 1)]
    return base + rise * sure
