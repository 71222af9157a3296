"""Ingress and replicas as one Ray Serve application, for `serve run`, `serve deploy` and KubeRay's RayService."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ray import serve

from paceline.cluster.config import FleetConfig, sized
from paceline.cluster.fleet import deployment, furnished
from paceline.cluster.worker import RemoteWorker
from paceline.config import EngineConfig
from paceline.core import SamplingParams
from paceline.errors import UsageError
from paceline.server.app import build_app
from paceline.server.metrics import Metrics
from paceline.server.security import Keys
from paceline.server.service import Service
from paceline.server.settings import ServerConfig, check_tables, server_config
from paceline.server.start import served_name, to_stderr


class Ingress:
    """The HTTP application of `paceline serve`. Ray's proxies listen."""

    def __init__(self, replicas: Any, engine: EngineConfig, server: ServerConfig, fleet: FleetConfig) -> None:
        def load() -> Any:
            return furnished(replicas, engine, self._service, fleet)

        worker = RemoteWorker(load, max_texts=server.max_texts)
        self._service = Service(served_name(server, engine.target), server, worker, Metrics(worker))
        worker.start()

    def __serve_build_asgi_app__(self) -> Any:
        server = self._service.config
        write = to_stderr if server.request_log else None
        return build_app(self._service, Keys.read(server.api_key_file), write)

    def check_health(self) -> None:
        worker = self._service.worker
        if worker.state == "failed":
            raise RuntimeError(f"the ingress has failed: {worker.error}")


def build(args: dict[str, Any]) -> Any:
    """The application for `args` with the tables `engine`, `server` and `fleet`, each as `paceline serve` knows it."""
    kinds = {"engine": EngineConfig, "server": ServerConfig, "fleet": FleetConfig, "sampling": SamplingParams}
    tables = check_tables(dict(args), kinds, "args")
    fleet = replace(FleetConfig(**tables[2]), ray_address="auto")  # the one that builds this
    engine = sized(EngineConfig.of(tables[0]), fleet)
    if "host" in tables[1]:
        raise UsageError(
            "args.server.host says nothing here, since Ray's proxies listen: leave it out, and set http_options.host"
        )
    # where they do is not known here, and may be on any network: not without a key unless without_key says so
    server = server_config({"host": "0.0.0.0", "sampling": tables[3]} | tables[1])
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="Ingress",
        ray_actor_options={"num_cpus": 1},
        max_ongoing_requests=server.max_connections,
        graceful_shutdown_timeout_s=server.drain_timeout,
    )
    return ingress.bind(deployment(engine, server, fleet), engine, server, fleet)
