"""A pool of numbered pages with reference counts. Integers only: it does not know what a page holds."""

from __future__ import annotations

from collections.abc import Callable

from paceline.errors import CapacityError


class OutOfPages(CapacityError):
    """The pool cannot serve a request even after eviction; nothing was taken."""


class PagePool:
    """Pages 0..count-1. A page is free when nobody holds it; holders share it by taking another reference."""

    def __init__(self, count: int, evict: Callable[[int], int] | None = None) -> None:
        """`evict(n)` is asked to drop references so that up to n pages become free; it returns how many did."""
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._refs = [0] * count
        self._evict = evict

    @property
    def free(self) -> int:
        return len(self._free)

    def refs(self, page: int) -> int:
        return self._refs[page]

    def take(self, n: int) -> list[int]:
        """n pages with one reference each, or OutOfPages with the pool unchanged."""
        missing = n - len(self._free)
        if missing > 0 and self._evict is not None:
            self._evict(missing)
        if n > len(self._free):
            raise OutOfPages(
                f"the K/V cache is full: {n} pages wanted, {len(self._free)} of {self.count} free; "
                "lower max_batch or max_model_len, or raise cache_memory"
            )
        pages = [self._free.pop() for _ in range(n)]
        for page in pages:
            self._refs[page] = 1
        return pages

    def share(self, page: int) -> None:
        assert self._refs[page] > 0, "a free page cannot be shared"
        self._refs[page] += 1

    def release(self, page: int) -> None:
        assert self._refs[page] > 0, "a free page cannot be released"
        self._refs[page] -= 1
        if self._refs[page] == 0:
            self._free.append(page)
