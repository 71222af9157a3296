"""Memory of each tensor by itself: in one block with others no sanitizer sees where it ends. A plugin of pytest, too."""

from __future__ import annotations

import torch

from paceline.memory import Arena


def _zeros(self: Arena, count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint8)


Arena.zeros = _zeros  # type: ignore[method-assign]
