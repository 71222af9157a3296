"""One engine as a replica of a Ray Serve deployment. Serve starts it, looks after its health, drains and replaces it."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch
from ray import serve

from paceline import __version__
from paceline.assembly import build_engine
from paceline.cluster.stream import Item, Sender, Visit
from paceline.cluster.wire import Hello, Order, Said, unpack
from paceline.config import EngineConfig
from paceline.core import Delta
from paceline.engine.engine import Engine
from paceline.engine.worker import Job, NotReady, StepEngine, Worker
from paceline.errors import PacelineError, RequestFailed
from paceline.files import fingerprint
from paceline.memory import freeze_objects
from paceline.server.loading import Facts, ServedEngine, furnish
from paceline.server.settings import ServerConfig

log = logging.getLogger(__name__)
UNLIMITED = 2**31  # texts: the ingress counts them


class SteppedWorker(Worker):
    """Says when a step's deltas have all been delivered."""

    def __init__(self, load: Callable[[], StepEngine], stepped: Callable[[], None]) -> None:
        super().__init__(load, max_texts=UNLIMITED)
        self._stepped = stepped

    def _step(self, engine: StepEngine) -> None:
        super()._step(engine)
        self._stepped()


class Replica:
    def __init__(self, config: EngineConfig, server: ServerConfig) -> None:
        """Raises what the engine cannot be loaded with: Serve tries again, and says so."""
        self._interval = server.stream_interval
        engine = build_engine(config, log.info)
        assert engine.tokenizer is not None, "an assembled engine has a tokenizer"
        self._facts = Facts.of(engine)
        self._kind = kind_of(engine, config)
        self._room = furnish(engine.tokenizer, self._facts, server)
        freeze_objects()
        self._name = serve.get_replica_context().replica_tag
        self._sender: Sender | None = None  # made on the event loop, with the first order
        self._worker = SteppedWorker(lambda: ServedEngine(engine), self._stepped)
        self._worker.start()
        while self._worker.state == "loading":
            time.sleep(0.01)

    async def describe(self) -> Facts:
        """What the ingress has to know of the model."""
        return self._facts

    def check_health(self) -> None:
        """Called by Serve every few seconds; it replaces a replica for which this raises."""
        if self._worker.state != "ready":
            raise RuntimeError(f"the engine is {self._worker.state}: {self._worker.error}")
        if self._sender is not None and self._sender.failed:
            raise RuntimeError("what the engine says is not sent any more: see the replica's log")

    async def write(self, order: Order) -> str:
        """Write an order's texts; its ingress has Hello and what they say by the stream. Returns why not, or nothing."""
        assert order.back is not None, "an order says where its answers go"
        if self._sender is None:
            self._sender = Sender(self._interval, self._said)
        try:
            stream = await self._sender.connect(order.back)
        except OSError as error:
            at = f"{order.back.host}:{order.back.port}"
            return f"it cannot reach the server at {at} ({error}): let Ray's machines connect to that one"
        with self._sender.visit(order.id, stream) as visit:
            await self._write(order, visit)
            return "its stream has ended" if stream.lost else ""

    async def _write(self, order: Order, visit: Visit) -> None:
        visit.say(Hello(self._name, self._kind, self._gauges()))
        if order.like not in (None, self._kind):
            why = f"it computes otherwise: {order.like} began the text, this is {self._kind}"
            return visit.say(Said([], gone=why, last=True))
        try:
            params = await asyncio.to_thread(unpack, order.params, self._room.grammars)
            visit.left = params.n if order.written is None else len(order.written)
            job = Job(order.id, order.prompt, params, visit.put, order.salt, written=order.written)
            self._worker.submit(job)
            await visit.done.wait()
        except PacelineError as error:
            visit.say(self._said([error]))
        finally:
            self._worker.cancel(order.id)

    def _stepped(self) -> None:
        if self._sender is not None:
            self._sender.stepped()

    def _said(self, items: list[Item]) -> Said:
        deltas = [item for item in items if isinstance(item, Delta)]
        error = next((item for item in items if isinstance(item, Exception)), None)
        if isinstance(error, NotReady) or (error is not None and self._worker.state == "failed"):
            return Said(deltas, gone=f"its engine is {self._worker.state}", last=True)
        if error is not None and not isinstance(error, PacelineError):
            error = RequestFailed(f"the request failed: {type(error).__name__}")
        return Said(deltas, error, last=error is not None)

    def _gauges(self) -> dict[str, float]:
        """For the ingress's metrics, by the names they have there."""
        info, counters = self._worker.info, self._worker.counters
        cache = {f"cache_use_{kind}": share for kind, share in info.get("cache_use", {}).items()}
        return {
            "engine_steps": counters.steps, "engine_step_errors": counters.step_errors,
            "preemptions": info.get("preemptions", 0), **cache,
        }  # fmt: skip

    def __del__(self) -> None:
        """Called by Serve once no request is open, or when the time for that is over."""
        if hasattr(self, "_worker"):
            self._worker.close()
            self._worker.join(5)
            self._room.grammars.close()


def kind_of(engine: Engine, config: EngineConfig) -> str:
    """What a text depends on beside prompt, parameters and seed, in one line: not on the drafter, nor on threads."""
    info = engine.info
    arithmetic = re.sub(r", \d+ threads", "", str(info["arithmetic"]))
    if "native" not in arithmetic or "switched off" in arithmetic:
        arithmetic += f", torch {torch.__version__}"
    weights = [fingerprint(Path(info["target"])), *([] if info["adapter"] is None else [str(config.adapter)])]
    weights += [str(config.adapters)] if config.adapters else []
    return " · ".join([
        f"paceline {__version__}", *weights, str(config.quantize or info["dtype"]), arithmetic,
        f"cache {info['cache_dtype']}", f"context {engine.max_len}",
    ])  # fmt: skip
