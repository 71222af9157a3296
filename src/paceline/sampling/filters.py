"""top_k, top_p and min_p as one threshold per row: what is kept is always "every logit >= t".

So tokens with equal logits stand or fall together and no order among ties exists. top_p keeps the smallest
such set that holds the mass, after top_k, renormalised (as transformers applies them one after the other).
The vocabulary is not sorted: the largest `BOUND` logits usually hold the mass; where not, that row is sorted.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

BOUND = 512  # candidates looked at for top_p before a full sort


@dataclass(frozen=True, slots=True)
class Filter:
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # 1 = off
    min_p: float = 0.0  # 0 = off


def keep_filtered(x: torch.Tensor, filters: Seq[Filter]) -> torch.Tensor:
    """Shaped logits [R, V] with -inf where row r's filter refuses the token; a new tensor."""
    return x.masked_fill(~(x >= thresholds(x, filters)[:, None]), -torch.inf)


def thresholds(x: torch.Tensor, filters: Seq[Filter]) -> torch.Tensor:
    """The smallest kept logit of each row, [R]. NaN for a row with NaN, which then keeps nothing."""
    width = x.shape[-1]
    bound = max([min(f.top_k, width) for f in filters] + [1])
    if any(f.top_p < 1 and not f.top_k for f in filters):
        bound = max(bound, min(BOUND, width))
    return _thresholds(x, filters, bound)


def _thresholds(x: torch.Tensor, filters: Seq[Filter], bound: int) -> torch.Tensor:
    top, columns = x.topk(bound)  # [R, bound], descending
    t = torch.full_like(top[:, 0], -torch.inf)  # [R]
    if any(f.top_k for f in filters):
        last = _column([min(f.top_k, x.shape[-1]) - 1 if f.top_k else 0 for f in filters], top)
        limited = _column([f.top_k > 0 for f in filters], top)
        t = torch.where(limited, top.gather(1, last), t[:, None])[:, 0]
    if any(f.top_p < 1 for f in filters):
        t = torch.maximum(t, _nucleus(x, filters, top, columns, t))
    if any(f.min_p > 0 for f in filters):
        share = _column([f.min_p for f in filters], top).log()  # [R, 1], -inf = off
        t = torch.maximum(t, (top[:, :1] + share)[:, 0])
    return t


def _nucleus(
    x: torch.Tensor, filters: Seq[Filter], top: torch.Tensor, columns: torch.Tensor, t: torch.Tensor
) -> torch.Tensor:
    """The logit at which the mass of what is >= t reaches top_p, [R]; -inf where top_p is off."""
    kept = x.masked_fill(x < t[:, None], -torch.inf)
    mass = torch.softmax(kept, -1).gather(1, columns).double()  # [R, bound]
    before = mass.cumsum(-1) - mass
    wanted = _column([f.top_p if f.top_p < 1 else 2.0 for f in filters], top).double()
    count = (before < wanted).sum(-1, keepdim=True).clamp_(min=1)  # [R, 1] tokens needed, of those looked at
    found = torch.where(wanted < 2, top.gather(1, count - 1), -torch.inf)[:, 0]
    if top.shape[-1] < x.shape[-1]:
        short = (before[:, -1:] + mass[:, -1:] < wanted) & (wanted < 2) & (top[:, -1:] > t[:, None])
        for r in short[:, 0].nonzero()[:, 0].tolist():
            found[r] = _thresholds(x[r : r + 1], [filters[r]], x.shape[-1])[0]
    return found


def _column(values: Seq[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values).to(like.device)[:, None]
