"""A tree of drafts in the cache: chains of one sequence, each with a slot, and pages of its own from the page on that is
not whole yet. A row is computed once, in the first branch that holds it, and its K/V are stored for all that do. So each
branch lies in the cache as a chain would, and to keep one is to take its pages.
"""

from __future__ import annotations

from paceline.kv.pages import OutOfPages
from paceline.kv.store import PageStore
from paceline.tree import Branches, branches, depths


class Fork:
    """The branches of one sequence in one tail. Raises OutOfPages with nothing taken."""

    def __init__(self, cache: PageStore, sequence_id: int, pending: int, parents: list[int]) -> None:
        """`pending`: tokens of the tail before the tree."""
        self._cache, self._id, self._pending = cache, sequence_id, pending
        self._entry = cache.entries[sequence_id]
        self.depth, self._chains = depths(parents), branches(parents)
        self._first, self._committed = self._entry.committed // cache.page_size, self._entry.committed
        count = len(self._chains) - 1
        if count > len(cache.free_branches):
            raise OutOfPages("all branches are in use: draft narrower trees")
        ends = [self._committed + pending + len(chain) for chain in self._chains[1:]]
        self._sizes = [-(-end // cache.page_size) - self._first for end in ends]
        self._pages: dict[str, list[list[int]]] = {}  # by kind and branch, the first one not among them
        taken: dict[str, list[int]] = {}
        try:
            for kind, pool in cache.pools.items():
                taken[kind] = pool.take(sum(self._sizes))
        except OutOfPages:
            for kind, pages in taken.items():
                for page in pages:
                    cache.pools[kind].release(page)
            raise
        self._slots = [cache.free_branches.pop() for _ in range(count)]
        cache.moved = True
        for kind, pages in taken.items():
            shared = slice(self._entry.first[kind], self._first)
            self._pages[kind] = []
            for slot, size in zip(self._slots, self._sizes, strict=True):
                own, table = pages[-size:], cache.host_tables[kind][slot]
                del pages[-size:]
                table[shared] = cache.host_tables[kind][self._entry.slot, shared]
                table[self._first : self._first + size] = own
                self._pages[kind].append(own)

    def place(self, row: int, skip: int, positions: list[int], slots: list[int], out: Branches) -> None:
        """Positions and slots of the tail's rows but the first `skip`; the next one is row `row` of the forward."""
        begin, all_slots = self._committed + skip, [self._entry.slot, *self._slots]
        new = self._pending - skip
        positions += range(begin, begin + new)
        positions += [begin + new - 1 + depth for depth in self.depth]
        slots += [self._entry.slot] * new
        out.further += [(row + r, slot) for r in range(new) for slot in self._slots]
        pages = range(self._first, -(-begin // self._cache.page_size))  # that hold something
        out.copies += [(self._entry.slot, slot, page) for slot in self._slots for page in pages]
        row, held = row + new, 0
        for chain, slot in zip(self._chains, all_slots, strict=True):
            if held:
                out.runs.append(row + held)
            out.further += [(row + node, slot) for node in chain if node < held]
            slots += [slot] * (chain[-1] + 1 - held)
            held = chain[-1] + 1

    def end(self, path: list[int]) -> None:
        """Let the sequence have the pages of the branch that begins with `path`, and give back those of the others."""
        cache, entry, first = self._cache, self._entry, self._first
        failed = self._id not in cache.entries  # then its pages may hold NaN: see `KVCache.close`
        chain_at = next(i for i, chain in enumerate(self._chains) if chain[: len(path)] == path) - 1
        cache.moved = True
        for kind, held in self._pages.items():
            if chain_at >= 0 and not failed:
                pages = slice(first, first + self._sizes[chain_at])
                entry.pages[kind][pages], held[chain_at] = held[chain_at], entry.pages[kind][pages]
                cache.host_tables[kind][entry.slot, pages] = entry.pages[kind][pages]
            for page in (page for pages in held for page in pages):
                if failed:
                    cache.scrub(kind, page)
                cache.pools[kind].release(page)
        cache.free_branches += self._slots
        self._pages, self._slots = {}, []
