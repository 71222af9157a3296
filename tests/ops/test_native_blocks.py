"""Linears and tables of weights in GGUF blocks, natively: against the values that the blocks stand for, to the bit where
inputs are not rounded, and `torch.equal` over numbers of rows, places and threads."""

from __future__ import annotations

from collections.abc import Iterator

import gguf
import gguf.quants
import numpy as np
import pytest
import torch

from paceline.core import ForwardBatch
from paceline.errors import UsageError
from paceline.ops import native
from paceline.ops.base import Graph, Weight
from paceline.ops.blocks import BLOCKS
from paceline.ops.grids import codes
from paceline.ops.reference import EagerRunner, dequantize
from paceline.ops.tiles import BLOCK_KINDS

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.why_not()))
NAN, INF = float("nan"), float("inf")
# Where the float16 scales of a block stand; MXFP4 has an exponent instead.
HALVES = {
    "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,), "q4_k": (0, 2), "q5_k": (0, 2),
    "q6_k": (208,), "iq4_nl": (0,), "iq4_xs": (0,), "mxfp4": (), "q2_k": (80, 82), "q3_k": (108,), "iq2_xxs": (0,),
    "iq2_xs": (0,), "iq2_s": (0,), "iq3_xxs": (0,), "iq3_s": (0,), "iq1_s": (0,), "iq1_m": (), "tq1_0": (52,),
    "tq2_0": (64,), "nvfp4": (), "q1_0": (0,), "q2_0": (0,),
}  # fmt: skip


@pytest.fixture(params=["best", "avx2", "generic"], autouse=True)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    extension = native._extension()
    assert extension.choose_isa("best")
    best = native.isa()
    if request.param == best or not extension.choose_isa(request.param):
        pytest.skip(f"{request.param} on a processor whose best is {best}")
    yield
    extension.choose_isa("best")


def blocked(kind: str, out: int, width: int, scale: float = 0.01, byte: int | None = None) -> Weight:
    """Random bits, or bytes all alike, under scales near `scale`, of either sign."""
    layout, rng = BLOCKS[kind], np.random.default_rng(out * width)
    count = out * width // layout.elements
    data = rng.integers(0, 256, (count, layout.size), dtype=np.uint8)
    if byte is not None:
        data[:] = byte
    for at in HALVES[kind]:
        halves = (scale * rng.uniform(0.5, 1.5, count) * rng.choice((-1, 1), count)).astype("<f2")
        data[:, at : at + 2] = halves.view(np.uint8).reshape(count, 2)
    if kind == "mxfp4":
        data[:, 0] = rng.integers(118, 122, count)
    if kind == "nvfp4":
        data[:, :4] = rng.integers(16, 32, (count, 4))
    if kind == "iq1_m":  # its float16 is spread over the highest four bits of four words
        half = (scale * rng.uniform(0.5, 1.5, count)).astype("<f2").view(np.uint16)
        for i in range(4):
            data[:, 49 + 2 * i] = data[:, 49 + 2 * i] & 15 | (half >> 4 * i & 15).astype(np.uint8) << 4
    return Weight(torch.from_numpy(data.reshape(out, -1)), kind)  # type: ignore[arg-type]


def rows_of(count: int) -> ForwardBatch:
    positions = torch.arange(count, dtype=torch.int32)
    return ForwardBatch(positions.long(), positions, torch.zeros(count, dtype=torch.int32), [0, count])


def linear(weight: Weight) -> Graph:
    return lambda ops: (ops.linear(ops.given("x", weight.in_features), weight),)


