"""Pairs of bfloat16 in one instruction or by float32 multiply-adds: the same bits. AMX has bits of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from paceline.core import ForwardBatch
from paceline.kv.cache import KVCache
from paceline.kv.layout import LayerKV, Layout
from paceline.ops import native
from paceline.ops.base import Ops, Value, Weight

pytestmark = pytest.mark.skipif(
    not (native.available() and native.bf16_dot()), reason="needs products of bfloat16"
)


@pytest.fixture(autouse=True)
def best_again() -> Iterator[None]:
    yield
    assert native._extension().choose_isa("best")


def both_ways(compute: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    results = []
    for way in ("pairs", "floats"):
        assert native._extension().choose_isa(way)
        assert native._extension().bf16_dot_way() == way
        assert native.isa() == "avx512-bf16"
        results.append(compute())
    return results[0], results[1]


def spread(*shape: int, least: int, most: int) -> torch.Tensor:
    """Random signs and digits, binary exponents from `least` to `most`."""
    digits = 1 + torch.rand(*shape)
    return (
        digits
        * torch.randint(0, 2, shape).mul(2).sub(1)
        * torch.exp2(torch.randint(least, most, shape).float())
    )


@pytest.mark.parametrize("width", [34, 256, 2080, 2081])
@pytest.mark.parametrize("exponents", [(-3, 3), (-80, -65), (-70, -55), (-126, -40), (-140, 126)])
def test_linears(width: int, exponents: tuple[int, int]) -> None:
    torch.manual_seed(width)
    least, most = exponents
    weight = Weight(spread(53, width, least=least, most=most).bfloat16(), "bfloat16")
    x = spread(20, width, least=max(least, -140), most=min(most, 0))
    positions = torch.arange(20, dtype=torch.int32)

    def compute() -> torch.Tensor:
        runner = native.NativeRunner(2)
        slots, out = torch.zeros(20, dtype=torch.int32), []

        def graph(ops: Ops) -> tuple[Value, ...]:
            return (ops.linear(ops.given("x", width), weight),)

        for count in (1, 2, 3, 4, 5, 9, 12, 17, 20):
            rows = ForwardBatch(positions.long()[:count], positions[:count], slots[:count], [0, count])
            out.append(runner.run(graph, rows, None, {"x": x[:count].contiguous()})[0].clone())
        return torch.cat(out)

    once, twice = both_ways(compute)
    assert once.isfinite().all()
    assert torch.equal(once, twice)
    if most == -65:  # every product is subnormal
        assert (x.bfloat16().double() @ weight.data.double().T).count_nonzero() == 20 * 53
        assert once.count_nonzero() == 0


@pytest.mark.parametrize("width", [2, 34, 256, 6177])  # more than two blocks of inputs
@pytest.mark.parametrize("exponents", [(-3, 3), (-80, -65), (-110, 126)])
def test_linears_in_registers(width: int, exponents: tuple[int, int]) -> None:
    """As exact as pairs are, and a row's bits depend on no other row."""
    if not native._extension().choose_isa("registers"):
        pytest.skip("needs AMX")
    assert native.isa() == "avx512-amx-bf16"
    torch.manual_seed(width)
    least, most = exponents
    weight = Weight(spread(96, width, least=least, most=most).bfloat16(), "bfloat16")
    x, runner = spread(70, width, least=max(least, -140), most=min(most, 0)), native.NativeRunner(2)

    def graph(ops: Ops) -> tuple[Value, ...]:
        return (ops.linear(ops.given("x", width), weight),)

    def some(begin: int, end: int) -> torch.Tensor:
        positions = torch.arange(end - begin, dtype=torch.int32)
        rows = ForwardBatch(positions.long(), positions, torch.zeros_like(positions), [0, end - begin])
        return runner.run(graph, rows, None, {"x": x[begin:end].contiguous()})[0].clone()

    whole, exact = some(0, 70), x.bfloat16().double() @ weight.data.double().T
    size = x.bfloat16().double().abs() @ weight.data.double().abs().T
    assert whole.isfinite().all()
    assert ((whole - exact).abs() <= size * 3e-6 + 2.0**-125 * width).all()
    for begin, count in [
        (0, 1),
        (69, 1),
        (3, 2),
        (20, 15),
        (0, 16),
        (7, 17),
        (1, 31),
        (38, 32),
        (2, 33),
        (9, 61),
    ]:
        assert torch.equal(some(begin, begin + count), whole[begin : begin + count]), (begin, count)


@pytest.mark.parametrize("window", [None, 90])
@pytest.mark.parametrize("width", [32, 96, 128])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_attention(window: int | None, width: int, kv_heads: int) -> None:
    torch.manual_seed(width)
    kind = "sliding_attention" if window else "full_attention"
    layout = Layout((LayerKV(kind, kv_heads, width),), {kind: window})
    length, heads, new = 230, 4, 21
    q = torch.randn(new, heads * width) * 0.3
    old = [torch.randn(length, kv_heads * width) for _ in range(2)]

    def store(ops: Ops) -> tuple[Value, ...]:
        k, v = ops.given("k", kv_heads * width), ops.given("v", kv_heads * width)
        ops.store_kv(0, k, v)
        return (ops.scale(k, 1.0),)

    def attend(ops: Ops) -> tuple[Value, ...]:
        return (ops.attention(ops.given("q", heads * width), 0, heads, window, True),)

    def compute() -> torch.Tensor:
        runner = native.NativeRunner(2)
        cache = KVCache(
            layout, dict.fromkeys(layout.kinds, 24), max_sequences=1, max_tokens=256, dtype="packed"
        )
        cache.open(0, [7] * length, share=False)
        with cache.tail([(0, [7] * length)]) as tail:
            every = tail.rows()
            runner.run(store, every, cache, {"k": old[0], "v": old[1]})
            out = []
            for count in (1, 2, 5, 8, 17, new):
                cut = slice(length - count, length)
                rows = ForwardBatch(every.tokens[cut], every.positions[cut], every.slots[cut], [0, count])
                out.append(runner.run(attend, rows, cache, {"q": q[new - count :].contiguous()})[0].clone())
        return torch.cat(out)

    once, twice = both_ways(compute)
    assert once.abs().sum() > 0
    assert torch.equal(once, twice)


def test_a_way_that_does_not_exist_is_refused() -> None:
    assert not native._extension().choose_isa("threes")
