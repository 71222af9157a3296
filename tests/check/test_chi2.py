"""The chi-squared test against tabled values, its own level and its own power."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.check.chi2 import compare, critical, noncentral_tail, noncentrality, tail

LAW = [0.4, 0.3, 0.2, 0.1]


def test_values_of_the_table() -> None:
    assert tail(3.841, 1) == pytest.approx(0.05, abs=1e-4)
    assert tail(18.307, 10) == pytest.approx(0.05, abs=1e-4)
    assert critical(10, 0.05) == pytest.approx(18.307, abs=1e-2)
    assert noncentral_tail(18.307, 10, 0.0) == pytest.approx(0.05, abs=1e-4)
    assert noncentrality(1, 0.05, 0.9) == pytest.approx(10.51, abs=0.05)  # Cohen's table
    assert noncentrality(10, 0.05, 0.9) == pytest.approx(20.53, abs=0.1)


def draw(distribution: list[float], n: int, seed: int) -> list[int]:
    g = torch.Generator().manual_seed(seed)
    picks = torch.multinomial(
        torch.tensor(distribution, dtype=torch.float64), n, replacement=True, generator=g
    )
    return torch.bincount(picks, minlength=len(distribution)).tolist()


def test_the_right_law_passes_and_a_distribution_as_far_as_stated_is_found() -> None:
    fits = [compare(draw(LAW, 2000, seed), LAW, alpha=0.01) for seed in range(40)]
    assert sum(f.refuted for f in fits) <= 4
    far = fits[0].detectable
    shifted = [LAW[0] + far, LAW[1] - far, LAW[2], LAW[3]]
    found = sum(compare(draw(shifted, 2000, seed), LAW, alpha=0.01).refuted for seed in range(40))
    assert found >= 32


def test_impossible_cells_refute_and_thin_cells_are_pooled() -> None:
    assert compare([99, 1], [1.0, 0.0]).p_value == 0.0
    fit = compare([50, 46, 1, 1, 1, 1], [0.5, 0.46, 0.01, 0.01, 0.01, 0.01])
    assert fit.freedom == 1
    assert not fit.refuted
    assert not math.isnan(compare([5], [1.0]).statistic)
