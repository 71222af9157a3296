"""Pages of keys and values, and who holds which: the memory of a `KVCache`, without what a sequence may do with it.

Here belongs where K/V lie and how they are read, copied and cleared. How sequences open, grow and close is cache.py; what
a step may write is tail.py; trees are fork.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np
import torch

from paceline.errors import CapacityError, UsageError
from paceline.kv.layout import SCALED, STATE, LayerKV, Layout
from paceline.kv.pages import PagePool
from paceline.kv.prefix import Node, PrefixIndex
from paceline.kv.states import States
from paceline.memory import Arena

PAGE_SIZE = 16  # tokens
MEMORY_PAGE = 4096  # bytes: no system has smaller ones
StoreType = torch.dtype | Literal["packed", "int8"]


def stored_as(dtype: StoreType) -> torch.dtype:
    """The type of the elements of a cache."""
    if isinstance(dtype, str):
        return torch.int8 if dtype == "int8" else torch.bfloat16
    return dtype


@dataclass(slots=True)
class Entry:
    slot: int
    pages: dict[str, list[int]]  # kind -> page id by page index
    first: dict[str, int]  # kind -> first page index that is still held
    committed: int
    parent: Node | str | None  # where the next whole page goes in the prefix index, None = not shared
    open_page: list[int]  # committed tokens of the page that is not whole yet
    turn: int = 0  # committed tokens at which a window has left a page behind
    state: int = -1
    stops: list[int] = field(default_factory=list)  # page ends at which the state is kept for other texts
    copied: int = 0  # the last page end at which it was copied,
    latest: int | None = None  # and that copy, where it is given up for the next one
    keys: list[int] | None = None  # that stand for the first tokens in the prefix index


def _zeros(
    arena: Arena, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return arena.zeros(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


def _widened(stored: torch.Tensor, width: int) -> torch.Tensor:
    """[..., columns and scales] of int8 -> [..., width], float32."""
    scales = stored[..., width:].contiguous().view(torch.float32)
    return stored[..., :width].float() * scales.repeat_interleave(SCALED, -1)


class PageStore:
    """K and V of every layer that owns them, in pages, and one page table per layer kind and sequence slot."""

    def __init__(
        self,
        layout: Layout,
        pages: dict[str, int],
        *,
        max_sequences: int,
        max_tokens: int,
        dtype: StoreType,
        device: torch.device | str = "cpu",
    ) -> None:
        """`pages`: kind -> number of pages or states. K/V are [pages * page_size, kv_heads, head_dim]; latents have one.

        Packed ones are of bfloat16, each page as native kernels that multiply pairs of it want it. In int8 the float32
        scales of a vector lie behind its columns (native/attention_bytes.h). `at` reads all of them.
        """
        self.layout, self.page_size = layout, PAGE_SIZE
        self.packed, self.quantized = dtype == "packed", dtype == "int8"
        self.max_tokens, self.max_sequences = max_tokens, max_sequences
        self.max_pages = -(-max_tokens // PAGE_SIZE)
        arena = Arena()
        try:
            new = partial(_zeros, arena, dtype=stored_as(dtype), device=device)
            self.k = [new(self._shape(pages[layer.kind], layer)) for layer in layout.layers]
            pairs = zip(self.k, layout.layers)
            self.v = [k if layer.latent is not None else new(tuple(k.shape)) for k, layer in pairs]
            self.states = None
            if layout.states:
                exact = torch.float64 if dtype == torch.float64 else torch.float32
                count = pages.get(STATE, 2 * max_sequences)
                zeros = partial(_zeros, arena, dtype=exact, device=device)
                self.states = States(layout.states, count, max_sequences, zeros)
        except RuntimeError as error:
            raise CapacityError(
                f"no memory for the K/V cache ({error}): lower cache_memory or max_batch"
            ) from error
        shape = (max_sequences, self.max_pages)
        self.host_tables = {kind: np.zeros(shape, np.int32) for kind in layout.kinds}
        self.tables = {kind: torch.from_numpy(table).to(device) for kind, table in self.host_tables.items()}
        self._mirrored = torch.device(device).type == "cpu"  # then `tables` are views of `host_tables`
        self.moved = False  # `host_tables` names a page that `tables` do not
        self.pools = {kind: PagePool(pages[kind], partial(self._evict, kind)) for kind in layout.kinds}
        if self.states is not None:
            self.pools[STATE] = PagePool(self.states.count, partial(self._evict, STATE))
        self.prefix = PrefixIndex(PAGE_SIZE, self.pools)
        self._kinds = layout.kinds
        self._free_slots = list(range(max_sequences - 1, -1, -1))
        self.branches, self.free_branches = 0, list[int]()  # at a time, beside the first of each sequence
        self.entries: dict[int, Entry] = {}
        self.scrubbed: list[tuple[str, int]] | None = None  # pages, for who has the other heads' K/V

    def _shape(self, pages: int, layer: LayerKV) -> tuple[int, int, int]:
        if self.quantized and layer.latent is not None:
            raise UsageError("keys that hold their values, too, cannot be kept in int8: use kv_cache auto")
        scales = 4 * (layer.head_dim // SCALED) if self.quantized else 0
        return pages * PAGE_SIZE, layer.kv_heads, layer.head_dim + scales

    def grow_branches(self, count: int) -> None:
        """Make room in the page tables for so many branches of trees at a time. Nothing may be open, or bound to them."""
        if not self.layout.branches:
            raise UsageError("what this model caches cannot branch: leave draft_tree out")
        shape = (self.max_sequences + count, self.max_pages)
        for kind in self._kinds:
            self.host_tables[kind] = np.zeros(shape, dtype=np.int32)
            self.tables[kind] = torch.from_numpy(self.host_tables[kind]).to(self.tables[kind].device)
        self.free_branches = list(range(self.max_sequences + count - 1, self.max_sequences - 1, -1))
        self.branches = count

    def _evict(self, kind: str, count: int) -> int:
        return self.prefix.evict(kind, count)

    def scrub(self, kind: str, page: int) -> None:
        """Make zeros of a page."""
        if self.scrubbed is not None:
            self.scrubbed.append((kind, page))
        for i, layer in enumerate(self.layout.layers):
            if layer.kind == kind:
                for store in self._stores(i):
                    store[page * PAGE_SIZE : (page + 1) * PAGE_SIZE].zero_()

    def copy_pages(self, copies: Seq[tuple[int, int, int]]) -> None:
        """Copy pages of all layers: (from a slot, to a slot, the page's index in both), as `Branches` wants it."""
        if not copies:
            return
        for layer, spec in enumerate(self.layout.layers):
            table = self.host_tables[spec.kind]
            source, to = ([int(table[copy[end], copy[2]]) for copy in copies] for end in (0, 1))
            for store in self._stores(layer):
                pages = store.view(-1, PAGE_SIZE, *store.shape[1:])
                pages[to] = pages[source]

    def at(self, layer: int, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [..., kv_heads, head_dim, or value_dim] at places `index` of a layer: page * page_size + place."""
        k, v = self.k[layer], self.v[layer]
        if self.quantized:
            width = self.layout.layers[layer].head_dim
            return _widened(k[index], width), _widened(v[index], width)
        if not self.packed:
            keys = k[index]
            return keys, keys[..., : self.layout.layers[layer].latent] if v is k else v[index]
        page, place = index // PAGE_SIZE, index % PAGE_SIZE
        shape = -1, k.shape[1], k.shape[2]  # of pages, see native/attention_packed.h
        keys = k.view(*shape[:2], shape[2] // 2, PAGE_SIZE, 2)[page, :, :, place]
        values = v.view(*shape[:2], PAGE_SIZE // 2, shape[2], 2)[page, :, place // 2, :, place % 2]
        return keys.flatten(-2), values

    def usage(self) -> dict[str, float]:
        """Share of pages in use by sequences, by kind; pages that only the prefix index holds count as free."""
        texts = self.entries.values()
        live = {kind: {p for e in texts for p in e.pages[kind][e.first[kind] :]} for kind in self._kinds}
        return {kind: len(pages) / self.pools[kind].count for kind, pages in live.items()}

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self._all_stores())

    @property
    def holds(self) -> str:
        """What K and V are kept as, in words."""
        return "packed bfloat16" if self.packed else str(self.k[0].dtype).removeprefix("torch.")

    @property
    def kind(self) -> StoreType:
        """What to make another cache of the same kind with."""
        return "packed" if self.packed else "int8" if self.quantized else self.k[0].dtype

    def touch(self, most: int) -> None:
        """Have the system back the first `most` bytes with memory now, the same share of each layer, instead of when
        they are first used: that takes milliseconds in the middle of a text, on virtual machines tens of them.
        """
        for store in self._all_stores():
            if store.is_cpu:
                rows = min(1.0, most / self.nbytes) * len(store)
                store[: int(rows)].view(torch.uint8).view(-1)[::MEMORY_PAGE].bitwise_or_(0)  # as it was

    def sync(self) -> None:
        if not self._mirrored and self.moved:
            for kind, table in self.tables.items():
                table.copy_(torch.from_numpy(self.host_tables[kind]), non_blocking=True)
            self.moved = False

    def _stores(self, layer: int) -> tuple[torch.Tensor, ...]:
        k, v = self.k[layer], self.v[layer]
        return (k,) if v is k else (k, v)

    def _all_stores(self) -> list[torch.Tensor]:
        states = [] if self.states is None else [*self.states.states, *self.states.recent]
        return [store for layer in range(len(self.k)) for store in self._stores(layer)] + states
