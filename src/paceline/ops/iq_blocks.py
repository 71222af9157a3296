"""The IQ1, IQ2 and IQ3 blocks of GGUF -> float32: numbers of a grid's entries, signs apart, a scale for 16 or 32 values.

Blocks [n, size] of uint8 give float32 [n, 256]. Layouts: ggml's `ggml-common.h`. A scale is a float16 times an odd number
and a power of two: exact, so only the last product is rounded, as in `gguf.quants`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.ops.grids import codes

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

# What a code of each grid stands for; of IQ1 times 8, because 1/8 is added to a value or taken from it.
IQ1_VALUES, IQ1_STEP = (-8, 0, 8), 1
IQ2_VALUES = (8, 25, 43)
IQ3_XXS_VALUES = (4, 12, 20, 28, 36, 44, 52, 62)
IQ3_S_VALUES = (1, 3, 5, 7, 9, 11, 13, 15)
# Seven signs are stored: the eighth makes their number even.
_EVEN = np.array([i | (i.bit_count() & 1) << 7 for i in range(128)], dtype=np.uint8)
_ONE = np.arange(8, dtype=np.uint8)


def _half(blocks: Bytes, start: int) -> Floats:
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _words(blocks: Bytes, start: int, stop: int, kind: str) -> NDArray[np.int64]:
    return np.ascontiguousarray(blocks[:, start:stop]).view(kind).astype(np.int64)


def _nibbles(packed: Bytes) -> NDArray[np.int64]:
    """[n, k] -> [n, 2 * k], the low half of each byte first."""
    return np.stack((packed & 15, packed >> 4), axis=-1).reshape(len(packed), -1).astype(np.int64)


def _signs(packed: Bytes) -> Floats:
    """Bytes of signs [n, k] -> [n, 8 * k] of 1 or -1."""
    bits = (packed[..., None] >> _ONE) & np.uint8(1)
    return (1.0 - 2.0 * bits.astype(np.float32)).reshape(len(packed), -1)


def _values(grid: str, meaning: tuple[int, ...], at: NDArray[np.int64]) -> Floats:
    """Entries `at` [n, k] of a grid -> what they stand for, [n, k * 8 or 4]."""
    table = np.array(meaning, dtype=np.float32)[codes(grid)]
    return table[at].reshape(len(at), -1)


def _scaled(d: Floats, odd: NDArray[np.int64], power: float, values: Floats) -> Floats:
    """d * (2 * odd + 1) * power for each of the equal parts of 256 values, times these."""
    scale = d * (2 * odd + 1).astype(np.float32) * np.float32(power)
    scaled: Floats = scale[:, :, None] * values.reshape(len(values), odd.shape[1], -1)
    return scaled.reshape(len(values), 256)


def _seven(words: NDArray[np.int64]) -> Bytes:
    """Four times seven signs in the low 28 bits of each word [n, 8] -> bytes of eight, [n, 32]."""
    signs: Bytes = _EVEN[(words[:, :, None] >> np.array([0, 7, 14, 21])) & 127].reshape(len(words), -1)
    return signs


def iq2_xxs(blocks: Bytes) -> Floats:
    pairs = _words(blocks, 2, 66, "<u4").reshape(len(blocks), 8, 2)
    at = (pairs[:, :, :1] >> np.array([0, 8, 16, 24])) & 255
    values = _values("iq2_xxs", IQ2_VALUES, at.reshape(len(blocks), 32)) * _signs(_seven(pairs[:, :, 1]))
    return _scaled(_half(blocks, 0), pairs[:, :, 1] >> 28, 1 / 8, values)


def iq2_xs(blocks: Bytes) -> Floats:
    words = _words(blocks, 2, 66, "<u2")
    values = _values("iq2_xs", IQ2_VALUES, words & 511) * _signs(_EVEN[words >> 9])
    return _scaled(_half(blocks, 0), _nibbles(blocks[:, 66:]), 1 / 8, values)


def iq2_s(blocks: Bytes) -> Floats:
    high = (blocks[:, 66:74, None] >> np.array([0, 2, 4, 6], dtype=np.uint8)).reshape(len(blocks), 32) & 3
    at = blocks[:, 2:34].astype(np.int64) | high.astype(np.int64) << 8
    values = _values("iq2_s", IQ2_VALUES, at) * _signs(blocks[:, 34:66])
    return _scaled(_half(blocks, 0), _nibbles(blocks[:, 74:]), 1 / 8, values)


def iq3_xxs(blocks: Bytes) -> Floats:
    words = _words(blocks, 66, 98, "<u4")
    values = _values("iq3_xxs", IQ3_XXS_VALUES, blocks[:, 2:66].astype(np.int64)) * _signs(_seven(words))
    return _scaled(_half(blocks, 0), words >> 28, 1 / 4, values)


def iq3_s(blocks: Bytes) -> Floats:
    ninth = ((blocks[:, 66:74, None] >> _ONE) & np.uint8(1)).reshape(len(blocks), 64)
    at = blocks[:, 2:66].astype(np.int64) | ninth.astype(np.int64) << 8
    values = _values("iq3_s", IQ3_S_VALUES, at) * _signs(blocks[:, 74:106])
    return _scaled(_half(blocks, 0), _nibbles(blocks[:, 106:]), 1, values)


def iq1_s(blocks: Bytes) -> Floats:
    words = _words(blocks, 34, 50, "<u2")
    high = ((words[:, :, None] >> np.array([0, 3, 6, 9])) & 7).reshape(len(blocks), 32)
    values = _values("iq1", IQ1_VALUES, blocks[:, 2:34].astype(np.int64) | high << 8)
    step = np.where(words >> 15, -IQ1_STEP, IQ1_STEP).astype(np.float32)
    values = (values.reshape(-1, 8, 32) + step[:, :, None]).reshape(-1, 256)
    return _scaled(_half(blocks, 0), (words >> 12) & 7, 1 / 8, values)


def iq1_m(blocks: Bytes) -> Floats:
    words = _words(blocks, 48, 56, "<u2")  # the float16 in their highest four bits each
    half = ((words >> 12) << np.array([0, 4, 8, 12])).sum(axis=1, keepdims=True).astype(np.uint16)
    scales = ((words[:, :, None] >> np.array([0, 3, 6, 9])) & 7).reshape(len(blocks), 16)
    high = _nibbles(blocks[:, 32:48])
    values = _values("iq1", IQ1_VALUES, blocks[:, :32].astype(np.int64) | (high & 7) << 8)
    step = np.where(high & 8, -IQ1_STEP, IQ1_STEP).astype(np.float32)
    values = (values.reshape(-1, 32, 8) + step[:, :, None]).reshape(-1, 256)
    return _scaled(half.view("<f2").astype(np.float32), scales, 1 / 8, values)
