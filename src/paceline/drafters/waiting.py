"""Hidden states of a text's last rows that its drafter has not computed yet: copied at each step, computed in one go.

A text that is not drafted for costs no more than the copy of a row a step, and now and then one batch of rows.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from ctypes import memmove
from typing import NamedTuple

import torch

from paceline.drafters.base import Kept

_FEW = 8  # rows that are copied one by one: torch takes longer to begin, and copies with threads of its own
_ROOM = 128  # rows that there is room for at first: memory that nobody writes costs nothing. More is not kept


class _Source(NamedTuple):
    """Where the rows of one tap lie, in bytes."""

    at: int
    stride: int
    width: int


class Waiting:
    """Rows [n, taps * H], the first `len` of a buffer that grows as they do."""

    def __init__(self) -> None:
        self._rows: torch.Tensor | None = None
        self._count = self._room = 0
        self._at = self._width = 0  # where the buffer lies, and bytes of a row; 0: not in host memory
        self._parts: Seq[torch.Tensor] = ()  # the same at most steps:
        self._sources: list[_Source] = []  # asking torch takes longer than copying

    def __len__(self) -> int:
        return self._count

    def add(self, news: Kept, skip: int) -> None:
        """Copy what was kept, without its first `skip` rows."""
        at = news.at
        count, first = (len(news) if at is None else at.stop - at.start) - skip, skip
        first += 0 if at is None else at.start
        if self._count + count > self._room:
            self._grow(news.step, count)
        if count > _FEW or not self._at or not self._near(news.step):
            self._copy_many(news.step, first, count)
        else:
            to = self._at + self._count * self._width
            for source in self._sources:
                for i in range(count):
                    memmove(to + i * self._width, source.at + (first + i) * source.stride, source.width)
                to += source.width
        self._count += count

    def cleared(self) -> list[Waiting]:
        """Let go of all rows: itself, if the buffer is worth keeping for another text."""
        self._count = 0
        return [self] if 0 < self._room <= _ROOM else []

    def put(self, rows: torch.Tensor) -> None:
        """Rows [n, taps * H] in place of all that wait."""
        self._hold(rows.clone())
        self._count = len(rows)

    def all(self) -> torch.Tensor:
        """A view [len, taps * H]."""
        assert self._rows is not None, "no row has been brought"
        return self._rows[: self._count]

    def keep(self, last: int) -> None:
        """Let go of all rows but the last ones."""
        rows, gone = self._rows, self._count - last
        if rows is None or gone <= 0:
            return
        if self._at and self._room <= _ROOM:
            memmove(self._at, self._at + gone * self._width, last * self._width)
            self._count = last
        else:
            self.put(rows[gone : self._count])

    def _near(self, parts: Seq[torch.Tensor]) -> bool:
        """Whether the rows of `parts` can be copied as they lie."""
        if len(parts) != len(self._parts) or any(a is not b for a, b in zip(parts, self._parts, strict=True)):
            if not all(part.stride(1) == 1 for part in parts):
                return False
            size = parts[0].element_size()
            self._parts = tuple(parts)
            self._sources = [_Source(p.data_ptr(), p.stride(0) * size, p.shape[1] * size) for p in parts]
        return True

    def _copy_many(self, parts: Seq[torch.Tensor], first: int, count: int) -> None:
        assert self._rows is not None
        column = 0
        for part in parts:
            width = part.shape[1]
            self._rows[self._count : self._count + count, column : column + width] = part[
                first : first + count
            ]
            column += width

    def _grow(self, parts: Seq[torch.Tensor], count: int) -> None:
        """Make place for so many more."""
        need, old = self._count + count, self._rows
        width = sum(part.shape[1] for part in parts)
        new = parts[0].new_empty((max(_ROOM, 1 << (need - 1).bit_length()), width))
        if old is not None and self._count:
            new[: self._count] = old[: self._count]
        self._hold(new)

    def _hold(self, rows: torch.Tensor) -> None:
        self._rows, self._room = rows, len(rows)
        self._at = rows.data_ptr() if rows.is_cpu else 0
        self._width = rows.shape[1] * rows.element_size()
