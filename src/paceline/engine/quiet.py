"""When to look again for something to copy in a text where there was nothing."""

from __future__ import annotations

from dataclasses import dataclass

FIRST, LOOK = 8, 64  # steps between two looks, at first and at most
SAMPLED = 64  # at first, where a text is drawn at a temperature: it repeats less, copies are kept more rarely
# Steps until the next look at least, where a watch tells when there is something worth copying: where looks do not pay
WATCHED = 256, 64  # and where they do
SPARING = 4  # times as many steps then between two looks, at most, too
SEEKING = 0.01  # of the time that looks may take at first,
LOOKING = 0.003  # and at last: sooner beside slow steps
# Share of the time for looks in vain among many texts, whatever becomes due: where looks do not pay, and where they do,
# but for no longer than `SPARING` times `LOOK`
VAIN = 0.004, 0.05
LATELY = 0.98  # of what looks took and copies brought before, for each look in vain
CREDIT = 1.0  # plain steps that looks may take before copies have brought something,
MOST = 4.0  # and that these may have brought beyond what looks took


@dataclass(slots=True)
class _Balance:
    """Of looks at so many texts at once, in plain steps: what they took in vain, and what copies brought."""

    seconds: float = 0.0  # that a step with a look takes more, lately
    spent: float = 0.0
    brought: float = 0.0
    first: int = FIRST  # steps between two looks
    longest: int = LOOK
    until: int = 0  # the step before which many texts are not looked at again

    @property
    def pays(self) -> bool:
        return self.spent <= self.brought + CREDIT

    def timed(self, look: float, step: float, now: int) -> None:
        self.seconds += 0.2 * (look - self.seconds) if self.seconds else look
        self.spent = LATELY * self.spent + look / step
        self.brought = LATELY * min(self.brought, self.spent + MOST)
        self.until = now + min(int(look / (VAIN[self.pays] * step)), SPARING * LOOK)
        most = max(1, min(int(self.seconds / (LOOKING * step)), LOOK))
        self.longest = 1 << (most.bit_length() - 1)  # so that all texts are looked at in the same steps
        dear = max(self.seconds / (SEEKING * step), FIRST * self.spent / (self.brought + CREDIT))
        self.first = FIRST
        while self.first < min(dear, LOOK):
            self.first *= 2


class Quiet:
    """Looks become rarer, at every 8th, 16th, ... step, while they find nothing or what they find is lost; of sampled
    text from the 64th on. Not rarer than what they take allows, and where that is much, or more than copies have brought
    lately to so many texts, not as often at first.
    """

    def __init__(self) -> None:
        # by number of texts, and whether all are sampled
        self._balances: dict[tuple[int, bool], _Balance] = {}
        self._here = _Balance()
        self._texts: dict[int, tuple[int, int]] = {}  # (steps to wait, until when)
        self._sampled: set[int] = set()  # texts that are looked at sparingly

    def among(self, texts: int, *, sampled: bool) -> None:
        """So many texts are at hand."""
        key = texts.bit_length(), sampled
        if (known := self._balances.get(key)) is None:
            known = self._balances[key] = _Balance()
        self._here = known

    @property
    def pays(self) -> bool:
        """Whether copies have brought what looks took."""
        return self._here.pays

    def due(self, sequence_id: int, now: int) -> int | None:
        """The step of the next look; None for a text that is new."""
        known = self._texts.get(sequence_id)
        return None if known is None else max(known[1], now)

    def common(self, step: int) -> int:
        """That step, or the next one in which others are looked at, too, where looks do not pay."""
        every = 1 if self.pays else min(self._here.first, self._here.longest)
        return -(-step // every) * every

    def hush(
        self, sequence_id: int, now: int, most: int = LOOK, *, sampled: bool = False, watched: bool = False
    ) -> int:
        """A look was in vain: the step of the next one, at most `most` later; all texts at the same steps.

        `sampled`: from now on it is looked at sparingly. `watched`: it rests, and something watches it.
        """
        known = self._texts.get(sequence_id)
        if sampled:
            self._sampled.add(sequence_id)
        sparing = SPARING if self.sparing(sequence_id) else 1
        first = (SAMPLED if self.pays else SPARING * SAMPLED) if sparing > 1 else self._here.first
        wait = min(2 * known[0] if known else first, sparing * most, sparing * self._here.longest)
        wait = max(wait, WATCHED[self.pays]) if watched and sparing == 1 else wait
        due = (now // wait + 1) * wait
        self._texts[sequence_id] = (wait, due)
        return due

    @property
    def until(self) -> int:
        """The step before which nobody is looked at again, if there are many texts."""
        return self._here.until

    def timed(self, look: float, step: float, now: int) -> None:
        """A look has taken so many seconds in a step of so many beside it, in vain."""
        self._here.timed(look, step, now)

    def brought(self, steps: float) -> None:
        """Copies have saved so many plain steps, net of what they took."""
        self._here.brought = max(self._here.brought + steps, 0.0)

    def sparing(self, sequence_id: int) -> bool:
        """Whether it is looked at sparingly."""
        return sequence_id in self._sampled

    def wake(self, sequence_id: int) -> None:
        """There was something: look at once."""
        self._texts[sequence_id] = (FIRST // 2, 0)

    def forget(self, sequence_id: int) -> None:
        self._texts.pop(sequence_id, None)
        self._sampled.discard(sequence_id)
