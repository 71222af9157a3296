"""What `reject` and `block` do with a draft over all uniforms: a distribution of how many of its tokens are kept."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from paceline.sampling.verify import _block, _ratios


@dataclass(frozen=True, slots=True)
class Odds:
    """A rule applied to one draft: the chance of keeping exactly i tokens, and the distribution of the next one.

    That distribution is max(weight[i] * p[i] - q[i], 0) normalised, or p[k] itself when all k are kept.
    """

    kept: list[float]  # [k + 1]
    weight: list[float]  # [k]


def reject_odds(p: torch.Tensor, q: Seq[torch.Tensor | None], draft: Seq[int]) -> Odds:
    """The distribution of `verify_reject` over uniforms."""
    kept, chance = [], 1.0
    for ratio in _ratios(p, q, draft):
        accept = min(ratio, 1.0)
        kept.append(chance * (1 - accept))
        chance *= accept
    return Odds([*kept, chance], [1.0] * len(draft))


def block_odds(p: torch.Tensor, q: Seq[torch.Tensor | None], draft: Seq[int]) -> Odds:
    """The distribution of `verify_block` over uniforms."""
    weight, keep = _block(p, q, draft)
    kept, chance = [], 1.0
    for h in reversed(keep):
        kept.append(chance * h)
        chance *= 1 - h
    return Odds([chance, *reversed(kept)], weight[:-1])
