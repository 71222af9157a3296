"""Matrices that are stored as 8-bit floats in blocks (`quant_method` "fp8", as DeepSeek-V3), read as bfloat16.

`x.weight` F8_E4M3 [out, in] stands beside `x.weight_scale_inv` [out / 128, in / 128], rounded up: what the values of a
block are multiplied with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from paceline.checkpoints.card import unquantized
from paceline.checkpoints.safetensors_file import Entry
from paceline.errors import LoadError, WeightsError
from paceline.files import read_json

WEIGHT, SCALE = ".weight", ".weight_scale_inv"
BLOCK = 128  # rows, and columns
STORED, READ = "F8_E4M3", "BF16"


def widen(entries: dict[str, Entry], folder: Path) -> None:
    """See each matrix with its scales as one of bfloat16, in place. Raises WeightsError unless all have theirs."""
    scales = {name.removesuffix(SCALE): entries[name] for name in entries if name.endswith(SCALE)}
    if not scales:
        return
    block = _block(folder)
    if block != [BLOCK, BLOCK]:
        raise WeightsError(
            f"{folder}: 8-bit floats in blocks of {block} are not read, only of {[BLOCK, BLOCK]}: use "
            f"{unquantized(folder)}, paceline quantizes while loading (--quantize int4)"
        )
    for at in {name.removesuffix(WEIGHT) for name, entry in entries.items() if entry.dtype == STORED} | set(
        scales
    ):
        data, scale = entries.get(at + WEIGHT), scales.get(at)
        if data is None or scale is None or not _fit(data, scale):
            stored = "missing" if data is None else f"{data.dtype} {list(data.shape)}"
            beside = "none" if scale is None else f"{scale.dtype} {list(scale.shape)}"
            raise WeightsError(
                f"{folder}: {at + WEIGHT} is {stored} and {SCALE[1:]} beside it is {beside}, where 8-bit floats have a "
                f"scale for each {BLOCK} x {BLOCK} values: download both again, from one revision"
            )
        size = data.nbytes + scale.nbytes
        entries[at + WEIGHT] = replace(data, dtype=READ, nbytes=size, scale=entries.pop(at + SCALE))


def _fit(data: Entry, scale: Entry) -> bool:
    blocks = tuple(-(-size // BLOCK) for size in data.shape)
    return (
        data.dtype == STORED and len(blocks) == 2 and scale.shape == blocks and scale.dtype in ("F32", "BF16")
    )


def _block(folder: Path) -> object:
    """The size of blocks that config.json names; where it names none, the shapes decide."""
    try:
        said = (read_json(folder / "config.json") or {}).get("quantization_config")
    except LoadError as error:
        raise WeightsError(str(error)) from error
    return (said.get("weight_block_size") if isinstance(said, Mapping) else None) or [BLOCK, BLOCK]


def widened(data: Tensor, scale: Tensor) -> Tensor:
    """[out, in] in bfloat16, some rows at a time."""
    out = torch.empty(data.shape, dtype=torch.bfloat16)
    for i, row in enumerate(scale.float()):
        rows = slice(i * BLOCK, (i + 1) * BLOCK)
        out[rows] = data[rows].float() * row.repeat_interleave(BLOCK)[: data.shape[1]]
    return out
