"""Draws on a GPU: every row of a batch in three kernels, its noise, filters and mass included.

The rules are those of `paceline.sampling`, whose host code in Python is the reference. A row's token and confidence
depend on that row alone, not on how many rows are drawn together.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from paceline.ops.base import Rule
from paceline.ops.cuda.kernels import draw as kernels
from paceline.ops.uploads import to_device

WORDS = kernels.WORDS.value
_ROW = (
    "fiQqdfi"  # of a rule as the kernels read it: factor, top_k, seed, position, top_p, ln min_p, steps done
)
_NEAR_ROOM = (
    8192  # columns of a filtered row that are copied; where more can be kept the whole row is read again
)
_MOST_ROWS = 256  # in one launch


@dataclass(frozen=True, slots=True)
class Logits:
    """What is drawn from: logits [M, C] float32, and their token ids [M, C] or [1, C] int64; None: 0, 1, ..."""

    x: torch.Tensor
    ids: torch.Tensor | None = None

    @property
    def ids_stride(self) -> int:
        return 0 if self.ids is None or self.ids.shape[0] == 1 else self.ids.stride(0)


class Drawer:
    """Room for draws from up to `rows` rows of `width` logits, and where the results lie. Holds no other state."""

    def __init__(self, rows: int, width: int, device: torch.device | str) -> None:
        self.width = width
        self._groups, self._parts = -(-width // kernels.GROUP.value), -(-width // kernels.PART.value)
        self._padded, self._padded_parts = _power(self._groups), _power(self._parts)
        self._scale = 2.0 ** (
            62 - max(1, (width - 1).bit_length())
        )  # so that no sum of `width` masses overflows
        self._room = min(_NEAR_ROOM, width)

        def room(columns: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(rows, columns, dtype=dtype, device=device)

        self._top, self._top_token = room(self._groups, torch.float32), room(self._groups, torch.int32)
        self._mass, self._score = room(self._parts, torch.int64), room(self._parts, torch.float64)
        self._token, self._y = room(self._parts, torch.int32), room(self._parts, torch.float32)
        self._near_y, self._near_token = room(self._room, torch.float32), room(self._room, torch.int32)
        self._near = torch.empty(rows, dtype=torch.int32, device=device)
        self.out = torch.empty(2, rows, dtype=torch.int32, device=device)
        self.tokens = self.out[0]  # [rows] -1: a NaN, or nothing finite
        self.confidence = self.out[1].view(torch.float32)  # [rows] 0 there

    def enqueue(
        self,
        logits: Logits,
        rules: torch.Tensor,
        purpose: int = 0,
        confidence: bool = True,
        plain: bool = False,
    ) -> None:
        """Draw a token for each row of `logits` on the current stream. `rules` as `encode` makes them, on the device.

        Without `confidence` that of greedy rows is not computed. `plain`: all rows are greedy.
        """
        x, ids = logits.x, logits.ids
        count = x.shape[0]
        source = x, x.stride(0), x if ids is None else ids, logits.ids_stride, self.width
        shape = {"IDS": ids is not None, "num_warps": 8}
        exact = {"PADDED": self._padded, "SCALE": self._scale, "SURE": confidence, "enable_fp_fusion": False}
        parts = self._mass, self._score, self._token, self._y
        near = self._near_y, self._near_token, self._near, self._room
        grid = self._parts, count
        kernels.peaks[grid](*source, self._top, self._top_token, self._near, self._groups, **shape)
        if confidence or not plain:
            kernels.scan[grid](
                *source, self._top, rules, purpose, self._groups, *parts, *near, **shape, **exact
            )
        kernels.finish[count,](
            *source, self._top, self._top_token, rules, purpose, self._groups, self._parts, *parts, *near,
            self.tokens, self.confidence, PARTS=self._padded_parts, **shape, **exact,
        )  # fmt: skip


def encode(rules: Seq[Rule]) -> np.ndarray:
    """Rules as the kernels read them, int64 [M, 5]."""
    flat: list[float] = []
    for factor, seed, position, top_k, top_p, least in rules:
        flat += (factor, top_k, seed, position, top_p, least, 0)
    packed = bytearray(struct.pack("=" + _ROW * len(rules), *flat))
    return np.frombuffer(packed, np.int64).reshape(-1, WORDS)


def suits(logits: torch.Tensor, ids: torch.Tensor | None) -> bool:
    """Whether `draw` takes them: float32 logits [M, C] on a GPU, each row contiguous; ids [M, C] int64 or None."""
    return (
        logits.dtype is torch.float32
        and logits.is_cuda
        and logits.stride(1) == 1
        and logits.shape[1] > 0
        and (ids is None or (ids.dtype == torch.int64 and ids.stride(1) == 1 and ids.shape == logits.shape))
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

    The token is -1, at confidence 0, where the row has a NaN or nothing finite. `edits`, by row: a tensor [C] that takes
    the place of that of `logits`. The host reads one small tensor.
    """
    if edits:
        logits = logits.clone()
        for i, row in edits.items():
            assert isinstance(row, torch.Tensor), (
                "masks are applied where the logits lie, see sampling/shape.py"
            )
            logits[i] = row
    tokens: list[int] = []
    sure: list[float] = []
    plain = all(rule.factor == 0 for rule in rules)
    encoded = to_device(torch.from_numpy(encode(rules)), logits.device)
    for begin in range(0, len(rules), _MOST_ROWS):
        end = min(begin + _MOST_ROWS, len(rules))
        drawer = drawer_for(_power(end - begin), logits.shape[1], str(logits.device))
        part = Logits(logits[begin:end], None if ids is None else ids[begin:end])
        drawer.enqueue(part, encoded[begin:end], purpose, confidence, plain)
        drawn = drawer.out[:, : end - begin].cpu()
        tokens += drawn[0].tolist()
        sure += drawn[1].view(torch.float32).tolist() if confidence else []
    return tokens, sure


@lru_cache(maxsize=8)
def drawer_for(rows: int, width: int, device: str) -> Drawer:
    """Room that is kept between calls."""
    return Drawer(rows, width, device)


def _power(count: int) -> int:
    """The least power of two that is as large."""
    return 1 << math.ceil(math.log2(count)) if count > 1 else 1