def inputs(rows: int, width: int) -> torch.Tensor:
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(width))
    x[:, ::7] *= 30  # activations have columns that stand out
    x[1 % rows] *= 1e-5
    x[2 % rows, : width // 2] = 0
    return x


def rounded(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Inputs as kernels see them that round to 8 bits, or 16 for weights of 6 and 8: 16 share a scale."""
    groups, most = x.view(x.shape[0], -1, 16), 127 * 254 if kind in ("q6_k", "q8_0") else 127
    largest = groups.abs().amax(-1, keepdim=True)
    factor = torch.where(largest > 0, most / largest, 0)
    fused = native.isa() != "generic"  # the product is not rounded before it becomes an integer
    product = groups.double() * factor.double() if fused else (groups * factor).double()
    return (product.round() * (largest * np.float32(1 / most)).double()).flatten(1)


def test_the_grids_are_those_of_ggml() -> None:
    """Every entry of every grid, by the values that gguf's own tables give."""
    types = gguf.GGMLQuantizationType
    for grid, kind in (("iq2_xxs", 0), ("iq2_xs", 0), ("iq2_s", 0), ("iq3_xxs", 0), ("iq3_s", 0), ("iq1", 1)):
        theirs = gguf.quants._type_traits[types["IQ1_S" if kind else grid.upper()]]
        theirs.init_grid()
        meaning = np.array(theirs.grid_map, dtype=np.float32)
        assert np.array_equal(meaning[codes(grid)], theirs.grid.reshape(theirs.grid_shape)), grid


@pytest.mark.parametrize("kind", BLOCK_KINDS)
@pytest.mark.parametrize(("out", "width"), [(53, 2304), (33, 32), (16, 96), (1, 4128)])
def test_exact_linears_have_the_bits_of_float32_weights(kind: str, out: int, width: int) -> None:
    if width % BLOCKS[kind].elements:
        width = 1280 if width > 1024 else 512
    weight, x = blocked(kind, out, width), inputs(9, width)
    values = dequantize(weight, None, torch.float32)
    runner = native.NativeRunner(2, exact=True)
    got = runner.run(linear(weight), rows_of(9), None, {"x": x})[0]
    want = runner.run(linear(Weight(values, "float32")), rows_of(9), None, {"x": x})[0]
    assert torch.equal(got, want)
    plain = EagerRunner(torch.float64).run(linear(weight), rows_of(9), None, {"x": x})[0]
    assert (got - plain).abs().max() <= 1e-5 * plain.abs().max()


@pytest.mark.parametrize("kind", BLOCK_KINDS)
@pytest.mark.parametrize(("out", "width"), [(53, 2304), (33, 32), (1, 4128)])
def test_inputs_are_rounded_and_nothing_else_is(kind: str, out: int, width: int) -> None:
    if width % BLOCKS[kind].elements:
        width = 1280 if width > 1024 else 512
    weight, x = blocked(kind, out, width), inputs(9, width)
    values = dequantize(weight, None, torch.float64)
    got = native.NativeRunner(2).run(linear(weight), rows_of(9), None, {"x": x})[0].double()
    seen = rounded(x, kind)
    terms = seen.abs() @ values.abs().T  # what errors are relative to, sums may cancel
    assert ((got - seen @ values.T).abs() <= 1e-6 * terms + 1e-30).all()
    loss = (got - x.double() @ values.T).norm() / (x.double() @ values.T).norm()
    assert loss < (1e-4 if kind in ("q6_k", "q8_0") else 0.02)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_bits_do_not_depend_on_rows_or_threads(kind: str, exact: bool) -> None:
    width = 1280 if exact else 512
    weight, x = blocked(kind, 75, width), inputs(70, width)
    runner = native.NativeRunner(2, exact)
    graph = linear(weight)
    whole = runner.run(graph, rows_of(70), None, {"x": x})[0].clone()
    for count in range(1, 34):
        native.set_threads(1 + count % 3)
        for start in (0, 70 - count, 11):
            part = runner.run(graph, rows_of(count), None, {"x": x[start : start + count].contiguous()})[0]
            assert torch.equal(part, whole[start : start + count]), (count, start)
    native.set_threads(2)


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_bits_are_those_of_the_widest_vectors(kind: str, instruction_set: None) -> None:
    """Sums of integers are exact, and floats are multiplied and added in one order, whatever multiplies the integers."""
    if native.isa() != "avx2":
        pytest.skip("generic code rounds every product, and the others are the widest")
    results = []
    for isa in ("avx2", "best"):
        assert native._extension().choose_isa(isa)
        weight, x = blocked(kind, 75, 512), inputs(9, 512)
        results.append(native.NativeRunner(2).run(linear(weight), rows_of(9), None, {"x": x})[0].clone())
    assert torch.equal(*results)


@pytest.mark.parametrize("kind", BLOCK_KINDS)
@pytest.mark.parametrize("byte", [0x7F, 0x80, 0xFF])
def test_no_sum_of_integers_overflows(kind: str, byte: int) -> None:
    """The largest weights of either sign times the largest inputs: sums of 16 and 32 bits must hold them."""
    weight, x = blocked(kind, 40, 1024, byte=byte), torch.ones(3, 1024)
    x[1], x[2, ::2] = -1, -1
    values = dequantize(weight, None, torch.float64)
    got = native.NativeRunner(2).run(linear(weight), rows_of(3), None, {"x": x})[0].double()
    terms = x.double().abs() @ values.abs().T
    assert ((got - x.double() @ values.T).abs() <= 2e-6 * terms).all()


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_a_table_gives_the_values_of_its_blocks(kind: str) -> None:
    width = 3 * BLOCKS[kind].elements
    weight = blocked(kind, 50, width)
    tokens = torch.tensor([0, 49, 17, 17, 3])
    rows = ForwardBatch(tokens, torch.arange(5, dtype=torch.int32), torch.zeros(5, dtype=torch.int32), [0, 5])
    got = native.NativeRunner(2).run(lambda ops: (ops.embed(ops.tokens(), weight, 1.7),), rows, None, {})[0]
    want = dequantize(weight, tokens, torch.float32) * torch.tensor(1.7)
    assert torch.equal(got, want)


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_a_tied_table_is_multiplied_with_too(kind: str) -> None:
    width = BLOCKS[kind].elements
    weight = blocked(kind, 50, width)
    runner = native.NativeRunner(2, exact=True)

    def graph(ops):  # type: ignore[no-untyped-def]
        return (ops.linear(ops.embed(ops.tokens(), weight, 1.0), weight),)

    runner.prepare([graph])
    want = EagerRunner(torch.float64).run(graph, rows_of(5), None, {})[0]
    got = runner.run(graph, rows_of(5), None, {})[0]
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_what_is_no_number_among_inputs_spoils_its_row_only(kind: str, bad: float, exact: bool) -> None:
    weight, x = blocked(kind, 40, 512), inputs(6, 512)
    runner = native.NativeRunner(2, exact)
    clean = runner.run(linear(weight), rows_of(6), None, {"x": x})[0].clone()
    assert clean.isfinite().all()
    x = x.clone()
    x[3, 301] = bad
    got = runner.run(linear(weight), rows_of(6), None, {"x": x})[0]
    assert not got[3].isfinite().any()
    assert got[3].isnan().all() or bad in (INF, -INF)
    keep = [0, 1, 2, 4, 5]
    assert torch.equal(got[keep], clean[keep])


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("kind", [kind for kind in BLOCK_KINDS if HALVES[kind]])
def test_a_scale_that_is_no_number_spoils_its_output_only(kind: str, bad: float, exact: bool) -> None:
    for at in HALVES[kind]:
        weight, x = blocked(kind, 40, 512), inputs(3, 512)
        clean = native.NativeRunner(2, exact).run(linear(weight), rows_of(3), None, {"x": x})[0].clone()
        spoilt = weight.data.clone()
        spoilt[21, at : at + 2] = torch.from_numpy(np.array([bad], dtype="<f2").view(np.uint8))
        got = native.NativeRunner(2, exact).run(
            linear(Weight(spoilt, weight.kind)), rows_of(3), None, {"x": x}
        )[0]
        assert not got[:, 21].isfinite().any()
        keep = [o for o in range(40) if o != 21]
        assert torch.equal(got[:, keep], clean[:, keep])


def test_inputs_too_small_for_a_scale_count_as_zero() -> None:
    weight, x = blocked("q4_1", 20, 64), torch.full((2, 64), 1e-39)
    x[1, :32] = 1.0
    got = native.NativeRunner(2).run(linear(weight), rows_of(2), None, {"x": x})[0]
    assert (got[0] == 0).all()
    want = dequantize(weight, None, torch.float32)[:, :32].sum(-1)
    torch.testing.assert_close(got[1], want, rtol=1e-5, atol=1e-5)


def test_half_a_block_is_refused() -> None:
    weight = Weight(torch.zeros(4, 35, dtype=torch.uint8), "q8_0")
    with pytest.raises(UsageError, match="no whole q8_0 blocks of 34"):
        native.NativeRunner(2).run(linear(weight), rows_of(1), None, {"x": torch.zeros(1, 32)})
