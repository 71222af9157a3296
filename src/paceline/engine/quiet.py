"""When to look again for something to copy in a text where there was nothing."""

from __future__ import annotations

FIRST, LOOK = 8, 64  # steps between two looks, at first and at most
SAMPLED = 64  # at first, where a text is drawn at a temperature: it repeats less, copies are kept more rarely
SPARING = 4  # times as many steps then between two looks, at most, too
SEEKING, LOOKING = (
    0.01,
    0.003,
)  # of the time that looks may take, at first and at last: sooner where a step takes long


class Quiet:
    """Looks become rarer, at every 8th, 16th, ... step, while they find nothing or what they find is lost; of sampled
    text from the 64th on. Not rarer than what they take allows, and where that is much, not as often at first.
    """

    def __init__(self) -> None:
        self._first, self._longest = FIRST, LOOK  # steps between two looks
        self._seconds = 0.0  # that a step with a look takes more, lately
        self._texts: dict[int, tuple[int, int]] = {}  # (steps to wait, until when)
        self._sampled: set[int] = set()  # texts that are looked at sparingly

    def due(self, sequence_id: int, now: int) -> int | None:
        """The step of the next look; None for a text that is new."""
        known = self._texts.get(sequence_id)
        return None if known is None else max(known[1], now)

    def hush(self, sequence_id: int, now: int, most: int = LOOK, *, sampled: bool = False) -> int:
        """A look was in vain: the step of the next one, at most `most` later; all texts at the same steps.

        `sampled`: from now on it is looked at sparingly.
        """
        known = self._texts.get(sequence_id)
        if sampled:
            self._sampled.add(sequence_id)
        sparing = SPARING if sequence_id in self._sampled else 1
        first = SAMPLED if sparing > 1 else self._first
        wait = min(2 * known[0] if known else first, sparing * most, sparing * self._longest)
        due = (now // wait + 1) * wait
        self._texts[sequence_id] = (wait, due)
        return due

    def timed(self, look: float, step: float) -> None:
        """A look has taken so many seconds in a step of so many beside it."""
        self._seconds += 0.2 * (look - self._seconds) if self._seconds else look
        self._longest = max(1, min(int(self._seconds / (LOOKING * step)), LOOK))
        self._first = FIRST
        while self._first < min(self._seconds / (SEEKING * step), LOOK):
            self._first *= 2  # so that all texts are looked at in the same steps

    def wake(self, sequence_id: int) -> None:
        """There was something: look at once."""
        self._texts[sequence_id] = (FIRST // 2, 0)

    def forget(self, sequence_id: int) -> None:
        self._texts.pop(sequence_id, None)
        self._sampled.discard(sequence_id)
