"""What a tower is to the rest: pixels or samples in, soft tokens out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

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

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """uint8 [height, width, 3], both multiples of the grid's side -> soft tokens [n, hidden_size] float32."""
        ...


class AudioTower(Protocol):
    def count(self, samples: int) -> int:
        """Soft tokens of so many samples at 16 kHz; 0 if they are too few."""
        ...

    def encode(self, samples: NDArray[np.float32]) -> torch.Tensor:
        """Samples [n] at 16 kHz in [-1, 1] -> soft tokens [count, hidden_size] float32."""
        ...
