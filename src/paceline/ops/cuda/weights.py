"""Weights in the form that the kernels of this room read: floats as they are, integers in words of neighbours.

Matrices that are multiplied with the same rows lie behind each other, so that one launch reads them all. A gate and the
value beside it lie output by output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from paceline.ops import blocks
from paceline.ops.base import Weight
from paceline.ops.cuda.kernels.linear import BLOCK, BYTES, GROUP

Order = Literal["plain", "pair", "halves", "rows", "table"]  # see `pack`
FLOAT, INT8, INT4, WORDS, MXFP4 = range(5)
LARGEST = 128  # exponent of MXFP4, whose scale times 2^126 bfloat16 holds
TILE = 64  # outputs of a tile at few rows
PROGRAMS = 264  # that a product with few rows should have, about two for each multiprocessor of a large card
MOST_SPLITS = 8
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """[outputs, inputs] on the device. int8: scale [outputs]; int4: [outputs, padded inputs / 32].

    INT4, MXFP4 (scales times 2^126), and WORDS for int8: `data` is int32, in blocks of so many inputs, see `in_words`.
    """

    data: Tensor
    scale: Tensor | None
    kind: int
    outputs: int
    inputs: int
    dtype: torch.dtype  # what it is multiplied in
    splits: int  # parts of the inputs that are added up apart, a property of the weight: see linear.py
    part: int  # inputs of each
    block: int = 0

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)


def pack(weights: Seq[Weight], dtype: torch.dtype, order: Order = "plain") -> Matrix:
    """Several weights of one kind and as many inputs, in one matrix. order: plain, behind each other; pair, a gate and a
    value, output by output; halves, behind each other, each one's first and second half output by output; rows, as plain
    where single rows are read: int8 is not put into words, and MXFP4 becomes floats; table, where only the latter holds.

    `dtype`: what int8 and int4 are multiplied in. Floats are multiplied in their own type.
    """
    as_stored = order not in ("rows", "table") and dtype != torch.float16 and all(map(_in_range, weights))
    parts = [_plain(weight, dtype, as_stored) for weight in weights]
    data = _joined([part.data for part in parts], order)
    first = parts[0]
    scale = (
        None
        if first.scale is None
        else _joined([part.scale for part in parts if part.scale is not None], order)
    )
    outputs, inputs = data.shape[0], first.in_features
    splits, part = (1, inputs) if order == "pair" else split_of(outputs, inputs)
    if first.kind == "int4":
        kind = MXFP4 if weights[0].kind == "mxfp4" else INT4
        data, scale = _padded(data, scale, inputs, 0 if kind == MXFP4 else 0x88, dtype)
        return Matrix(in_words(data, BLOCK, 4), scale, kind, outputs, inputs, dtype, splits, part, BLOCK)
    if first.kind == "int8":
        block = next((size for size in (BLOCK, BYTES) if inputs % size == 0), 0)
        if order != "rows" and block:
            data = in_words(data, block, 8)
            return Matrix(data, scale, WORDS, outputs, inputs, dtype, splits, part, block)
        return Matrix(data, scale, INT8, outputs, inputs, dtype, splits, part)
    return Matrix(data, None, FLOAT, outputs, inputs, data.dtype, splits, part)


def split_of(outputs: int, inputs: int) -> tuple[int, int]:
    """(parts, inputs of a part). By the shape alone, so that it never changes with the rows."""
    tiles = -(-outputs // TILE)
    splits = max(1, min(MOST_SPLITS, PROGRAMS // tiles, inputs // 512))
    part = -(-inputs // splits // BLOCK) * BLOCK if splits > 1 else inputs
    return -(-inputs // part), part


def kind_of(weight: Weight) -> str:
    """What a weight becomes, by which weights can be packed together."""
    return {"q4_0": "int4", "int4": "int4", "int8": "int8", "mxfp4": "mxfp4"}.get(
        weight.kind, weight.kind if weight.kind in FLOATS else "bfloat16"
    )


def _joined(parts: Seq[Tensor], order: Order) -> Tensor:
    if order == "pair":
        return torch.stack(tuple(parts), 1).flatten(0, 1)
    if order == "halves":
        parts = [part.view(2, -1, *part.shape[1:]).transpose(0, 1).flatten(0, 1) for part in parts]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(tuple(parts))


def _in_range(weight: Weight) -> bool:
    """Of MXFP4, whether it can be kept so."""
    return weight.kind == "mxfp4" and bool(
        (weight.data.view(len(weight.data), -1, 17)[..., 0] <= LARGEST).all()
    )


def _plain(weight: Weight, dtype: torch.dtype, as_stored: bool) -> Weight:
    """Blocks of GGUF files as int4 where that is what they are, MXFP4 in that form if it is `kept`, else as floats."""
    layout = weight.blocks
    if layout is None:
        return weight
    device = weight.data.device
    if weight.kind == "q4_0" or as_stored:  # bytes of scale, then 16 bytes: inputs j and j + 16 in one
        raw = weight.data.view(weight.data.shape[0], -1, layout.size)
        if as_stored:
            scale = ((raw[..., 0].int() + 126) << 23).view(torch.float32)  # 2^(exponent - 1)
        else:
            scale = raw[..., :2].contiguous().view(torch.float16).squeeze(-1).float()
        low, high = raw[..., -16:] & 15, raw[..., -16:] >> 4
        nibbles = torch.cat((low, high), -1).flatten(1)
        return Weight(nibbles[:, 0::2] | nibbles[:, 1::2] << 4, "int4", scale)
    values = np.empty((weight.out_features, weight.in_features), np.float32)
    step = max(1, (1 << 24) // weight.in_features)
    for i in range(0, len(values), step):
        beside = None if weight.scale is None else weight.scale[i : i + step].cpu().numpy()
        values[i : i + step] = blocks.dequantize(layout.name, weight.data[i : i + step].cpu().numpy(), beside)
    return Weight(torch.from_numpy(values).to(device, dtype), {v: k for k, v in FLOATS.items()}[dtype])  # type: ignore[arg-type]


def _padded(
    data: Tensor, scale: Tensor | None, inputs: int, zeros: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """int4 with whole blocks of inputs: nibbles of zero with scales of zero. `zeros`: two such nibbles."""
    assert scale is not None
    padded = math.ceil(inputs / BLOCK) * BLOCK
    if padded != inputs:
        data = torch.nn.functional.pad(data, (0, (padded - inputs) // 2), value=zeros)
        scale = torch.nn.functional.pad(scale, (0, (padded - inputs) // GROUP))
    return data, scale.to(dtype).contiguous()


def in_words(data: Tensor, block: int, bits: int) -> Tensor:
    """[outputs, bytes] -> int32 [outputs, words]. Word j of the w of a block holds its inputs j, j + w, j + 2w, ...

    So what stands in one place of neighbouring words are neighbouring inputs, as an instruction wants them in a register.
    bits 4: bytes hold two inputs, low nibble first.
    """
    out = torch.empty(len(data), data.shape[1] // 4, dtype=torch.int32, device=data.device)
    step, parts = max(1, (1 << 26) // data.shape[1]), 32 // bits
    for i in range(0, len(data), step):
        piece = data[i : i + step].view(torch.uint8)
        if bits == 4:
            values = torch.stack((piece & 15, piece >> 4), -1).view(len(piece), -1, parts, block // parts)
            piece = values[:, :, 0::2] | values[:, :, 1::2] << 4
        placed = piece.view(len(piece), -1, 4, block // parts).transpose(2, 3).contiguous()
        out[i : i + step] = placed.view(torch.int32).view(len(piece), -1)
    return out
