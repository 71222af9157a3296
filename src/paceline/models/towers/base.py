"""What a tower is to the rest: pixels or samples in, soft tokens out."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

Slices = Generator[None, None, torch.Tensor]  # stops after each piece of its work; returns soft tokens
BUDGETS = (70, 140, 280, 560, 1120)  # soft tokens of a picture, at most


@dataclass(frozen=True, slots=True)
class Grid:
    """How a model cuts pictures: patches of `patch` pixels a side, `pooling` x `pooling` of which give a soft token."""

    patch: int
    pooling: int

    @property
    def side(self) -> int:
        """Pixels of a soft token's side."""
        return self.patch * self.pooling


class VisionTower(Protocol):
    grid: Grid
    together: bool  # the language model lets rows of a picture see each other

    def slices(self, pixels: torch.Tensor) -> Slices:
        """uint8 [height, width, 3], both multiples of the grid's side -> soft tokens [n, hidden_size] float32.

        Between slices others may compute. Bits do not depend on who does.
        """
        ...


class AudioTower(Protocol):
    def count(self, samples: int) -> int:
        """Soft tokens of so many samples at 16 kHz; 0 if they are too few."""
        ...

    def slices(self, samples: NDArray[np.float32]) -> Slices:
        """Samples [n] at 16 kHz in [-1, 1] -> soft tokens [count, hidden_size] float32, slice by slice as pictures."""
        ...


def whole(slices: Slices) -> torch.Tensor:
    """What all slices, one after the other, give."""
    while True:
        try:
            next(slices)
        except StopIteration as done:
            vectors: torch.Tensor = done.value
            return vectors
