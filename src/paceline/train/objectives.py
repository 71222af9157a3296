"""What a drafter is trained to make small. Pure functions of log-probabilities; no model, no state.

p is the target's distribution, q the drafter's, both given as log-probabilities [N, V] in float32: a bfloat16 softmax
makes the gradient of KL wrong by 3% at acceptance .88 and by 19% at .98 (measured by the speculators
project). Every objective returns one value per row, [N]. Acceptance is alpha = sum min(p, q) = 1 - TV(p, q)
(arXiv 2211.17192).

What the sources do not settle is which one is best for a given pair: `docs/training.md` has the experiment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch

from paceline.errors import UsageError

HYBRID_DECAY = 3.0  # of arXiv 2602.23881: the weight of KL is exp(-3 alpha)
CE_SHARE, TV_SHARE = 0.1, 0.9  # of arXiv 2607.05147; its L1 distance is 2 TV
USED_AT, GREEDY_SHARE = 0.8, 0.3  # of `shaped`: the temperature, and the weight of the greedy case beside it


@dataclass(frozen=True, slots=True)
class Laws:
    """One drafted position of N rows."""

    log_p: torch.Tensor  # [N, C] float32, no gradient
    log_q: torch.Tensor  # [N, C] float32
    tokens: (
        torch.Tensor
    )  # [N] int64, what the text has there, -1 if it is none of the C tokens that can be drafted
    best: torch.Tensor  # [N] int64, the target's most likely token, -1 likewise


Objective = Callable[[Laws], torch.Tensor]


def acceptance(distributions: Laws) -> torch.Tensor:
    """[N]: the chance that a token drawn from q is kept, sum min(p, q)."""
    return torch.minimum(distributions.log_p.exp(), distributions.log_q.exp()).sum(-1)


def cross_entropy(distributions: Laws) -> torch.Tensor:
    """-log q(token of the text): blind to the target, as joint fine-tuning recipes do it (NeMo gemma4
    joint MTP).
    """
    tokens = distributions.tokens
    log_q = distributions.log_q.gather(-1, tokens.clamp_min(0)[:, None])[:, 0]
    return torch.where(tokens < 0, 0.0, -log_q)


def kl(distributions: Laws) -> torch.Tensor:
    """KL(p || q), the classic distillation loss (arXiv 2310.08461)."""
    p = distributions.log_p.exp()
    return (p * (distributions.log_p.clamp_min(-1e4) - distributions.log_q)).sum(-1)  # 0 log 0 = 0


def reverse_kl(distributions: Laws) -> torch.Tensor:
    """KL(q || p), mode seeking (arXiv 2310.08461)."""
    return (distributions.log_q.exp() * (distributions.log_q - distributions.log_p)).sum(-1)


def total_variation(distributions: Laws) -> torch.Tensor:
    """TV(p, q) = 1 - alpha: the rejection rate itself (arXiv 2310.08461, 2602.23881)."""
    return 0.5 * (distributions.log_p.exp() - distributions.log_q.exp()).abs().sum(-1)


def lk(distributions: Laws) -> torch.Tensor:
    """-log alpha (arXiv 2602.23881): TV's minimum, with a gradient that does not fade while alpha is
    small.
    """
    return -acceptance(distributions).clamp_min(1e-12).log()


def hybrid(distributions: Laws) -> torch.Tensor:
    """w KL + (1 - w) TV with w = exp(-3 alpha), held constant (arXiv 2602.23881): KL while far, TV when
    near.
    """
    tv = total_variation(distributions)
    weight = torch.exp(-HYBRID_DECAY * (1 - tv)).detach()
    return weight * kl(distributions) + (1 - weight) * tv


def ce_tv(distributions: Laws) -> torch.Tensor:
    """0.1 CE + 0.9 L1 (arXiv 2607.05147), without its confidence term: calibration is fitted afterwards."""
    return CE_SHARE * cross_entropy(distributions) + TV_SHARE * 2 * total_variation(distributions)


def shaped(distributions: Laws) -> torch.Tensor:
    """`hybrid` of both distributions at temperature 0.8, as people sample, and 0.3 times -log q(the target's most likely
    token), which is what greedy decoding keeps.
    """
    log_p, log_q = (torch.log_softmax(x / USED_AT, -1) for x in (distributions.log_p, distributions.log_q))
    sampled = hybrid(Laws(log_p, log_q, distributions.tokens, distributions.best))
    best = distributions.best
    greedy = -distributions.log_q.gather(-1, best.clamp_min(0)[:, None])[:, 0]
    return sampled + GREEDY_SHARE * torch.where(best < 0, 0.0, greedy)


OBJECTIVES: Mapping[str, Objective] = MappingProxyType(
    {
        "ce": cross_entropy,
        "kl": kl,
        "rkl": reverse_kl,
        "tv": total_variation,
        "lk": lk,
        "hybrid": hybrid,
        "ce-tv": ce_tv,
        "shaped": shaped,
    }
)

Weighting = Literal["even", "decay", "credit"]
WEIGHTINGS: tuple[Weighting, ...] = ("even", "decay", "credit")


def find_objective(name: str) -> Objective:
    """The objective called `name`, or UsageError with the names there are."""
    if name not in OBJECTIVES:
        raise UsageError(f"objective {name!r} is unknown: use one of {', '.join(OBJECTIVES)}")
    return OBJECTIVES[name]


def position_weights(kind: Weighting, alphas: torch.Tensor, decay: float = 0.8) -> torch.Tensor:
    """Weight of each drafted position, [N, K] from alphas [N, K], constant in the gradient; rows average to
    1.

    even: all 1. decay: decay^i, as EAGLE-3 (0.8) and FastMTP (0.6). credit: what one unit of log alpha_i adds
    to the expected number of kept tokens, sum over m >= i of alpha_0 ... alpha_m (the idea of arXiv
    2605.18810; with the objective `lk` its gradient is, up to scale, exactly that of the expected length).
    """
    alphas = alphas.detach()
    if kind == "even":
        weights = torch.ones_like(alphas)
    elif kind == "decay":
        steps = torch.arange(alphas.shape[1], device=alphas.device, dtype=alphas.dtype)
        weights = torch.exp(math.log(decay) * steps).expand_as(alphas)
    elif kind == "credit":
        weights = alphas.cumprod(1).flip(1).cumsum(1).flip(1)
        return weights / weights.mean().clamp_min(1e-6)
    else:
        raise UsageError(f"position weights {kind!r} are unknown: use one of {', '.join(WEIGHTINGS)}")
    return weights / weights.mean(1, keepdim=True)


def expected_tokens(accepted: torch.Tensor, valid: torch.Tensor) -> float:
    """Mean tokens per target step, bonus included, from the chance to keep each draft token [N, K]; valid
    [N, K].
    """
    chain = torch.where(valid, accepted.double(), 0.0).cumprod(1)
    return 1.0 + float(chain.sum(1).mean())
