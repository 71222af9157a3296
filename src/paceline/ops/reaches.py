"""Which keys rows read from a paged cache, as indices and masks, and softmax attention over them in plain torch."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from paceline.core import ForwardBatch
from paceline.kv.cache import KVCache

MAX_SCORES = 1 << 27  # attention scores held at once, in elements


@dataclass(frozen=True, slots=True)
class Reach:
    """Which keys the rows of each sequence read: shared by every layer of one kind."""

    index: Tensor  # [B * S] into a layer's storage
    mask: Tensor  # [B, 1, T * group, S]
    keys: int  # S


class Reaches:
    """Which keys the rows of a forward see, by kind of layer, and how the rows are padded to [B, T]."""

    def __init__(self, rows: ForwardBatch, cache: KVCache | None, runs: Seq[int]) -> None:
        """`runs` [B + 1]: where rows that stand one behind the other begin."""
        self._rows, self._cache, self._runs = rows, cache, runs
        self._reach: dict[tuple[str, int | None, int | None, int], Reach] = {}
        self._pad: tuple[Tensor, Tensor, int] | None = None

    def padding(self) -> tuple[Tensor, Tensor, int]:
        """Row of each place of [B, T], places of the rows, and T. Places past an end repeat the last row."""
        if self._pad is None:
            starts, device = self._runs, self._rows.tokens.device
            counts = [b - a for a, b in pairwise(starts)]
            longest = max(counts)
            take = [a + min(t, n - 1) for a, n in zip(starts, counts) for t in range(longest)]
            back = [b * longest + t for b, n in enumerate(counts) for t in range(n)]
            self._pad = (torch.tensor(take, device=device), torch.tensor(back, device=device), longest)
        return self._pad

    def of(self, kind: str, window: int | None, ahead: int | None, group: int) -> Reach:
        """Keys from the first to the last that any row of a sequence sees; no other sequence's are read."""
        key = (kind, window, ahead, group)
        if key not in self._reach:
            assert self._cache is not None
            take, _, longest = self.padding()
            batch = len(self._runs) - 1
            position = self._rows.positions.long()[take].view(batch, longest)  # [B, T]
            # [B, T] last visible key
            last = position[:, -1:].expand_as(position) if ahead is None else position + ahead
            first = torch.zeros_like(last)
            if window is not None:
                first = (position - window + (-1 if ahead == -1 else 1)).clamp(min=0)
                last = self._reached(last, take)
            begin, end = first[:, :1], last[:, -1:]  # [B, 1]
            keys = max(1, int((end - begin).max()) + 1)
            j = begin + torch.arange(keys, device=position.device)  # [B, S]
            mask = (j[:, None] <= last[..., None]) & (j[:, None] >= first[..., None])  # [B, T, S]
            j = torch.minimum(j, end).clamp(min=0)
            page = self._cache.page_size
            slots = self._rows.slots.long()[take].view(batch, longest)[:, :1]  # [B, 1]
            index = self._cache.tables[kind][slots, j // page].long() * page + j % page
            mask = mask[:, None].repeat_interleave(group, dim=2)
            self._reach[key] = Reach(index.flatten(), mask, keys)
        return self._reach[key]

    def _reached(self, last: Tensor, take: Tensor) -> Tensor:
        """`last` [B, T], further for rows of pictures whose rows see each other."""
        media = self._rows.media
        if media is None or media.reach is None:
            return last
        reach = torch.tensor(media.reach, device=last.device)[take].view(last.shape)
        return torch.maximum(last, reach - 1)


def attend(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    mask: Tensor,
    exact: torch.dtype,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Softmax attention with scale 1 of q [B, kv_heads, T, d], the softmax in `exact`; in pieces, so that a long prefill
    does not need [T, S] at once. `sinks` [kv_heads, T, 1]: scores beside those of the keys that bring no value.
    `softcap`: see `Ops.attention`."""
    k, v = kv
    piece = max(1, MAX_SCORES // (q.shape[0] * q.shape[1] * k.shape[2]))
    outs = []
    for start in range(0, q.shape[2], piece):
        rows = slice(start, start + piece)
        scores = q[:, :, rows] @ k.transpose(-1, -2)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~mask[:, :, rows], float("-inf"))
        if sinks is not None:
            beside = sinks[:, rows].expand(len(scores), -1, -1, -1).to(scores.dtype)
            scores = torch.cat((scores, beside), dim=-1)
        shares = torch.softmax(scores, dim=-1, dtype=exact).to(v.dtype)
        outs.append(shares[..., : v.shape[2]] @ v)
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)
