"""What launches read beside their places: the step's integers on the device, the cache, and scratch memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from paceline.kv.cache import KVCache
from paceline.ops.cuda.shape import Bucket


@dataclass(frozen=True, slots=True)
class Keys:
    """What an attention reads: a storage layer by so many heads, within a window (-1: all), as `Reach.sees` says."""

    layer: int
    heads: int
    window: int
    sees: int


@dataclass(slots=True, eq=False)
class Context:
    """Of one bucket."""

    bucket: Bucket
    meta: Callable[[str], Tensor]  # count, tokens, positions, slots, ends, further_rows, further_slots: int32
    tiles: Callable[[int], Tensor]  # int32 [tiles, 2], of a `Reach` by its number
    reach: Callable[[Keys], int]  # the number of an attention's `Reach`
    cache: KVCache | None
    scratch: Callable[[str, int], Tensor]  # float32 of so many elements, the plan's own, by name


Launch = Callable[[Context], None]
