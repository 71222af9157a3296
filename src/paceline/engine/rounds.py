"""What a draft round costs by its shape, from a guess and from rounds that ran. Pure values."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import NamedTuple

FADE = 0.998  # of what was seen of a drafter, for each step without it,
KEPT = 0.96  # and for each further round

RoundCost = tuple[float, float, float]  # seconds of a draft round: (base, per step, per token)


class Round(NamedTuple):
    """A draft round that ran, for a step of so many texts."""

    steps: int
    tokens: int
    seconds: float
    texts: int = 1
    warm: bool = True  # others came before it


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Seconds of a draft round = base + step * steps + token * tokens, by decayed least squares from a guess.

    `steps`: calls of the network in a row, the longest draft of the round; `tokens`: of all rows together.
    """

    guess: RoundCost
    trust: float = 0.2  # rounds that each of four points of the guess counts for
    sums: tuple[float, ...] = (0.0,) * 9  # of weight, s, t, ss, st, tt, y, sy, ty

    @classmethod
    def like(cls, seconds: float) -> DraftCost:
        """Before anything was measured: small shares of a target step. A cost thought too high is never tried."""
        return cls((0.1 * seconds, 0.04 * seconds, 0.005 * seconds))

    def faded(self, steps: int) -> DraftCost:
        """Nothing was drafted for so many steps: the guess gains weight, or one bad moment would last for ever."""
        return replace(self, sums=tuple(v * FADE**steps for v in self.sums))

    def add(self, rounds: Seq[tuple[float, float, float]], kept: float = KEPT) -> DraftCost:
        """More rounds, as (steps, tokens, seconds). `kept`: of what was seen before, for each of them."""
        n, s, t, ss, st, tt, y, sy, ty = self.sums
        for steps, tokens, seconds in rounds:
            n, s, t, y = kept * n + 1.0, kept * s + steps, kept * t + tokens, kept * y + seconds
            ss, st, tt = kept * ss + steps * steps, kept * st + steps * tokens, kept * tt + tokens * tokens
            sy, ty = kept * sy + steps * seconds, kept * ty + tokens * seconds
        return replace(self, sums=(n, s, t, ss, st, tt, y, sy, ty))

    def fit(self) -> RoundCost:
        """(base, step, token), none negative. The guess stands for a little evidence in every direction."""
        base, step, token = self.guess
        n, s, t, ss, st, tt, y, sy, ty = self.sums
        for steps, tokens in ((1, 1), (4, 4), (1, 8), (4, 32)):
            w, v = self.trust, base + step * steps + token * tokens
            n, s, t, y = n + w, s + w * steps, t + w * tokens, y + w * v
            ss, st, tt = ss + w * steps * steps, st + w * steps * tokens, tt + w * tokens * tokens
            sy, ty = sy + w * steps * v, ty + w * tokens * v
        a, b, c = ss - s * s / n, st - s * t / n, tt - t * t / n
        e, f = sy - s * y / n, ty - t * y / n
        step = (e * c - f * b) / (a * c - b * b)
        token = (f * a - e * b) / (a * c - b * b)
        if step < 0:
            step, token = 0.0, max(f / c, 0.0)
        elif token < 0:
            step, token = max(e / a, 0.0), 0.0
        base = (y - step * s - token * t) / n
        if base < 0:  # a line through the origin, as steep as the rounds say
            scale = y / (step * s + token * t)
            return 0.0, step * scale, token * scale
        return base, step, token
