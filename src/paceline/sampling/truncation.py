"""Samplers beyond top_k, top_p and min_p, as llama.cpp defines them (src/llama-sampler.cpp), of one row on the host.

Their order among the filters is llama.cpp's: top-n-sigma, top_k, typical, top_p, min_p, XTC. Temperature goes before all
of them, as in vLLM, or after with `temperature_last`, as in llama.cpp; a dynamic one always goes after. Tokens with
equal logits stand or fall together. At least one token is left.

Each is a function of the row's logits and of the position's own noise (the coin of XTC). Mirostat's threshold is one of
the text before the row. So the text hangs on no draft.
"""

from __future__ import annotations

import math

import numpy as np

from paceline.core import SamplingParams
from paceline.sampling import noise


def probabilities(x: np.ndarray) -> np.ndarray:
    """The softmax of a row [C], float64."""
    p: np.ndarray = np.exp(x.astype(np.float64) - float(x.max()))
    p /= p.sum()
    return p


def keep_near_best(x: np.ndarray, sigmas: float) -> None:
    """Top-n-sigma: drop logits [C] below the largest by more than `sigmas` standard deviations of what is possible."""
    possible = x[x > -np.inf].astype(np.float64)
    if len(possible) > 1:
        x[x < possible.max() - sigmas * possible.std()] = -np.inf


def keep_typical(x: np.ndarray, mass: float) -> None:
    """Locally typical sampling (arXiv 2202.00666): keep those whose surprise is nearest to the entropy, up to `mass`."""
    p = probabilities(x)
    possible = np.flatnonzero(p > 0)
    surprise = -np.log(p[possible])
    distance = np.abs(surprise - (p[possible] * surprise).sum())
    order = distance.argsort(kind="stable")
    reached = np.flatnonzero(p[possible][order].cumsum() > mass)
    if len(reached):
        out = np.ones(len(x), dtype=bool)
        out[possible[distance <= distance[order[reached[0]]]]] = False
        x[out] = -np.inf


def exclude_top(x: np.ndarray, threshold: float) -> None:
    """XTC, once its coin fell: of the tokens of at least `threshold`, keep the least likely only."""
    likely = x[probabilities(x) >= threshold]
    if len(likely) > 1:
        x[x > likely.min()] = -np.inf


def excludes(params: SamplingParams, seed: int, position: int) -> bool:
    """Whether the coin of XTC falls at a position."""
    chance = params.xtc_probability
    return chance > 0 and noise.scalar(seed, position, noise.XTC) <= chance


def keep_expected(x: np.ndarray, mu: float) -> None:
    """Mirostat 2 (arXiv 2007.14966): drop tokens of a row [C] whose surprise is above `mu` bits; the likeliest stays."""
    p = probabilities(x)
    x[(p < 2.0**-mu) & (x < x.max())] = -np.inf


def next_mu(x: np.ndarray, token: int, mu: float, params: SamplingParams) -> float:
    """The threshold after `token` was taken from a row [V] that `mu` has shaped."""
    p = float(probabilities(x)[token]) if np.isfinite(x.max()) else 0.0
    return mu if p <= 0 else mu - params.mirostat_eta * (-math.log2(p) - params.mirostat_tau)


def dynamic_temperature(x: np.ndarray, params: SamplingParams) -> float:
    """The temperature for a row [C], by its entropy over the largest that as many tokens can have; 0: the best one."""
    low, high = (
        max(0.0, params.temperature - params.dynatemp_range),
        params.temperature + params.dynatemp_range,
    )
    p = probabilities(x)
    p = p[p > 0]
    possible = int(np.count_nonzero(x > -np.inf))
    if possible < 2:
        return params.temperature
    share = float(-(p * np.log(p)).sum()) / math.log(possible)
    return float(low + (high - low) * min(max(share, 0.0), 1.0) ** params.dynatemp_exponent)


def cool(x: np.ndarray, temperature: float) -> None:
    """Divide a row [C] by a temperature; one of 0 leaves the largest."""
    if temperature < 1e-5:
        x[x < x.max()] = -np.inf
    elif temperature != 1:
        x *= np.float32(1.0 / temperature)
