"""Which committed pages hold which tokens, so that requests with a common beginning share them.

A trie over whole pages of tokens. A node owns one reference to a page of every kind; pages that only the trie holds
are evicted, least recently used first. Nodes compare tokens, not hashes, so a collision cannot serve a wrong prefix.
Scopes (salts) are separate roots: nothing is shared, and no timing leaks, across them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from paceline.kv.pages import PagePool


@dataclass(slots=True, eq=False)
class Node:
    key: tuple[object, tuple[int, ...]]  # (parent node or scope, tokens of this page)
    pages: dict[str, int]  # kind -> page; a kind may be missing after eviction


class PrefixIndex:
    def __init__(self, page_size: int, pools: dict[str, PagePool]) -> None:
        self._page_size = page_size
        self._pools = pools
        self._nodes: dict[tuple[object, tuple[int, ...]], Node] = {}
        self._lru: dict[str, OrderedDict[int, Node]] = {kind: OrderedDict() for kind in pools}

    def held(self, kind: str) -> int:
        """Pages of `kind` that the index holds a reference to."""
        return len(self._lru[kind])

    def evictable(self, kind: str, wanted: int) -> int:
        """Pages of `kind` that only the index holds, as far as `wanted`."""
        return sum(1 for _ in islice(self._alone(kind), max(wanted, 0)))

    def _alone(self, kind: str) -> Iterator[int]:
        """Pages that only the index holds, least recently used first: very many in a large cache."""
        refs = self._pools[kind].refs
        return (page for page in self._lru[kind] if refs(page) == 1)

    def match(self, tokens: list[int], salt: str) -> list[Node]:
        """Nodes of the longest known prefix in whole pages, without the last token, which must be computed."""
        path: list[Node] = []
        parent: object = salt
        for end in range(self._page_size, len(tokens), self._page_size):
            node = self._nodes.get((parent, tuple(tokens[end - self._page_size : end])))
            if node is None:
                break
            path.append(node)
            parent = node
        for node in reversed(path):  # the root becomes the most recent, so leaves are evicted first
            for kind, page in node.pages.items():
                self._lru[kind].move_to_end(page)
        return path

    def insert(self, parent: Node | str, tokens: tuple[int, ...], pages: dict[str, int]) -> Node:
        """The node for `tokens` below `parent`; takes a reference to each page that the index did not have yet."""
        key = (parent, tokens)
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = Node(key, {})
        for kind, page in pages.items():
            if kind not in node.pages:
                self._pools[kind].share(page)
                node.pages[kind] = page
                self._lru[kind][page] = node
        return node

    def evict(self, kind: str, wanted: int) -> int:
        """Drop pages of `kind` that nobody else holds until `wanted` are free; returns how many were freed."""
        pages = list(islice(self._alone(kind), wanted))
        for page in pages:
            self._drop(kind, page)
        return len(pages)

    def take_back(self, kind: str, page: int) -> None:
        """Drop a page, unless the index has dropped it already or somebody else holds it."""
        if page in self._lru[kind] and self._pools[kind].refs(page) == 1:
            self._drop(kind, page)

    def clear(self) -> None:
        for kind, pages in self._lru.items():
            for page in list(pages):
                self._drop(kind, page)

    def _drop(self, kind: str, page: int) -> None:
        node = self._lru[kind].pop(page)
        del node.pages[kind]
        self._pools[kind].release(page)
        if not node.pages:
            del self._nodes[node.key]
