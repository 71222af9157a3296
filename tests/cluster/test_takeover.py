"""A request goes on at another replica with the same text: in one process, with replicas that are lost at random."""

from __future__ import annotations

import asyncio
import queue
import random
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install paceline[ray]")

from ray.exceptions import ActorDiedError, RayTaskError

from paceline.cluster import worker as remote
from paceline.cluster.batch import Pool
from paceline.cluster.journey import AGAIN, Journey
from paceline.cluster.wire import Hello, Lost, Order, Said, unpack
from paceline.cluster.worker import RemoteWorker
from paceline.core import Delta, SamplingParams
from paceline.engine.worker import Job
from paceline.errors import RequestFailed
from testing import VOCAB, Setup, make_engine, prompts, tiny_tokenizer

Text = tuple[str, list[int], str | None, list[float]]


class Alternating:
    """A constraint: even and odd tokens in turn."""

    def __init__(self) -> None:
        self.count = 0

    def masks(self, draft: Any) -> list[np.ndarray | None]:
        return [np.arange(VOCAB) % 2 == (self.count + i) % 2 for i in range(len(draft) + 1)]

    def commit(self, tokens: Any) -> None:
        for token in tokens:
            assert token % 2 == self.count % 2
            self.count += 1


@dataclass
class Flaky:
    """Replicas, of which the first `lost` are lost after a few steps. `bend`: those that take over say something else."""

    lost: int = 0
    kinds: list[str] = field(default_factory=lambda: ["same"])
    bend: bool = False
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    verify: Any = "match"
    late: bool = False  # a replica is lost when all is said, before its answer ends
    visits: int = 0
    orders: list[Order] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
    closed: bool = False

    def __post_init__(self) -> None:
        self.tokenizer = tiny_tokenizer()

    async def write(self, order: Order) -> AsyncGenerator[Hello | Said, None]:
        self.orders.append(replace(order))
        kind = self.kinds[self.visits % len(self.kinds)]
        self.visits += 1
        yield Hello(f"r{self.visits}", kind)
        if order.like not in (None, kind):
            yield Said([], gone="it computes otherwise")
            return
        drafter = self.rng.choice(["none", "mtp", "random"])
        seed = 7 if self.bend and order.written else 0
        engine = make_engine(Setup(seed, drafter=drafter), tokenizer=self.tokenizer)
        engine.add(order.id, order.prompt, unpack(order.params, None), order.salt, order.written)  # type: ignore[arg-type]
        steps = self.rng.randrange(1, 14) if self.visits <= self.lost else 10**6
        while engine.has_work:
            if not steps:
                raise Lost("killed")
            steps -= 1
            yield Said(engine.step())
            await asyncio.sleep(0)
        if self.late:
            raise Lost("killed")

    def close(self) -> None:
        assert not self.closed
        self.closed = True


@contextmanager
def running(fleet: Flaky) -> Iterator[RemoteWorker]:
    worker = RemoteWorker(lambda: fleet)
    worker.start()
    while worker.state == "loading":
        pass
    yield worker
    worker.close()
    assert worker.join(10)
    assert fleet.closed


def texts(worker: RemoteWorker, prompt: list[int], params: SamplingParams, name: str = "a") -> list[Text]:
    """All texts of one request. Raises what went wrong."""
    came: queue.SimpleQueue[Delta | Exception] = queue.SimpleQueue()
    worker.submit(Job(name, prompt, params, came.put))
    out: dict[int, Text] = {i: ("", [], None, []) for i in range(params.n)}
    while any(text[2] is None for text in out.values()):
        item = came.get(timeout=20)
        if isinstance(item, Exception):
            raise item
        text, ids, _, scores = out[item.index]
        scores = scores + [round(one.raw, 6) for one in item.logprobs]
        out[item.index] = (text + item.text, ids + item.token_ids, item.finish_reason, scores)
        if item.stats is not None:
            assert item.stats.emitted == len(out[item.index][1])
            assert item.stats.steps > 0
    return list(out.values())


ASKED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 5},
    "penalties": {"temperature": 0.8, "seed": 6, "repetition_penalty": 1.3, "presence_penalty": 0.4,
                  "frequency_penalty": 0.3},
    "stop string": {"temperature": 1.0, "seed": 8, "stop": ("ab", "cad", "xyz"), "min_tokens": 9},
    "three texts": {"temperature": 1.0, "seed": 9, "n": 3},
    "log probabilities": {"temperature": 1.0, "seed": 10, "logprobs": 2},
    "constraint": {"temperature": 1.0, "seed": 11, "constraint": Alternating},
    "filters": {"temperature": 1.2, "seed": 12, "top_k": 7, "top_p": 0.9, "logit_bias": {4: 2.0}},
}  # fmt: skip


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_a_text_is_the_same_however_often_its_replica_is_lost(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "WAIT_SECONDS", 0)
    params, moved = SamplingParams(max_tokens=40, **asked), 0
    for i, prompt in enumerate(prompts(4)):
        with running(Flaky()) as worker:
            expected = texts(worker, prompt, params)
        with running(Flaky(lost=5, rng=random.Random(i))) as worker:
            assert texts(worker, prompt, params) == expected
            moved += worker.replicas.moved
            assert worker.counters.finished == 1
            assert worker.load().texts == 0
    assert moved > 2


