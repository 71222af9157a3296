"""Several models behind one address: a request's `model` chooses. Each is an application and a worker of its own.

A model is loaded when a request names it, and unloaded when nobody has asked for it for a while, or when another one
needs its memory and it is the one that was not asked for the longest. Who is answered holds a lease until the last byte
is sent, and nothing is unloaded under a lease.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import math
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from fastapi import FastAPI, Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.config import EngineConfig
from paceline.engine.worker import Counters, Load, NotReady, State, Worker
from paceline.errors import PacelineError, sized
from paceline.server.bodies import SHORT, check_counts
from paceline.server.errors import ApiError, as_api_error
from paceline.server.params import refuse
from paceline.server.security import replay
from paceline.server.service import Service
from paceline.server.settings import ServerConfig

if TYPE_CHECKING:
    from paceline.assembly import Footprint

log = logging.getLogger(__name__)
LATEST = ":latest"
_POLL = 0.02  # seconds between two looks at a model that is loading
_CACHE_SHARE = 0.3  # of what is left below `memory`, for K/V
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(ns|us|µs|ms|s|m|h)")
Show = Callable[[Request, ApiError], ASGIApp]


@dataclass(slots=True, eq=False)
class Entry:
    """One model. `make`: a worker that loads it by a config, which is asked for on its thread; it is not started yet."""

    service: Service
    wanted: EngineConfig
    make: Callable[[Callable[[], EngineConfig]], Worker]
    app: FastAPI
    keep: float  # seconds without a request after which it is unloaded, as the last request said that came
    loaded: bool = False  # it is, or it is on its way
    users: int = 0
    used: float = field(default_factory=time.monotonic)
    reserved: int = 0  # bytes that it will take, about
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    timer: asyncio.TimerHandle | None = None

    @property
    def name(self) -> str:
        return self.service.model

    @property
    def size(self) -> int:
        """Bytes that it takes, about."""
        info = self.service.worker.info
        return (
            int(info["files"]["bytes"]) + int(info["cache_bytes"]) if "cache_bytes" in info else self.reserved
        )

    def start(self, config: Callable[[], EngineConfig]) -> None:
        self.loaded = True
        self.service.worker = self.make(config)
        self.service.worker.start()


@dataclass(frozen=True, slots=True)
class Said:
    """What a request says of its model."""

    model: str | None = None
    keep: float | None = None  # seconds


class Models:
    """An ASGI application that hands each request to its model's own; and, as a worker is, what `run` starts and ends."""

    def __init__(
        self, config: ServerConfig, show: Show, measure: Callable[[EngineConfig], Footprint]
    ) -> None:
        """`measure`: what a model takes. `front` answers what is asked of all models; the first model is the one that
        answers who names none.
        """
        self._config, self._show, self._measure = config, show, measure
        self.entries: list[Entry] = []
        self.front = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        self._by_name: dict[str, Entry] = {}
        self._loading = asyncio.Lock()  # one at a time: each looks at what the others have left
        self._draining = self._begun = False
        self._past = Counters()  # of workers that are gone
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, entry: Entry) -> None:
        self.entries.append(entry)
        self._by_name[entry.name] = entry

    # what `run` and the metrics ask of a worker

    @property
    def state(self) -> State:
        first = self.entries[0].service.worker
        self._begun |= first.state == "ready"
        if self._draining:
            states = [entry.service.worker.state for entry in self.entries if entry.loaded]
            return "closed" if all(state in ("closed", "failed") for state in states) else "draining"
        return "ready" if self._begun else first.state

    @property
    def error(self) -> Exception | None:
        return self.entries[0].service.worker.error if self.state == "failed" else None

    @property
    def info(self) -> dict[str, Any]:
        return {}

    @property
    def counters(self) -> Counters:
        made = replace(self._past)
        for entry in self.entries:
            if entry.loaded:
                _add(made, entry.service.worker.counters)
        return made

    def load(self) -> Load:
        loads = [entry.service.worker.load() for entry in self.entries if entry.loaded]
        return Load(
            sum(load.waiting for load in loads),
            sum(load.running for load in loads),
            sum(load.texts for load in loads),
        )

    def start(self) -> None:
        """Load the first model."""
        first = self.entries[0]

        def fitted() -> EngineConfig:
            footprint = self._measure(first.wanted)
            return self._fitted(first, footprint, self._left(footprint))

        first.start(fitted)

    def drain(self) -> None:
        self._draining = True
        for entry in self.entries:
            if entry.loaded:
                entry.service.worker.drain()

    def close(self) -> None:
        self._draining = True
        for entry in self.entries:
            if entry.loaded:
                entry.service.worker.close()

    def join(self, timeout: float | None = None) -> bool:
        ended = [entry.service.worker.join(timeout) for entry in self.entries if entry.loaded]
        return all(ended)

    def most_bytes(self) -> int:
        return max(entry.service.most_bytes() for entry in self.entries)

    # requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive()).get("body", b"") if scope["type"] == "http" else b""
        receive = replay(body, receive)
        try:
            app, asked = await self._app_of(scope, body)
            if asked is None:
                await app(scope, receive, send)
                return
            async with self._lease(asked) as entry:
                await entry.app(scope, receive, send)
        except (ApiError, PacelineError) as error:
            await self._show(Request(scope), as_api_error(error))(scope, receive, send)

    async def _app_of(self, scope: Scope, body: bytes) -> tuple[ASGIApp, Said | None]:
        """The application for a request, and what it says of its model if it needs one."""
        path, first = scope["path"], self.entries[0].app
        if path.startswith("/v1/models/") or path in _paths(self.front):
            return self.front, None
        if scope["method"] == "POST" and path in _paths(first, "POST"):
            return first, await asyncio.to_thread(_said, body) if len(body) > SHORT else _said(body)
        if path == "/props":
            return first, Said((parse_qs(scope["query_string"].decode("latin-1")).get("model") or [None])[0])
        return first, None

    def find(self, name: str | None) -> Entry:
        """The model of a name, the first where none is named. Raises ApiError 404."""
        if not name:
            return self.entries[0]
        entry = (
            self._by_name.get(name)
            or self._by_name.get(name.removesuffix(LATEST))
            or self._with_adapter(name)
        )
        if entry is None:
            served = ", ".join(map(repr, self._by_name))
            message = f"model {name[:80]!r} is not served here: use one of {served}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return entry

    def _with_adapter(self, name: str) -> Entry | None:
        return next(
            (entry for entry in self.entries if any(name == own for own, _ in entry.wanted.adapters)), None
        )

    @asynccontextmanager
    async def _lease(self, asked: Said) -> AsyncIterator[Entry]:
        """A model that is loaded, and stays so meanwhile. Raises ApiError and NotReady."""
        entry = self.find(asked.model)
        entry.users += 1
        entry.keep = (self._config.idle_unload or math.inf) if asked.keep is None else asked.keep
        if entry.timer is not None:
            entry.timer.cancel()
        try:
            async with asyncio.timeout(self._config.request_timeout):
                await self._ready(entry)
        except TimeoutError:
            self._release(entry)
            message = f"{entry.name} is still being loaded: try again later"
            raise ApiError(503, message, code="not_ready", headers={"Retry-After": "30"}) from None
        except BaseException:
            self._release(entry)
            raise
        try:
            yield entry
        finally:
            self._release(entry)

    def _release(self, entry: Entry) -> None:
        entry.users, entry.used = entry.users - 1, time.monotonic()
        if not entry.users and entry.loaded and entry.keep < math.inf and not self._draining:
            loop = asyncio.get_running_loop()
            entry.timer = loop.call_later(entry.keep, self._expire, entry)

    def _expire(self, entry: Entry) -> None:
        task = asyncio.get_running_loop().create_task(self._unload(entry))
        self._tasks.add(task)  # the loop itself keeps none
        task.add_done_callback(self._tasks.discard)

    async def _ready(self, entry: Entry) -> None:
        """Load it if it is not there. Raises ApiError and NotReady."""
        if self._draining:
            raise NotReady("the server is draining: try again later")
        async with entry.lock:
            if not entry.loaded:
                async with self._loading:
                    await self._settled()
                    await self._begin(entry)
                    await self._until_loaded(entry)
                return
        await self._until_loaded(entry)

    async def _settled(self) -> None:
        """Wait for the model that was loaded at start: until then nobody knows what it takes."""
        while self.entries[0].loaded and self.entries[0].service.worker.state == "loading":
            await asyncio.sleep(_POLL)

    async def _until_loaded(self, entry: Entry) -> None:
        worker = entry.service.worker
        while worker.state == "loading":
            await asyncio.sleep(_POLL)
        if worker.state != "failed":
            return
        if entry.service.worker is worker and (entry is not self.entries[0] or self._begun):
            await self._forget(entry)  # the next request tries again
        raise ApiError(
            503, f"{entry.name} cannot be loaded: {worker.error}", param="model", code="model_failed"
        ) from worker.error

    async def _begin(self, entry: Entry) -> None:
        """Start to load, once there is room. Raises ApiError 503."""
        footprint = await asyncio.to_thread(self._measure, entry.wanted)
        need = footprint.weights + footprint.cache
        while (left := self._left(footprint)) < need:
            idle = [
                other for other in self.entries if other.loaded and not other.users and other is not entry
            ]
            if not idle:
                raise self._no_room(entry, need, left)
            await self._unload(min(idle, key=lambda other: other.used))
            footprint = await asyncio.to_thread(self._measure, entry.wanted)
        config = self._fitted(entry, footprint, left)
        log.info("%s is loaded", entry.name)
        entry.start(lambda: config)

    def _fitted(self, entry: Entry, footprint: Footprint, left: int) -> EngineConfig:
        """How a model is loaded, with as much K/V as there is room for below `memory`."""
        entry.reserved = footprint.weights + footprint.cache
        if self._config.memory is None or entry.wanted.cache_memory is not None:
            return entry.wanted
        share = max(footprint.cache, int((left - footprint.weights) * _CACHE_SHARE))
        entry.reserved = footprint.weights + share
        return replace(entry.wanted, cache_memory=share)

    def _left(self, footprint: Footprint) -> int:
        """Bytes that another model may take."""
        if self._config.memory is None:
            return footprint.free
        taken = sum(entry.size for entry in self.entries if entry.loaded)
        return min(footprint.free, int(self._config.memory) - taken)

    def _no_room(self, entry: Entry, need: int, left: int) -> ApiError:
        busy = [other.name for other in self.entries if other.loaded and other is not entry]
        beside = (
            f" beside {', '.join(busy)}, which {'is' if len(busy) == 1 else 'are'} answering" if busy else ""
        )
        todo = "ask again later" if busy else "serve a smaller model, or quantize it"
        if self._config.memory is not None:
            todo += ", or start the server with more --memory"
        return ApiError(
            503, f"{entry.name} needs {sized(need)} and {sized(max(0, left))} are left{beside}: {todo}", param="model",
            code="out_of_memory", headers={"Retry-After": "30"},
        )  # fmt: skip

    async def _unload(self, entry: Entry) -> None:
        """Take a model down, unless somebody has asked for it meanwhile."""
        async with entry.lock:
            if entry.users or not entry.loaded:
                return
            entry.service.worker.drain()
            await asyncio.to_thread(entry.service.worker.join)
            await self._forget(entry)
            log.info("%s is unloaded", entry.name)

    async def _forget(self, entry: Entry) -> None:
        """Let go of what a worker that has ended was made of."""
        room = entry.service.loaded
        _add(self._past, entry.service.worker.counters)
        entry.loaded, entry.reserved, entry.service.loaded = False, 0, None
        entry.service.worker = entry.make(lambda: entry.wanted)  # that has seen nothing
        if room is not None:
            await asyncio.to_thread(room.close)
        del room
        await asyncio.to_thread(_collect)


