"""What steps take now, beside what start-up has measured: a Kalman filter over logarithms. Pure values, no torch.

A step that takes so many times as long as its price tells of a product: of the machine's pace, of what reading the
weights takes longer since others use the caches and the bandwidth, of the level of so many texts and, where it checks
drafts, of the drag of so many texts and of such a spread of their rows after a round of such a drafter. Which of them it
was is told by how sure each is: what changes from one second to the next is the pace and, less, what reading the weights
takes, which every step does once; a level or a drag hardly does. (R. E. Kalman, A New Approach to Linear Filtering and
Prediction Problems, 1960; extended by linearising where `READING` enters.)
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import lru_cache
from math import exp, log
from typing import NamedTuple

import numpy as np

# what: (name, number of texts, spread), numbers of texts as 1, 2 to 3, 4 to 7, ...: 1, 2, 3
Key = tuple[str, int, int]


class Law(NamedTuple):
    """How a part of the product behaves, as a logarithm. Time is counted in steps of one row, as long as at start-up."""

    doubt: float  # standard deviation of what it may be, before anything was seen of it,
    most: float  # that after it was not seen for long,
    wanders: float  # and of what it changes by in a step
    bound: float


LAWS = {
    "reading": Law(0.3, 1.0, 0.003, 3.0),  # in steps of one row, not a logarithm
    "pace": Law(0.1, log(4.0), 0.01, log(64.0)),
    "level": Law(0.5, 0.5, 0.001, log(2.5)),
    "drag": Law(0.12, 0.12, 0.001, log(2.0)),
}
SPREAD = Law(0.08, 0.08, 0.0007, log(2.0))  # of the drag, by drafter and spread
SPREADS = "spread of "
READING: Key = ("reading", 0, 0)
PACE: Key = ("pace", 0, 0)
FASTEST = -0.6  # reading the weights saves at most so much of a step of one row
ROUNDS = 0.5  # how much of what a draft round takes is for reading
STEP, STEPS = 0.1, 0.06  # what one step is off by, as a standard deviation, and what many in a row are
ACCIDENT = 1.5  # times the median of some steps: one that took longer counts as that
LONG = 10_000.0  # steps: more may have passed while the machine slept
# Standard deviations by which what is seen may surprise: the rest is an accident, or the machine is another one, whose
# pace is less sure by so much of its square, at most 1.
CLEAR, STRANGE = 3.0, 0.1


@lru_cache(maxsize=256)
def parts(size: int, spread: int, kind: str) -> tuple[Key, ...]:
    """What a step of so many texts (1, 2 to 3, 4 to 7, ...: 1, 2, 3, ...) tells of. `spread`: 0 if it checks no draft.
    `kind`: of the drafter.
    """
    own = (READING, PACE) if size <= 1 else (READING, PACE, ("level", size, 0))
    return (*own, ("drag", size, 0), (f"{SPREADS}{kind}", size, spread)) if spread else own


class _Book(NamedTuple):
    """What does not change for the parts in some order."""

    at: Mapping[Key, int]  # where each is
    doubt: np.ndarray  # [parts] variance before anything was seen,
    most: np.ndarray  # at most,
    moves: np.ndarray  # and what it grows by in a step
    low: np.ndarray
    high: np.ndarray


@lru_cache(maxsize=256)
def _book(keys: tuple[Key, ...]) -> _Book:
    laws = [LAWS.get(name, SPREAD) for name, _, _ in keys]
    doubt, most, moves, high = np.array([[a.doubt**2, a.most**2, a.wanders**2, a.bound] for a in laws]).T
    low = np.where([key == READING for key in keys], FASTEST, -high)
    return _Book({key: i for i, key in enumerate(keys)}, doubt, most, moves, low, high)


def _fresh() -> np.ndarray:
    return np.diag([LAWS["reading"].doubt ** 2, LAWS["pace"].doubt ** 2])


@dataclass(frozen=True, slots=True)
class Tempo:
    """What is thought of each part, and how sure that is."""

    means: Mapping[Key, float] = field(default_factory=lambda: {READING: 0.0, PACE: 0.0})
    covariance: np.ndarray = field(default_factory=_fresh)  # [parts, parts], in the order of `means`
    # by what is told of, `READING` apart: a plan asks for dozens of steps
    _products: dict[tuple[Key, ...], float] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def times(self, size: int, spread: int, kind: str, reading: float) -> float:
        """A step takes so many times its price, of which a usual step of one row is this share, at most 1: `reading`."""
        return self._product(parts(size, spread, kind), reading)

    def _product(self, told: tuple[Key, ...], reading: float) -> float:
        means, known = self.means, self._products.get(told)
        if known is None:
            known = self._products[told] = exp(sum([means.get(key, 0.0) for key in told[1:]]))
        return (1.0 + means[READING] * reading) * known

    @property
    def pace(self) -> float:
        """What a draft round takes, as a multiple of its price."""
        return (1.0 + self.means[READING] * ROUNDS) * exp(self.means[PACE])

    def drag(self, size: int) -> float:
        """On the whole, of what was seen."""
        spreads = [
            value
            for (name, texts, _), value in self.means.items()
            if texts == size and name.startswith(SPREADS)
        ]
        return exp(self.means.get(("drag", size, 0), 0.0) + sum(spreads) / max(len(spreads), 1))

    def dearer(self, size: int, factor: float) -> Tempo:
        """Where drafts for so many texts take so many times what is thought."""
        key = ("drag", size, 0)
        tempo = self._with((key,))
        return Tempo({**tempo.means, key: tempo.means[key] + log(factor)}, tempo.covariance)

    def after(self, steps: float) -> Tempo:
        """So much later: the less sure."""
        book, covariance = _book(tuple(self.means)), self.covariance.copy()
        diagonal = covariance.ravel()[:: len(self.means) + 1]
        diagonal += np.maximum(np.minimum(min(steps, LONG) * book.moves, book.most - diagonal), 0.0)
        return Tempo(self.means, covariance)

    def seen(self, told: tuple[Key, ...], reading: float, ratios: Seq[float]) -> Tempo:
        """Steps that tell of these `parts` have taken so many times their price, see `times`."""
        tempo = self._with(told)
        means, keys = tempo.means, tuple(tempo.means)
        book = _book(keys)
        here = np.zeros(len(keys))
        here[[book.at[key] for key in told]] = 1.0
        here[0] = reading / (1.0 + means[READING] * reading)
        shares = tempo.covariance @ here
        doubt = float(shares @ here) + STEP**2 / len(ratios) + STEPS**2
        most = ACCIDENT * sorted(ratios)[(len(ratios) - 1) // 2]
        mean = sum([min(ratio, most) for ratio in ratios]) / len(ratios)
        news = log(mean / tempo._product(told, reading))
        surprise = CLEAR * doubt**0.5
        strange = min(max(abs(news) - surprise, 0.0), 1.0)
        news = min(max(news, -surprise), surprise) / doubt
        moved = np.minimum(np.maximum(shares * news + list(means.values()), book.low), book.high)
        covariance = tempo.covariance - shares * (shares / doubt)[:, None]
        covariance[1, 1] += STRANGE * strange**2  # `PACE` comes after `READING`
        return Tempo(dict(zip(keys, moved.tolist(), strict=True)), covariance)

    def _with(self, keys: Seq[Key]) -> Tempo:
        """The same, knowing of these parts."""
        new = tuple([key for key in keys if key not in self.means])
        if not new:
            return self
        old, count = len(self.means), len(self.means) + len(new)
        covariance = np.zeros((count, count))
        covariance[:old, :old] = self.covariance
        covariance[range(old, count), range(old, count)] = _book(new).doubt
        return Tempo({**self.means, **dict.fromkeys(new, 0.0)}, covariance)
