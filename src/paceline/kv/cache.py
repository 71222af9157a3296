"""Paged K/V storage: for each sequence a committed prefix, and one provisional tail per step.

A tail that is not committed never existed: nothing is rolled back, its positions are overwritten by the next one.
What can fail (space) fails in `tail()`, before any forward. Sliding layers keep the pages that the window, one more
key for the MTP drafter, and the tail can reach; older pages go back to the pool or stay with the prefix index. What has a
recurrent state instead of keys is in kv/states.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np
import torch

from paceline.core import MAX_DRAFT_TOKENS
from paceline.errors import CapacityError, UsageError
from paceline.kv.kept import keep, offer
from paceline.kv.layout import STATE, Layout
from paceline.kv.pages import OutOfPages, PagePool
from paceline.kv.prefix import Node, PrefixIndex
from paceline.kv.states import States
from paceline.kv.tail import Tail
from paceline.memory import Arena
from paceline.tree import depths

PAGE_SIZE = 16  # tokens
MEMORY_PAGE = 4096  # bytes: no system has smaller ones
StoreType = torch.dtype | Literal["packed"]


def stored_as(dtype: StoreType) -> torch.dtype:
    """The type of the elements of a cache."""
    return torch.bfloat16 if isinstance(dtype, str) else dtype


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


class KVCache:
    """K and V of every layer that owns them, shared by up to `max_sequences` sequences of up to `max_tokens`."""

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
        """`pages`: kind -> number of pages, or of states. K/V tensors are [pages * page_size, kv_heads, head_dim]; a
        latent has one.

        Packed ones are of bfloat16, each page as native kernels that multiply pairs of it want it; `at` reads both kinds.
        """
        self.layout, self.page_size, self.packed = layout, PAGE_SIZE, dtype == "packed"
        self.max_tokens, self.max_sequences = max_tokens, max_sequences
        self.max_pages = -(-max_tokens // PAGE_SIZE)
        arena = Arena()
        shapes = [(pages[s.kind] * PAGE_SIZE, s.kv_heads, s.head_dim) for s in layout.layers]
        try:
            self.k = [_zeros(arena, shape, stored_as(dtype), device) for shape in shapes]
            self.v = [
                k if layer.latent is not None else _zeros(arena, shape, stored_as(dtype), device)
                for k, layer, shape in zip(self.k, layout.layers, shapes)
            ]
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
        self._host = {kind: np.zeros((max_sequences, self.max_pages), np.int32) for kind in layout.kinds}
        self.tables = {kind: torch.from_numpy(table).to(device) for kind, table in self._host.items()}
        self._mirrored = torch.device(device).type == "cpu"  # then `tables` are views of `_host`
        self.moved = False  # `_host` names a page that `tables` do not
        self.pools = {kind: PagePool(pages[kind], partial(self._evict, kind)) for kind in layout.kinds}
        if self.states is not None:
            self.pools[STATE] = PagePool(self.states.count, partial(self._evict, STATE))
        self.prefix = PrefixIndex(PAGE_SIZE, self.pools)
        self._kinds = layout.kinds
        self._free_slots = list(range(max_sequences - 1, -1, -1))
        self.branches, self._free_branches = 0, list[int]()  # at a time, beside the first of each sequence
        self._entries: dict[int, Entry] = {}
        self.scrubbed: list[tuple[str, int]] | None = None  # pages, for who has the other heads' K/V

    def grow_branches(self, count: int) -> None:
        """Make room in the page tables for so many branches of trees at a time. Nothing may be open, or bound to them."""
        if not self.layout.branches:
            raise UsageError("what this model caches cannot branch: leave draft_tree out")
        shape = (self.max_sequences + count, self.max_pages)
        for kind in self._kinds:
            self._host[kind] = np.zeros(shape, dtype=np.int32)
            self.tables[kind] = torch.from_numpy(self._host[kind]).to(self.tables[kind].device)
        self._free_branches = list(range(self.max_sequences + count - 1, self.max_sequences - 1, -1))
        self.branches = count

    def _evict(self, kind: str, count: int) -> int:
        return self.prefix.evict(kind, count)

    # -- sequences ---------------------------------------------------------------------------------------------

    def open(
        self,
        sequence_id: int,
        tokens: list[int],
        salt: str = "",
        *,
        share: bool = True,
        most: int | None = None,
        keys: list[int] | None = None,
    ) -> int:
        """Give the sequence a slot and return how many of its first tokens are already committed (a prefix hit).

        A hit never covers all tokens: the last one must be computed, since its hidden state is needed. Nor more than
        `most`: of the others somebody needs the hidden states. `keys`: what tells the first tokens apart, where tokens
        alone do not (soft_tokens.py); as many as there are keys.
        """
        if not self._free_slots:
            raise OutOfPages("all sequence slots are in use: raise max_batch")
        told_apart = tokens if keys is None else keys + tokens[len(keys) :]
        known = self.prefix.match(told_apart, salt) if share else []
        known = known if most is None else known[: most // PAGE_SIZE]
        path = self._usable(known)
        parent = (path[-1] if path else salt) if share else None
        state = self._take_state(path)
        known_to = len(path) * PAGE_SIZE
        entry = Entry(
            self._free_slots.pop(), {}, {}, known_to, parent, [], state=state, copied=known_to, keys=keys
        )
        if self.states is not None:
            self.states.begin(entry.slot, state, path[-1].pages[STATE] if path else None)
            if share:  # where other texts went on from here, and where the prompt ends
                ends = {len(known) * PAGE_SIZE, (len(tokens) - 1) // PAGE_SIZE * PAGE_SIZE}
                entry.stops = sorted(end for end in ends if end > entry.committed)
        for kind in self._kinds:
            first = self._first_page(kind, entry.committed)
            held = [node.pages[kind] for node in path[first:]]
            for page in held:
                self.pools[kind].share(page)
            entry.pages[kind], entry.first[kind] = [0] * min(first, len(path)) + held, min(first, len(path))
            self._host[kind][entry.slot, : len(path)] = entry.pages[kind]
        self._entries[sequence_id] = entry
        return entry.committed

    def _take_state(self, path: list[Node]) -> int:
        """A state for a new text, not the one that it is to begin with."""
        if self.states is None:
            return -1
        pool = self.pools[STATE]
        held = [path[-1].pages[STATE]] if path else []
        for state in held:
            pool.share(state)
        try:
            return pool.take(1)[0]
        finally:
            for state in held:
                pool.release(state)

    def _first_page(self, kind: str, committed: int) -> int:
        """Index of the first page that a tail at `committed`, or a drafter one key further back, can still read."""
        window = self.layout.windows[kind]
        return 0 if window is None else max(0, committed - 1 - window) // PAGE_SIZE

    def _leaves(self, kind: str, index: int) -> int:
        """Committed tokens at which a page gets out of reach: the least that makes `_first_page` larger than `index`."""
        window = self.layout.windows[kind]
        return self.max_tokens + 1 if window is None else (index + 1) * PAGE_SIZE + window + 1

    def _usable(self, path: list[Node]) -> list[Node]:
        """The longest beginning of `path` whose pages are all still there, as far back as each window reaches."""
        for length in range(len(path), 0, -1):
            if all(
                kind in node.pages
                for kind in self._kinds
                for node in path[self._first_page(kind, length * PAGE_SIZE) : length]
            ) and (self.states is None or STATE in path[length - 1].pages):
                return path[:length]
        return []

    def close(self, sequence_id: int, *, scrub: bool = False) -> None:
        """Free everything the sequence holds. `scrub` zeroes its private pages (after NaN, which masks do not stop)."""
        entry = self._entries.pop(sequence_id)
        if self.states is not None and not scrub:
            offer(self, entry, entry.state)
        for kind, pages in entry.pages.items():
            for page in pages[entry.first[kind] :]:
                if scrub and self.pools[kind].refs(page) == 1:
                    self.scrub(kind, page)
                self.pools[kind].release(page)
        self._free_slots.append(entry.slot)
        if self.states is not None:
            self.pools[STATE].release(entry.state)

    def most(self, sequence_id: int, count: int) -> int:
        """How many of the next `count` tokens of a text should be in one tail: a state is kept on the way."""
        entry = self._entries[sequence_id]
        if self.states is None or not entry.stops or entry.stops[0] <= entry.committed:
            return count
        stop = entry.stops[0]
        return (
            count
            if self.states.can_wait(stop, entry.committed + count)
            else min(count, stop - entry.committed)
        )

    def scrub(self, kind: str, page: int) -> None:
        """Make zeros of a page."""
        if self.scrubbed is not None:
            self.scrubbed.append((kind, page))
        for i, layer in enumerate(self.layout.layers):
            if layer.kind == kind:
                for store in self._stores(i):
                    store[page * PAGE_SIZE : (page + 1) * PAGE_SIZE].zero_()

    def slot(self, sequence_id: int) -> int:
        return self._entries[sequence_id].slot

    def committed(self, sequence_id: int) -> int:
        return self._entries[sequence_id].committed

    @property
    def open_sequences(self) -> int:
        return len(self._entries)

    def _stores(self, layer: int) -> tuple[torch.Tensor, ...]:
        k, v = self.k[layer], self.v[layer]
        return (k,) if v is k else (k, v)

    def _all_stores(self) -> list[torch.Tensor]:
        states = [] if self.states is None else [*self.states.states, *self.states.recent]
        return [store for layer in range(len(self.k)) for store in self._stores(layer)] + states

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self._all_stores())

    @property
    def holds(self) -> str:
        """What K and V are kept as, in words."""
        return "packed bfloat16" if self.packed else str(self.k[0].dtype).removeprefix("torch.")

    def touch(self, most: int) -> None:
        """Have the system back the first `most` bytes with memory now, the same share of each layer, instead of when
        they are first used: that takes milliseconds in the middle of a text, on virtual machines tens of them.
        """
        for store in self._all_stores():
            if store.is_cpu:
                rows = min(1.0, most / self.nbytes) * len(store)
                store[: int(rows)].view(torch.uint8).view(-1)[::MEMORY_PAGE].bitwise_or_(0)  # as it was

    def usage(self) -> dict[str, float]:
        """Share of pages in use by sequences, by kind; pages that only the prefix index holds count as free."""
        texts = self._entries.values()
        live = {kind: {p for e in texts for p in e.pages[kind][e.first[kind] :]} for kind in self._kinds}
        return {kind: len(pages) / self.pools[kind].count for kind, pages in live.items()}

    def fits(self, count: int) -> bool:
        """Whether `count` tokens of a new text would find free or evictable pages."""
        for kind, pool in self.pools.items():
            window = 0 if kind == STATE else self.layout.windows[kind]
            reach = count if window is None else min(count, window + 2 * PAGE_SIZE)
            missing = (1 if kind == STATE else -(-reach // PAGE_SIZE)) - pool.free
            if not self._free_slots or missing > self.prefix.evictable(kind, missing):
                return False
        return True

    def at(self, layer: int, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [..., kv_heads, head_dim, or value_dim] at places `index` of a layer: page * page_size + place."""
        k, v = self.k[layer], self.v[layer]
        if not self.packed:
            keys = k[index]
            return keys, keys[..., : self.layout.layers[layer].latent] if v is k else v[index]
        page, place = index // PAGE_SIZE, index % PAGE_SIZE
        shape = -1, k.shape[1], k.shape[2]  # of pages, see native/attention_packed.h
        keys = k.view(*shape[:2], shape[2] // 2, PAGE_SIZE, 2)[page, :, :, place]
        values = v.view(*shape[:2], PAGE_SIZE // 2, shape[2], 2)[page, :, place // 2, :, place % 2]
        return keys.flatten(-2), values

    # -- steps -------------------------------------------------------------------------------------------------

    def tail(
        self,
        items: Seq[tuple[int, list[int]]],
        parents: Seq[list[int] | None] | None = None,
        sure: Seq[int] | None = None,
    ) -> Tail:
        """Reserve space for new tokens of some sequences: (sequence id, tokens from `committed` on).

        `parents`: of the last tokens of each item, where they are a tree in preorder (see tree.py). `sure`: how many
        first ones of each will be kept if any is, so that a recurrent state may go over them; None: all but as many as a
        step can draft. Raises OutOfPages with nothing changed for the rows that did not fit; earlier rows keep harmless
        reserves.
        """
        trees = {} if parents is None else {i: tree for i, tree in enumerate(parents) if tree}
        for i, (sequence_id, tokens) in enumerate(items):
            deep = len(tokens)
            if i in trees:
                deep += max(depths(trees[i])) - len(trees[i])
            self._reserve(sequence_id, deep)
            if self.states is not None:
                assert i not in trees, "a recurrent state cannot branch"
                stays = max(0, deep - MAX_DRAFT_TOKENS - 1) if sure is None else sure[i]
                entry = self._entries[sequence_id]
                self.states.aim(
                    entry.slot, entry.committed, deep, stays, entry.stops[0] if entry.stops else None
                )
        return Tail(self, items, trees)

    def copy_pages(self, copies: Seq[tuple[int, int, int]]) -> None:
        """Copy pages of all layers: (from a slot, to a slot, the page's index in both), as `Branches` wants it."""
        if not copies:
            return
        for layer, spec in enumerate(self.layout.layers):
            table = self._host[spec.kind]
            source, to = ([int(table[copy[end], copy[2]]) for copy in copies] for end in (0, 1))
            for store in self._stores(layer):
                pages = store.view(-1, PAGE_SIZE, *store.shape[1:])
                pages[to] = pages[source]

    def _reserve(self, sequence_id: int, count: int) -> None:
        entry = self._entries[sequence_id]
        end = entry.committed + count
        if end > self.max_tokens:
            raise CapacityError(f"{end} tokens do not fit into max_model_len={self.max_tokens}")
        need = -(-end // PAGE_SIZE)
        for kind, pages in entry.pages.items():
            have = len(pages)
            if need > have:
                pages.extend(self.pools[kind].take(need - have))
                self._host[kind][entry.slot, have:need] = pages[have:]
                self.moved = True

    def _sync(self) -> None:
        if not self._mirrored and self.moved:
            for kind, table in self.tables.items():
                table.copy_(torch.from_numpy(self._host[kind]), non_blocking=True)
            self.moved = False

    def _commit(self, sequence_id: int, tokens: list[int]) -> None:
        """Advance over `tokens`, computed from the committed position on; index whole pages, free those out of reach."""
        entry = self._entries[sequence_id]
        if entry.parent is not None:
            self._index(entry, tokens)
        entry.committed += len(tokens)
        if self.states is not None:
            keep(self, entry)
        if entry.committed < entry.turn:
            return
        entry.turn = self.max_tokens + 1
        for kind in self._kinds:
            first = min(self._first_page(kind, entry.committed), len(entry.pages[kind]))
            for page in entry.pages[kind][entry.first[kind] : first]:
                self.pools[kind].release(page)
            entry.first[kind] = max(first, entry.first[kind])
            entry.turn = min(entry.turn, self._leaves(kind, entry.first[kind]))

    def _index(self, entry: Entry, tokens: list[int]) -> None:
        index = entry.committed // PAGE_SIZE
        if entry.keys is not None and (own := entry.keys[entry.committed : entry.committed + len(tokens)]):
            tokens = own + tokens[len(own) :]
        entry.open_page += tokens
        while len(entry.open_page) >= PAGE_SIZE:
            assert entry.parent is not None
            run = tuple(entry.open_page[:PAGE_SIZE])
            pages = {kind: entry.pages[kind][index] for kind in self._kinds}
            entry.parent = self.prefix.insert(entry.parent, run, pages)
            del entry.open_page[:PAGE_SIZE]
            index += 1
