"""What a tower is to the rest: pixels or samples in, soft tokens out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

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
