"""A matrix of integers with a scale for each group of inputs, and the forms that it can be written in without loss.

A value is an integer times the scale of its group, plus, in some layouts, what the group adds. Rows are made some at a
time, so that a table of a gigabyte needs little more than its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from paceline.errors import WeightsError
from paceline.ops.blocks import BY_NAME, dequantize

GROUP = 32  # inputs that share a scale in every form but int8
PIECE = 1 << 22  # values that are made at a time


@dataclass(frozen=True, slots=True)
class Matrix:
    """[out, inputs]. `integers(rows)` gives int16 [n, inputs] of some rows, zero points taken away."""

    integers: Callable[[slice], Tensor]
    scale: Tensor  # float32 [out, groups]
    inputs: int
    least: Tensor | None = None  # float32 [out, groups], is added
    order: Tensor | None = None  # int64 [inputs], the group of each input; None: they lie one after the other

    def pieces(self) -> Iterator[slice]:
        """Rows, some at a time."""
        step = max(1, PIECE // max(1, self.inputs))
        for start in range(0, len(self.scale), step):
            yield slice(start, min(start + step, len(self.scale)))

    def by_input(self, groups: Tensor) -> Tensor:
        """[n, groups] -> [n, inputs]"""
        if self.order is not None:
            return groups[:, self.order]
        return groups.repeat_interleave(self.inputs // groups.shape[1], dim=1)

    def by_group(self, groups: Tensor) -> Tensor:
        """[n, groups] -> [n, inputs / 32]. Inputs lie one after the other, in groups of multiples of 32."""
        return groups.repeat_interleave(self.inputs // GROUP // groups.shape[1], dim=1)

    @property
    def in_order(self) -> bool:
        """Whether groups are runs of inputs, though an order is given."""
        size = self.inputs // self.scale.shape[1]
        return self.order is None or torch.equal(self.order, torch.arange(self.inputs) // size)


def floats(matrix: Matrix, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Its values, computed in float32 and rounded once."""
    out = torch.empty(len(matrix.scale), matrix.inputs, dtype=dtype)
    for rows in matrix.pieces():
        values = matrix.integers(rows).float() * matrix.by_input(matrix.scale[rows])
        if matrix.least is not None:
            values += matrix.by_input(matrix.least[rows])
        out[rows] = values
    return out


def int4(matrix: Matrix) -> Tensor:
    """Integers from -8 to 7 as a `Weight`'s int4: two a byte, plus 8, the first in the low half."""
    out = torch.empty(len(matrix.scale), matrix.inputs // 2, dtype=torch.uint8)
    for rows in matrix.pieces():
        raised = matrix.integers(rows) + 8
        if raised.numel() and (int(raised.min()) < 0 or int(raised.max()) > 15):
            raise WeightsError(
                'config.json calls 4 bits symmetric that have zero points of their own: set "sym": false in it'
            )
        raised = raised.to(torch.uint8)
        out[rows] = raised[:, 0::2] | raised[:, 1::2] << 4
    return out


def int4_scales(matrix: Matrix) -> Tensor:
    return matrix.by_group(matrix.scale).contiguous()


def int8(matrix: Matrix) -> Tensor:
    out = torch.empty(len(matrix.scale), matrix.inputs, dtype=torch.int8)
    for rows in matrix.pieces():
        out[rows] = matrix.integers(rows).to(torch.int8)
    return out


def int8_scales(matrix: Matrix) -> Tensor:
    return matrix.scale[:, 0].contiguous()


def _halves(values: Tensor) -> Tensor | None:
    """float32 [...] as the bytes of float16 [..., 2], None unless each is one."""
    half = values.half()
    if not torch.equal(half.float(), values):
        return None
    return _bytes(half).view(*values.shape, 2)


def _bytes(values: Tensor) -> Tensor:
    """[bytes]. Of a matrix of one column that was turned, the strides are no run, though torch calls it contiguous."""
    return values.reshape(-1).contiguous().view(torch.uint8)


def _needed(matrix: Matrix) -> Tensor:
    """The scales, 0 in the place of those that are no float16 and multiply nothing but zeros: of groups of zeros, makers
    store the smallest number that they can divide by."""
    odd = matrix.scale.half().float() != matrix.scale
    rows = odd.any(dim=1).nonzero().flatten().tolist()
    scale = matrix.scale if not rows else matrix.scale.clone()
    for row in rows:
        zeros = (matrix.integers(slice(row, row + 1)) == 0).view(scale.shape[1], -1).all(dim=1)
        scale[row, odd[row] & zeros] = 0
    return scale


def _in_halves(q: Tensor) -> Tensor:
    """uint8 [n, groups, 32] of 0..15 -> [n, groups, 16]: value j in the low and value j + 16 in the high half."""
    return q[..., :16] | q[..., 16:] << 4


def _fifths(q: Tensor) -> Tensor:
    """uint8 [n, groups, 32] of 0..31 -> [n, groups, 4]: bit i of 32 is the fifth one of value i."""
    bits = (q >> 4).view(*q.shape[:-1], 4, 8) << torch.arange(8, dtype=torch.uint8)
    return bits.sum(-1).to(torch.uint8)


def blocks(matrix: Matrix, kind: str) -> Tensor | None:
    """Blocks of `kind` (Q8_0, Q5_0: no `least`; Q4_1, Q5_1: with one), None where a scale is no float16."""
    if not matrix.in_order:
        return None
    d = _halves(_needed(matrix))
    m = None if matrix.least is None else _halves(matrix.least)
    if d is None or (matrix.least is not None and m is None):
        return None
    count, size = matrix.inputs // GROUP, BY_NAME[kind].size
    out = torch.empty(len(matrix.scale), count, size, dtype=torch.uint8)
    repeat = partial(torch.repeat_interleave, repeats=count // matrix.scale.shape[1], dim=1)
    for rows in matrix.pieces():
        q = matrix.integers(rows).view(-1, count, GROUP)
        parts = [repeat(d[rows])] if m is None else [repeat(d[rows]), repeat(m[rows])]
        if kind == "Q8_0":
            parts.append(q.to(torch.int8).view(torch.uint8))
        else:
            raised = (q + 16 if kind == "Q5_0" else q).to(torch.uint8)
            parts += [_fifths(raised)] if kind.startswith("Q5") else []
            parts.append(_in_halves(raised & 15))
        out[rows] = torch.cat(parts, dim=-1)
    return out.flatten(1)


def from_blocks(kind: str, data: Tensor) -> Tensor:
    """Blocks [..., bytes] as float32 [..., values]."""
    return torch.from_numpy(dequantize(kind, data.numpy()))


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Words of 32 bits [n, k] -> uint8 [n, 32 * k / bits]: a run of bits, the first value in the lowest."""
    data = _bytes(words).view(len(words), -1)  # little-endian, as the words are
    if bits == 8:
        return data
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        values: Tensor = (data[..., None] >> shifts) & (2**bits - 1)
        return values.flatten(-2)
    groups = data.view(len(data), -1, bits)  # 8 values in so many bytes
    out = torch.empty(*groups.shape[:-1], 8, dtype=torch.uint8)
    for i in range(8):
        at, shift = divmod(i * bits, 8)
        value = groups[..., at].to(torch.int16) >> shift
        if shift + bits > 8:
            value = value | groups[..., at + 1].to(torch.int16) << (8 - shift)
        out[..., i] = (value & (2**bits - 1)).to(torch.uint8)
    return out.flatten(1)
