"""Every block type against the PyPI package `gguf`: equal to the bit, also where blocks hold extremes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from paceline.checkpoints.gguf.blocks import BY_NAME, DEQUANTIZERS, NAMES_OF_OTHERS, TYPES, dequantize

BEYOND = ("Q1_0", "Q2_0")  # which llama.cpp writes and the package has no arithmetic of
KINDS = sorted({*DEQUANTIZERS} - {*BEYOND})


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
        if layout.name == "Q2_0":
            continue  # newer than the package
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, *gguf.GGML_QUANT_SIZES[kind]) == (layout.name, layout.elements, layout.size)
    known = {kind.value for kind in gguf.GGMLQuantizationType}
    assert known == {*TYPES, *NAMES_OF_OTHERS} - {4, 5, 42}
    assert all(NAMES_OF_OTHERS[n] == gguf.GGMLQuantizationType(n).name for n in known - set(TYPES))


@pytest.mark.parametrize(("kind", "bits"), [("Q1_0", 1), ("Q2_0", 2)])
def test_signs_and_pairs_of_bits(kind: str, bits: int) -> None:
    """A float16, then bits from the lowest of the first byte on: minus or plus it; or the pair less one, times it."""
    layout, rng = BY_NAME[kind], np.random.default_rng(3)
    blocks = rng.integers(0, 256, (50, layout.size), dtype=np.uint8)
    blocks[:, :2] = rng.normal(size=50).astype("<f2").view(np.uint8).reshape(50, 2)
    want = np.empty((50, layout.elements))
    for b, block in enumerate(blocks):
        d, run = float(block[:2].view("<f2")[0]), int.from_bytes(block[2:].tobytes(), "little")
        for j in range(layout.elements):
            q = run >> bits * j & (2**bits - 1)
            want[b, j] = d * (2 * q - 1 if bits == 1 else q - 1)
    assert np.array_equal(dequantize(kind, blocks), want)


def test_what_scales_of_nvfp4_are_multiplied_with() -> None:
    """One number for each row, before the product with a value: a row may have several blocks."""
    blocks, beside = (
        np.random.default_rng(4).integers(0, 126, (5, 3 * 36), dtype=np.uint8),
        np.linspace(0.1, 3, 5, dtype="f4"),
    )
    got, plain = dequantize("NVFP4", blocks, beside), dequantize("NVFP4", blocks)
    assert got.shape == plain.shape == (5, 192)
    assert np.allclose(got, plain * beside[:, None], rtol=2e-7, atol=0)
    assert np.array_equal(dequantize("NVFP4", blocks, np.ones(5, "f4")), plain)
