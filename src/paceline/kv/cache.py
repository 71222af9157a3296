"""Paged K/V storage: for each sequence a committed prefix, and one provisional tail per step.

A tail that is not committed never existed: nothing is rolled back, its positions are overwritten by the next one.
What can fail (space) fails in `tail()`, before any forward. Sliding layers keep the pages that the window, one more
key for the MTP drafter, and the tail can reach; older pages go back to the pool or stay with the prefix index. What has a
recurrent state instead of keys is in kv/states.py.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from paceline.core import MAX_DRAFT_TOKENS
from paceline.errors import CapacityError
from paceline.kv.kept import keep, offer
from paceline.kv.layout import STATE
from paceline.kv.pages import OutOfPages
from paceline.kv.prefix import Node
from paceline.kv.store import PAGE_SIZE, Entry, PageStore
from paceline.kv.tail import Tail
from paceline.tree import depths


class KVCache(PageStore):
    """The K/V of up to `max_sequences` sequences of up to `max_tokens`."""

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
        `most`: of the others somebody needs the hidden states. `keys`: what distinguishes the first tokens, where tokens
        alone do not (soft_tokens.py); as many as there are keys.
        """
        if not self._free_slots:
            raise OutOfPages("all sequence slots are in use: raise max_batch")
        distinct = tokens if keys is None else keys + tokens[len(keys) :]
        known = self.prefix.match(distinct, salt) if share else []
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
            self.host_tables[kind][entry.slot, : len(path)] = entry.pages[kind]
        self.entries[sequence_id] = entry
        return entry.committed

    def _take_state(self, path: list[Node]) -> int:
        """Allocate a state for a new text, never by evicting the state that it starts from."""
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
        """The smallest number of committed tokens at which page `index` can no longer be read."""
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
        entry = self.entries.pop(sequence_id)
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
        """Largest chunk of the next `count` tokens that ends where a recurrent state must be saved."""
        entry = self.entries[sequence_id]
        if self.states is None or not entry.stops or entry.stops[0] <= entry.committed:
            return count
        stop = entry.stops[0]
        return (
            count
            if self.states.can_wait(stop, entry.committed + count)
            else min(count, stop - entry.committed)
        )

    def slot(self, sequence_id: int) -> int:
        return self.entries[sequence_id].slot

    def committed(self, sequence_id: int) -> int:
        return self.entries[sequence_id].committed

    @property
    def open_sequences(self) -> int:
        return len(self.entries)

    def fits(self, count: int) -> bool:
        """Whether `count` tokens of a new text would find free or evictable pages."""
        for kind, pool in self.pools.items():
            window = 0 if kind == STATE else self.layout.windows[kind]
            reach = count if window is None else min(count, window + 2 * PAGE_SIZE)
            missing = (1 if kind == STATE else -(-reach // PAGE_SIZE)) - pool.free
            if not self._free_slots or missing > self.prefix.evictable(kind, missing):
                return False
        return True

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
                entry = self.entries[sequence_id]
                self.states.aim(
                    entry.slot, entry.committed, deep, stays, entry.stops[0] if entry.stops else None
                )
        return Tail(self, items, trees, self._commit)

    def _reserve(self, sequence_id: int, count: int) -> None:
        entry = self.entries[sequence_id]
        end = entry.committed + count
        if end > self.max_tokens:
            raise CapacityError(f"{end} tokens do not fit into max_model_len={self.max_tokens}")
        need = -(-end // PAGE_SIZE)
        for kind, pages in entry.pages.items():
            have = len(pages)
            if need > have:
                pages.extend(self.pools[kind].take(need - have))
                self.host_tables[kind][entry.slot, have:need] = pages[have:]
                self.moved = True

    def _commit(self, sequence_id: int, tokens: list[int]) -> None:
        """Advance over `tokens`, computed from the committed position on; index whole pages, free those out of reach."""
        entry = self.entries[sequence_id]
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
