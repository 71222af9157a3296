"""The worker: order, limits, failures that touch one request only, draining."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from paceline.core import Delta, SamplingParams
from paceline.engine.worker import DeadlinePassed, Job, NotReady, QueueFull, Worker
from paceline.errors import EngineLost, LoadError, RequestFailed
from server.fake_engine import FakeEngine, make_tokenizer


class Sink:
    def __init__(self) -> None:
        self.items: list[Delta | Exception] = []
        self.done = threading.Event()

    def __call__(self, item: Delta | Exception) -> None:
        self.items.append(item)
        if isinstance(item, Exception) or item.finish_reason:
            self.done.set()

    @property
    def text(self) -> str:
        return "".join(item.text for item in self.items if isinstance(item, Delta))


def job(name: str, sink: Sink, deadline: float | None = None, **params: object) -> Job:
    return Job(name, [2, 30, 40], SamplingParams(max_tokens=50, seed=5, **params), sink, "", deadline)  # type: ignore[arg-type]


@contextmanager
def working(engine: FakeEngine, **options: int) -> Iterator[Worker]:
    worker = Worker(lambda: engine, **options)
    worker.start()
    wait(lambda: worker.state == "ready")
    yield worker
    worker.close()
    assert worker.join(10)


def wait(check: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not check():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.002)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(make_tokenizer())


def test_requests_are_answered_and_counted(engine: FakeEngine) -> None:
    with working(engine) as worker:
        sinks = [Sink() for _ in range(5)]
        for i, sink in enumerate(sinks):
            worker.submit(job(f"r{i}", sink))
        for sink in sinks:
            assert sink.done.wait(10)
        assert len({sink.text for sink in sinks}) == 1
        wait(lambda: worker.load().texts == 0)
        assert worker.counters.finished == 5


def test_the_queue_is_bounded_by_texts(engine: FakeEngine) -> None:
    engine.delay = 0.01
    with working(engine, max_texts=3) as worker:
        worker.submit(job("a", Sink(), n=2))
        worker.submit(job("b", Sink()))
        with pytest.raises(QueueFull):
            worker.submit(job("c", Sink()))
        worker.cancel("a")
        wait(lambda: worker.load().texts == 1)
        worker.submit(job("d", Sink(), n=2))


def test_cancel_frees_within_two_steps_at_any_phase(engine: FakeEngine) -> None:
    engine.delay = 0.005
    with working(engine) as worker:
        for pause in (0.0, 0.003, 0.012, 0.03):
            sink = Sink()
            worker.submit(job("a", sink))
            time.sleep(pause)
            steps = worker.counters.steps
            worker.cancel("a")
            wait(lambda: not engine.running and worker.load().texts == 0)
            assert worker.counters.steps - steps <= 2
            seen = len(sink.items)
            time.sleep(0.02)
            assert len(sink.items) <= seen + 1


def test_a_failing_step_is_tried_again(engine: FakeEngine) -> None:
    with working(engine) as worker:
        engine.fail = [RuntimeError("once")]
        sink, plain = Sink(), Sink()
        worker.submit(job("a", sink))
        assert sink.done.wait(10)
        worker.submit(job("b", plain))
        assert plain.done.wait(10)
        assert sink.text == plain.text != ""
        assert worker.counters.step_errors == 1


def test_an_engine_that_has_lost_a_process_is_not_tried_again(engine: FakeEngine) -> None:
    with working(engine) as worker:
        engine.fail = [EngineLost("rank 1 of 2 has ended")]
        sink = Sink()
        worker.submit(job("a", sink))
        assert sink.done.wait(10)
        assert isinstance(sink.items[-1], RequestFailed)
        wait(lambda: worker.state == "failed")
        assert isinstance(worker.error, EngineLost)


def test_a_step_that_keeps_failing_costs_the_newest_request_only(engine: FakeEngine) -> None:
    engine.delay = 0.01
    with working(engine) as worker:
        old, new = Sink(), Sink()
        worker.submit(job("old", old))
        worker.submit(job("new", new))
        wait(lambda: bool(old.items) and bool(new.items))
        engine.fail = [RuntimeError("out of memory")] * 2
        assert new.done.wait(10)
        assert isinstance(new.items[-1], RequestFailed)
        assert old.done.wait(10)
        assert isinstance(old.items[-1], Delta)
        assert worker.state == "ready"


class Broken:
    def __init__(self, after: int) -> None:
        self.after = after

    def masks(self, draft: object) -> list[None]:
        if self.after == 0:
            raise RequestFailed("the grammar became too complex")
        return [None]

    def commit(self, tokens: list[int]) -> None:
        self.after = max(0, self.after - len(tokens))


@pytest.mark.parametrize("after", [0, 3, 20])
def test_a_constraint_that_fails_ends_its_own_request_only(engine: FakeEngine, after: int) -> None:
    with working(engine) as worker:
        good, bad = Sink(), Sink()
        worker.submit(job("good", good))
        worker.submit(job("bad", bad, constraint=lambda: Broken(after)))
        assert bad.done.wait(10)
        assert isinstance(bad.items[-1], RequestFailed)
        assert good.done.wait(10)
        assert isinstance(good.items[-1], Delta)
        assert worker.counters.step_errors == 0


def test_deadlines(engine: FakeEngine) -> None:
    engine.delay = 0.01
    with working(engine) as worker:
        late, fine = Sink(), Sink()
        worker.submit(job("late", late, time.monotonic() + 0.03))
        worker.submit(job("fine", fine))
        assert late.done.wait(10)
        last = late.items[-1]
        assert isinstance(last, Delta)
        assert last.finish_reason == "length"
        assert fine.done.wait(10)
        assert isinstance(fine.items[-1], Delta)


def test_a_request_of_which_nothing_is_written_at_its_deadline_fails(engine: FakeEngine) -> None:
    with working(engine) as worker:
        late = Sink()
        worker.submit(job("late", late, time.monotonic() - 1))
        assert late.done.wait(10)
        assert isinstance(late.items[-1], DeadlinePassed)


def test_a_request_that_comes_while_the_others_are_looked_at_ends_nothing(engine: FakeEngine) -> None:
    """It used to end the worker: "dictionary changed size during iteration"."""
    late, came = Sink(), threading.Event()

    class Visited(dict[str, object]):
        def values(self) -> Iterator[object]:  # type: ignore[override]
            for value in super().values():
                if not came.is_set():
                    came.set()
                    guest = threading.Thread(target=worker.submit, args=[job("late", late)])
                    guest.start()
                    guest.join(0.2)  # it waits if it must
                yield value

    with working(engine) as worker:
        worker._open = Visited()  # type: ignore[assignment]
        first = Sink()
        worker.submit(job("first", first))
        assert first.done.wait(10)
        assert late.done.wait(10)
        assert worker.state == "ready"
        assert late.text == first.text


def test_draining_finishes_what_is_open_and_takes_nothing_new(engine: FakeEngine) -> None:
    engine.delay = 0.005
    worker = Worker(lambda: engine)
    worker.start()
    wait(lambda: worker.state == "ready")
    sink = Sink()
    worker.submit(job("a", sink))
    worker.drain()
    with pytest.raises(NotReady, match="draining"):
        worker.submit(job("b", Sink()))
    assert sink.done.wait(10)
    assert isinstance(sink.items[-1], Delta)
    assert worker.join(10)
    assert worker.state == "closed"


def test_a_model_that_cannot_be_loaded() -> None:
    def load() -> FakeEngine:
        raise LoadError("no such folder")

    worker = Worker(load)
    with pytest.raises(NotReady, match="loading"):
        worker.submit(job("a", Sink()))
    worker.start()
    assert worker.join(10)
    assert worker.state == "failed"
    assert isinstance(worker.error, LoadError)


def test_lost_tokens_are_an_error_not_a_shorter_text(engine: FakeEngine) -> None:
    step = engine.step
    engine.step = lambda: [d for d in step() if d.finish_reason]  # type: ignore[method-assign]
    with working(engine) as worker:
        sink = Sink()
        worker.submit(job("a", sink))
        assert sink.done.wait(10)
        assert isinstance(sink.items[-1], RequestFailed)
