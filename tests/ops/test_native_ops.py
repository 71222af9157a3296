"""Each native op against a float64 computation, and `torch.equal` over numbers of rows, threads and neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from paceline.core import ForwardBatch
from paceline.errors import UsageError
from paceline.ops import native
from paceline.ops.base import Experts, Growth, Ops, Value, Weight
from paceline.ops.quantize import quantize
from paceline.ops.reference import EagerRunner, dequantize

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.why_not()))
KINDS = ("float32", "bfloat16", "float16", "int8", "int4")


@pytest.fixture(params=["best", "avx2", "generic"], autouse=True)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    extension = native._extension()
    assert extension.choose_isa("best")
    best = native.isa()
    if request.param == best or not extension.choose_isa(request.param):
        pytest.skip(f"{request.param} on a processor whose best is {best}")
    yield
    extension.choose_isa("best")


def rows_of(count: int, start: int = 0) -> ForwardBatch:
    positions = torch.arange(start, start + count, dtype=torch.int32)
    return ForwardBatch(positions.long(), positions, torch.zeros(count, dtype=torch.int32), [0, count])


def make_weight(kind: str, out: int, width: int, seed: int = 0) -> Weight:
    data = torch.randn(out, width, generator=torch.Generator().manual_seed(out * width + seed))
    if kind in ("int8", "int4"):
        return quantize(data, kind)  # type: ignore[arg-type]
    return Weight(data.to(getattr(torch, kind)), kind)  # type: ignore[arg-type]


def multiplied(x: torch.Tensor, weight: Weight, exact: bool) -> torch.Tensor:
    """What a linear with `weight` multiplies it with, in float64."""
    return (x.bfloat16() if weight.kind == "bfloat16" and native.bf16_dot() and not exact else x).double()


@pytest.mark.parametrize(
    ("kind", "exact"), [*((kind, False) for kind in KINDS), ("bfloat16", True), ("int4", True)]
)
@pytest.mark.parametrize(("out", "width"), [(100, 256), (7, 96), (53, 2080), (24, 6144)])
def test_linear(kind: str, exact: bool, out: int, width: int) -> None:
    weight = make_weight(kind, out, width)
    x = torch.randn(64, width, generator=torch.Generator().manual_seed(2))
    x[3] *= 1e-4
    x[4] = 0
    runner = native.NativeRunner(2, exact)

    def graph(ops: Ops) -> tuple[Value, ...]:
        return (ops.linear(ops.given("x", width), weight),)

    whole = runner.run(graph, rows_of(64), None, {"x": x})[0].clone()
    want = multiplied(x, weight, exact) @ dequantize(weight, None, torch.float64).T
    size = want.abs().amax(-1, keepdim=True).clamp(min=1e-9)
    # int8: inputs are rounded to 11..15 bits of a row; int4: to 8 bits of 16 inputs
    worst = {"int8": 5e-4, "int4": 3e-2}.get(kind, 3e-6) if not exact else 3e-6
    assert ((whole - want).abs() / size).max() < worst
    for count in range(1, 64):
        native.set_threads(1 + count % 2)
        part = runner.run(graph, rows_of(count), None, {"x": x[64 - count :].contiguous()})[0]
        assert torch.equal(part, whole[64 - count :]), count
    native.set_threads(2)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [1, 5, 24, 100])
@pytest.mark.parametrize("exact", [False, True])
def test_linear_of_odd_widths(kind: str, width: int, exact: bool) -> None:
    weight = make_weight(kind, 9, width)
    x = torch.randn(5, width)
    runner = native.NativeRunner(2, exact)
    got = runner.run(lambda ops: (ops.linear(ops.given("x", width), weight),), rows_of(5), None, {"x": x})
    want = multiplied(x, weight, exact) @ weight.data.double().T
    torch.testing.assert_close(got[0].double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("exact", [False, True])
def test_bfloat16_linears_pass_on_what_is_no_number(exact: bool) -> None:
    weight = Weight(torch.ones(40, 34, dtype=torch.bfloat16), "bfloat16")
    x = torch.ones(5, 34)
    x[0, 33], x[1, 0], x[2, 5], x[3, 7] = float("nan"), float("inf"), -float("inf"), 3.4e38
    runner = native.NativeRunner(2, exact)
    got = runner.run(lambda ops: (ops.linear(ops.given("x", 34), weight),), rows_of(5), None, {"x": x})[0]
    assert got[0].isnan().all()
    assert (got[1] == float("inf")).all()
    assert (got[2] == -float("inf")).all()
    assert (got[3] > 3.3e38).all()
    assert (got[4] == 34).all()


OPS: dict[str, Callable[[Ops, Value, Value], Value]] = {
    "add": lambda ops, x, y: ops.add(x, y),
    "mul": lambda ops, x, y: ops.mul(x, y),
    "scale": lambda ops, x, y: ops.scale(x, 0.3),
    "gelu": lambda ops, x, y: ops.gelu(x),
    "gated_gelu": lambda ops, x, y: ops.gated(x, y, "gelu"),
    "gated_silu": lambda ops, x, y: ops.gated(x, y, "silu"),
    "gated_relu": lambda ops, x, y: ops.gated(x, y, "relu"),
    "bias": lambda ops, x, y: ops.linear(x, IDENTITY, BIAS),
    "experts": lambda ops, x, y: ops.moe(x, y, EXPERTS),
    "grouped experts": lambda ops, x, y: ops.moe(x, y, GROUPED),
    "ungrouped experts": lambda ops, x, y: ops.moe(x, y, replace(GROUPED, groups=1, kept_groups=1)),
    "biased experts": lambda ops, x, y: ops.moe(x, y, BIASED),
    "per head": lambda ops, x, y: ops.per_head(x, HEADS),
    "per head, beside": lambda ops, x, y: ops.per_head(ops.columns(x, 16, 64), HEADS[:3], ops.columns(y, 1, 7)),
    "softcap": lambda ops, x, y: ops.softcap(x, 30.0),
    "norm": lambda ops, x, y: ops.rms_norm(x, None, 1e-6),
    "norm of slices": lambda ops, x, y: ops.rms_norm(x, BIAS, 1e-6, 4),
    "layer norm": lambda ops, x, y: ops.layer_norm(x, BIAS, 1e-5),
    "head norm": lambda ops, x, y: ops.rms_norm(x, HEAD_NORM, 1e-6, 4),
    "rotary": lambda ops, x, y: ops.rotary(x, FREQUENCIES, 4),
    "part rotary": lambda ops, x, y: ops.rotary(x, FREQUENCIES[:5], 4, 1.3),
    "growing rotary": lambda ops, x, y: ops.rotary(x, FREQUENCIES[:5], 4, 1.3, GROWTH),
    "columns": lambda ops, x, y: ops.scale(ops.columns(x, 3, 20), 1.0),
    "concat": lambda ops, x, y: ops.concat(x, ops.columns(y, 1, 12)),
    "embed": lambda ops, x, y: ops.embed(ops.tokens(), TABLE, 1.7),
}  # fmt: skip
IDENTITY, BIAS = Weight(torch.eye(64), "float32"), torch.linspace(-3, 3, 64)
EXPERTS = Experts(
    make_weight("float32", 5, 64), tuple(make_weight("float32", 48, 64, e) for e in range(5)),
    tuple(make_weight("float32", 64, 24, e) for e in range(5)), 2, "silu", renormalize=False,
)  # fmt: skip
GROUPED = Experts(
    make_weight("float32", 12, 64), tuple(make_weight("float32", 48, 64, e) for e in range(12)),
    tuple(make_weight("float32", 64, 24, e) for e in range(12)), 3, "silu", expert_scale=torch.full((12,), 2.5),
    choice_bias=torch.linspace(0.1, -0.1, 12), groups=4, kept_groups=2,
)  # fmt: skip
BIASED = replace(
    EXPERTS, activation="clamped", router_bias=torch.linspace(-9, 9, 5), renormalize=True,
    gate_up_bias=torch.linspace(-9, 9, 5 * 48).view(5, 48), down_bias=torch.linspace(-3, 3, 5 * 64).view(5, 64),
)  # fmt: skip
HEADS = tuple(make_weight("float32", 24, 16, h) for h in range(4))
HEAD_NORM = torch.linspace(0.5, 1.5, 16)
FREQUENCIES = torch.cat((torch.logspace(0, -4, 7), torch.zeros(1)))
GROWTH = Growth(torch.tensor([1.0, 1.5, 0.25]), 7)
TABLE = quantize(torch.randn(70000, 32), "int4")


@pytest.mark.parametrize("name", sorted(OPS))
@pytest.mark.parametrize("scale", [0.01, 40.0])
def test_row_op(name: str, scale: float) -> None:
    width = 64
    generator = torch.Generator().manual_seed(4)
    given = {n: torch.randn(64, width, generator=generator) * scale for n in ("x", "y")}
    op = OPS[name]

    def graph(ops: Ops) -> tuple[Value, ...]:
        return (op(ops, ops.given("x", width), ops.given("y", width)),)

    rows, runner = rows_of(64, 65000), native.NativeRunner(2)
    rows = ForwardBatch(rows.tokens - 65000, rows.positions, rows.slots, rows.starts)
    got = runner.run(graph, rows, None, given)[0].clone()
    wide = EagerRunner(torch.float64)
    want = wide.run(graph, rows, None, given)[0]
    if "rotary" in name:  # the angle is rounded to float32 first, as transformers does
        want = EagerRunner().run(graph, rows, None, given)[0].double()
    least = (
        want.abs().max().item() if "expert" in name or "per head" in name or "layer" in name else scale
    )  # sums of products, or of a row, for which a row's size counts
    error = (got.double() - want).abs() / want.abs().clamp(min=least)
    assert error.max() < (
        3e-6 if name == "biased experts" else 1e-6
    )  # shares hang on scores of some hundreds
    few = ForwardBatch(
        rows.tokens[9:14].contiguous(), rows.positions[9:14].contiguous(), rows.slots[:5], [0, 5]
    )
    part = runner.run(graph, few, None, {n: v[9:14].contiguous() for n, v in given.items()})[0]
    assert torch.equal(part, got[9:14])


@pytest.mark.parametrize("rows", [3, 64, 65, 200])
def test_wide_elementwise_rows_are_cut_by_columns_if_they_are_few(rows: int) -> None:
    x = torch.randn(rows, 5003)
    runner = native.NativeRunner(2)
    got = runner.run(
        lambda ops: (ops.softcap(ops.gelu(ops.given("x", 5003)), 5.0),), rows_of(rows), None, {"x": x}
    )
    want = torch.tanh(torch.nn.functional.gelu(x.double(), approximate="tanh") / 5) * 5
    torch.testing.assert_close(got[0].double(), want, rtol=1e-5, atol=1e-6)


def test_many_wide_rows() -> None:
    """As many as would have more parts than can be counted, if each were cut by columns."""
    rows, width = 1100, 65536
    x = torch.ones(rows, width)
    got = native.NativeRunner(2).run(
        lambda ops: (ops.scale(ops.given("x", width), 0.5),), rows_of(rows), None, {"x": x}
    )[0]
    assert bool((got == 0.5).all())


def bad_weights() -> Iterator[tuple[Weight, str]]:
    yield Weight(torch.randn(8, 64)[:, ::2], "float32"), "contiguous"
    yield Weight(torch.randn(8, 32).double(), "float32"), "float64"
    yield Weight(torch.zeros(8, 32, dtype=torch.int8), "int8"), "scales"
    yield Weight(torch.zeros(8, 32, dtype=torch.int8), "int8", torch.ones(7)), "scales"
    yield Weight(torch.randn(8, 32, device="meta"), "float32"), "on meta"


@pytest.mark.parametrize("case", list(bad_weights()), ids=lambda case: case[1])
def test_bad_weights_are_refused(case: tuple[Weight, str]) -> None:
    weight, word = case
    with pytest.raises(UsageError, match=word):
        native.NativeRunner(2).run(
            lambda ops: (ops.linear(ops.given("x", 32), weight),), rows_of(1), None, {"x": torch.zeros(1, 32)}
        )


def test_unaligned_weights_and_inputs_work() -> None:
    raw = torch.randn(8 * 64 + 1)
    weight = Weight(raw[1:].view(8, 64), "float32")
    x = torch.randn(3 * 64 + 1)[1:].view(3, 64)
    runner = native.NativeRunner(2)
    got = runner.run(lambda ops: (ops.linear(ops.given("x", 64), weight),), rows_of(3), None, {"x": x})
    torch.testing.assert_close(got[0], x @ weight.data.T)


def test_inputs_whose_rows_lie_apart_are_read_where_they_are() -> None:
    weight = make_weight("float32", 24, 512)
    far = torch.randn(20, native.apart(512))
    x = far[:, :512]
    assert native.apart(512) > 512
    assert not x.is_contiguous()
    runner = native.NativeRunner(2)

    def graph(ops: Ops) -> tuple[Value, ...]:
        wide = ops.scale(ops.given("x", 512), 0.5)  # a buffer of the plan's own, its rows apart too
        return (ops.linear(wide, weight), wide)

    got, wide = (y.clone() for y in runner.run(graph, rows_of(20), None, {"x": x}))
    want, _ = (y.clone() for y in runner.run(graph, rows_of(20), None, {"x": x.contiguous()}))
    assert torch.equal(got, want)
    assert torch.equal(wide, x * 0.5)
    far[:, :512] = 1.0
    assert torch.equal(runner.run(graph, rows_of(20), None, {"x": x})[1], torch.full((20, 512), 0.5))
    with pytest.raises(UsageError, match="input 'x' must be"):
        runner.run(graph, rows_of(20), None, {"x": far})
    every_other = torch.randn(20, 1024)[:, ::2]
    assert torch.equal(runner.run(graph, rows_of(20), None, {"x": every_other})[1], every_other * 0.5)


def test_threads_out_of_range() -> None:
    for threads in (0, -1, 100000):
        with pytest.raises(UsageError, match="threads="):
            native.set_threads(threads)


def routed(
    scores: torch.Tensor, bias: torch.Tensor, groups: int, kept: int, top_k: int = 2
) -> list[set[int]]:
    """The experts that the rows of `scores` [N, E] get."""
    count = scores.shape[1]
    up, down = make_weight("float32", 2, count + 1), make_weight("float32", count, 1)
    router = Weight(torch.eye(count), "float32")
    one = Experts(router, (up,) * count, (down,) * count, top_k, "silu")
    one = replace(one, choice_bias=bias, groups=groups, kept_groups=kept)
    names = torch.full((len(scores), count + 1), 1.0)
    given = {"scores": scores, "names": names}

    def graph(ops: Ops) -> tuple[Value, ...]:
        return (ops.moe(ops.given("scores", count), ops.given("names", count + 1), one),)

    runner = native.NativeRunner(2)
    runner.run(graph, rows_of(len(scores)), None, given)
    route = next(
        n for step in runner._plans[graph].steps for n in step if n.code is native.Code.ROUTE
    ).outputs[0]
    chosen = runner._plans[graph]._tensors[route][: len(scores), :top_k]
    return [set(map(int, row)) for row in chosen.tolist()]


def test_experts_are_chosen_by_group_and_bias_the_lowest_first_on_ties() -> None:
    none, scores = torch.zeros(8), torch.tensor([[9.0, -9, -9, -9, 2, 2, 1, 1], [0.0] * 8])
    assert routed(scores, none, 1, 1) == [{0, 4}, {0, 1}]
    assert routed(scores, none, 4, 1) == [{4, 5}, {0, 1}], "two good ones beat one that is best"
    assert routed(scores, torch.tensor([0.0, 0, 0, 0, 0, 0, 2, 2]), 4, 1) == [{6, 7}, {6, 7}]
    assert routed(scores, torch.tensor([0.0, 0, 0, 0, 0, 0, 2, 0]), 1, 1) == [{0, 6}, {0, 6}]
    assert routed(scores * float("nan"), none, 4, 2) == [{0, 1}, {0, 1}]
