"""The sizes that a launch depends on, and the integers that a step hands to the device, in one small copy.

Rows are padded to a bucket, so that few graphs serve all steps. Rows past the end read what is left from earlier steps,
write no K/V, and nobody reads their results.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from paceline.ops.cuda.kernels.attention import COLUMNS, section_of

FEW = 64  # rows up to which parts of the inputs, and sections of the keys, have programs of their own
FIELDS = ("tokens", "positions", "slots", "ends", "reach")
TEXTS = ("start", "rows", "place", "begin", "goal")  # of linear attention, by text: see `States`
HEAD = 4  # integers before the fields: rows, further rows of trees, and two to align


@dataclass(frozen=True, slots=True)
class Reach:
    """Which keys the rows of an attention see, as `Ops.attention` and `block_attention` say it."""

    window: int  # -1: all
    sees: int  # 1: itself, 0: only what is before it, 2: all rows of its text in this run
    per_tile: int  # rows of a tile


@dataclass(frozen=True, slots=True)
class Bucket:
    """All that a captured graph depends on."""

    rows: int
    tiles: tuple[int, ...] = ()  # programs for the tiles of each `Reach`,
    sections: tuple[int, ...] = ()  # and for their sections
    further: int = 0  # rows of trees that are stored for other branches, too
    texts: int = 0  # programs for texts with a recurrent state

    @property
    def few(self) -> bool:
        return self.rows <= FEW


def round_up(count: int) -> int:
    """The rows that are computed for `count`: a power of two up to 64, then a multiple of 64, then of 256."""
    if count <= FEW:
        return 1 << max(0, count - 1).bit_length()
    step = 64 if count <= 512 else 256
    return -(-count // step) * step


def lanes_of(group: int) -> tuple[int, int]:
    """(heads of a tile, groups of so many that share a K/V head) of `group` heads that do."""
    heads = next(n for n in range(min(group, COLUMNS), 0, -1) if group % n == 0)
    return heads, group // heads


def power(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


class Layout:
    """Where the integers of a step with so many rows lie in its buffer of int32."""

    def __init__(self, rows: int, tables: int, recurs: bool = False) -> None:
        """`tables`: how many tables of tiles there are. `recurs`: there is linear attention."""
        self.rows, self._tables = rows, tables
        self.fixed = HEAD + (len(FIELDS) + 2 * tables + (len(TEXTS) if recurs else 0)) * rows

    def field(self, name: str) -> int:
        return HEAD + FIELDS.index(name) * self.rows

    def tiles(self, table: int) -> int:
        return HEAD + (len(FIELDS) + 2 * table) * self.rows

    def text(self, name: str) -> int:
        return self.tiles(self._tables) + TEXTS.index(name) * self.rows

    def size(self, further: int) -> int:
        return self.fixed + 2 * further


def fill_texts(buffer: np.ndarray, layout: Layout, texts: Seq[Seq[int]]) -> int:
    """Write what `TEXTS` names of each text; how many programs have to be launched."""
    programs = min(power(len(texts)), layout.rows)
    for i, name in enumerate(TEXTS):
        at = layout.text(name)
        buffer[at : at + programs] = 0
        buffer[at : at + len(texts)] = [text[i] for text in texts]
    return programs


def tiles_of(runs: Seq[int], per_tile: int) -> list[int]:
    """(first row, rows) of each tile, flat. `runs`: offsets of rows of one text, or branch, with rising positions."""
    out: list[int] = []
    for start, end in pairwise(runs):
        for first in range(start, end, per_tile):
            out += (first, min(per_tile, end - first))
    return out


def sections_of(runs: Seq[int], positions: Seq[int], reach: Reach) -> int:
    """The most sections that a run reads."""
    most = 1
    for start, end in pairwise(runs):
        if start < end:
            last = max(0, positions[end - 1] - (reach.sees == 0))
            first = positions[start] - (reach.sees == 0)
            low = 0 if reach.window < 0 else max(0, first - reach.window + (reach.sees != 0))
            most = max(most, section_of(last) - section_of(low) + 1)
    return most


@dataclass(frozen=True, slots=True)
class Step:
    """The integers of a forward, by row, and its runs: rows of one text, or branch, with rising positions."""

    numbers: tuple[list[int], list[int], list[int]]  # tokens, positions, slots
    runs: Seq[int]
    reach: Seq[int] | None = (
        None  # of pictures: the end of what a row sees where there is a window, 0 for itself
    )


def fill(buffer: np.ndarray, layout: Layout, step: Step, reaches: Seq[Reach]) -> Bucket:
    """Write a step into `buffer`; what has to be launched for it."""
    tokens, positions, slots = step.numbers
    count = len(tokens)
    buffer[0], buffer[1] = count, 0
    last = positions if step.reach is None else [max(p, end - 1) for p, end in zip(positions, step.reach)]
    for name, values in zip(("tokens", "positions", "slots", "reach"), (tokens, positions, slots, last)):
        at = layout.field(name)
        buffer[at : at + count] = values
        buffer[at + count : at + layout.rows] = 0  # padding reads what is there
    at = layout.field("ends")
    for start, end in pairwise(step.runs):
        if start < end:
            buffer[at + start : at + end] = positions[end - 1]
    tiles, sections = [], []
    for i, reach in enumerate(reaches):
        run_tiles = tiles_of(step.runs, reach.per_tile)
        at, number = layout.tiles(i), len(run_tiles) // 2
        programs = min(power(number), layout.rows)
        buffer[at : at + 2 * programs] = 0
        buffer[at : at + len(run_tiles)] = run_tiles
        tiles.append(programs)
        few = layout.rows <= FEW
        sections.append(power(sections_of(step.runs, positions, reach)) if few else 1)
    return Bucket(layout.rows, tuple(tiles), tuple(sections))
