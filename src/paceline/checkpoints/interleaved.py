"""Experts whose gate and up lie row by row, as gpt-oss stores them, seen as the stacks that experts are computed as.

Floats are stored turned: `gate_up_proj` [E, H, 2 * I], `down_proj` [E, I, H]. In MXFP4, `x_blocks` uint8 [E, rows,
columns / 32, 16] holds two neighbouring values a byte, the first in the low bits, and `x_scales` uint8 [E, rows,
columns / 32] their exponents plus 127. Both become `x` [E, rows, columns], MXFP4 as GGUF's blocks. Biases have names of
their own, `gate_up_bias` and `down_bias`, so what was put in order once is not taken for it again.
Source: openai/gpt-oss's and transformers' GptOssExperts, and llama.cpp's converter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from paceline.checkpoints.safetensors_file import Entry
from paceline.errors import WeightsError
from paceline.ops import blocks as formats

MXFP4 = "MXFP4"
BLOCKS, SCALES = "_blocks", "_scales"
BIAS = ".experts.gate_up_proj_bias"  # what only such a checkpoint has
GATE_UP_BIAS = ".experts.gate_up_bias"  # its name here
ROUTER = (".mlp.router.", ".mlp.gate.")  # its name here, and that of other families
GROUP, PAIRS = 32, 16  # values of a block, and bytes that hold them


def put_in_order(entries: dict[str, Entry], folder: Path) -> None:
    """See experts of such a checkpoint as stacks, in place. Raises WeightsError for blocks that do not fit together."""
    if is_interleaved(entries):
        for name in [name for name in entries if ".experts." in name and name.endswith(BLOCKS)]:
            _see_blocks(entries, name, folder)
        for name, entry in list(entries.items()):
            if (
                ".experts." in name
                and entry.make is None
                and (order := order_of(name, entry.shape)) is not None
            ):
                _see_floats(entries, name, *order)
    for name in [name for name in entries if ROUTER[0] in name]:
        entries[name.replace(*ROUTER)] = entries.pop(name)


def is_interleaved(entries: Mapping[str, Entry]) -> bool:
    """Whether experts of the checkpoint lie in this order."""
    return any(name.endswith(BIAS) for name in entries)


def order_of(name: str, shape: tuple[int, ...]) -> tuple[str, Callable[[Tensor], Tensor]] | None:
    """(what a float tensor of experts is called here, what puts it in order); None for any other tensor."""
    at, _, part = name.rpartition(".")
    if part in ("gate_up_proj", "down_proj") and len(shape) == 3:
        return name, (_turned_halves if part == "gate_up_proj" else _turned)
    if part in ("gate_up_proj_bias", "down_proj_bias") and len(shape) == 2:
        return f"{at}.{part.replace('_proj', '')}", (_halves if part == "gate_up_proj_bias" else _same)
    return None


def _see_floats(entries: dict[str, Entry], name: str, new: str, order: Callable[[Tensor], Tensor]) -> None:
    """See the tensor `name` as `new`, put in order."""
    entry = entries.pop(name)
    shape = entry.shape if len(entry.shape) == 2 else (entry.shape[0], entry.shape[2], entry.shape[1])
    entries[new] = Entry(new, entry.file, entry.dtype, shape, entry.nbytes, (entry,), make=order)


def _see_blocks(entries: dict[str, Entry], name: str, folder: Path) -> None:
    at = name.removesuffix(BLOCKS)
    data, scale = entries.pop(name), entries.pop(at + SCALES, None)
    known = data.dtype == "U8" and len(data.shape) == 4 and data.shape[-1] == PAIRS
    if scale is None or not known or scale.dtype != "U8" or scale.shape != data.shape[:-1]:
        beside = "none" if scale is None else f"{scale.dtype} {list(scale.shape)}"
        raise WeightsError(
            f"{folder}: {name} is {data.dtype} {list(data.shape)} and {SCALES} beside it is {beside}, where MXFP4 has "
            f"blocks of {PAIRS} bytes with a scale each: download both again, from one revision"
        )
    shape = (*data.shape[:2], data.shape[2] * GROUP)
    gated = at.endswith("gate_up_proj")
    blocks = packed_halves if gated else packed

    def make(data: Tensor, scale: Tensor) -> Tensor:
        return values_of(blocks(data, scale))

    size = data.nbytes + scale.nbytes
    entries[at] = Entry(at, data.file, MXFP4, shape, size, (data, scale), make=make, blocks=blocks)


def packed(data: Tensor, scale: Tensor) -> Tensor:
    """Blocks [E, rows, n, 16] and scales [E, rows, n] -> rows of GGUF's blocks [E, rows, n * 17]: the exponent, then 16
    bytes with value j in the low and value j + 16 in the high bits."""
    out = torch.empty(*data.shape[:-1], PAIRS + 1, dtype=torch.uint8)
    out[..., 0] = scale
    for to, expert in zip(out, data):  # one expert at a time: a stack may take gigabytes
        values = torch.stack((expert & 15, expert >> 4), dim=-1).flatten(-2)  # [rows, n, 32]
        to[..., 1:] = values[..., :PAIRS] | values[..., PAIRS:] << 4
    return out.flatten(2)


def packed_halves(data: Tensor, scale: Tensor) -> Tensor:
    """The same with all gates before all ups."""
    return packed(_halves(data), _halves(scale))


def values_of(packed: Tensor) -> Tensor:
    """GGUF's blocks [E, rows, bytes] as bfloat16, which holds their values exactly; one expert at a time."""
    made = [torch.from_numpy(formats.dequantize(MXFP4, expert.numpy())).bfloat16() for expert in packed]
    return torch.stack(made)


def stored_as(name: str, data: Tensor) -> tuple[str, Tensor]:
    """(name, values) of a tensor as such a checkpoint has it: `put_in_order` the other way round, of floats."""
    at, _, part = name.rpartition(".")
    if ".experts." in name and part.startswith(
        "gate_up"
    ):  # all gates before all ups, which lie in turns then
        data = torch.stack(data.chunk(2, dim=1), dim=2).flatten(1, 2)
    if part in ("gate_up_proj", "down_proj") and data.dim() == 3:
        return name, data.transpose(1, 2).contiguous()
    if part in ("gate_up_bias", "down_bias"):
        return f"{at}.{part.replace('_bias', '_proj_bias')}", data
    return name.replace(ROUTER[1], ROUTER[0]), data


def _halves(data: Tensor) -> Tensor:
    """All gates [E, I, ...] before all ups, which lie in turns along the second axis."""
    return torch.cat((data[:, 0::2], data[:, 1::2]), dim=1)


def _turned(data: Tensor) -> Tensor:
    return data.transpose(1, 2).contiguous()


def _turned_halves(data: Tensor) -> Tensor:
    return _halves(data.transpose(1, 2))


def _same(data: Tensor) -> Tensor:
    return data
