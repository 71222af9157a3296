"""What replicas send to an ingress: one message a step for all texts, over a real connection, without Ray's processes."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install paceline[ray]")

from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError

from paceline.cluster import fleet as fleets
from paceline.cluster import stream as streams
from paceline.cluster.fleet import RayFleet
from paceline.cluster.stream import Receiver, Sender, Visit
from paceline.cluster.wire import Hello, Lost, Order, Said
from paceline.core import Delta
from paceline.engine.worker import NotReady
from paceline.errors import RequestFailed

NEVER = 3600.0  # seconds: whoever waits for this to pass runs into the limit of `within`
ORDERS = ("a", "b", "c")


def said(name: str, token: int, last: bool = False) -> Delta:
    return Delta(name, 0, "x", [token], ["target"], finish_reason="length" if last else None)


def answer(items: list[Any]) -> Said:
    error = next((item for item in items if isinstance(item, Exception)), None)
    return Said([item for item in items if isinstance(item, Delta)], error, last=error is not None)


@dataclass
class Machine:
    """A replica without Ray and without an engine, and the fleet that reaches it."""

    interval: float = 0.0
    visits: dict[str, Visit] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)  # orders that the replica is not at any more
    sent: list[list[str]] = field(default_factory=list)  # the orders of each message

    def __post_init__(self) -> None:
        self.receiver = Receiver("127.0.0.1")
        self.fleet = RayFleet(
            SimpleNamespace(options=lambda method_name: SimpleNamespace(remote=self.remote)),
            None,
            "match",
            self.receiver,
        )  # type: ignore[arg-type]
        self.sender = Sender(self.interval, answer)

    def remote(self, order: Order) -> Any:
        return asyncio.ensure_future(self.write(order))

    async def write(self, order: Order) -> str:
        assert order.back is not None
        stream = await self.sender.connect(order.back)
        with self.sender.visit(order.id, stream) as visit:
            self.visits[order.id] = visit
            visit.say(Hello("r", "kind"))
            try:
                await visit.done.wait()
            finally:
                self.ended.append(order.id)
        return "its stream has ended" if stream.lost else ""

    async def step(self, *deltas: Any, pause: float = 0.01) -> None:
        """What an engine says in a step, on a thread of its own."""

        def run() -> None:
            for name, item in deltas:
                self.visits[name].put(item)
            self.sender.stepped()

        await asyncio.to_thread(run)
        await asyncio.sleep(pause)


async def collect(answers: AsyncGenerator[Hello | Said, None]) -> list[int]:
    ids: list[int] = []
    async with aclosing(answers):
        async for one in answers:
            if isinstance(one, Said):
                if one.gone:
                    raise Lost(one.gone)
                if one.error:
                    raise one.error
                ids += [token for delta in one.deltas for token in delta.token_ids]
    return ids


@asynccontextmanager
async def at_work(
    interval: float, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[tuple[Machine, Any], None]:
    """A machine that has taken three orders, and their answers as tasks."""
    machine = Machine(interval)
    send = streams._Stream.send

    def count(self: Any, message: Any) -> None:
        machine.sent.append([order for order, item in message if isinstance(item, Said)])
        send(self, message)

    monkeypatch.setattr(streams._Stream, "send", count)
    tasks = {
        name: asyncio.ensure_future(collect(machine.fleet.write(Order(name, [1], b"", ""))))
        for name in ORDERS
    }
    while len(machine.visits) < len(ORDERS):
        await asyncio.sleep(0.001)
    machine.sent.clear()
    yield machine, tasks
    for task in tasks.values():
        task.cancel()
    machine.fleet.close()


def within(run: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(run(), 20))  # type: ignore[arg-type]


def test_a_step_of_all_texts_is_one_message_and_steps_within_the_interval_gather(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run(interval: float) -> list[list[str]]:
        async with at_work(interval, monkeypatch) as (machine, tasks):
            for token in range(3):
                await machine.step(*((name, said(name, token)) for name in ORDERS))
            await machine.step(("a", said("a", 3)), ("b", said("b", 3, last=True)))
            assert await tasks["b"] == [0, 1, 2, 3]
            await machine.step(*((name, said(name, 4, last=True)) for name in "ac"))
            assert (await tasks["a"], await tasks["c"]) == ([0, 1, 2, 3, 4], [0, 1, 2, 4])
            assert sorted(machine.ended) == list(ORDERS)
            assert len(machine.sender._streams) == 1
            return machine.sent

    whole = list(ORDERS)
    assert within(partial(run, 0.0)) == [whole, whole, whole, ["a", "b"], ["a", "c"]]
    # the first tokens do not wait, and neither does an end
    assert within(partial(run, NEVER)) == [whole, whole, ["a", "c"]]


def test_errors_and_clients_that_leave_touch_their_own_order_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with at_work(NEVER, monkeypatch) as (machine, tasks):
            await machine.step(*((name, said(name, 0)) for name in ORDERS))
            failed = RequestFailed("the grammar failed")
            await asyncio.to_thread(machine.visits["a"].put, failed)  # between steps
            with pytest.raises(RequestFailed, match="the grammar failed"):
                await tasks["a"]
            tasks["b"].cancel()
            await asyncio.wait([tasks["b"]])
            while "b" not in machine.ended:
                await asyncio.sleep(0.001)
            await machine.step(("b", said("b", 1, last=True)), ("c", said("c", 1, last=True)))
            assert await tasks["c"] == [0, 1]

    within(run)


def test_a_lost_connection_loses_its_orders_at_both_ends_and_the_next_order_connects_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        async with at_work(0.0, monkeypatch) as (machine, tasks):
            await machine.step(("a", said("a", 0, last=True)))
            assert await tasks["a"] == [0]
            machine.visits["b"].stream.writer.transport.abort()
            for name in "bc":
                with pytest.raises(Lost, match="its stream has ended"):
                    await tasks[name]
            assert sorted(machine.ended) == list(ORDERS)
            again = asyncio.ensure_future(collect(machine.fleet.write(Order("b/1", [1], b"", ""))))
            while "b/1" not in machine.visits:
                await asyncio.sleep(0.001)
            await machine.step(("b/1", said("b/1", 7, last=True)))
            assert await again == [7]

    within(run)


class Evil:
    def __reduce__(self) -> Any:
        return os._exit, (1,)


def test_nothing_is_read_from_a_connection_without_the_key() -> None:
    async def run() -> None:
        receiver = Receiver("127.0.0.1")
        address = await receiver.open()
        data = pickle.dumps(Evil())
        for key in (bytes(streams.KEY), address.key[:-1] + bytes([address.key[-1] ^ 1]), b"short"):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(key + len(data).to_bytes(4, "big") + data)
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()
        assert repr(address.key) not in repr(address)
        receiver.close()

    within(run)


@pytest.mark.parametrize(("outcome", "raised", "match"), [
    (ActorDiedError(), Lost, "cannot be reached any more"),
    (RayTaskError("write", "trace", ValueError("no rows")), RayTaskError, "no rows|trace"),
    (DeploymentUnavailableError(SimpleNamespace(name="x", app_name="y")), NotReady, "no replica can be started"),
    (OSError("broken"), OSError, "broken"),
    ("it cannot reach the server", Lost, "cannot reach"),
    ("", Lost, "its last message is missing"),
])  # fmt: skip
def test_what_ray_says_of_a_call_reaches_its_order(
    outcome: Any, raised: type[Exception], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleets, "LAST_SECONDS", 0.01)

    async def call(order: Order) -> str:
        if isinstance(outcome, Exception):
            raise outcome
        return str(outcome)

    async def run() -> None:
        machine = Machine()
        machine.write = call  # type: ignore[method-assign]
        with pytest.raises(raised, match=match):
            await collect(machine.fleet.write(Order("a", [1], b"", "")))
        machine.fleet.close()

    within(run)
