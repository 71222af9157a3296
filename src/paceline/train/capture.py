"""The frozen target as a teacher: hidden states, shared K/V and logits of whole windows, computed and thrown
away.

There is no second model here: the engine's own target runs over the texts with a fresh paged cache, and K and
V are read back from its pages, exactly as the drafter will see them. Nothing is stored on disk; a batch lives
as long as its gradient does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from paceline.config import EngineConfig
from paceline.core import ForwardBatch
from paceline.errors import WeightsError
from paceline.kv.cache import KVCache
from paceline.kv.store import PAGE_SIZE
from paceline.kv.tail import Tail
from paceline.models.registry import load_target
from paceline.models.target import GraphTarget
from paceline.ops.base import Ops, Value
from paceline.ops.reference import dequantize
from paceline.ops.runners import pick_device, pick_runner
from paceline.train.parallel import Captured
from paceline.train.windows import Windows

ROWS, GPU_ROWS = 512, 8192  # of one forward

Part = tuple[torch.Tensor, ...]  # [n, ...] of the rows of one forward


class TargetTeacher:
    """Runs a loaded target over windows, never with a gradient. `kv`: the drafter reads the target's K/V."""

    def __init__(self, target: GraphTarget, *, kv: bool = False) -> None:
        self.target, self.kv = target, kv
        self._embed_graph = self._embed
        self._narrow = target  # gives the scores of what the drafter can draft

    @property
    def device(self) -> torch.device:
        return self.target.device

    def _embed(self, ops: Ops) -> tuple[Value]:
        return (ops.embed(ops.tokens(), self.target.embedding, self.target.embedding_scale),)

    def narrow(self, ids: torch.Tensor | None) -> torch.Tensor:
        """From now on `narrow_logits` are of the tokens `ids` [C] only (None: all). Its head, float32 [C, H].

        Before the first forward, which may pack the head.
        """
        if ids is not None:
            self._narrow = self.target.narrowed(ids.to(self.device))
        return dequantize(self._narrow.head, None, torch.float32)

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[M, H] -> [M, V] float32."""
        return self.target.logits(hidden.to(self.target.dtype)).clone()

    @torch.no_grad()
    def narrow_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[M, H] -> [M, C] float32, of the tokens that can be drafted."""
        return self._narrow.logits(hidden.to(self.target.dtype)).clone()

    @torch.no_grad()
    def capture(self, windows: Windows) -> Captured:
        """What the drafter reads of B windows of T tokens. Padding holds zeros. WeightsError for states that are no
        numbers.
        """
        texts = _texts(windows)
        cache = self._cache([stop - start for _, start, stop in texts])
        parts = list(self._forwards(cache, windows, texts))
        joined = [torch.cat(column) for column in zip(*parts, strict=True)]
        positions, embedded, states, *kv = joined
        if not bool(states.isfinite().all()):
            raise WeightsError(
                f"{self.target.path}: the target's hidden states are not finite, so nothing can be learnt of them: "
                "download its weights again, or use a precision that holds them"
            )
        batch, length = windows.tokens.shape
        place = torch.cat([row * length + torch.arange(a, b) for row, a, b in texts]).to(self.device)

        def spread(x: torch.Tensor) -> torch.Tensor:
            """[N, ...] -> [B, T, ...]: each row to its place in its window, zeros in the padding."""
            out = torch.zeros(batch * length, *x.shape[1:], dtype=x.dtype, device=self.device)
            return out.index_copy_(0, place, x).view(batch, length, *x.shape[1:])

        width = self.target.hidden_size
        return Captured(
            tokens=torch.from_numpy(windows.tokens.astype(np.int64)).to(self.device),
            segments=torch.from_numpy(windows.segments.astype(np.int64)).to(self.device),
            counted=torch.from_numpy(windows.counted).to(self.device),
            positions=spread(positions),
            embeddings=spread(embedded),
            hidden=spread(states[:, :width]),
            kv=_by_kind(cache, kv, spread) if self.kv else {},
            states=spread(states[:, width:]) if self.target.tapped else None,
        )

    def _forwards(
        self, cache: KVCache, windows: Windows, texts: list[tuple[int, int, int]]
    ) -> Iterator[Part]:
        """All rows in order, some at a time: positions, embeddings, hidden states beside those of the taps, K and V."""
        most = ROWS if self.device.type == "cpu" else GPU_ROWS
        items = [(i, windows.tokens[row, a:b].tolist()) for i, (row, a, b) in enumerate(texts)]
        for i, tokens in items:
            cache.open(i, tokens, share=False)
        for group in _groups(items, most):
            tail: Tail = cache.tail(group)
            rows = tail.rows(self.device)
            states = torch.cat(self.target.states(rows, cache), dim=-1)
            embedded = self.target.runner.run(self._embed_graph, rows, None, {})[0].clone()
            kv = [x for kind in cache.layout.kinds for x in _read(cache, kind, rows)] if self.kv else []
            yield rows.positions.long(), embedded, states, *kv
            tail.commit(
                [len(tokens) for _, tokens in group]
            )  # pages that no key of a window reaches are given up

    def _cache(self, lengths: list[int]) -> KVCache:
        """A cache with room for every token of every text."""
        pages = sum(-(-n // PAGE_SIZE) for n in lengths)
        layout = self.target.layout
        return KVCache(
            layout, dict.fromkeys(layout.kinds, pages), max_sequences=len(lengths), max_tokens=max(lengths),
            dtype=self.target.kv_dtype, device=self.device,
        )  # fmt: skip


def _groups(items: list[tuple[int, list[int]]], most: int) -> Iterator[list[tuple[int, list[int]]]]:
    """The texts in order, cut where `most` tokens are full."""
    group: list[tuple[int, list[int]]] = []
    room = most
    for i, tokens in items:
        rest = tokens
        while rest:
            group.append((i, rest[:room]))
            rest, room = rest[room:], room - len(rest[:room])
            if not room:
                yield group
                group, room = [], most
    if group:
        yield group


def _by_kind(
    cache: KVCache, kv: list[torch.Tensor], spread: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """K and V [B, kv_heads, T, head_dim] of the last layer of each kind."""
    turned = [spread(x).transpose(1, 2).contiguous() for x in kv]
    return {kind: (turned[2 * i], turned[2 * i + 1]) for i, kind in enumerate(cache.layout.kinds)}


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


def load_frozen(folder: Path, device: str) -> GraphTarget:
    """The target of a folder, on the engine's own arithmetic. Raises LoadError."""
    place = pick_device(device)
    config = EngineConfig(target=str(folder), device=device, threads=torch.get_num_threads())
    runner, _ = pick_runner(config, place)
    return load_target(folder, device=place, runner=runner)
