"""Embeddings: a vector of a prompt, made of the hidden states after the final norm that reading it computes anyway.

`last` takes the last token's state, `mean` the mean of all of them. Sums go over the tokens in order, in float64, so
that neither the parts in which a prompt is read nor the texts beside it change a bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.core import Pooling


@dataclass(slots=True)
class Pool:
    kind: Pooling
    total: np.ndarray | None = None  # [H] float64
    count: int = 0  # rows in it

    @property
    def wants_all(self) -> bool:
        """Whether all states of a prompt are needed: then none of it may come out of the prefix cache."""
        return self.kind == "mean"

    def push(self, rows: np.ndarray, first: int) -> None:
        """States [n, H] of a prompt from token `first` on. One that is read again, as it was preempted, begins anew."""
        if self.kind == "last":
            self.total, self.count = rows[-1].astype(np.float64), 1
            return
        if first == 0 or self.total is None:
            self.total, self.count = np.zeros(rows.shape[1]), 0
        for row in rows:
            self.total += row
        self.count += len(rows)

    def vector(self) -> np.ndarray:
        """[H] float32 of length 1."""
        assert self.total is not None
        return normed(self.total / self.count)


def normed(vector: np.ndarray, size: int | None = None) -> np.ndarray:
    """The first `size` numbers of a vector (None: all), float32, of length 1; zeros stay zeros."""
    cut = vector[:size].astype(np.float64)
    length = float(np.sqrt((cut * cut).sum()))
    return (cut / (length or 1.0)).astype(np.float32)
