"""Confidence: the fit finds the truth it was drawn from, and never judges itself on what it was fitted on."""

from __future__ import annotations

import torch

from paceline.train.calibration import BINS, calibrate, expected_error, fit_logistic
from paceline.train.rounds import Observed


def drawn(rounds: int, steps: int, slope: float, offset: float) -> Observed:
    """Rounds whose tokens are kept with probability sigmoid(slope * logit(c) + offset)."""
    generator = torch.Generator().manual_seed(0)
    confidence = torch.rand(rounds, steps, generator=generator).clamp(0.01, 0.99)
    kept = torch.sigmoid(slope * torch.logit(confidence) + offset)
    hits = (torch.rand(rounds, steps, generator=generator) < kept).float()
    return Observed(hits, hits, confidence, torch.ones(rounds, steps, dtype=torch.bool))


def test_the_logistic_fit_recovers_its_parameters() -> None:
    seen = drawn(20_000, 1, 0.6, -0.5)
    slope, offset = fit_logistic(seen.confidence.flatten(), seen.hits.flatten())
    assert abs(slope - 0.6) < 0.05
    assert abs(offset + 0.5) < 0.05


def test_calibration_lowers_the_held_out_error() -> None:
    found = calibrate([drawn(4000, 3, 0.6, -0.5)])
    assert found is not None
    assert found.error_before > 0.08
    assert found.error_after < 0.03
    assert len(found.acceptance) == 3
    assert len(found.bins) == BINS
    rates = [kept / tried for kept, tried in found.bins if tried]
    assert rates == sorted(rates)


def test_tokens_after_a_rejected_one_do_not_count() -> None:
    hits = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]]).repeat(40, 1)
    seen = Observed(hits, hits, torch.full_like(hits, 0.5), torch.ones_like(hits, dtype=torch.bool))
    found = calibrate([seen])
    assert found is not None
    assert found.samples == 40 * 2 + 40 * 1  # position 2 of the first kind of round was never reached
    assert found.acceptance[1] < 0.05


def test_too_few_rounds_give_no_calibration() -> None:
    assert calibrate([drawn(5, 2, 1.0, 0.0)]) is None


def test_the_error_of_a_perfect_forecast_is_zero() -> None:
    assert expected_error(torch.tensor([0.5] * 10), torch.tensor([0.0, 1.0] * 5)) == 0
