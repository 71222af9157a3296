"""Whether weights are fetched to the second-level cache ahead of use, where the last-level cache could hold them all.

On a machine whose last-level cache others use too, that hides how long it takes; on one that is quiet it is work for
nothing, up to 16% of a step of one row. So it is timed when a model is loaded, on its own weights. No bit depends on it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from statistics import median
from types import ModuleType

import torch

from paceline.ops.recording import Code

Matrix = tuple[int, int, int, int, int]  # tiles, scales (0: in them), outputs, inputs, kind
ROWS = (1, 2, 4)  # with more, arithmetic takes longer than memory
TURNS, SECONDS = (3, 16), 0.05  # fewest and most; none is begun after that long


def settle(extension: ModuleType, matrices: Seq[Matrix]) -> None:
    """Time all of `matrices`, one after the other, with and without, in turns, and keep the faster way."""
    if not matrices or not extension.get_weights_in_cache():
        return
    program = extension.Program()
    for matrix in matrices:
        program.begin_step()
        program.add(int(Code.LINEAR), [(0, 0, matrix[3]), (1, 0, matrix[2])], [matrix], [], 0.0)
    held = [torch.zeros(max(ROWS), max(m[i] for m in matrices)) for i in (3, 2)]
    for buffer, values in enumerate(held):
        program.bind(buffer, values.data_ptr(), values.stride(0))
    seen: dict[tuple[bool, int], list[float]] = {(far, rows): [] for far in (True, False) for rows in ROWS}
    begin = time.perf_counter()
    for turn in range(TURNS[1]):
        if turn >= TURNS[0] and time.perf_counter() - begin > SECONDS:
            break
        for (far, rows), taken in seen.items():
            extension.set_fetches_far(far)
            program.run(rows, 0, 0, 0)  # leaves in the caches what it would, step after step
            start = time.perf_counter()
            program.run(rows, 0, 0, 0)
            taken.append(time.perf_counter() - start)
    # by number of rows, or the longest would decide alone
    share = [median(seen[True, rows]) / median(seen[False, rows]) for rows in ROWS]
    extension.set_fetches_far(sum(share) < len(ROWS))
