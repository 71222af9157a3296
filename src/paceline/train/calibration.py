"""How much a drafter's confidence is worth: the chance that a token drafted with probability c is kept.

Fitted on one half of the held-out rounds and judged on the other. The policy starts from it instead of
from a guess: `acceptance` is the chance at each position given that all before were kept, `bins` are (kept,
tried) counts by confidence in equal bins over [0, 1].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from paceline.core import MAX_DRAFT_TOKENS
from paceline.train.rounds import Observed

FILE_NAME = "paceline_calibration.json"
BINS = 12
BIN_TRIES = 64.0  # what the file's counts add up to at most in a bin, so that a live engine can still learn


@dataclass(slots=True)
class Calibration:
    acceptance: list[float]  # [K]
    bins: list[tuple[float, float]]  # [BINS] (kept, tried)
    slope: float  # P(kept) = sigmoid(slope * logit(c) + offset)
    offset: float
    error_before: float  # held-out expected calibration error of the raw confidence
    error_after: float  # of the fitted one
    samples: int

    def apply(self, confidence: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.slope * _logit(confidence) + self.offset)

    def as_json(self) -> dict[str, object]:
        return {
            "version": 1, "acceptance": [round(a, 5) for a in self.acceptance],
            "bins": [[round(h, 3), round(t, 3)] for h, t in self.bins],
            "logistic": {"slope": self.slope, "offset": self.offset},
            "calibration_error": {"raw": self.error_before, "fitted": self.error_after},
            "samples": self.samples,
        }  # fmt: skip


def _logit(confidence: torch.Tensor) -> torch.Tensor:
    c = confidence.double().clamp(1e-6, 1 - 1e-6)
    return c.log() - (-c).log1p()


def expected_error(predicted: torch.Tensor, accepted: torch.Tensor) -> float:
    """Expected calibration error: |mean predicted - share kept| over equal bins, weighted by their size."""
    place = (predicted * BINS).long().clamp(0, BINS - 1)
    count = torch.bincount(place, minlength=BINS).double()
    promised = torch.bincount(place, predicted.double(), minlength=BINS)
    seen = torch.bincount(place, accepted.double(), minlength=BINS)
    return float((promised - seen).abs().sum() / count.sum().clamp_min(1))


def fit_logistic(confidence: torch.Tensor, accepted: torch.Tensor, rounds: int = 50) -> tuple[float, float]:
    """(slope, offset) of the logistic fit by Newton's method, with a weak pull to (1, 0)."""
    x = torch.stack((_logit(confidence), torch.ones_like(confidence, dtype=torch.double)), -1)
    y, theta = accepted.double(), torch.tensor([1.0, 0.0], dtype=torch.double)
    prior = torch.tensor([1.0, 0.0], dtype=torch.double)
    for _ in range(rounds):
        p = torch.sigmoid(x @ theta)
        gradient = x.T @ (p - y) + (theta - prior)
        curve = (x * (p * (1 - p))[:, None]).T @ x + torch.eye(2, dtype=torch.double)
        step = torch.linalg.solve(curve, gradient)
        theta = theta - step.clamp(-1, 1)
        if float(step.abs().max()) < 1e-9:
            break
    return float(theta[0]), float(theta[1])


def calibrate(seen: list[Observed]) -> Calibration | None:
    """From held-out rounds of a greedy drafter; None if there are too few. Tokens after a rejected one do
    not count.
    """
    hits, confidence = torch.cat([s.hits for s in seen]), torch.cat([s.confidence for s in seen])
    valid = torch.cat([s.valid for s in seen])
    reached = valid & (torch.cat((torch.ones_like(hits[:, :1]), hits[:, :-1]), 1).cumprod(1) > 0)  # [R, K]
    tried = reached.double().sum(0)
    rates = ((hits * reached).double().sum(0) + 0.5) / (tried + 1)
    c, accepted = confidence[reached], hits[reached]
    if len(c) < 50:
        return None
    fit = torch.arange(len(c)) % 2 == 0
    slope, offset = fit_logistic(c[fit], accepted[fit])
    out = Calibration(rates.tolist()[:MAX_DRAFT_TOKENS], [], slope, offset, 0.0, 0.0, len(c))
    out.error_before = expected_error(c[~fit], accepted[~fit])
    out.error_after = expected_error(out.apply(c[~fit]), accepted[~fit])
    if out.error_after > out.error_before:  # too little data to know better than the drafter itself
        out.slope, out.offset, out.error_after = 1.0, 0.0, out.error_before
    out.bins = _bins(out, c)
    assert all(math.isfinite(x) for x in (slope, offset, out.error_after)), "a fit is finite"
    return out


def _bins(fitted: Calibration, confidence: torch.Tensor) -> list[tuple[float, float]]:
    """Counts by confidence that say what the fit says, as heavy as the data behind them, up to BIN_TRIES."""
    place = (confidence * BINS).long().clamp(0, BINS - 1)
    count = torch.bincount(place, minlength=BINS).clamp_max(int(BIN_TRIES)).tolist()
    centres = (torch.arange(BINS, dtype=torch.double) + 0.5) / BINS
    rates = fitted.apply(centres).tolist()
    return [(rate * tried, float(tried)) for rate, tried in zip(rates, count, strict=True)]
