"""The block types of GGUF -> float32, equal to the bit to `gguf.quants.dequantize`.

A row of a quantized tensor is a run of blocks; a block holds `elements` values in `size` bytes, little-endian. The
layouts are those of ggml's `ggml-common.h`. Every function takes blocks [n, size] of uint8 and gives float32
[n, elements]; the order of multiplications is that of the source, because the last bit depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class BlockType:
    """How one tensor type is stored: `elements` values take `size` bytes."""

    name: str
    elements: int
    size: int


# Numbers of ggml's `enum ggml_type`. Types that are not here cannot be read; NAMES_OF_OTHERS says what they are.
TYPES: Mapping[int, BlockType] = {
    number: BlockType(name, elements, size)
    for number, name, elements, size in (
        (0, "F32", 1, 4), (1, "F16", 1, 2), (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24), (8, "Q8_0", 32, 34), (12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210), (20, "IQ4_NL", 32, 18), (23, "IQ4_XS", 256, 136), (26, "I32", 1, 4), (27, "I64", 1, 8),
        (30, "BF16", 1, 2), (39, "MXFP4", 32, 17),
    )
}  # fmt: skip
NAMES_OF_OTHERS: Mapping[int, str] = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 24: "I8", 25: "I16", 28: "F64", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
BY_NAME: Mapping[str, BlockType] = {kind.name: kind for kind in TYPES.values()}
# By the kind of a `Weight`: what matrices stay in while they are multiplied with.
BLOCKS: Mapping[str, BlockType] = {kind.name.lower(): kind for kind in TYPES.values() if kind.elements >= 32}

_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)
_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)  # doubled
_ROWS_AT_ONCE = 2**20  # values whose intermediate arrays stand in memory together


def dequantize(kind: str, blocks: Bytes) -> Floats:
    """Bytes [..., n * size] of type `kind` -> float32 [..., n * elements]. Source of truth: ggml's dequantize_row_*."""
    layout = BY_NAME[kind]
    shape = (*blocks.shape[:-1], blocks.shape[-1] // layout.size * layout.elements)
    flat = np.ascontiguousarray(blocks).reshape(-1, layout.size)
    out: Floats = np.empty((flat.shape[0], layout.elements), dtype=np.float32)
    step = max(1, _ROWS_AT_ONCE // layout.elements)
    for start in range(0, flat.shape[0], step):
        out[start : start + step] = DEQUANTIZERS[kind](flat[start : start + step])
    return out.reshape(shape)


def _half(blocks: Bytes, start: int) -> Floats:
    """The float16 at byte `start` of each block, [n, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes, group: int) -> Bytes:
    """[n, k] bytes -> [n, 2 * k]: of each `group` bytes first all low halves, then all high ones."""
    parts = packed.reshape(len(packed), -1, 1, group)
    return np.concatenate([parts & 15, parts >> 4], axis=2).reshape(len(packed), -1)


def _bits(packed: Bytes) -> Bytes:
    """[n, 4] bytes -> [n, 32] of 0 or 16: bit i is the fifth bit of value i."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _f32(blocks: Bytes) -> Floats:
    return blocks.view("<f4")


def _f16(blocks: Bytes) -> Floats:
    return blocks.view("<f2").astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q4_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:], 16).astype(np.float32) - 8)


def _q4_1(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:], 16).astype(np.float32) + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    q = _nibbles(blocks[:, 6:], 16) | _bits(blocks[:, 2:6])
    return _half(blocks, 0) * (q.astype(np.float32) - 16)


def _q5_1(blocks: Bytes) -> Floats:
    q = _nibbles(blocks[:, 8:], 16) | _bits(blocks[:, 4:8])
    return _half(blocks, 0) * q.astype(np.float32) + _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32) * _half(blocks, 0)


def _scales_and_mins(packed: Bytes) -> tuple[Floats, Floats]:
    """12 bytes -> 8 scales and 8 minima of 6 bits, as Q4_K and Q5_K pack them; each [n, 8]."""
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 2) & 48)], axis=1)
    mins = np.concatenate([middle & 63, (high >> 4) | ((middle >> 2) & 48)], axis=1)
    return scales.astype(np.float32), mins.astype(np.float32)


def _with_mins(blocks: Bytes, q: Bytes) -> Floats:
    """d * scale * q - dmin * min over 8 sub-blocks of 32; `q` [n, 256]."""
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    d = (_half(blocks, 0) * scales)[:, :, None]
    m = (_half(blocks, 2) * mins)[:, :, None]
    values: Floats = d * q.reshape(-1, 8, 32).astype(np.float32) - m
    return values.reshape(-1, 256)


def _q4_k(blocks: Bytes) -> Floats:
    return _with_mins(blocks, _nibbles(blocks[:, 16:], 32))


def _q5_k(blocks: Bytes) -> Floats:
    high = blocks[:, 16:48].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    fifth: Bytes = np.left_shift(high & np.uint8(1), 4, dtype=np.uint8).reshape(-1, 256)
    q: Bytes = _nibbles(blocks[:, 48:], 32) | fifth
    return _with_mins(blocks, q)


def _q6_k(blocks: Bytes) -> Floats:
    low = _nibbles(blocks[:, :128], 64)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], dtype=np.uint8).reshape(
        1, 1, 4, 1
    )
    q = (low | ((high & 3) << 4).reshape(-1, 256)).astype(np.float32) - 32
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    d = (_half(blocks, 208) * scales)[:, :, None]
    values: Floats = d * q.reshape(-1, 16, 16)
    return values.reshape(-1, 256)


def _iq4_nl(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _IQ4[_nibbles(blocks[:, 2:], 16)]


def _iq4_xs(blocks: Bytes) -> Floats:
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)
    low = _nibbles(blocks[:, 4:8], 1)
    scales = (low | ((high & 3) << 4)).astype(np.float32) - 32
    d = (_half(blocks, 0) * scales)[:, :, None]
    values: Floats = d * _IQ4[_nibbles(blocks[:, 8:], 16)].reshape(-1, 8, 32)
    return values.reshape(-1, 256)


def _mxfp4(blocks: Bytes) -> Floats:
    exponent = blocks[:, :1].astype(np.uint32)  # half of 2^(e - 127), because the table is doubled
    bits = np.where(exponent < 2, np.uint32(0x00200000) << exponent, (np.maximum(exponent, 1) - 1) << 23)
    return bits.astype(np.uint32).view(np.float32) * _E2M1[_nibbles(blocks[:, 1:], 16)]


DEQUANTIZERS: Mapping[str, Callable[[Bytes], Floats]] = {
    "F32": _f32, "F16": _f16, "BF16": _bf16, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4,
}  # fmt: skip
