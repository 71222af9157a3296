"""Arithmetic that towers share, in plain torch and float32. Weights stay as stored and are widened where they are used"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

Take = Callable[[str], Tensor]  # a tensor by its name, as stored
BOUNDS = ("input_min", "input_max", "output_min", "output_max")


def norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMS norm over the last dimension, times the weight as stored."""
    return F.rms_norm(x, x.shape[-1:], None if weight is None else weight.to(x), eps)


class Linear:
    """x @ weight.T, where the checkpoint says so between bounds: clamp(W clamp(x))."""

    def __init__(self, take: Take, name: str, clipped: bool, inner: str = ".linear") -> None:
        self.weight = take(f"{name}{inner}.weight")
        self.bounds = [float(take(f"{name}.{bound}")) for bound in BOUNDS] if clipped else None

    def __call__(self, x: Tensor) -> Tensor:
        if self.bounds is None:
            return F.linear(x, self.weight.to(x))
        low, high, least, most = self.bounds
        return F.linear(x.clamp(low, high), self.weight.to(x)).clamp_(least, most)


def axial_rotary(x: Tensor, places: Sequence[Tensor], theta: float) -> Tensor:
    """Turn x [N, heads, d] by positions on several axes: axis i has the i-th part of each head, whose halves are pairs.

    `places`: [N] whole numbers for each axis; the angle of pair j of a part of width w is place * theta^(-2j / w).
    """
    width = x.shape[-1] // len(places)
    out = []
    for part, place in zip(torch.split(x, width, dim=-1), places, strict=True):
        turns = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32, device=x.device) / width)
        angles = place.float()[:, None] * turns
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        low, high = part.chunk(2, dim=-1)
        out += [low * cos - high * sin, high * cos + low * sin]
    return torch.cat(out, dim=-1)
