"""Small statistics of repeated measurements: medians, quartiles, and a bootstrapped interval of a median."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with its quartiles and its 95% bootstrap interval; `count` measurements."""

    median: float
    low: float
    high: float
    ci_low: float
    ci_high: float
    count: int


def spread(values: Seq[float]) -> Spread:
    """Of at least one value; the bootstrap is seeded, so the same values give the same interval."""
    ordered = sorted(values)
    rng = random.Random(0)
    draws = (
        sorted(median(rng.choices(ordered, k=len(ordered))) for _ in range(200))
        if len(ordered) > 1
        else ordered
    )
    return Spread(
        median(ordered), quantile(ordered, 0.25), quantile(ordered, 0.75),
        quantile(draws, 0.025), quantile(draws, 0.975), len(ordered),
    )  # fmt: skip


def quantile(ordered: Seq[float], share: float) -> float:
    """Linear interpolation in sorted values."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
