"""Every block type against the PyPI package `gguf`: equal to the bit, also where blocks hold extremes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from paceline.checkpoints.gguf.blocks import BY_NAME, DEQUANTIZERS, NAMES_OF_OTHERS, TYPES, dequantize

KINDS = sorted(DEQUANTIZERS)


def assert_same_bits(kind: str, blocks: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        ours = dequantize(kind, blocks)
        theirs = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    assert ours.shape == theirs.shape
    nan = np.isnan(theirs)
    assert np.array_equal(np.isnan(ours), nan)
    assert np.array_equal(ours.view(np.uint32)[~nan], theirs.view(np.uint32)[~nan])


@pytest.mark.parametrize("kind", KINDS)
def test_random_blocks(kind: str) -> None:
    layout = BY_NAME[kind]
    rng = np.random.default_rng(7)
    blocks = rng.integers(0, 256, (37, 64 * layout.size), dtype=np.uint8)
    assert_same_bits(kind, blocks)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("byte", [0x00, 0x01, 0x7B, 0x7F, 0x80, 0xFF])
def test_extreme_blocks(kind: str, byte: int) -> None:
    """All bytes alike (zero, subnormal, large, infinite and NaN scales), then each byte of a block set by itself."""
    layout = BY_NAME[kind]
    blocks = np.full((layout.size + 1, layout.size), byte, dtype=np.uint8)
    for i in range(layout.size):
        blocks[i, i] = 255 - byte
    assert_same_bits(kind, blocks)


def test_more_values_than_are_handled_at_once() -> None:
    rng = np.random.default_rng(8)
    assert_same_bits("Q4_K", rng.integers(0, 256, (5, 1000 * 144), dtype=np.uint8))


def test_a_stack_of_experts_keeps_its_shape() -> None:
    blocks = np.random.default_rng(9).integers(0, 100, (3, 5, 4 * 17), dtype=np.uint8)
    assert dequantize("MXFP4", blocks).shape == (3, 5, 128)
    assert np.array_equal(dequantize("MXFP4", blocks)[1], dequantize("MXFP4", blocks[1]))


def test_sizes_and_names_are_those_of_ggml() -> None:
    for number, layout in TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, *gguf.GGML_QUANT_SIZES[kind]) == (layout.name, layout.elements, layout.size)
    known = {kind.value for kind in gguf.GGMLQuantizationType}
    assert known == {*TYPES, *NAMES_OF_OTHERS} - {4, 5}
    assert all(NAMES_OF_OTHERS[n] == gguf.GGMLQuantizationType(n).name for n in known - set(TYPES))
