"""Rotary embeddings: radians per position of each pair of a head, with the scalings that configs name."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.models.layers.decoder_config import Rotary


def inverse_frequencies(rotary: Rotary, head_dim: int) -> Tensor:
    """Radians per position of each pair of a head, float32 [head_dim / 2]; source: transformers' modeling_rope_utils."""
    turn = 1.0 / rotary.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rotary.kind == "longrope":
        return turn / torch.tensor(rotary.divisors, dtype=torch.float32)
    if rotary.kind == "linear":
        return turn / rotary.factor
    if rotary.kind == "yarn":
        first, last = (
            head_dim * math.log(rotary.original / (turns * 2 * math.pi)) / (2 * math.log(rotary.theta))
            for turns in (rotary.high, rotary.low)
        )  # the pairs that make so many turns
        if rotary.rounded:
            first, last = math.floor(first), math.ceil(last)
        begin, end = max(first, 0), min(last, head_dim - 1)
        share = (torch.arange(head_dim // 2, dtype=torch.float32) - begin) / ((end - begin) or 0.001)
        share = share.clamp(0, 1)
        return turn / rotary.factor * share + turn * (1 - share)
    if rotary.kind != "llama3":
        return turn
    length = 2 * math.pi / turn  # of a wave, in positions
    smooth = (rotary.original / length - rotary.low) / (rotary.high - rotary.low)
    between = (1 - smooth) * turn / rotary.factor + smooth * turn
    scaled = torch.where(length > rotary.original / rotary.low, turn / rotary.factor, between)
    return torch.where(length < rotary.original / rotary.high, turn, scaled)
