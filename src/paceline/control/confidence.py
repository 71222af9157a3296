"""What a drafter's confidence is worth: the share of tokens that were kept, by bins of the confidence."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

from paceline.control.base import Line

BINS = 12
OWN_WORD = 8.0  # observations that the drafter's own word counts for
MEMORY = 512.0  # observations of a bin


class ConfidenceCalibrator:
    """Of one drafter, over all requests."""

    def __init__(self, bins: Seq[tuple[float, float]] = ()) -> None:
        """`bins` [BINS]: (kept, tried) from a calibration file, or empty."""
        self._bins = [(float(accepted), float(tried)) for accepted, tried in bins] or [(0.0, 0.0)] * BINS
        if len(self._bins) != BINS:
            raise ValueError(f"{len(self._bins)} bins of confidence: give {BINS}")
        self._lines: tuple[Line, ...] | None = None

    def add(self, confidence: Seq[float], accepted: int) -> None:
        """Count the tokens that verification reached. What is no probability counts for nothing."""
        for j, value in enumerate(confidence[: accepted + 1]):
            if 0.0 <= value <= 1.0:
                i = min(int(value * BINS), BINS - 1)
                agreed, tried = self._bins[i]
                keep = 1.0 - 1.0 / MEMORY
                self._bins[i] = agreed * keep + (j < accepted), tried * keep + 1.0
                self._lines = None

    @property
    def bins(self) -> tuple[tuple[float, float], ...]:
        """[BINS] (kept, tried)"""
        return tuple(self._bins)

    def lines(self) -> tuple[Line, ...]:
        """By bin: (chance at confidence 0, its rise until 1). Without evidence, what the drafter says itself."""
        if self._lines is None:
            self._lines = tuple(
                [
                    (accepted / (tried + OWN_WORD), OWN_WORD / (tried + OWN_WORD))
                    for accepted, tried in self._bins
                ]
            )
        return self._lines


def worth_of(lines: Seq[Line], confidence: float) -> float:
    """Chance that a token is kept which was drafted with such a confidence. NaN is worth as little as 0."""
    c = confidence if math.isfinite(confidence) and 0.0 <= confidence <= 1.0 else 0.0
    start, rise = lines[min(int(c * BINS), BINS - 1)]
    return start + rise * c
