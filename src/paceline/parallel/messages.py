"""What rank 0 sends the other ranks, and what they answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.config import EngineConfig
from paceline.core import AdapterRows, Numbers
from paceline.errors import PacelineError
from paceline.kv.store import StoreType
from paceline.tree import Branches


@dataclass(frozen=True, slots=True)
class Order:
    """What a rank is to load, of `config`'s target, and of the drafter that reads the target's K/V, if there is one."""

    config: EngineConfig
    target: Path
    assistant: Path | None
    rank: int
    port: int | None  # of the store, where there is one
    memory: int | None  # a file by which the ranks exchange what they compute


@dataclass(frozen=True, slots=True)
class Ready:
    """A rank has loaded its share; `facts` must be the same at all ranks."""

    facts: str


@dataclass(frozen=True, slots=True)
class Failed:
    """A rank gives up. `error` is one of ours, or None with its words in `text`; `peer`: it only lost another rank."""

    error: PacelineError | None
    text: str
    peer: bool


@dataclass(frozen=True, slots=True)
class NewCache:
    pages: Mapping[str, int]
    max_sequences: int
    max_tokens: int
    dtype: StoreType
    branches: int  # of trees


@dataclass(slots=True)
class Forward:
    """One run of a shared graph. Page tables are those of rank 0: their rows are sent when they have changed."""

    graph: int  # in the order in which they were prepared
    cache: int
    numbers: Numbers
    starts: list[int]
    given: Mapping[str, NDArray[np.generic]]
    branches: Branches | None = None
    adapters: AdapterRows | None = None
    tables: list[tuple[str, list[int], NDArray[np.int32]]] = field(
        default_factory=list
    )  # kind, slots, their rows
    scrubbed: list[tuple[str, int]] = field(default_factory=list)  # pages that became zeros
    new: NewCache | None = None
    dropped: list[int] = field(default_factory=list)  # caches
