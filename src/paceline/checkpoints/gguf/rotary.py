"""What `rope_freqs.weight` says: a divisor for the frequency of each pair, instead of the parameters it came from."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

ROTATES_NOT = 1e29  # what stands for pairs that do not rotate is 1e30
EXACT = 1e-3  # relative; the factors are float32 and the parameters are whole numbers


def llama3_scaling(factors: NDArray[np.float32], head_dim: int, theta: float) -> dict[str, Any] | None:
    """The `rope_scaling` of Llama 3 that gives these factors [head_dim / 2]; None if none does.

    A frequency with fewer than `low` turns in the original context is divided by `factor`, one with more than `high`
    is kept, and between them 1 / factor changes over linearly in the number of turns. Only two of (low, high,
    context) can be read off the factors, so low is 1, as in every published Llama 3. Source: transformers'
    modeling_rope_utils.
    """
    if not 1 < theta < 1e30 or len(factors) * 2 != head_dim:
        return None
    if not np.isfinite(factors).all() or factors.min() < 1 - EXACT:
        return None
    factor = round(float(factors.max()), 3)
    if factor < 1 + EXACT:
        return {"rope_type": "default"}
    turns = theta ** (-2 * np.arange(len(factors)) / head_dim) / (2 * np.pi)  # for each position
    smooth = (1 / factors.astype(np.float64) - 1 / factor) / (1 - 1 / factor)
    between = (smooth > EXACT) & (smooth < 1 - EXACT)
    low, high, context = 1.0, 4.0, 8192.0
    if between.sum() >= 2:  # smooth = (context * turns - low) / (high - low)
        slope, start = np.polyfit(turns[between], smooth[between], 1)
        if start >= 0 or slope <= 0:
            return None
        high = round(float(1 - 1 / start), 2)
        context = float(round(float(slope) * (1 - 1 / float(start) - low)))
    elif between.any():  # high is 4, then
        context = float(np.round((smooth * (high - low) + low) / turns)[between][0])
    expected = np.clip((context * turns - low) / (high - low), 0, 1)
    again = 1 / ((1 - expected) / factor + expected)
    if not np.allclose(again, factors, rtol=EXACT):
        return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": int(context),
    }


def rotating_share(factors: NDArray[np.float32]) -> float | None:
    """Which share of the pairs rotates, if the first ones do, unscaled, and the rest do not; None for anything else."""
    rotates = factors < ROTATES_NOT
    count = int(rotates.sum())
    if not count or not rotates[:count].all() or not np.array_equal(factors[:count], np.ones(count)):
        return None
    return count / len(factors)
