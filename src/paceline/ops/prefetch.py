"""Whether weights are fetched to the second-level cache ahead of use, where the last-level cache could hold them all, and
those in blocks where it could not.

On a machine whose last-level cache others use too, that hides how long it takes; on one that is quiet it is work for
nothing, up to 16% of a step of one row. From memory one row of blocks takes 0.73 of the time with it, or somewhat more
without: that is the machine's, too. So it is timed when a model is loaded, on its own weights. No bit depends on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from statistics import median
from types import ModuleType

import torch

from paceline.memory import last_level_cache
from paceline.ops.recording import Code
from paceline.ops.tiles import IN_BLOCKS

Matrix = tuple[int, int, int, int, int]  # tiles, scales (0: in them), outputs, inputs, kind
ROWS = (1, 2, 4)  # with more, arithmetic takes longer than memory
FEWEST, MOST, SECONDS = (
    (5, 3),
    16,
    0.05,
)  # turns from memory and from the cache; none is begun after that long
UNKNOWN = 1 << 26  # bytes of weights that are timed where the system does not say how large its caches are


def settle(extension: ModuleType, matrices: Seq[Matrix]) -> None:
    """Time `matrices`, one after the other, with and without, in turns, and keep the faster way."""
    in_cache = extension.get_weights_in_cache()
    if not in_cache:
        matrices = _from_memory(extension, matrices)
    if not matrices:
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
    for turn in range(MOST):
        if turn >= FEWEST[in_cache] and time.perf_counter() - begin > SECONDS:
            break
        for (far, rows), taken in seen.items():
            extension.set_fetches_far(far)
            if in_cache:
                program.run(rows, 0, 0, 0)  # leaves in the caches what it would, step after step
            start = time.perf_counter()
            program.run(rows, 0, 0, 0)
            taken.append(time.perf_counter() - start)
    # neighbours in the cache are a part of the time there; from memory only other work on the core would be
    typical: Callable[[list[float]], float] = median if in_cache else min
    # by number of rows, or the longest would decide alone
    share = [typical(seen[True, rows]) / typical(seen[False, rows]) for rows in ROWS]
    extension.set_fetches_far(sum(share) < len(ROWS))


def _from_memory(extension: ModuleType, matrices: Seq[Matrix]) -> list[Matrix]:
    """Of those in blocks as many as push each other out of the last-level cache."""
    out: list[Matrix] = []
    room = 2 * last_level_cache() or UNKNOWN
    for matrix in matrices:
        if matrix[4] >= IN_BLOCKS and room > 0:
            out.append(matrix)
            room -= extension.packed_bytes(matrix[4], matrix[2], matrix[3])
    return out
