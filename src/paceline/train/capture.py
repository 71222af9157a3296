"""The frozen target as a teacher: hidden states, shared K/V and logits of whole windows, computed and thrown
away.

There is no second model here: the engine's own target runs over the texts with a fresh paged cache, and K and
V are read back from its pages, exactly as the drafter will see them. Nothing is stored on disk; a batch lives
as long as its gradient does.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from paceline.core import ForwardBatch
from paceline.errors import PairError
from paceline.kv.cache import PAGE_SIZE, KVCache
from paceline.models.config import GemmaConfig, parse_target, read_config
from paceline.models.registry import load_target
from paceline.models.target import GraphTarget
from paceline.ops.base import Ops, Value
from paceline.train.parallel import Captured
from paceline.train.windows import Windows


class TargetTeacher:
    """Runs a loaded target over windows, never with a gradient."""

    def __init__(self, target: GraphTarget) -> None:
        self.target = target
        self._embed_graph = self._embed

    @property
    def device(self) -> torch.device:
        return self.target.device

    def _embed(self, ops: Ops) -> tuple[Value]:
        return (ops.embed(ops.tokens(), self.target.embedding, self.target.embedding_scale),)

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[M, H] -> [M, V] float32."""
        return self.target.logits(hidden.to(self.target.dtype)).clone()

    @torch.no_grad()
    def capture(self, windows: Windows) -> Captured:
        """What the drafter reads of B windows of T tokens. Padding holds zeros."""
        texts = _texts(windows)
        cache = self._cache([stop - start for _, start, stop in texts])
        rows = self._rows(cache, windows, texts)
        hidden = self.target.forward(rows, cache)
        (embedded,) = self.target.runner.run(self._embed_graph, rows, None, {})
        batch, length = windows.tokens.shape
        device = self.device
        place = torch.cat([row * length + torch.arange(a, b) for row, a, b in texts]).to(device)

        def spread(x: torch.Tensor) -> torch.Tensor:
            """[N, ...] -> [B, T, ...]: each row to its place in its window, zeros in the padding."""
            out = torch.zeros(batch * length, *x.shape[1:], dtype=x.dtype, device=device)
            return out.index_copy_(0, place, x).view(batch, length, *x.shape[1:])

        return Captured(
            tokens=torch.from_numpy(windows.tokens.astype(np.int64)).to(device),
            segments=torch.from_numpy(windows.segments.astype(np.int64)).to(device),
            counted=torch.from_numpy(windows.counted).to(device),
            positions=spread(rows.positions.long()),
            embeddings=spread(embedded),
            hidden=spread(hidden),
            kv={kind: self._kv(cache, kind, rows, spread) for kind in cache.layout.kinds},
        )

    def _kv(
        self, cache: KVCache, kind: str, rows: ForwardBatch, spread: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [B, kv_heads, T, head_dim] of the last layer of `kind`."""
        k, v = _read(cache, kind, rows)
        return spread(k).transpose(1, 2).contiguous(), spread(v).transpose(1, 2).contiguous()

    def _cache(self, lengths: list[int]) -> KVCache:
        """A cache with room for every token of every text, so that no page is given up before it is read."""
        pages = sum(-(-n // PAGE_SIZE) for n in lengths)
        layout = self.target.layout
        return KVCache(
            layout, dict.fromkeys(layout.kinds, pages), max_sequences=len(lengths), max_tokens=max(lengths),
            dtype=self.target.kv_dtype, device=self.device,
        )  # fmt: skip

    def _rows(self, cache: KVCache, windows: Windows, texts: list[tuple[int, int, int]]) -> ForwardBatch:
        """The rows of all texts."""
        items = [(i, windows.tokens[row, a:b].tolist()) for i, (row, a, b) in enumerate(texts)]
        for i, tokens in items:
            cache.open(i, tokens, share=False)
        return cache.tail(items).rows(self.device)  # left uncommitted: the cache is dropped with the batch


def _read(cache: KVCache, kind: str, rows: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [N, kv_heads, head_dim] of the last layer of `kind`, at the rows' own positions."""
    layer, position = cache.layout.last_of(kind), rows.positions.long()
    page = cache.tables[kind][rows.slots.long(), position // PAGE_SIZE].long()
    index = page * PAGE_SIZE + position % PAGE_SIZE
    return cache.at(layer, index)


def _texts(windows: Windows) -> list[tuple[int, int, int]]:
    """(window, start, stop) of every text."""
    out = []
    for row, segments in enumerate(windows.segments):
        edges = np.flatnonzero(np.diff(segments, prepend=-2, append=-2))
        out += [(row, int(a), int(b)) for a, b in pairwise(edges) if segments[a] >= 0]
    return out


def load_teacher(folder: Path, device: str = "cpu") -> TargetTeacher:
    """The target of a folder as a teacher. Raises LoadError, and PairError if no drafter could read its
    K/V.
    """
    config = parse_target(read_config(folder))
    if not isinstance(config, GemmaConfig):
        raise PairError(
            f"{folder} is a {config.model_type}, and MTP drafters are trained for Gemma 4 only: use the n-gram drafter"
        )
    owners = {layer.kind for layer in config.layers if not layer.shared}
    if owners != {"sliding_attention", "full_attention"}:
        raise PairError(
            f"{folder} has K/V of {', '.join(sorted(owners))} only, and an MTP drafter reads sliding and "
            "full attention: this target has no drafter support, use the n-gram drafter"
        )
    return TargetTeacher(load_target(folder, device=device))
