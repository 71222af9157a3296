"""Where the values of a recorded graph lie on the device, and which may share memory."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.ops.cuda.shape import FEW
from paceline.ops.recording import Symbol


@dataclass(slots=True, eq=False)
class Place:
    """[rows, width]; of a split product with few rows its parts [splits, FEW, width]. `tensor` is there once the rows of
    the largest forward are known."""

    width: int
    dtype: torch.dtype
    splits: int = 1
    fixed: bool = False  # read or written from outside: shares its memory with nobody
    tensor: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Ref:
    """`width` columns of a place."""

    place: Place
    column: int
    width: int

    @property
    def data(self) -> Tensor:
        """The first element, as kernels take it."""
        assert self.place.tensor is not None
        return self.place.tensor.view(-1)[self.column :]

    @property
    def stride(self) -> int:
        """Elements from a row to the next."""
        return self.place.width

    @property
    def split_stride(self) -> int:
        """Elements from a part to the next."""
        return FEW * self.place.width

    @property
    def splits(self) -> int:
        return self.place.splits

    def rows(self, count: int) -> Tensor:
        """[count, width], a view."""
        assert self.place.tensor is not None
        return self.place.tensor[:count, self.column : self.column + self.width]


class Places:
    """Resolves symbols to places; a symbol may be a slice of what several products wrote side by side."""

    def __init__(self) -> None:
        self._of: dict[Symbol, tuple[Place, int]] = {}

    def define(self, symbol: Symbol, dtype: torch.dtype, splits: int = 1, *, fixed: bool = False) -> Ref:
        """The place of the root of `symbol`, made at its first mention."""
        root = symbol.root
        if root not in self._of:
            self._of[root] = Place(root.width, dtype, splits, fixed), 0
        return self[symbol]

    def alias(self, symbol: Symbol, place: Place, column: int) -> None:
        """`symbol`, which is its own root, lies in `place` from `column` on."""
        self._of[symbol.root] = place, column

    def __contains__(self, symbol: Symbol) -> bool:
        return symbol.root in self._of

    def __getitem__(self, symbol: Symbol) -> Ref:
        place, column = self._of[symbol.root]
        return Ref(place, column + symbol.column, symbol.width)


@dataclass(slots=True)
class Use:
    """The places that one launch reads and writes."""

    reads: Seq[Place]
    writes: Seq[Place]


def allocate(uses: Seq[Use], capacity: int, device: torch.device) -> int:
    """Give each place its tensor for `capacity` rows; one whose last reader is done hands its memory on. Bytes in all."""
    last: dict[int, int] = {}
    for i, use in enumerate(uses):
        for place in (*use.reads, *use.writes):
            last[id(place)] = i
    free: dict[tuple[int, torch.dtype, int], list[Tensor]] = {}
    given: set[int] = set()
    total = 0
    for i, use in enumerate(uses):
        for place in (*use.reads, *use.writes):
            if id(place) in given:
                continue
            given.add(id(place))
            shelf = free.get((place.width, place.dtype, place.splits), [])
            if shelf and not place.fixed:
                place.tensor = shelf.pop()
                continue
            rows = max(capacity, place.splits * FEW) if place.splits > 1 else capacity
            place.tensor = torch.zeros(rows, place.width, dtype=place.dtype, device=device)
            total += place.tensor.nbytes
        for place in {id(p): p for p in (*use.reads, *use.writes)}.values():
            if last[id(place)] == i and not place.fixed:
                assert place.tensor is not None
                free.setdefault((place.width, place.dtype, place.splits), []).append(place.tensor)
    return total
