"""Whether weights are fetched ahead is settled by what takes less time, and changes no bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

from paceline.core import ForwardBatch
from paceline.ops import native, prefetch
from paceline.ops.base import Ops, Value, Weight


@dataclass
class Machine:
    """Stands in for the extension and its clock: a run takes so long with, and one second without."""

    with_it: float
    in_cache: bool = True
    far: bool | None = None
    now: float = 0.0
    runs: list[tuple[bool | None, int]] = field(default_factory=list)
    added: list[prefetch.Matrix] = field(default_factory=list)

    def get_weights_in_cache(self) -> bool:
        return self.in_cache

    def set_fetches_far(self, far: bool) -> None:
        self.far = far

    def packed_bytes(self, kind: int, outputs: int, inputs: int) -> int:
        return outputs * inputs

    def Program(self) -> Machine:
        return self

    def begin_step(self) -> None: ...

    def add(self, code: int, values: object, matrices: list[prefetch.Matrix], *_: object) -> None:
        self.added += matrices

    def bind(self, *buffer: int) -> None: ...

    def run(self, rows: int, *_: int) -> None:
        self.runs.append((self.far, rows))
        self.now += self.with_it if self.far else 1.0


@pytest.fixture
def matrices() -> list[prefetch.Matrix]:
    return [(0, 0, 64, 32, 0), (0, 0, 32, 64, 0)]


@pytest.mark.parametrize(("with_it", "taken"), [(0.9, True), (1.1, False)])
def test_the_faster_way_is_kept(
    with_it: float, taken: bool, matrices: list[prefetch.Matrix], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(with_it)
    monkeypatch.setattr(prefetch.time, "perf_counter", lambda: machine.now)
    prefetch.settle(machine, matrices)  # type: ignore[arg-type]
    assert machine.far is taken
    ways = 2 * len(prefetch.ROWS)
    assert len(machine.runs) == 2 * ways * prefetch.FEWEST[True]  # each was past the time
    assert set(machine.runs) == {(far, rows) for far in (True, False) for rows in prefetch.ROWS}


def test_of_weights_from_memory_only_blocks_are_timed(
    matrices: list[prefetch.Matrix], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(0.9, in_cache=False)
    prefetch.settle(machine, matrices)  # type: ignore[arg-type]
    assert machine.far is None
    assert not machine.runs
    monkeypatch.setattr(prefetch.time, "perf_counter", lambda: machine.now)
    monkeypatch.setattr(prefetch, "last_level_cache", lambda: 2048)
    blocks = [(0, 0, 64, 32, 9)] * 5
    prefetch.settle(machine, [*matrices, *blocks])  # type: ignore[arg-type]
    assert machine.far is True
    assert len(machine.runs) == 2 * len(prefetch.ROWS) * prefetch.FEWEST[False]
    assert machine.added == [(0, 0, 64, 32, 9)] * 2  # twice the cache


@pytest.fixture
def as_before() -> Iterator[None]:
    extension = native._extension()
    before = extension.get_fetches_far(), extension.get_weights_in_cache()
    yield
    extension.set_fetches_far(before[0])
    extension.set_weights_in_cache(before[1])


@pytest.mark.skipif(not native.available(), reason=str(native.why_not()))
@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("in_cache", [True, False])
def test_no_bit_depends_on_it(in_cache: bool) -> None:
    if in_cache:
        weight = Weight(torch.randn(200, 96).bfloat16(), "bfloat16")
    else:
        weight = Weight(torch.randint(0, 64, (200, 60), dtype=torch.uint8), "q4_1")
    x, some = torch.randn(20, 96), torch.zeros(20, dtype=torch.int32)

    def graph(ops: Ops) -> tuple[Value, ...]:
        return (ops.linear(ops.given("x", 96), weight),)

    runner, seen = native.NativeRunner(2), []
    runner.prepare([graph])
    for far in (True, False):
        native._extension().set_weights_in_cache(in_cache)
        native._extension().set_fetches_far(far)
        for n in (1, 2, 5, 20):
            rows = ForwardBatch(some[:n].long(), some[:n], some[:n], [0, n])
            seen.append(runner.run(graph, rows, None, {"x": x[:n].contiguous()})[0].clone())
    for one, other in zip(seen[:4], seen[4:], strict=True):
        assert torch.equal(one, other)


@pytest.mark.skipif(not native.available(), reason=str(native.why_not()))
def test_a_small_drafter_is_not_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[int] = []
    monkeypatch.setattr(native, "settle", lambda extension, matrices: timed.append(len(matrices)))
    runner = native.NativeRunner(threads=1)
    for outputs in (
        64,
        32,
        96,
    ):  # the target, a drafter of half its size, and one that makes it thrice as much
        weight = Weight(torch.zeros(outputs, 32), "float32")
        runner.prepare([lambda ops, weight=weight: (ops.linear(ops.given("x", 32), weight),)])  # type: ignore[misc]
    assert timed == [1, 3]
