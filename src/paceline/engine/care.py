"""What deciding and learning take in a step with drafts, which is a part of what drafts cost."""

from __future__ import annotations

from paceline.engine.learning import FORGET

RECENT = 1 - 1 / 32  # of what was seen before, for each step with drafts


class Care:
    """Seconds, by number of texts (1, 2 to 3, 4 to 7, ...): many take longer than few."""

    def __init__(self) -> None:
        self._deciding: dict[int, float] = {}
        self._learning: dict[int, float] = {}
        self.thought = 0.0  # seconds of this step that are over, learning included,
        self._learnt = 0.0  # and of these those that many steps share

    def of(self, texts: int) -> float:
        size = texts.bit_length()
        return self._deciding.get(size, 0.0) + self._learning.get(size, 0.0)

    def learnt(self, texts: int, steps: int, seconds: float) -> None:
        """It was learnt at one go from steps, so many of them with drafts: each has its share."""
        self._learnt += seconds
        if steps:
            _drift(self._learning, texts, seconds / steps, steps)

    def taken(self) -> float:
        """Seconds that were thought in this step, before it is observed."""
        thought, self.thought = self.thought, 0.0
        return thought

    def over(self, texts: int, steps: int, seconds: float | None) -> None:
        """A step with drafts for so many texts is, in which it took that long, or so many without any: None."""
        if seconds is not None:
            # at least 0: what is learnt as a text ends is no part of what was timed
            _drift(self._deciding, texts, max(seconds - self._learnt, 0.0), 1)
        else:
            for known in (self._deciding, self._learning):
                if texts.bit_length() in known:
                    known[texts.bit_length()] *= FORGET**steps
        self._learnt = 0.0


def _drift(known: dict[int, float], texts: int, seconds: float, steps: int) -> None:
    """So many steps took that long each."""
    before = known.get(texts.bit_length(), 0.0)
    known[texts.bit_length()] = seconds + RECENT**steps * (before - seconds)
