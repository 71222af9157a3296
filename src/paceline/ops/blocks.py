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

from paceline.ops import iq_blocks

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
        (30, "BF16", 1, 2), (39, "MXFP4", 32, 17), (10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110),
        (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74), (22, "IQ2_S", 256, 82), (18, "IQ3_XXS", 256, 98),
        (21, "IQ3_S", 256, 110), (19, "IQ1_S", 256, 50), (29, "IQ1_M", 256, 56), (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66), (40, "NVFP4", 64, 36), (41, "Q1_0", 128, 18), (42, "Q2_0", 64, 18),
    )
}  # fmt: skip
# What ggml knows, but no file has weights in: what it multiplies with inside, and what it gave up in 2023.
NAMES_OF_OTHERS: Mapping[int, str] = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 28: "F64",
}  # fmt: skip
BY_NAME: Mapping[str, BlockType] = {kind.name: kind for kind in TYPES.values()}
# By the kind of a `Weight`: what matrices stay in while they are multiplied with.
BLOCKS: Mapping[str, BlockType] = {kind.name.lower(): kind for kind in TYPES.values() if kind.elements >= 32}

_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)
_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)  # doubled
_ROWS_AT_ONCE = 2**20  # values whose intermediate arrays stand in memory together


def dequantize(kind: str, blocks: Bytes, beside: Floats | None = None) -> Floats:
    """Bytes [..., n * size] of type `kind` -> float32 [..., n * elements]. Source of truth: ggml's dequantize_row_*.

    `beside` [...]: what the scales of NVFP4's rows are multiplied with.
    """
    layout = BY_NAME[kind]
    shape = (*blocks.shape[:-1], blocks.shape[-1] // layout.size * layout.elements)
    flat = np.ascontiguousarray(blocks).reshape(-1, layout.size)
    out: Floats = np.empty((flat.shape[0], layout.elements), dtype=np.float32)
    step = max(1, _ROWS_AT_ONCE // layout.elements)
    rows = None if beside is None else np.repeat(beside.reshape(-1), len(flat) // max(1, beside.size))
    for start in range(0, flat.shape[0], step):
        part = slice(start, start + step)
        if rows is None:
            out[part] = DEQUANTIZERS[kind](flat[part])
        else:
            out[part] = _nvfp4(flat[part], rows[part, None])
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


def _crumbs(packed: Bytes, group: int) -> Bytes:
    """[n, k] bytes -> [n, 4 * k]: of each `group` bytes first all lowest pairs of bits, then the next, to the highest."""
    parts = packed.reshape(len(packed), -1, 1, group) >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    return (parts & np.uint8(3)).reshape(len(packed), -1)


def _q2_k(blocks: Bytes) -> Floats:
    d = (_half(blocks, 80) * (blocks[:, :16] & 15).astype(np.float32))[:, :, None]
    m = (_half(blocks, 82) * (blocks[:, :16] >> 4).astype(np.float32))[:, :, None]
    values: Floats = d * _crumbs(blocks[:, 16:80], 32).reshape(-1, 16, 16).astype(np.float32) - m
    return values.reshape(-1, 256)


def _q3_k(blocks: Bytes) -> Floats:
    third = (blocks[:, None, :32] >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1)) & np.uint8(1)
    q = _crumbs(blocks[:, 32:96], 32).astype(np.float32) + 4 * third.reshape(-1, 256).astype(np.float32) - 4
    low, high = _nibbles(blocks[:, 96:104], 8), _crumbs(blocks[:, 104:108], 4)
    scales = (low | high << np.uint8(4)).astype(np.float32) - 32
    values: Floats = (_half(blocks, 108) * scales)[:, :, None] * q.reshape(-1, 16, 16)
    return values.reshape(-1, 256)


def _trits(packed: Bytes, group: int, count: int) -> Floats:
    """[n, k] bytes of `count` digits to base 3, as fractions of 256: -1, 0 or 1, the first digits of `group` first."""
    powers = np.array([1, 3, 9, 27, 81][:count], np.uint8).reshape(1, 1, count, 1)
    parts = packed.reshape(len(packed), -1, 1, group) * powers  # modulo 256
    trits: Floats = ((parts.astype(np.uint16) * 3) >> 8).astype(np.float32).reshape(len(packed), -1) - 1
    return trits


def _tq1_0(blocks: Bytes) -> Floats:
    parts = ((blocks[:, :32], 32, 5), (blocks[:, 32:48], 16, 5), (blocks[:, 48:52], 4, 4))
    values: Floats = _half(blocks, 52) * np.concatenate([_trits(*part) for part in parts], axis=1)
    return values


def _tq2_0(blocks: Bytes) -> Floats:
    return _half(blocks, 64) * (_crumbs(blocks[:, :64], 32).astype(np.float32) - 1)


def _q1_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * (
        2 * np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").astype(np.float32) - 1
    )


def _q2_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * (_crumbs(blocks[:, 2:], 1).astype(np.float32) - 1)


def _nvfp4(blocks: Bytes, beside: Floats | None = None) -> Floats:
    scale = nvfp4_scales(blocks[:, :4])
    scale = (scale if beside is None else scale * beside)[:, :, None]
    values: Floats = scale * _E2M1[_nibbles(blocks[:, 4:], 8)].reshape(-1, 4, 16)
    return values.reshape(-1, 64)


def nvfp4_scales(stored: Bytes) -> Floats:
    """8-bit floats without a sign, E4M3, as float32: half of each, because the table of values is doubled."""
    exponent, rest = (stored >> 3) & np.uint8(15), (stored & np.uint8(7)).astype(np.float32)
    scales = np.where(exponent == 0, rest / 1024, np.ldexp(1 + rest / 8, exponent.astype(np.int32) - 8))
    return np.where(stored == 0x7F, 0, scales).astype(np.float32)  # no number stands for zero, as in ggml


DEQUANTIZERS: Mapping[str, Callable[[Bytes], Floats]] = {
    "F32": _f32, "F16": _f16, "BF16": _bf16, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4,
    "Q2_K": _q2_k, "Q3_K": _q3_k, "TQ1_0": _tq1_0, "TQ2_0": _tq2_0, "NVFP4": _nvfp4, "Q1_0": _q1_0, "Q2_0": _q2_0,
    "IQ1_S": iq_blocks.iq1_s, "IQ1_M": iq_blocks.iq1_m, "IQ2_XXS": iq_blocks.iq2_xxs, "IQ2_XS": iq_blocks.iq2_xs,
    "IQ2_S": iq_blocks.iq2_s, "IQ3_XXS": iq_blocks.iq3_xxs, "IQ3_S": iq_blocks.iq3_s,
}  # fmt: skip
