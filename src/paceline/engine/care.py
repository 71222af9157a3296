"""What deciding and learning take in a step with drafts, which is a part of what drafts cost."""

from __future__ import annotations

from paceline.engine.choice import LONGEST_HOLD
from paceline.engine.learning import FORGET


class Care:
    """Seconds, by number of texts (1, 2 to 3, 4 to 7, ...): many take longer than few."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def of(self, texts: int) -> float:
        return self._seconds.get(texts.bit_length(), 0.0)

    def over(self, texts: int, steps: int, seconds: float | None) -> None:
        """A step with drafts for so many texts is, in which it took that long, or so many without any: None."""
        care = self.of(texts)
        if seconds is not None:
            self._seconds[texts.bit_length()] = care + (seconds - care) / LONGEST_HOLD
        elif care:
            self._seconds[texts.bit_length()] = care * FORGET**steps
