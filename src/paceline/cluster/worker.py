"""The ingress's worker: it hands jobs to replicas and goes on at another one when a replica is lost.

To the server it is the worker of `engine/worker.py`: the same states, limits, time limits and counters. Its thread runs
an event loop with one task for each open job.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any, Protocol

from paceline.cluster.journey import Journey
from paceline.cluster.wire import Hello, Lost, Order, Said, pack
from paceline.core import Delta, SamplingParams, VerifyRule
from paceline.engine.worker import Job, Worker
from paceline.errors import PacelineError, RequestFailed
from paceline.sampling.noise import fresh_seed
from paceline.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)
MOST_MOVES = (
    8  # replicas that may be lost under one request, before the request is suspected to be what kills them
)
WAIT_SECONDS = 0.25  # longer before each move: a replica of the right kind may be about to come back
FORGET_SECONDS = 3600.0  # after which a replica without requests has left the metrics
LOOK_SECONDS = 0.2  # from one look at the time limits to the next


class Refused(Lost):
    """The replica computes otherwise than the one that began the text: it has written nothing of it."""


class Fleet(Protocol):
    """Replicas, however they are reached (cluster/fleet.py)."""

    tokenizer: Tokenizer
    verify: VerifyRule  # of requests that say nothing of it

    def write(self, order: Order) -> AsyncGenerator[Hello | Said, None]:
        """The answers of the replica that takes the order. Raises Lost when it can be reached no more."""
        ...

    def close(self) -> None:
        """On the event loop, once no order is open."""


class Replicas:
    """What the metrics say of the replicas; written on the worker's thread."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()  # (replica, why it was chosen)
        self.tokens: Counter[str] = Counter()
        self.open: Counter[str] = Counter()
        self.gauges: dict[str, dict[str, float]] = {}  # replica -> what it said of itself last
        self.seen: dict[str, float] = {}  # replica -> when it last took a request, time.monotonic()
        self.kinds: set[str] = set()  # ways in which they compute
        self.lost = 0  # replicas under a request
        self.moved = 0  # times that a request went on elsewhere after its first token

    def greet(self, hello: Hello, chosen: str) -> None:
        self.requests[hello.replica, chosen] += 1
        self.open[hello.replica] += 1
        self.gauges[hello.replica] = dict(hello.gauges)
        if self.kinds and hello.kind not in self.kinds:
            log.warning("a request cannot move between these replicas: %s", sorted({hello.kind, *self.kinds}))
        self.kinds.add(hello.kind)
        self.seen[hello.replica] = now = time.monotonic()
        for replica in [r for r, at in self.seen.items() if now - at > FORGET_SECONDS and not self.open[r]]:
            for known in (self.tokens, self.open, self.gauges, self.seen):
                known.pop(replica, None)
            self.requests = Counter({key: n for key, n in self.requests.items() if key[0] != replica})


class _Inbox(queue.SimpleQueue[Job | str | None]):
    """Commands from any thread to an event loop."""

    loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        self._came = asyncio.Event()
        self.loop = asyncio.get_running_loop()

    def put(self, item: Job | str | None, block: bool = True, timeout: float | None = None) -> None:
        super().put(item)
        if self.loop is not None:
            with suppress(RuntimeError):  # the loop is closed: nothing is open any more
                self.loop.call_soon_threadsafe(self._came.set)

    async def take(self, seconds: float) -> list[Job | str | None]:
        """All commands that are there, after waiting for one."""
        if self.empty():
            try:
                await asyncio.wait_for(self._came.wait(), seconds)
            except TimeoutError:
                return []
        self._came.clear()
        return [self.get() for _ in range(self.qsize())]


