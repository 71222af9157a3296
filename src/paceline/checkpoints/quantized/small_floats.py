"""Layouts of small floats: 8 bits with scales for a matrix, rows or blocks; NVFP4 and MXFP4; bitsandbytes' 4 bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.errors import WeightsError

PIECE = 1 << 22  # values that are widened at a time
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NVFP4_GROUP = 16
LONGEST_STATE = 1 << 16  # bytes of the JSON that bitsandbytes stores


def widened(data: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """8-bit floats [out, in] times a scale [down, across] for each block of rows and columns, in bfloat16."""
    out, (tall, wide) = torch.empty(data.shape, dtype=torch.bfloat16), block
    step = max(1, PIECE // data.shape[1] // tall) * tall
    for start in range(0, len(data), step):
        piece = data[start : start + step].float()
        some = scale[start // tall : -(-(start + step) // tall)].float()
        if some.shape[1] > 1:
            some = some.repeat_interleave(wide, 1)[:, : data.shape[1]]
        out[start : start + step] = piece * some.repeat_interleave(tall, 0)[: len(piece)]
    return out


def nvfp4_floats(divided: bool) -> Callable[..., Tensor]:
    """Two values a byte [out, in / 2], the first in the low half, 8-bit floats [out, in / 16], a scale for all; float32.

    `divided`: by that scale (compressed-tensors), not times it (ModelOpt).
    """

    def make(data: Tensor, scale: Tensor, whole: Tensor) -> Tensor:
        table = torch.tensor((*E2M1, *(-value for value in E2M1)))
        groups = scale.float() * (1 / whole.float().reshape(()) if divided else whole.float().reshape(()))
        out = torch.empty(len(data), data.shape[1] * 2)
        step = max(1, PIECE // out.shape[1])
        for start in range(0, len(data), step):
            piece = data[start : start + step]
            values = table[torch.stack((piece & 15, piece >> 4), dim=-1).flatten(1).long()]
            out[start : start + step] = values * groups[start : start + step].repeat_interleave(
                NVFP4_GROUP, 1
            )
        return out

    return make


def nvfp4_blocks(data: Tensor, scale: Tensor, whole: Tensor) -> Tensor | None:
    """Of the same, GGUF's blocks of 64: four scales, then of each 16 values the first eight in low halves of bytes, the
    others in high ones."""
    if (scale.view(torch.uint8) >= 0x7F).any():
        return None  # below zero, or no number: GGUF's scales have no sign
    out = torch.empty(len(data), data.shape[1] // 32, 36, dtype=torch.uint8)
    step = max(1, PIECE // data.shape[1])
    for start in range(0, len(data), step):
        piece = data[start : start + step]
        values = torch.stack((piece & 15, piece >> 4), dim=-1).view(len(piece), -1, 4, 16)
        to = out[start : start + step]
        to[..., :4] = scale[start : start + step].view(torch.uint8).view(len(piece), -1, 4)
        to[..., 4:] = (values[..., :8] | values[..., 8:] << 4).flatten(-2)
    return out.flatten(1)


def nvfp4_beside(divided: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """What the scales of each row are multiplied with, [out]."""

    def make(data: Tensor, scale: Tensor, whole: Tensor) -> Tensor:
        factor = whole.float().reshape(())
        return (1 / factor if divided else factor).expand(len(data)).contiguous()

    return make


def mxfp4_blocks(data: Tensor, scale: Tensor) -> Tensor:
    """Two values a byte [..., in / 2] and exponents [..., in / 32] -> GGUF's blocks, [rows, in / 32 * 17]."""
    data, scale = data.flatten(0, -2), scale.flatten(0, -2)
    out = torch.empty(*scale.shape, 17, dtype=torch.uint8)
    out[..., 0] = scale.view(torch.uint8)
    step = max(1, PIECE // data.shape[1])
    for start in range(0, len(data), step):
        piece = data[start : start + step]
        values = torch.stack((piece & 15, piece >> 4), dim=-1).view(len(piece), -1, 32)
        out[start : start + step, :, 1:] = values[..., :16] | values[..., 16:] << 4
    return out.flatten(1)


def bitsandbytes_floats(shape: tuple[int, ...], ends: tuple[str, ...]) -> Callable[..., Tensor]:
    """Four bits a value, the first in the high half of a byte: places in a table of 16 floats; and a largest value for
    each run of so many, which may be stored as places in another table."""

    def make(data: Tensor, *others: Tensor) -> Tensor:
        by_end = dict(zip(ends, others, strict=True))
        state = _state(next(value for end, value in by_end.items() if ".quant_state." in end))
        largest, table = by_end[".weight.absmax"], by_end[".weight.quant_map"].float()
        if ".weight.nested_absmax" in by_end:
            size, outer = int(state["nested_blocksize"]), by_end[".weight.nested_absmax"].float()
            inner = by_end[".weight.nested_quant_map"].float()[largest.long()]
            largest = inner * outer.repeat_interleave(size)[: len(inner)] + float(state["nested_offset"])
        block, count = int(state["blocksize"]), data.numel() * 2
        if len(largest) != -(-count // block) or len(table) != 16 or count != shape[0] * shape[1]:
            raise WeightsError(f"4 bits of {list(shape)} values have {len(largest)} scales of {block} each")
        out = torch.empty(count, dtype=torch.bfloat16)
        flat, step = data.reshape(-1), max(1, PIECE // block) * block
        for start in range(0, count, step):
            piece = flat[start // 2 : (start + step) // 2]
            values = table[torch.stack((piece >> 4, piece & 15), dim=-1).flatten().long()]
            scale = largest[start // block : -(-(start + step) // block)].float().repeat_interleave(block)
            out[start : start + step] = values * scale[: len(values)]
        return out.view(shape)

    return make


def _state(stored: Tensor) -> dict[str, Any]:
    if stored.numel() > LONGEST_STATE:
        raise WeightsError(
            f"the quantization state of a matrix takes {stored.numel()} bytes: download it again"
        )
    try:
        state = json.loads(bytes(stored.tolist()))
        numbers = all(
            isinstance(state.get(key, 1), int | float)
            for key in ("blocksize", "nested_blocksize", "nested_offset")
        )
    except (ValueError, RecursionError, AttributeError):
        numbers = False
    if (
        not numbers
        or not 0 < state.get("blocksize", 0) <= 1 << 20
        or not 0 < state.get("nested_blocksize", 1) <= 1 << 20
    ):
        raise WeightsError("the quantization state of a matrix is not readable: download it again")
    return dict(state)
