"""top_k, top_p and min_p as one threshold per row: what is kept is always "every logit >= t".

So tokens with equal logits stand or fall together and no order among ties exists. top_p keeps the smallest such
set that holds the mass, after top_k, renormalised (as transformers applies them one after the other). On the host
each row looks only at logits near its largest, as far down as the mass asks for; on a GPU all rows go together
and nothing is read back.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

_NEAR = (8.0, 16.0, float("inf"))  # how far below the largest logit to look, one after the other


@dataclass(frozen=True, slots=True)
class Filter:
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # 1 = off
    min_p: float = 0.0  # 0 = off


def host_threshold(x: np.ndarray, f: Filter) -> float:
    """The smallest kept logit of one row [V]. NaN for a row with NaN, which then keeps nothing."""
    most = x.max()
    if not np.isfinite(most):
        return float("nan")
    t = -np.inf
    if 0 < f.top_k < len(x):
        t = kth_largest(x, f.top_k, most)
    if f.top_p < 1:
        t = max(t, _host_nucleus(x, f.top_p, most, t))
    if f.min_p > 0:
        t = max(t, float(most + np.log(np.float32(f.min_p))))
    return t


def kth_largest(x: np.ndarray, k: int, most: np.float32) -> float:
    """The k-th largest (k from 1) value of x [V], given the largest."""
    near = next(near for near in (x[x >= most - gap] for gap in _NEAR) if len(near) >= k)
    return float(np.partition(near, len(near) - k)[len(near) - k])


def _host_nucleus(x: np.ndarray, top_p: float, most: np.float32, t: float) -> float:
    """The logit at which the mass of what is >= t reaches top_p."""
    whole = np.exp(x - most) if t == -np.inf else np.exp(x[x >= t] - most)
    wanted = top_p * float(whole.sum(dtype=np.float64))
    for gap in _NEAR:
        least = max(t, float(most - gap))
        near = np.sort(x[x >= least])[::-1]
        mass = np.exp(near - most).cumsum(dtype=np.float64)
        if mass[-1] >= wanted:
            return float(near[np.searchsorted(mass, wanted)])
        if least == t:
            break
    return t


def thresholds(x: torch.Tensor, filters: Seq[Filter]) -> torch.Tensor:
    """`host_threshold` for all rows [R, V] at once, [R]; nothing is read by the host."""
    width = x.shape[-1]
    every = any(
        f.top_p < 1 and not f.top_k for f in filters
    )  # then top_k does not bound how many are looked at
    top, columns = x.topk(width if every else max([min(f.top_k, width) for f in filters] + [1]))
    t = torch.full_like(top[:, :1], -torch.inf)  # [R, 1]
    if any(f.top_k for f in filters):
        last = _column([min(f.top_k, width) - 1 if f.top_k else 0 for f in filters], top)
        limited = _column([f.top_k > 0 for f in filters], top)
        t = torch.where(limited, top.gather(1, last), t)
    if any(f.top_p < 1 for f in filters):
        mass = (
            torch.softmax(x.masked_fill(x < t, -torch.inf), -1).gather(1, columns).double()
        )  # [R, looked at]
        wanted = _column([min(f.top_p, 1.0) for f in filters], top).double()
        count = (mass.cumsum(-1) - mass < wanted).sum(-1, keepdim=True).clamp_(min=1)
        t = torch.where(wanted < 1, torch.maximum(t, top.gather(1, count - 1)), t)
    if any(f.min_p > 0 for f in filters):
        t = torch.maximum(t, top[:, :1] + _column([f.min_p for f in filters], top).log())  # log 0 = off
    return t[:, 0]


def _column(values: Seq[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values).to(like.device)[:, None]
