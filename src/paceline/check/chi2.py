"""Pearson's chi-squared test with its power. Pure numbers, float64 through torch's incomplete gamma
function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

LEAST_EXPECTED = 5.0  # cells with less are pooled


@dataclass(frozen=True, slots=True)
class Fit:
    """`detectable`: any distribution at least this far (total variation) is refuted with chance `power` at level
    `alpha`.
    """

    statistic: float
    freedom: int
    p_value: float
    samples: int
    alpha: float
    power: float
    detectable: float

    @property
    def refuted(self) -> bool:
        return self.p_value < self.alpha


def compare(counts: Seq[int], distribution: Seq[float], alpha: float = 1e-4, power: float = 0.9) -> Fit:
    """Compare counts with a distribution over the same cells. A count where it has no mass refutes at once."""
    samples = sum(counts)
    cells: list[tuple[float, float]] = []  # (count, expected)
    rest = [0.0, 0.0]
    for count, chance in sorted(zip(counts, distribution, strict=True), key=lambda pair: -pair[1]):
        if chance <= 0 and count:
            return Fit(math.inf, 1, 0.0, samples, alpha, power, 0.0)
        if chance * samples >= LEAST_EXPECTED:
            cells.append((count, chance * samples))
        else:
            rest = [rest[0] + count, rest[1] + chance * samples]
    if rest[1] >= LEAST_EXPECTED or not cells:
        cells.append((rest[0], rest[1]))
    elif rest[1] > 0:
        cells[-1] = (cells[-1][0] + rest[0], cells[-1][1] + rest[1])
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells if expected > 0)
    freedom = max(len(cells) - 1, 1)
    need = noncentrality(freedom, alpha, power)
    # 2 TV <= sqrt(chi distance) by Cauchy-Schwarz, so a distribution at distance TV has noncentrality >= 4 N TV^2
    detectable = min(math.sqrt(need / samples) / 2, 1.0) if samples else 1.0
    return Fit(statistic, freedom, tail(statistic, freedom), samples, alpha, power, detectable)


def compare_samples(one: Seq[int], other: Seq[int], alpha: float = 1e-4, power: float = 0.9) -> Fit:
    """Whether two samples, counted over the same cells, come from one distribution (test of homogeneity).

    `detectable`: two distributions at least this far apart (total variation) are distinguished with chance `power`.
    """
    n, m = sum(one), sum(other)
    if not n or not m:
        return Fit(0.0, 1, 1.0, min(n, m), alpha, power, 1.0)
    cells: list[tuple[float, float]] = []
    rest = (0.0, 0.0)
    for a, b in sorted(zip(one, other, strict=True), key=lambda pair: -(pair[0] + pair[1])):
        if (a + b) * min(n, m) / (n + m) >= LEAST_EXPECTED:
            cells.append((a, b))
        else:
            rest = (rest[0] + a, rest[1] + b)
    if sum(rest) * min(n, m) / (n + m) >= LEAST_EXPECTED or not cells:
        cells.append(rest)
    elif sum(rest):
        cells[-1] = (cells[-1][0] + rest[0], cells[-1][1] + rest[1])
    statistic = sum((a * m - b * n) ** 2 / (n * m * (a + b)) for a, b in cells if a + b)
    freedom = max(len(cells) - 1, 1)
    need = noncentrality(freedom, alpha, power)
    # one cell holds everything: nothing could have been found
    detectable = min(math.sqrt(need * (n + m) / (n * m)) / 2, 1.0) if len(cells) > 1 else 1.0
    return Fit(statistic, freedom, tail(statistic, freedom), min(n, m), alpha, power, detectable)


def tail(x: float, freedom: float) -> float:
    """P(chi-squared >= x)."""
    a, b = torch.tensor(freedom / 2, dtype=torch.float64), torch.tensor(max(x, 0.0) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(a, b))


def critical(freedom: int, alpha: float) -> float:
    """The value that chi-squared exceeds with chance alpha."""
    return _root(lambda x: alpha - tail(x, freedom))


def noncentral_tail(x: float, freedom: int, shift: float) -> float:
    """P(noncentral chi-squared >= x): a Poisson mixture of central ones."""
    terms = int(shift / 2 + 12 * math.sqrt(shift / 2 + 1)) + 20
    j = torch.arange(terms, dtype=torch.float64)
    weight = torch.exp(j * math.log(max(shift, 1e-300) / 2) - shift / 2 - torch.lgamma(j + 1))
    parts = torch.special.gammaincc(freedom / 2 + j, torch.full_like(j, x / 2))
    return float((weight * parts).sum())


def noncentrality(freedom: int, alpha: float, power: float) -> float:
    """The shift at which a test at level alpha refutes with chance `power`."""
    x = critical(freedom, alpha)
    return _root(lambda shift: noncentral_tail(x, freedom, shift) - power)


def _root(f: Callable[[float], float]) -> float:
    """Zero of a rising function on [0, inf)."""
    low, high = 0.0, 1.0
    while f(high) < 0:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if f(middle) < 0 else (low, middle)
    return high
