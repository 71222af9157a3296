"""From options to a running server: everything that can be refused is refused before anything is loaded."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from paceline.config import EngineConfig
from paceline.engine.worker import StepEngine, Worker
from paceline.errors import UsageError
from paceline.server.app import build_app
from paceline.server.metrics import Metrics
from paceline.server.run import bind, run
from paceline.server.security import Gate, Keys
from paceline.server.service import Service
from paceline.server.settings import Served, ServerConfig, read_config, read_models, server_config


class Place(Protocol):
    """Where the engine is: in this process, or in others (cluster/fleet.py)."""

    def worker(self, load: Callable[[], Any], wanted: EngineConfig, config: ServerConfig) -> Worker: ...

    def load(self, wanted: EngineConfig, service: Service, say: Callable[[str], None]) -> Any:
        """What the worker works with; sets `service.loaded`. On the worker's thread."""
        ...

    def close(self) -> None: ...


class Here:
    """The engine is in this process."""

    def worker(self, load: Callable[[], StepEngine], wanted: EngineConfig, config: ServerConfig) -> Worker:
        return Worker(load, max_texts=config.max_texts)

    def load(self, wanted: EngineConfig, service: Service, say: Callable[[str], None]) -> StepEngine:
        # torch comes with them: only on the worker's thread
        from paceline.memory import freeze_objects
        from paceline.server.loading import load

        loaded = load(wanted, service, say)
        freeze_objects()
        return loaded

    def close(self) -> None:
        """What is in this process ends with it."""


def start(
    config_file: str | None, server: dict[str, Any], engine: dict[str, Any], say: Callable[[str], None],
    profile_dir: str | None = None, place: Place | None = None, targets: Sequence[str] = (),
) -> None:  # fmt: skip
    """Serve until told to stop. `server` and `engine` are flags by name, None = not given, and win over the file.

    `profile_dir`: where start-up's measurements are kept if neither says; "none" in either: nowhere. `targets`: several
    models, in place of the one of `engine`.
    """
    place = place or Here()
    from_file: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    if config_file is not None:
        from_file = read_config(config_file)
    sampling = {**from_file[0].get("sampling", {}), **server.get("sampling", {})}
    config = server_config(from_file[0] | _given(server) | {"sampling": sampling})
    shared = {"profile_dir": profile_dir} | from_file[1] | _given(engine)
    keys = Keys.read(config.api_key_file)
    listed = [Served({"target": target}) for target in targets]
    if not listed and config_file is not None and "target" not in _given(engine):
        listed = read_models(config_file)
    if listed or config.idle_unload or config.memory is not None:
        if not isinstance(place, Here):
            raise UsageError(
                "replicas are of one model: give one target, and neither --idle-unload nor --memory"
            )
        _serve_models(listed or [Served({})], shared, config, keys, say)
        return
    wanted = EngineConfig.of(shared)
    listening = bind(config)
    name = served_name(config, wanted.target)

    def load() -> Any:
        loaded = place.load(wanted, service, say)
        say(f"{name} is ready on {address(config, listening)}")
        return loaded

    worker = place.worker(load, wanted, config)
    service = Service(name, config, worker, Metrics(worker))
    try:
        run(build_app(service, keys, to_stderr if config.request_log else None), worker, config, listening)
    finally:
        _leave(config, listening, [service])
        place.close()


def _serve_models(
    listed: Sequence[Served],
    shared: dict[str, Any],
    config: ServerConfig,
    keys: Keys,
    say: Callable[[str], None],
) -> None:
    """Several models, or one that is unloaded."""
    from paceline.server.several import build_models

    place = Here()

    def make(wanted: Callable[[], EngineConfig], service: Service) -> Worker:
        def load() -> StepEngine:
            loaded = place.load(wanted(), service, say)
            say(f"{service.model} is ready on {address(config, listening)}")
            return loaded

        return Worker(load, max_texts=config.max_texts)

    models = build_models(_named(listed, shared, config), shared, config, make, keys.wanted)
    listening = bind(config)
    write = to_stderr if config.request_log else None
    counted = models.entries[0].service.metrics.answered
    app = Gate(models, config, keys, counted, write, models.most_bytes)
    try:
        run(app, models, config, listening)
    finally:
        _leave(config, listening, [entry.service for entry in models.entries])


def _named(listed: Sequence[Served], shared: dict[str, Any], config: ServerConfig) -> dict[str, Served]:
    """The models by the names that clients choose by. Raises UsageError for a name that two have."""
    out: dict[str, Served] = {}
    for served in listed:
        target = EngineConfig.of(shared | dict(served.engine)).target
        name = served.name or (served_name(config, target) if len(listed) == 1 else model_name(target))
        if name in out:
            raise UsageError(
                f"two models are called {name}: give each a name of its own in a file with [[models]]"
            )
        out[name] = served
    return out


def _leave(config: ServerConfig, listening: socket.socket, services: Sequence[Service]) -> None:
    """End what outlives the engines."""
    listening.close()
    if config.uds is not None:
        Path(config.uds).unlink(missing_ok=True)
    for service in services:
        if service.loaded is not None:
            service.loaded.close()


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value is not None}


def served_name(config: ServerConfig, target: str) -> str:
    return config.model_name or next(iter(config.served_model_names), None) or model_name(target)


def model_name(target: str) -> str:
    """The last part of a path or hub id, with nothing in it that a client could not write in a URL."""
    last = target.rstrip("/").rpartition("/")[2]
    return re.sub(r"[^\w.\-]", "-", last) or "model"


def address(config: ServerConfig, listening: socket.socket) -> str:
    """Where the server is found."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    scheme = "http" if config.ssl_certfile is None else "https"
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{scheme}://{host}:{listening.getsockname()[1]}{config.root_path or ''}"
