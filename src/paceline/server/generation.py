"""One client request on its way through the worker: its jobs, and their deltas as an async stream."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from paceline.core import Delta, SamplingParams, Stats
from paceline.engine.worker import Job, Sink, Worker
from paceline.errors import RequestFailed
from paceline.server.metrics import Metrics
from paceline.server.predicted import Predicted
from paceline.server.progress import Progress, Watchers
from paceline.server.request_log import Told
from paceline.server.usage import failure_of_drafter
from paceline.soft_tokens import media_of, use_of

log = logging.getLogger(__name__)
Item = Delta | Progress | Exception
T = TypeVar("T")
_CUT_OFF = "the server's time limit for a request ended the answer: ask for fewer tokens, or start it with a longer one"


@dataclass(frozen=True, slots=True)
class Ask:
    """What is wanted of the engine."""

    jobs: list[tuple[list[int], SamplingParams]]  # prompt ids, and how it is sampled
    salt: str
    deadline: float  # time.monotonic() seconds
    buffer: int  # deltas that may wait for a slow reader
    interval: float  # seconds from one batch to the next; an end does not wait for it
    predicted: Predicted | None = None  # counts what the prediction has brought
    told: Told | None = None  # for the request log
    warnings: list[str] = field(
        default_factory=list
    )  # of the answer: a time limit that ended it comes to them
    progress: bool = False  # `Generation.progress` says how far the prompts are read


@dataclass(slots=True)
class Channel(Generic[T]):
    """From the worker's thread to an event loop."""

    loop: asyncio.AbstractEventLoop
    room: int  # items that may gather while the loop rests
    items: deque[T] = field(default_factory=deque)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    awake: bool = False  # the loop will look at the items by itself

    def put(self, item: T, urgent: bool) -> None:
        """On the worker's thread. Waking the loop costs more than the rest: not while it will look by itself, but what
        is urgent need not wait for that."""
        self.items.append(item)
        if self.awake and not urgent and len(self.items) < self.room:
            return
        self.awake = True
        try:
            self.loop.call_soon_threadsafe(self.ready.set)
        except RuntimeError:  # the loop is closed: nobody listens any more
            self.items.clear()

    async def take(self) -> list[T]:
        """On the loop: wait for items, and take them all."""
        while not self.items:
            self.awake = False
            if not self.items:  # none has come before the flag was down
                await self.ready.wait()
            self.ready.clear()
        self.awake = True
        return [self.items.popleft() for _ in range(len(self.items))]

    async def rest(self, seconds: float) -> None:
        """On the loop, after `take`: let items gather, for as long as `put` leaves it in peace."""
        timer = self.loop.call_later(seconds, self.ready.set)
        try:
            await self.ready.wait()
        finally:
            timer.cancel()
        self.ready.clear()


def joined(batch: list[tuple[int, Delta]]) -> list[tuple[int, Delta]]:
    """One delta for each text of the batch, in the order of their first ones; `proposed` is not kept."""
    out: dict[tuple[int, int], Delta] = {}
    for prompt, delta in batch:
        key = prompt, delta.index
        before = out.get(key)
        out[key] = delta if before is None else Delta(
            delta.request, delta.index, before.text + delta.text, before.token_ids + delta.token_ids,
            before.origins + delta.origins, [], before.logprobs + delta.logprobs,
            delta.finish_reason, delta.stats, delta.error,
        )  # fmt: skip
    return [(prompt, delta) for (prompt, _), delta in out.items()]


