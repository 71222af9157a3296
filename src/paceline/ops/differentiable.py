"""`Ops` for training: the draft rounds of whole windows at once, with a gradient.

A round begins at an anchor, a token of a window that the target has not computed yet. Its rows see the K/V of entries,
which are made of what the target says of all rows before the anchor, and those of its own rows. Nothing mixes two rounds.
K/V are not written over here, as they are in a cache: those of a step are put beside the ones before. So a gradient finds
its way back through all steps of a round.

Matrices are multiplied in their own dtype, or as `torch.autocast` says. All else is `ReferenceOps`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.core import ForwardBatch
from paceline.kv.layout import LayerKV, Layout
from paceline.ops.base import Weight
from paceline.ops.reference import ReferenceOps, dequantize

KV = tuple[Tensor, Tensor]
Role = Literal["entries", "again", "own"]


@dataclass(slots=True)
class LayerKeys:
    """K/V of one storage layer."""

    entries: KV  # [B, kv_heads, T, d] each
    own: list[KV] = field(default_factory=list)  # of each step so far, [B, kv_heads, A, K, d] each


@dataclass(slots=True)
class Rounds:
    """What the rows of A rounds in each of B windows of T tokens see; shared by the forwards of an unrolling.

    `sees`: of a window in keys, or None, the mask [B, 1, A, T] of the entries that each round sees.
    """

    layout: Layout
    sees: Callable[[int | None], Tensor]
    layers: dict[int, LayerKeys] = field(default_factory=dict)
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor:
        if window not in self._masks:
            self._masks[window] = self.sees(window)
        return self._masks[window]


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one forward: K side by side for each of A rounds in B windows.

    `role`: "entries": one row for each token of the windows, whose K/V all rounds see. "again": the last entry of each
    round once more, whose K/V are there already. "own": rows of the rounds, each seen by its round alone.
    """

    tokens: Tensor  # [B, A, K]
    positions: Tensor  # [B, A, K]
    role: Role

    @property
    def flat(self) -> ForwardBatch:
        """The same, one behind the other."""
        tokens, positions = self.tokens.flatten(), self.positions.flatten()
        return ForwardBatch(tokens, positions, torch.zeros_like(positions), [0, len(tokens)])


class DifferentiableOps(ReferenceOps):
    """One forward over `rows`; values are [B * A * K, width]."""

    def __init__(
        self, rows: Rows, rounds: Rounds, given: Mapping[str, Tensor], dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(rows.flat, None, given, dtype)
        self._shape, self._role, self._rounds = rows.tokens.shape, rows.role, rounds

    def embed(self, tokens: Tensor, table: Weight, scale: float) -> Tensor:
        if _stored_apart(table):
            return super().embed(tokens, table, scale)
        rows = F.embedding(tokens, table.data).to(self.dtype)
        return rows if scale == 1.0 else rows * scale

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        # not narrowed to x's dtype as in `ReferenceOps`: autocast does so once for all steps of a round
        matrix = dequantize(weight, None, x.dtype) if _stored_apart(weight) else weight.data
        return F.linear(x, matrix, bias)

    def block_conv(self, x: Tensor, mix: Tensor, base: Tensor) -> Tensor:
        """Over the rows of a round, as they lie side by side."""
        count, width = base.shape
        rows, own = (part.view(-1, self._shape[2], part.shape[-1]) for part in (x, mix))
        taps = own.view(*own.shape[:2], count, -1).repeat_interleave(width * count // mix.shape[-1], 3) + base
        out = taps[:, :, 0] * rows
        for tap in range(1, count):
            earlier = F.pad(rows, (0, 0, tap, 0))[:, : self._shape[2]]
            out = out + taps[:, :, tap] * earlier
        return out.view(x.shape).to(x.dtype)

    def store_kv(self, layer: int, k: Tensor, v: Tensor | None) -> None:
        assert v is not None, "layers without values of their own are not trained"
        spec = self._rounds.layout.layers[layer]
        k, v = (self._apart(part, spec)[:, :, 0] for part in (k, v))  # [B, kv_heads, A, K, d]
        if self._role == "entries":
            self._rounds.layers[layer] = LayerKeys((k[:, :, :, 0], v[:, :, :, 0]))
        elif self._role == "own":
            self._rounds.layers[layer].own.append((k, v))

    def attention(
        self,
        q: Tensor,
        layer: int,
        heads: int,
        window: int | None,
        sees_itself: bool,
        latent: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Rows that see themselves see all earlier rows of their round, too: of those, K is 1."""
        assert latent is None, "latent attention is not trained"
        assert softcap is None, "capped scores are not trained"
        assert not sees_itself or (window is None and self._shape[2] == 1), "only such rows are trained"
        return self._over(q, layer, window, sees_itself)

    def block_attention(self, q: Tensor, layer: int, heads: int, window: int | None = None) -> Tensor:
        assert window is None, "blocks with a window are not trained"
        return self._over(q, layer, None, True)

    def _over(self, q: Tensor, layer: int, window: int | None, own: bool) -> Tensor:
        """Attention over the entries that a round sees and, if `own`, over its own rows."""
        assert self._role != "entries", "entries are not attended from"
        spec, keys, mask = (
            self._rounds.layout.layers[layer],
            self._rounds.layers[layer],
            self._rounds.mask(window),
        )
        q = self._apart(q, spec)  # [B, kv_heads, group, A, K, d]
        k, v = (part.to(q.dtype) for part in keys.entries)
        if not own:
            rows, seen = q.flatten(1, 2).flatten(2, 3), mask.repeat_interleave(self._shape[2], 2)
            out = F.scaled_dot_product_attention(rows, k, v, attn_mask=seen, scale=1.0, enable_gqa=True)
            return self._together(out.view(q.shape))
        count = k.shape[2]
        far = (q.flatten(2, 4) @ k.mT).view(*q.shape[:-1], count).to(self._exact)
        far = far.masked_fill(~mask[:, :, None, :, None], -torch.inf)
        near = [_scores(q, part[:, :, None]).to(self._exact) for part, _ in keys.own]
        shares = torch.cat([far, *near], -1).softmax(-1).to(q.dtype)
        out, at = (shares[..., :count].flatten(2, 4) @ v).view(q.shape), count
        for _, part in keys.own:
            out = out + _mixed(shares[..., at : at + part.shape[3]], part[:, :, None])
            at += part.shape[3]
        return self._together(out)

    def _apart(self, x: Tensor, spec: LayerKV) -> Tensor:
        """[N, heads * d] -> [B, kv_heads, heads / kv_heads, A, K, d]"""
        parts = x.view(*self._shape, spec.kv_heads, -1, spec.head_dim)
        return parts.permute(0, 3, 4, 1, 2, 5)

    def _together(self, x: Tensor) -> Tensor:
        """As `_apart`, back."""
        return x.permute(0, 3, 4, 1, 2, 5).reshape(-1, x.shape[1] * x.shape[2] * x.shape[5])


def _stored_apart(weight: Weight) -> bool:
    """Whether a matrix is stored in blocks or beside a scale."""
    return weight.blocks is not None or weight.scale is not None


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """[..., A, K, d] x [..., A, K, d] -> [..., A, K, K]; of one row a sum, faster than many tiny products."""
    return (q * k).sum(-1, keepdim=True) if k.shape[-2] == 1 else q @ k.mT


def _mixed(shares: Tensor, v: Tensor) -> Tensor:
    """[..., A, K, K] x [..., A, K, d] -> [..., A, K, d]"""
    return shares * v if v.shape[-2] == 1 else shares @ v
