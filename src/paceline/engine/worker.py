"""The one thread that touches the engine: requests go in from any thread, deltas come out by their sinks.

States: loading -> ready -> draining -> closed, or failed when the engine cannot be loaded or cannot go on.
A sink is called on the worker's thread and must neither block nor raise; an exception is the last it gets.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from paceline.core import Constraint, Delta, SamplingParams, Stats
from paceline.errors import CapacityError, EngineLost, PacelineError, RequestFailed

if TYPE_CHECKING:
    import numpy as np

State = Literal["loading", "ready", "draining", "closed", "failed"]
Sink = Callable[[Delta | Exception], None]
log = logging.getLogger(__name__)


class StepEngine(Protocol):
    """What the worker needs of an engine; none of it is safe to call from two threads."""

    def add(
        self, request_id: str, prompt_ids: list[int], params: SamplingParams, salt: str = "",
        written: Mapping[int, list[int]] | None = None,
    ) -> None: ...  # fmt: skip

    def cancel(self, request_id: str) -> None: ...

    def cut_off(
        self, request_id: str
    ) -> list[Delta]: ...  # as Engine has it; [] where only `cancel` is possible

    def step(self) -> list[Delta]: ...

    def watch(self) -> None: ...  # raises EngineLost if it could not step any more

    def close(self) -> None: ...  # no step follows

    @property
    def has_work(self) -> bool: ...

    @property
    def info(self) -> Mapping[str, Any]: ...


class DeadlinePassed(RequestFailed):
    """The request ran into its time limit."""


class NotReady(PacelineError):
    """The worker is loading, draining, closed or failed."""


class QueueFull(CapacityError):
    """As many texts are waiting or running as are allowed."""


@dataclass(frozen=True, slots=True)
class Job:
    id: str  # unique among the open ones
    prompt_ids: list[int]
    params: SamplingParams
    sink: Sink
    salt: str = ""
    deadline: float | None = None  # time.monotonic() seconds
    written: Mapping[int, list[int]] | None = None  # only these texts, after tokens that another engine wrote


@dataclass(slots=True)
class _Open:
    job: Job
    left: int  # texts still in the making
    order: int
    started: bool = False
    tokens: dict[int, int] = field(default_factory=dict)  # text -> tokens delivered
    ended: set[int] = field(default_factory=set)  # texts that were delivered whole
    broken: Exception | None = None  # what its constraint raised


@dataclass(slots=True)
class Counters:
    """What the worker has seen since the start; read from other threads, written by the worker only."""

    submitted: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    steps: int = 0
    step_errors: int = 0


@dataclass(slots=True)
class Load:
    """How full the worker is."""

    waiting: int  # requests without a first token
    running: int  # requests that have one
    texts: int  # the texts of both, n per request


@dataclass(slots=True)
class _Guarded:
    """A constraint whose failure ends its own request, not the step that all requests share."""

    inner: Constraint
    entry: _Open

    def masks(self, draft: Seq[int]) -> list[np.ndarray | None]:
        try:
            return self.inner.masks(draft)
        except Exception as error:  # noqa: BLE001  it is reported to the request
            self.entry.broken = error
            return [None] * (len(draft) + 1)

    def commit(self, tokens: Seq[int]) -> None:
        try:
            self.inner.commit(tokens)
        except Exception as error:  # noqa: BLE001  it is reported to the request
            self.entry.broken = error


class Worker:
    def __init__(self, load: Callable[[], StepEngine], *, max_texts: int = 128) -> None:
        """`load` builds the engine on the worker's thread; `max_texts`: how many may wait and run in all."""
        self.state: State = "loading"
        self.error: Exception | None = None
        self.counters = Counters()
        self.info: Mapping[str, Any] = {}
        self.max_texts = max_texts
        self._load = load
        self._open: dict[str, _Open] = {}
        self._texts = 0
        self._looked = 0.0
        self._lock = threading.Lock()
        self._commands: queue.SimpleQueue[Job | str | None] = queue.SimpleQueue()  # None: look at the state
        self._thread = threading.Thread(target=self._run, name="paceline-worker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # From any thread

    def submit(self, job: Job) -> None:
        """Hand a request over. Raises NotReady or QueueFull; every later error goes to the job's sink."""
        with self._lock:
            if self.state != "ready":
                raise NotReady(f"the server is {self.state}: try again later")
            if self._texts + job.params.n > self.max_texts:
                raise QueueFull(f"{self._texts} texts are waiting or running, the limit is {self.max_texts}")
            if job.id in self._open:
                raise RequestFailed(f"request id {job.id} is already in use: choose another")
            self.counters.submitted += 1
            self._texts += job.params.n
            left = job.params.n if job.written is None else len(job.written)
            self._open[job.id] = _Open(job, left, self.counters.submitted)
            self._commands.put(job)

    def cancel(self, request_id: str) -> None:
        """Forget a request before the next step; its sink is not called again. Unknown ids are ignored."""
        self._commands.put(request_id)

    def load(self) -> Load:
        with self._lock:
            running = sum(entry.started for entry in self._open.values())
            return Load(len(self._open) - running, running, self._texts)

    def drain(self) -> None:
        """Take no new request, finish the open ones, then close. Returns at once; `join` waits."""
        with self._lock:
            if self.state in ("loading", "ready"):
                self.state = "draining"
        self._commands.put(None)

    def close(self) -> None:
        """Stop after the step that is running; open requests get an error."""
        with self._lock:
            if self.state != "failed":
                self.state = "closed"
        self._commands.put(None)

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the thread to end; False if it has not within `timeout` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # On the worker's thread

    def _run(self) -> None:
        try:
            engine = self._load()
        except Exception as error:  # noqa: BLE001  whatever it was, the server reports it instead of a dead thread
            self._fail(error)
            return
        self.info = engine.info
        with self._lock:
            if self.state == "loading":
                self.state = "ready"
        try:
            self._go(engine)
        except Exception as error:
            log.error("the engine cannot go on", exc_info=None if isinstance(error, EngineLost) else error)
            self._fail(error)
            return
        self._end_all(NotReady("the server is shutting down: try again later"))
        self.state = "closed"

    def _go(self, engine: StepEngine) -> None:
        while self._take(engine):
            self._expire(engine)
            if engine.has_work:
                self._step(engine)
                self._look(engine)
            else:
                engine.watch()
        engine.close()

    def _look(self, engine: StepEngine) -> None:
        """Note what the engine says of itself, twice a second and whenever it falls idle."""
        now = time.monotonic()
        if now - self._looked > 0.5 or not engine.has_work:
            self.info, self._looked = engine.info, now

    def _take(self, engine: StepEngine) -> bool:
        """Apply all commands, waiting for one if there is nothing else to do; False: stop."""
        while True:
            if self.state == "closed" or (self.state == "draining" and not self._open):
                return False
            try:
                command = self._commands.get(block=not engine.has_work, timeout=1.0)
            except queue.Empty:
                return True
            if isinstance(command, Job):
                self._add(engine, command)
            elif command is not None:
                self._forget(engine, command)

    def _add(self, engine: StepEngine, job: Job) -> None:
        entry = self._open.get(job.id)
        if entry is None:
            return
        params, make = job.params, job.params.constraint
        if make is not None:
            params = replace(params, constraint=lambda: _Guarded(make(), entry))
        try:
            engine.add(job.id, job.prompt_ids, params, job.salt, job.written)
        except Exception as error:  # noqa: BLE001  a bad request must not end the others
            self._finish(job.id, error)

    def _forget(self, engine: StepEngine, request_id: str) -> None:
        if self._remove(request_id) is not None:
            self.counters.cancelled += 1
            engine.cancel(request_id)

    def _entries(self) -> list[_Open]:
        """A snapshot of the open requests: others may be submitted meanwhile."""
        with self._lock:
            return list(self._open.values())

    def _expire(self, engine: StepEngine) -> None:
        now = time.monotonic()
        error = DeadlinePassed("the request ran into its time limit: ask for fewer tokens")
        for entry in [e for e in self._entries() if e.job.deadline is not None and e.job.deadline <= now]:
            if entry.started:
                self._cut_off(engine, entry)
            else:
                engine.cancel(entry.job.id)
                self._finish(entry.job.id, error)

    def _cut_off(self, engine: StepEngine, entry: _Open) -> None:
        """End a request at its deadline: its texts finish as they do at max_tokens."""
        name = entry.job.id
        for delta in engine.cut_off(name):
            self._deliver(delta)
        engine.cancel(name)
        for index in sorted({*range(entry.job.params.n)} - entry.ended):
            stats = Stats(emitted=entry.tokens.get(index, 0))
            self._deliver(Delta(name, index, "", [], [], finish_reason="length", stats=stats))

    def _step(self, engine: StepEngine) -> None:
        """One step. What fails was not committed: it is tried again, then the newest request is given up."""
        try:
            deltas = engine.step()
        except EngineLost:
            raise
        except Exception as error:
            self.counters.step_errors += 1
            log.exception("a step failed")
            try:
                deltas = engine.step()
            except Exception as again:  # noqa: BLE001  as above: one request must not end the others
                self._give_up_newest(engine, again)
                deltas = []
                log.warning("first error of the two: %r", error)
        self.counters.steps += 1
        for entry in [e for e in self._entries() if e.broken is not None]:
            assert entry.broken is not None
            engine.cancel(entry.job.id)
            self._finish(entry.job.id, entry.broken)
        for delta in deltas:
            self._deliver(delta)

    def _give_up_newest(self, engine: StepEngine, error: Exception) -> None:
        newest = max(self._entries(), key=lambda entry: entry.order, default=None)
        if newest is None:
            raise RequestFailed(f"the engine fails without any request: {error}") from error
        engine.cancel(newest.job.id)
        self._finish(newest.job.id, RequestFailed(f"the request failed: {type(error).__name__}"))

    def _deliver(self, delta: Delta) -> None:
        entry = self._open.get(delta.request)
        if entry is None:
            return
        entry.started = True
        entry.tokens[delta.index] = entry.tokens.get(delta.index, 0) + len(delta.token_ids)
        if delta.stats is not None and delta.stats.emitted != entry.tokens[delta.index]:
            self._finish(delta.request, RequestFailed("a step failed and tokens were lost: ask again"))
            return
        if delta.finish_reason is not None:
            entry.left -= 1
            entry.ended.add(delta.index)
        if entry.left == 0:
            self.counters.finished += 1
            self._remove(delta.request)
        entry.job.sink(delta)

    def _finish(self, request_id: str, error: Exception) -> None:
        entry = self._remove(request_id)
        if entry is not None:
            self.counters.failed += 1
            entry.job.sink(error)

    def _remove(self, request_id: str) -> _Open | None:
        with self._lock:
            entry = self._open.pop(request_id, None)
            if entry is not None:
                self._texts -= entry.job.params.n
            return entry

    def _end_all(self, error: Exception) -> None:
        for request_id in list(self._open):
            self._finish(request_id, error)

    def _fail(self, error: Exception) -> None:
        self.error = error
        with self._lock:
            self.state = "failed"
        self._end_all(RequestFailed("the engine has stopped: see the server's log"))
