"""Draws on the CPU through the C++ extension: every row of a batch in one call, its noise, filters and mass included.

The rules are those of `paceline.sampling`, whose host code in Python is the reference: the same token from the same
logits. A row's result depends on that row alone, not on its neighbours, the number of threads or the instruction set.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from functools import cache

import numpy as np
import torch

from paceline.ops.base import Rule
from paceline.ops.extension import extension

_BOOL = np.dtype(np.bool_)


@cache
def available() -> bool:
    """Whether this installation has the extension, with these functions in it."""
    return extension("draw") is not None


def suits(logits: torch.Tensor, ids: torch.Tensor | None) -> bool:
    """Whether `draw` takes them: float32 logits [M, C] on the CPU, each row contiguous; ids [M, C] int64 or None."""
    return (
        logits.dtype is torch.float32
        and logits.is_cpu
        and logits.stride(1) == 1
        and logits.shape[1] > 0
        and (ids is None or (ids.dtype == torch.int64 and ids.stride(1) == 1 and ids.shape == logits.shape))
        and available()
    )


def draw(
    logits: torch.Tensor,
    ids: torch.Tensor | None,
    rules: Seq[Rule],
    purpose: int,
    confidence: bool,
    edits: Mapping[int, torch.Tensor | np.ndarray] | None = None,
) -> tuple[list[int], list[float]]:
    """Token of each row of logits [M, C], and its probability after temperature (1 for greedy rows) and filters.

    The token is -1, at confidence 0, where the row has a NaN or nothing finite. Without `confidence` that of greedy
    rows is not computed. `edits`, by row: a tensor [C] takes the place of that of `logits`; a bool array says by token
    id what the row may take, and refuses ids beyond its end.
    """
    native = extension("draw")
    assert native is not None
    count, width = logits.shape
    assert len(rules) == count
    masks: list[tuple[int, np.ndarray]] = []
    instead: list[tuple[int, int]] = []
    for i, edit in edits.items() if edits else ():
        if isinstance(edit, torch.Tensor):
            assert edit.dtype == torch.float32
            assert edit.shape == (width,)
            instead.append((i, edit.data_ptr()))
        elif edit.dtype is _BOOL and edit.flags.c_contiguous:
            masks.append((i, edit))
        else:
            masks.append((i, np.ascontiguousarray(edit, dtype=np.bool_)))
    return native.draw(  # type: ignore[no-any-return]
        (logits.data_ptr(), 4 * logits.stride(0)),
        (0, 0) if ids is None else (ids.data_ptr(), 8 * ids.stride(0)),
        rules,
        width,
        purpose,
        confidence,
        instead,
        masks,
    )