class _Tasks:
    """The open jobs' tasks, as far as `Worker` knows an engine."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, request_id: str, work: Any) -> None:
        task = self._tasks[request_id] = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(lambda _: self._tasks.pop(request_id, None))

    def cancel(self, request_id: str) -> None:
        if request_id in self._tasks:
            self._tasks[request_id].cancel()

    def cut_off(self, request_id: str) -> list[Delta]:
        """The worker itself ends the texts: what a replica holds back of them is lost."""
        return []

    async def end(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class RemoteWorker(Worker):
    def __init__(self, load: Callable[[], Any], *, max_texts: int = 128) -> None:
        """`load` reaches the fleet, on the worker's thread."""
        super().__init__(load, max_texts=max_texts)
        self.replicas = Replicas()
        self._commands = self._inbox = _Inbox()

    def _go(self, fleet: Any) -> None:
        asyncio.run(self._serve(fleet))

    async def _serve(self, fleet: Fleet) -> None:
        self._inbox.open()
        tasks: Any = _Tasks()
        try:
            await self._work(fleet, tasks)
        finally:
            await tasks.end()
            fleet.close()

    async def _work(self, fleet: Fleet, tasks: Any) -> None:
        while self.state == "ready" or (self.state == "draining" and self._open):
            for command in await self._inbox.take(LOOK_SECONDS):
                if isinstance(command, Job):
                    if command.id in self._open:
                        tasks.start(command.id, self._carry(fleet, command))
                elif command is not None:
                    self._forget(tasks, command)
            self._expire(tasks)

    async def _carry(self, fleet: Fleet, job: Job) -> None:
        """One job, from its first replica to its end; what goes wrong goes to its sink."""
        params = job.params if job.params.seed is not None else replace(job.params, seed=fresh_seed())
        try:
            journey = Journey(params, fleet.tokenizer)
            order = Order(job.id, job.prompt_ids, await asyncio.to_thread(pack, params), job.salt)
            why = ""
            for move in range(MOST_MOVES + 1):
                order = replace(
                    order, id=f"{job.id}/{move}"
                )  # the one that was lost may still know the last id
                try:
                    return await self._visit(fleet, order, job.id, journey)
                except Lost as lost:
                    if journey.ended:  # all was said, only its last message is missing
                        return None
                    why = str(lost)
                    if not isinstance(lost, Refused):
                        self.replicas.lost += 1
                        self.replicas.moved += journey.begun
                    log.warning("a request has to go on elsewhere: %s", why)
                    self._move(order, journey, params, params.verify or fleet.verify)
                await asyncio.sleep(WAIT_SECONDS * move)
            raise RequestFailed(
                f"{MOST_MOVES + 1} replicas did not write this text to its end, ask again; the last one: {why}"
            )
        except PacelineError as error:
            self._finish(job.id, error)
        except Exception as error:
            log.exception("a request failed")
            self._finish(job.id, RequestFailed(f"the request failed: {type(error).__name__}"))

    async def _visit(self, fleet: Fleet, order: Order, request_id: str, journey: Journey) -> None:
        """One replica's part of a job. Raises Lost, and what the replica says has failed."""
        replica = ""
        broken: type[Lost] = Lost
        try:
            async with aclosing(fleet.write(order)) as answers:
                async for answer in answers:
                    if isinstance(answer, Hello):
                        replica = answer.replica
                        self.replicas.greet(answer, order.chosen)
                        journey.meet(answer.kind)
                        broken = Lost if order.like in (None, answer.kind) else Refused
                        continue
                    for delta in answer.deltas:
                        delta.request = request_id
                        items = journey.take(delta)
                        if items is not None:
                            self.replicas.tokens[replica] += len(items.token_ids)
                            self._deliver(items)
                    if answer.error is not None:
                        raise answer.error
                    if answer.gone:
                        raise broken(answer.gone)
            if not journey.ended:
                raise Lost("its answer ended early")
        finally:
            order.avoid |= {replica}
            if replica:
                self.replicas.open[replica] -= 1

    def _move(self, order: Order, journey: Journey, params: SamplingParams, rule: VerifyRule) -> None:
        """The replica is lost: what the next one is sent. Raises RequestFailed if none can go on."""
        if journey.begun and rule != "match" and params.temperature > 0:
            raise RequestFailed(
                f"the replica that wrote this text was lost, and with verify={rule} none can go on with it: "
                "ask again, or use match"
            )
        order.written, order.like = journey.move()
