"""Texts as token windows: packing, held-out split, and the order in which training sees them.

The order is a function of (seed, step) alone, so a run that was killed goes on with the very same batches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paceline.errors import UsageError

OPEN_BINS = 64  # windows that may still take a text while packing


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens of one text, and from which on each run of counted ones goes: [start, stop) pairs."""

    tokens: Seq[int]
    counted: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Windows:
    """N windows of T tokens. `segments` numbers the texts inside a window from 0; padding is -1."""

    tokens: npt.NDArray[np.int32]  # [N, T]
    segments: npt.NDArray[np.int16]  # [N, T]
    counted: npt.NDArray[np.bool_]  # [N, T] tokens that the target would write

    def __len__(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def length(self) -> int:
        return int(self.tokens.shape[1])

    @property
    def filled(self) -> int:
        """Tokens that are not padding."""
        return int((self.segments >= 0).sum())

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(repr(self.tokens.shape).encode())
        for part in (self.tokens, self.segments, self.counted):
            digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()[:16]

    def take(self, rows: Seq[int] | npt.NDArray[np.int64]) -> Windows:
        return Windows(self.tokens[rows], self.segments[rows], self.counted[rows])

    @classmethod
    def of_array(cls, tokens: npt.NDArray[np.integer]) -> Windows:
        """Windows [N, T] that are one text each."""
        shape = tokens.shape
        return cls(tokens.astype(np.int32), np.zeros(shape, dtype=np.int16), np.ones(shape, dtype=np.bool_))


def pack(texts: Iterable[Text], length: int) -> Windows:
    """Put texts of at most `length` tokens side by side into windows, first fit; texts of one token are
    dropped.
    """
    bins: list[list[Text]] = []
    room: list[int] = []
    for text in texts:
        size = len(text.tokens)
        assert size <= length, "texts are cut before they are packed"
        if size < 2:
            continue
        first = max(0, len(bins) - OPEN_BINS)
        fitting = next((i for i in range(first, len(bins)) if room[i] >= size), None)
        if fitting is None:
            bins.append([])
            room.append(length)
            fitting = len(bins) - 1
        bins[fitting].append(text)
        room[fitting] -= size
    out = Windows(
        np.zeros((len(bins), length), dtype=np.int32),
        np.full((len(bins), length), -1, dtype=np.int16),
        np.zeros((len(bins), length), dtype=np.bool_),
    )
    for row, held in enumerate(bins):
        start = 0
        for number, text in enumerate(held):
            stop = start + len(text.tokens)
            out.tokens[row, start:stop] = text.tokens
            out.segments[row, start:stop] = number
            for first, last in text.counted:
                out.counted[row, start + first : min(stop, start + last)] = True
            start = stop
    return out


def split(count: int, share: float, seed: int) -> tuple[list[int], list[int]]:
    """Indices for training and held out (at least one each); UsageError if there are not two."""
    if count < 2:
        raise UsageError("the data holds fewer than two texts, so none can be held out: give more data")
    order = np.random.default_rng([seed, 0x5E1D]).permutation(count)
    held = min(count - 1, max(1, round(count * share)))
    # The held-out ones stay shuffled: evaluations look at the first few, which should come from all files.
    return sorted(int(i) for i in order[held:]), [int(i) for i in order[:held]]


def batch_rows(count: int, batch: int, seed: int, index: int) -> npt.NDArray[np.int64]:
    """Rows [batch] of the index-th micro-batch: every epoch is a fresh permutation, epochs follow without
    a seam.
    """
    rows = np.arange(index * batch, (index + 1) * batch)
    epochs, within = rows // count, rows % count
    out = np.empty(batch, dtype=np.int64)
    for epoch in np.unique(epochs):
        order = np.random.default_rng([seed, 0xE70C, int(epoch)]).permutation(count)
        out[epochs == epoch] = order[within[epochs == epoch]]
    return out


def step_generator(seed: int, index: int) -> torch.Generator:
    """Randomness of the index-th micro-batch, on the CPU."""
    mixed = int(np.random.SeedSequence([seed, 0xA9C4, index]).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(mixed & (2**63 - 1))