def test_a_request_without_a_seed_keeps_the_one_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "WAIT_SECONDS", 0)
    fleet = Flaky(lost=5)
    with running(fleet) as worker:
        texts(worker, [2, 3], SamplingParams(max_tokens=40, temperature=1.0))
    seeds = {unpack(order.params, None).seed for order in fleet.orders}  # type: ignore[arg-type]
    assert len(fleet.orders) > 2
    assert len(seeds) == 1
    assert None not in seeds


def test_another_text_is_an_error_and_never_passed_on() -> None:
    params, failed = SamplingParams(max_tokens=40, temperature=1.0, seed=3), 0
    for i in range(6):
        with running(Flaky(lost=1, bend=True, rng=random.Random(i))) as worker:
            try:
                texts(worker, [2, 3], params)
            except RequestFailed as error:
                failed += "goes on otherwise" in str(error)
    assert failed > 2


def test_only_a_replica_of_the_same_kind_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "WAIT_SECONDS", 0)
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3)
    with running(Flaky()) as worker:
        expected = texts(worker, [2, 3], params)
    mixed = Flaky(lost=1, kinds=["same", "other", "other", "same"], rng=random.Random(3))
    with running(mixed) as worker:
        assert texts(worker, [2, 3], params) == expected
        assert mixed.visits == 4
        assert mixed.orders[3].avoid == {"r1", "r2", "r3"}
        assert worker.replicas.kinds == {"same", "other"}
        assert (worker.replicas.lost, worker.replicas.moved) == (1, 1)  # who refuses is not lost
    alone = Flaky(lost=1, kinds=["same", *["other"] * 20], rng=random.Random(3))
    with running(alone) as worker, pytest.raises(RequestFailed, match="it computes otherwise"):
        texts(worker, [2, 3], params)


def test_other_verify_rules_cannot_go_on_but_may_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3, verify="reject")
    with (
        running(Flaky(lost=1, rng=random.Random(3))) as worker,
        pytest.raises(RequestFailed, match="verify=reject"),
    ):
        texts(worker, [2, 3], params)


def test_what_kills_every_replica_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "WAIT_SECONDS", 0)
    fleet = Flaky(lost=10**6, rng=random.Random(0))
    with running(fleet) as worker, pytest.raises(RequestFailed, match="9 replicas did not write this text"):
        texts(worker, [2, 3], SamplingParams(max_tokens=400))
    assert fleet.visits == remote.MOST_MOVES + 1


def test_a_cancelled_request_leaves_its_replica() -> None:
    fleet = Flaky()
    with running(fleet) as worker:
        came: queue.SimpleQueue[Delta | Exception] = queue.SimpleQueue()
        worker.submit(Job("a", [2], SamplingParams(max_tokens=400), came.put))
        came.get(timeout=20)
        worker.cancel("a")
        end = time.monotonic() + 10
        while (not worker.counters.cancelled or +worker.replicas.open) and time.monotonic() < end:
            time.sleep(0.01)
        assert worker.counters.cancelled == 1
        assert not +worker.replicas.open
        assert worker.load().texts == 0
        assert texts(worker, [2], SamplingParams(max_tokens=3), "b")


def test_a_replica_that_is_lost_after_the_last_token_is_not_followed() -> None:
    fleet = Flaky(late=True)
    with running(fleet) as worker:
        for name in "ab":
            assert texts(worker, [2], SamplingParams(max_tokens=3), name)
        end = time.monotonic() + 10
        while +worker.replicas.open and time.monotonic() < end:
            time.sleep(0.01)
        assert (fleet.visits, worker.replicas.lost, worker.replicas.moved) == (2, 0, 0)


def test_what_is_said_again_is_compared_and_not_passed_on() -> None:
    def said(ids: list[int]) -> Delta:
        return Delta("x", 0, "".join(chr(97 + i) for i in ids), ids, ["target"] * len(ids))

    journey = Journey(SamplingParams(seed=1), tiny_tokenizer())
    journey.meet("same")
    for ids in ([1, 2, 3], [4, 5], [6]):
        assert journey.take(said(ids)) is not None
    written, kind = journey.move()
    assert kind == "same"
    assert written == {0: [1, 2, 3, 4, 5, 6][:-AGAIN]}
    assert journey.take(said([3, 4])) is None
    rest = journey.take(said([5, 6, 7]))
    assert rest is not None
    assert (rest.token_ids, rest.text) == ([7], "h")
    assert journey.move()[0] == {0: [1, 2, 3]}
    with pytest.raises(RequestFailed, match="ask again"):
        journey.take(said([4, 6]))


def test_a_batch_tells_an_error_in_its_prompts_from_a_lost_process(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = object.__new__(Pool)
    for error, said in (
        (
            RayTaskError("write", "Traceback:\nRuntimeError: no rows", RuntimeError("no rows")),
            "RuntimeError: no rows",
        ),
        (ActorDiedError(), "lost their process 6 times"),
    ):
        monkeypatch.setattr("paceline.cluster.batch.ray.get", Mock(side_effect=error))
        with pytest.raises(RequestFailed, match=said) as caught:
            pool._fetch(None)
        assert ("lost" in str(caught.value)) == isinstance(error, ActorDiedError)
