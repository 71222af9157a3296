"""One client request on its way through the worker: its jobs, and their deltas as an async stream."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from paceline.core import Delta, SamplingParams, Stats
from paceline.engine.worker import Job, Sink, Worker
from paceline.errors import RequestFailed
from paceline.server.metrics import Metrics
from paceline.server.usage import failure_of_drafter

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ask:
    """What is wanted of the engine."""

    jobs: list[tuple[list[int], SamplingParams]]  # prompt ids, and how it is sampled
    salt: str
    deadline: float  # time.monotonic() seconds
    buffer: int  # deltas that may wait for a slow reader


@dataclass(slots=True)
class _Channel:
    """From the worker's thread to the event loop; both ends belong to one request."""

    loop: asyncio.AbstractEventLoop
    items: deque[tuple[int, Delta | Exception]] = field(default_factory=deque)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    woken: bool = False  # the loop knows of the items, or is about to

    def put(self, prompt: int, item: Delta | Exception) -> None:
        """On the worker's thread. Waking the loop costs more than the rest: once is enough until it has looked."""
        self.items.append((prompt, item))
        if self.woken:
            return
        self.woken = True
        try:
            self.loop.call_soon_threadsafe(self.ready.set)
        except RuntimeError:  # the loop is closed: nobody listens any more
            self.items.clear()

    async def wait(self) -> None:
        """On the loop: returns when there are items; what comes from now on wakes again."""
        await self.ready.wait()
        self.ready.clear()
        self.woken = False


class Generation:
    """Use as `async with`: leaving it, for whatever reason, frees everything in the engine."""

    def __init__(self, worker: Worker, ask: Ask, metrics: Metrics) -> None:
        self.ask = ask
        self.stats: dict[tuple[int, int], Stats] = {}  # (prompt, text) -> stats of the finished ones
        self._worker, self._metrics = worker, metrics
        self._channel = _Channel(asyncio.get_running_loop())
        self._ids = [uuid.uuid4().hex for _ in ask.jobs]
        self._left = sum(params.n for _, params in ask.jobs)
        self._outcome = "disconnected"

    async def __aenter__(self) -> Generation:
        try:
            for i, (prompt, params) in enumerate(self.ask.jobs):
                sink, ask = self._sink(i), self.ask
                self._worker.submit(Job(self._ids[i], prompt, params, sink, ask.salt, ask.deadline))
                self._metrics.prompt(len(prompt))
        except Exception as error:
            self._outcome = type(error).__name__
            self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._left:
            for request_id in self._ids:
                self._worker.cancel(request_id)
        self._metrics.request_ended(self._outcome)

    def _sink(self, prompt: int) -> Sink:
        def sink(item: Delta | Exception) -> None:
            if len(self._channel.items) < self.ask.buffer or isinstance(item, Exception):
                self._channel.put(prompt, item)
            else:
                self._worker.cancel(self._ids[prompt])
                error = RequestFailed("the answer was read too slowly: read the stream as it comes")
                self._channel.put(prompt, error)

        return sink

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """(prompt, delta) in the order of the engine. Raises what ended the request early."""
        async for batch in self.batches():
            for item in batch:
                yield item

    async def batches(self) -> AsyncIterator[list[tuple[int, Delta]]]:
        """As `deltas`, but what is ready at the same time comes together: it can be sent as one."""
        begin = last = time.monotonic()
        first = True
        while self._left:
            await self._channel.wait()
            batch: list[tuple[int, Delta]] = []
            failure: Exception | None = None
            now = time.monotonic()
            while self._channel.items and failure is None:
                prompt, item = self._channel.items.popleft()
                failure = self._failure(prompt, item)
                if failure is None:
                    assert isinstance(item, Delta)
                    self._metrics.delta(item, now - begin if first else None, now - last)
                    first, last = False, now
                    batch.append((prompt, item))
            if batch:
                yield batch
            if failure is not None:
                raise failure

    def _failure(self, prompt: int, item: Delta | Exception) -> Exception | None:
        """What ends the request early, if this does; else its end is noted."""
        if isinstance(item, Exception):
            self._outcome = type(item).__name__
            return item
        if item.finish_reason is None:
            return None
        if item.finish_reason in ("error", "abort"):
            self._outcome = item.finish_reason
            return RequestFailed(item.error or "the request was aborted")
        self._left -= 1
        if item.stats is not None:
            self.stats[prompt, item.index] = item.stats
            self._metrics.text_finished(item.stats)
            failure = failure_of_drafter(item.stats)
            if failure is not None:
                log.warning("a text was finished without its drafter: %s", failure)
        if not self._left:
            self._outcome = "finished"
        return None