class Generation:
    """Use as `async with`: leaving it, for whatever reason, frees everything in the engine."""

    def __init__(self, worker: Worker, ask: Ask, metrics: Metrics, watchers: Watchers) -> None:
        self.ask, self._watchers = ask, watchers
        self.progress: list[tuple[int, Progress]] = []  # (prompt, its progress) since the last batch
        self.stats: dict[tuple[int, int], Stats] = {}  # (prompt, text) -> stats of the finished ones
        self._worker, self._metrics = worker, metrics
        self._channel = Channel[tuple[int, Item]](asyncio.get_running_loop(), ask.buffer // 2)
        self._ids = [uuid.uuid4().hex for _ in ask.jobs]
        self._left = sum(params.n for _, params in ask.jobs)
        self._outcome = "disconnected"

    async def __aenter__(self) -> Generation:
        try:
            for i, (prompt, params) in enumerate(self.ask.jobs):
                sink, ask = self._sink(i), self.ask
                if ask.progress:
                    self._watchers.add(self._ids[i], partial(self._put, i))
                self._worker.submit(Job(self._ids[i], prompt, params, sink, ask.salt, ask.deadline))
                self._metrics.prompt(len(prompt))
                self._metrics.media(use_of(media_of(prompt)))
        except Exception as error:
            self._outcome = type(error).__name__
            self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        if self.ask.progress:
            for request_id in self._ids:
                self._watchers.remove(request_id)
        if self._left:
            if self.ask.told is not None:
                self.ask.told.finish[self._outcome] = None
            for request_id in self._ids:
                self._worker.cancel(request_id)
        self._metrics.request_ended(self._outcome)

    def _put(self, prompt: int, item: Item) -> None:
        """On the worker's thread. An end does not wait for the interval."""
        self._channel.put((prompt, item), not isinstance(item, Delta) or item.finish_reason is not None)

    def _sink(self, prompt: int) -> Sink:
        def sink(item: Delta | Exception) -> None:
            if len(self._channel.items) < self.ask.buffer or isinstance(item, Exception):
                self._put(prompt, item)
            else:
                self._worker.cancel(self._ids[prompt])
                error = RequestFailed("the answer was read too slowly: read the stream as it comes")
                self._put(prompt, error)

        return sink

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """(prompt, delta) in the order of the engine. Raises what ended the request early."""
        async for batch in self.batches():
            for item in batch:
                yield item

    async def batches(self) -> AsyncIterator[list[tuple[int, Delta]]]:
        """As `deltas`, but what comes within one interval comes together: it can be sent as one.

        A batch is empty where only `progress` has something new.
        """
        begin = time.monotonic()
        last: dict[tuple[int, int], float] = {}  # when each text had its last batch
        while self._left:
            batch: list[tuple[int, Delta]] = []
            failure: Exception | None = None
            self.progress.clear()
            for prompt, item in await self._channel.take():
                if isinstance(item, Progress):
                    self.progress.append((prompt, item))
                    continue
                failure = self._failure(prompt, item)
                if failure is not None:
                    break
                assert isinstance(item, Delta)
                batch.append((prompt, item))
                if self.ask.told is not None:
                    self.ask.told.delta(item)
                if self.ask.predicted is not None:
                    self.ask.predicted.push((prompt, item.index), item)
            self._observe(batch, begin, last)
            if batch or self.progress:
                yield batch
            if failure is not None:
                raise failure
            if self._left:
                await self._channel.rest(self.ask.interval)

    def _observe(
        self, batch: list[tuple[int, Delta]], begin: float, last: dict[tuple[int, int], float]
    ) -> None:
        now = time.monotonic()
        tokens = Counter[tuple[int, int]]()
        for prompt, delta in batch:
            tokens[prompt, delta.index] += len(delta.token_ids)
        for prompt, delta in batch:
            text = prompt, delta.index
            since = now - last[text] if text in last else None
            self._metrics.delta(delta, None if since is None else since / max(1, tokens[text]))
        if batch and not last:
            self._metrics.first_token(now - begin)
        last.update(dict.fromkeys(tokens, now))

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
        if item.finish_reason == "length" and time.monotonic() >= self.ask.deadline:
            self.ask.warnings[:] = [*dict.fromkeys([*self.ask.warnings, _CUT_OFF])]
        if item.stats is not None:
            self.stats[prompt, item.index] = item.stats
            self._metrics.text_finished(item.stats)
            failure = failure_of_drafter(item.stats)
            if failure is not None:
                log.warning("a text was finished without its drafter: %s", failure)
        if not self._left:
            self._outcome = "finished"
        return None