def _paths(app: FastAPI, method: str = "GET") -> set[str]:
    return {
        route.path for route in app.routes if isinstance(route, Route) and method in (route.methods or ())
    }


def _collect() -> None:
    """Give back what a model was made of; what was frozen when models were loaded may be part of it."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def _add(total: Counters, more: Counters) -> None:
    for name in Counters.__dataclass_fields__:
        setattr(total, name, getattr(total, name) + getattr(more, name))


def _said(body: bytes) -> Said:
    """Of a body that may be anything: what is wrong with it, its route says. Raises ApiError 400."""
    check_counts(body)
    try:
        made = json.loads(body)
    except (ValueError, RecursionError):
        return Said()
    if not isinstance(made, dict):
        return Said()
    model = made.get("model", made.get("name"))
    return Said(model if isinstance(model, str) else None, seconds_of(made.get("keep_alive")))


def seconds_of(value: Any) -> float | None:
    """What `keep_alive` says, as Ollama's clients write it: seconds, infinite for a negative value, None where nothing is
    said. Numbers are seconds, texts as `1h30m`.

    Raises ApiError 400.
    """
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and value == value:
        return math.inf if value < 0 else float(value)
    if isinstance(value, str) and len(value) <= 64:
        text = value.strip()
        sign, text = text[:1] == "-", text.removeprefix("-")
        if re.fullmatch(r"\d{1,9}", text):
            return math.inf if sign else float(text)
        parts = _PART.findall(text)
        if parts and "".join(number + unit for number, unit in parts) == text:
            return math.inf if sign else sum(float(number) * _UNITS[unit] for number, unit in parts)
    raise refuse("keep_alive", "give seconds, or a time such as 5m or 1h30m; -1 keeps the model loaded")
