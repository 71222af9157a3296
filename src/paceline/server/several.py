"""What is asked of several models together: which there are, which are loaded, how the server is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from fastapi import Response
from fastapi.responses import JSONResponse

from paceline import __version__
from paceline.config import EngineConfig
from paceline.engine.worker import Worker
from paceline.server.app import Heads, add_handlers, model_of, routes, shown
from paceline.server.metrics import Metrics
from paceline.server.models import Entry, Models
from paceline.server.ollama_models import model_card
from paceline.server.service import Service
from paceline.server.settings import Served, ServerConfig

MakeWorker = Callable[[Callable[[], EngineConfig], Service], Worker]
_FAR = datetime(9999, 1, 1, tzinfo=UTC)  # when what stays is unloaded


def build_models(
    listed: dict[str, Served], shared: dict[str, Any], config: ServerConfig, make: MakeWorker, needs_key: bool
) -> Models:
    """Models by name. `shared`: options of all their engines; `make`: a worker that loads what a config says."""

    def measure(wanted: EngineConfig) -> Any:
        from paceline import assembly  # torch comes with it: only in a thread of its own

        return assembly.footprint(wanted)

    models = Models(config, shown, measure)
    metrics = Metrics(models)
    for name, served in listed.items():
        sampling = {**config.sampling, **served.sampling}
        own = replace(config, model_name=name, served_model_names=(), sampling=sampling)
        models.add(_entry(own, EngineConfig.of(shared | dict(served.engine)), metrics, make, needs_key))
    _add_front(models, metrics)
    return models


def _entry(
    config: ServerConfig, wanted: EngineConfig, metrics: Metrics, make: MakeWorker, needs_key: bool
) -> Entry:
    assert config.model_name is not None
    unloaded = Worker(_nothing, max_texts=config.max_texts)  # until it is loaded
    service = Service(config.model_name, config, unloaded, metrics, keeps=True)
    keep = config.idle_unload or math.inf
    return Entry(service, wanted, lambda asked: make(asked, service), routes(service, needs_key), keep)


def _nothing() -> Any:
    raise AssertionError("this worker is not started")


def _add_front(models: Models, metrics: Metrics) -> None:
    front = models.front
    add_handlers(front)

    @front.get("/healthz")
    @front.get("/health")
    async def health() -> JSONResponse:
        state = models.state
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    @front.get("/version")
    async def version() -> JSONResponse:
        return JSONResponse({"version": __version__})

    @front.get("/models")
    @front.get("/v1/models")
    async def listed() -> JSONResponse:
        return JSONResponse(
            {
                "object": "list",
                "data": [_card(entry, name) for entry in models.entries for name in entry.service.names],
            }
        )

    @front.get("/v1/models/{model:path}")
    async def one(model: str) -> JSONResponse:
        entry = models.find(model)
        return JSONResponse(_card(entry, model if model in entry.service.names else entry.name))

    @front.get("/metrics")
    async def measured() -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @front.get("/api/tags")
    async def tags() -> JSONResponse:
        return JSONResponse({"models": [_tag(entry) for entry in models.entries]})

    @front.get("/api/ps")
    async def running() -> JSONResponse:
        return JSONResponse({"models": [_running(entry) for entry in models.entries if _is_there(entry)]})

    front.add_middleware(Heads)


def _is_there(entry: Entry) -> bool:
    return entry.loaded and entry.service.loaded is not None


def _card(entry: Entry, name: str) -> dict[str, Any]:
    return model_of(entry.service, name) | {"loaded": _is_there(entry)}


def _tag(entry: Entry) -> dict[str, Any]:
    made = datetime.fromtimestamp(entry.service.created, UTC).isoformat()
    return model_card(entry.service, entry.name) | {"modified_at": made}


def _running(entry: Entry) -> dict[str, Any]:
    room, ends = entry.service.loaded, _FAR
    if entry.keep < 1e9:
        since = 0.0 if entry.users else time.monotonic() - entry.used
        ends = datetime.fromtimestamp(time.time() + entry.keep - since, UTC)
    length = {} if room is None else {"context_length": room.max_len}
    return model_card(entry.service, entry.name) | {"expires_at": ends.isoformat(), "size_vram": 0} | length
