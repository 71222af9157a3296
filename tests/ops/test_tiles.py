"""Weights in tiles: packed once, let go as they were loaded, and clusters of any size."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from checkpoints import build_target
from paceline.core import ForwardBatch
from paceline.errors import UsageError
from paceline.kv.cache import KVCache
from paceline.memory import Loaded
from paceline.models.families.gemma4.target import GemmaTarget
from paceline.models.registry import load_target
from paceline.ops import native, tiles
from paceline.ops.base import Ops, Value, Weight
from paceline.ops.quantize import quantize
from paceline.ops.reference import EagerRunner

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.why_not()))
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def logits(target: GemmaTarget) -> torch.Tensor:
    pages = dict.fromkeys(target.layout.kinds, 16)
    cache = KVCache(target.layout, pages, max_sequences=1, max_tokens=64, dtype=torch.float32)
    cache.open(1, TOKENS, share=False)
    with cache.tail([(1, TOKENS)]) as tail:
        return target.logits(target.forward(tail.rows(), cache)).clone()


def test_prepared_weights_are_let_go_and_the_table_stays(tmp_path: Path) -> None:
    build_target("e2b", tmp_path)
    want = logits(load_target(tmp_path, runner=native.NativeRunner(2)))
    target = load_target(tmp_path, runner=native.NativeRunner(2))
    assert target.head is target.embedding  # tied: read by rows and in tiles
    size = target.layers[0].gate.nbytes
    target.runner.prepare([target.hidden_graph, target.logits_graph])
    assert torch.equal(logits(target), want)
    assert target.embedding.data.device.type == "cpu"
    assert target.layers[0].gate.data.is_meta
    assert target.layers[0].gate.nbytes == size
    target.runner.prepare([target.hidden_graph, target.logits_graph])  # once more: nothing to do
    assert torch.equal(logits(target), want)


def test_a_weight_that_was_let_go_is_read_by_other_graphs_of_its_runner_only() -> None:
    weight = quantize(torch.randn(40, 64), "int4")
    runner = native.NativeRunner(2, exact=True)

    def one(ops: Ops) -> tuple[Value, ...]:
        return (ops.linear(ops.given("x", 64), weight),)

    def other(ops: Ops) -> tuple[Value, ...]:
        return (ops.linear(ops.given("x", 64), weight),)

    x, rows = (
        torch.randn(1, 64),
        ForwardBatch(torch.zeros(1).long(), torch.zeros(1).int(), torch.zeros(1).int(), [0, 1]),
    )
    want = EagerRunner().run(one, rows, None, {"x": x})[0]
    runner.prepare([one])
    torch.testing.assert_close(runner.run(one, rows, None, {"x": x})[0], want, rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(runner.run(other, rows, None, {"x": x})[0], want, rtol=1e-3, atol=1e-2)
    with pytest.raises(UsageError, match="meta"):
        native.NativeRunner(2).run(other, rows, None, {"x": x})


@pytest.mark.parametrize("size", [1, 5, 16, 37])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])
def test_clusters_of_any_size(size: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(size)
    clusters, width, top = 6, 32, 3
    matrix = torch.randn(clusters * size, width, generator=generator)
    head = (
        quantize(matrix, kind) if kind in ("int8", "int4") else Weight(matrix.to(getattr(torch, kind)), kind)
    )  # type: ignore[arg-type]
    centroids = Weight(torch.randn(clusters, width, generator=generator), "float32")
    ordering = torch.randperm(clusters * size, generator=generator)

    def graph(ops: Ops) -> tuple[Value, ...]:
        return ops.centroid_logits(ops.given("x", width), centroids, ordering, head, top)

    x = torch.randn(7, width, generator=generator).bfloat16().float()  # nothing is lost by rounding it
    some = torch.zeros(7, dtype=torch.int32)
    rows = ForwardBatch(some.long(), some, some, [0, 7])
    ids, got = native.NativeRunner(2, exact=kind == "int4").run(graph, rows, None, {"x": x})
    wanted, want = EagerRunner().run(graph, rows, None, {"x": x})
    assert torch.equal(ids, wanted)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=2e-2 if kind == "int8" else 1e-4)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])
def test_bits_do_not_depend_on_where_weights_are_read_from(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a cache few rows take several tiles at once, from memory one: that is decided by what is loaded."""
    matrix = torch.randn(200, 96, generator=torch.Generator().manual_seed(5))
    weight = (
        quantize(matrix, kind) if kind in ("int8", "int4") else Weight(matrix.to(getattr(torch, kind)), kind)
    )  # type: ignore[arg-type]

    def graph(ops: Ops) -> tuple[Value, ...]:
        return (ops.linear(ops.given("x", 96), weight),)

    x, some = torch.randn(4, 96), torch.zeros(4, dtype=torch.int32)
    out = {}
    for size in (0, 1 << 40):
        monkeypatch.setattr(tiles, "last_level_cache", lambda size=size: size)
        runner = native.NativeRunner(2)
        for n in range(1, 5):
            rows = ForwardBatch(some[:n].long(), some[:n], some[:n], [0, n])
            out[size, n] = runner.run(graph, rows, None, {"x": x[:n].contiguous()})[0].clone()
        assert native._extension().get_weights_in_cache() == (size > 0)
    for n in range(1, 5):
        assert torch.equal(out[0, n], out[1 << 40, n])
        assert torch.equal(out[0, n], out[0, 4][:n])


def test_rows_make_tensors_only_when_asked() -> None:
    made = []

    def make(
        numbers: tuple[list[int], list[int], list[int]],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        made.append(numbers)
        tokens, positions, slots = map(torch.tensor, numbers)
        return tokens, positions, slots

    rows = ForwardBatch.of(([7, 8], [0, 1], [2, 2]), [0, 2], make)
    assert rows.count == 2
    assert not made
    assert rows.positions.tolist() == [0, 1]
    assert rows.slots.tolist() == [2, 2]
    assert len(made) == 1
    assert rows.numbers is None  # from here on only the tensors count


def test_tiles_that_are_let_go_count_no_more() -> None:
    gc.collect()
    before = Loaded.total

    def graph(ops: Ops) -> tuple[Value, ...]:
        return (ops.linear(ops.given("x", 64), weight),)

    weight, some = Weight(torch.randn(64, 64), "float32"), torch.zeros(1, dtype=torch.int32)
    runner = native.NativeRunner(2)
    runner.run(graph, ForwardBatch(some.long(), some, some, [0, 1]), None, {"x": torch.randn(1, 64)})
    assert Loaded.total >= before + 64 * 64 * 4
    del runner
    gc.collect()
    assert Loaded.total == before
