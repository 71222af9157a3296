"""The pool after a fork, stopped within a slice, and on fewer processors than threads: the bits are the same."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch

from paceline.core import ForwardBatch
from paceline.ops import native
from paceline.ops.base import Ops, Value, Weight

pytestmark = pytest.mark.skipif(
    not (native.available() and hasattr(os, "fork")), reason="needs kernels and fork"
)
ROWS, WIDTH, OUT = 9, 384, 1024


@pytest.fixture
def compute() -> Callable[[], torch.Tensor]:
    """Two linears by a runner of three threads, with more slices than those."""
    torch.manual_seed(0)
    up, down = Weight(torch.randn(OUT, WIDTH), "float32"), Weight(torch.randn(WIDTH, OUT), "float32")
    x, runner = torch.randn(ROWS, WIDTH), native.NativeRunner(3)
    at = torch.arange(ROWS, dtype=torch.int32)
    rows = ForwardBatch(at.long(), at, torch.zeros(ROWS, dtype=torch.int32), [0, ROWS])

    def graph(ops: Ops) -> tuple[Value, ...]:
        return (ops.linear(ops.linear(ops.given("x", WIDTH), up), down),)

    return lambda: runner.run(graph, rows, None, {"x": x})[0].clone()


def forked(body: Callable[[], bool], seconds: float = 60.0) -> tuple[int, int]:
    """(number of a child that says whether `body` holds, a pipe on which it says once that it has begun)."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        code = 2
        try:
            signal.alarm(int(seconds))
            os.write(writes, b"x")
            code = 0 if body() else 1
        finally:
            os._exit(code)
    os.close(writes)
    return child, reads


def test_a_fork_after_threads_were_started(compute: Callable[[], torch.Tensor]) -> None:
    """The child has no threads but its own: it computes all slices itself."""
    told = compute()
    child, reads = forked(lambda: all(torch.equal(compute(), told) for _ in range(20)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(reads)
    assert torch.equal(compute(), told), "and the parent goes on"


def test_a_fork_while_another_thread_computes(compute: Callable[[], torch.Tensor]) -> None:
    """The child inherits no lock that nobody gives back. It may start threads of its own."""
    told, over = compute(), threading.Event()
    torch.manual_seed(1)
    wide, x, at = torch.randn(2048, 2048), torch.randn(32, 2048), torch.arange(32, dtype=torch.int32)
    weight, runner = Weight(wide, "float32"), native.NativeRunner(3)
    rows = ForwardBatch(at.long(), at, torch.zeros_like(at), [0, 32])

    def graph(ops: Ops) -> tuple[Value, ...]:
        return (ops.linear(ops.given("x", 2048), weight),)

    def busy() -> None:
        while not over.is_set():
            runner.run(graph, rows, None, {"x": x})

    def body() -> bool:
        once = torch.equal(compute(), told)
        native.set_threads(2)
        return once and torch.equal(compute(), told)

    other = threading.Thread(target=busy)
    other.start()
    codes = []
    try:
        for _ in range(10):
            child, reads = forked(body, 10.0)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            os.close(reads)
            if codes[-1]:
                break
    finally:
        over.set()
        other.join()
    assert codes == [0] * 10
    assert torch.equal(compute(), told)


def test_stopped_in_the_middle(compute: Callable[[], torch.Tensor]) -> None:
    """Whoever is stopped within a slice goes on with it, also after a second: others wait for it."""
    told = compute()

    def body() -> bool:
        native.set_threads(1)
        native.set_threads(3)  # threads of the child's own
        end = time.monotonic() + 1.6
        same = True
        while same and time.monotonic() < end:
            same = torch.equal(compute(), told)
        return same

    child, reads = forked(body)
    os.read(reads, 1)
    for seconds in (0.05, 0.05, 0.05, 0.05, 1.0):
        time.sleep(0.05)
        os.kill(child, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(child, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(reads)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_fewer_processors_than_threads(compute: Callable[[], torch.Tensor]) -> None:
    told, allowed = compute(), os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert native.default_threads() == 1
        assert all(torch.equal(compute(), told) for _ in range(5))
        native.set_threads(native.default_threads())
        assert torch.equal(compute(), told)
    finally:
        os.sched_setaffinity(0, allowed)
        native.set_threads(3)
    assert torch.equal(compute(), told)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_all_threads_on_one_processor(compute: Callable[[], torch.Tensor]) -> None:
    """As `taskset` starts a process: its threads are made under the affinity, and take turns."""
    told = compute()

    def body() -> bool:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        native.set_threads(1)
        native.set_threads(3)
        return native.default_threads() == 1 and all(torch.equal(compute(), told) for _ in range(3))

    child, reads = forked(body)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(reads)
