"""Which code draws all rows of a batch in one call, with noise, filters and mass: the C++ extension or Triton kernels."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from functools import cache
from typing import NamedTuple, Protocol

import numpy as np
import torch

from paceline.ops import cuda, native_sampling
from paceline.ops.base import Rule


class Call(Protocol):
    def __call__(
        self,
        logits: torch.Tensor,
        ids: torch.Tensor | None,
        rules: Seq[Rule],
        purpose: int,
        confidence: bool,
        edits: Mapping[int, torch.Tensor | np.ndarray] | None = None,
    ) -> tuple[list[int], list[float]]:
        """Token of each row of logits [M, C], of ids [M, C] if given, and its probability after temperature (1 for greedy
        rows) and filters.

        The token is -1, at confidence 0, where the row has a NaN or nothing finite. Without `confidence` that of greedy
        rows may be left out. `edits`, by row: a tensor [C] takes the place of that of `logits`; with `Draw.masks` also a
        bool array that says by token id what the row may take.
        """
        ...


class Draw(NamedTuple):
    call: Call
    masks: bool  # it takes what a constraint allows as it is


def draw_of(logits: torch.Tensor, ids: torch.Tensor | None) -> Draw | None:
    """What draws from such logits; None: only the code of `paceline.sampling` does."""
    if native_sampling.suits(logits, ids):
        return Draw(native_sampling.draw, masks=True)
    if logits.is_cuda and _has_kernels(logits.get_device()):
        from paceline.ops.cuda import drawing

        return Draw(drawing.draw, masks=False) if drawing.suits(logits, ids) else None
    return None


@cache
def _has_kernels(device: int) -> bool:
    return cuda.why_not(torch.device("cuda", device)) is None
