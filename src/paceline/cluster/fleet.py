"""Replicas on a Ray cluster, this machine's own or one that is there: joined, deployed, observed until ready, deleted."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError, RequestCancelledError

from paceline.cluster.config import FleetConfig, sized
from paceline.cluster.metrics import ReplicaMetrics
from paceline.cluster.replica import Replica
from paceline.cluster.stream import Box, Receiver
from paceline.cluster.wire import Hello, Lost, Order, Recipes, Said
from paceline.cluster.worker import RemoteWorker
from paceline.config import EngineConfig
from paceline.core import VerifyRule
from paceline.engine.worker import NotReady
from paceline.errors import LoadError, UsageError
from paceline.hub.resolve import resolve
from paceline.server.loading import Facts, furnish
from paceline.server.service import Service
from paceline.server.settings import ServerConfig
from paceline.text.formats.choose import load_tokenizer
from paceline.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)
Say = Callable[[str], None]
ROUTER = "paceline.cluster.router.PrefixRouter"
TRIES = 3  # of a replica to load its model, before the deployment has failed
CLOSING = 30.0  # seconds for the replicas to be taken down, once they are drained
LAST_SECONDS = 5.0  # that a stream may be behind Ray with an order's last message
OBJECT_STORE = 100 * 2**20  # bytes, on a cluster of our own: what crosses is small


def deployment(engine: EngineConfig, server: ServerConfig, fleet: FleetConfig) -> Any:
    """The replicas as a Serve application. `engine` is `sized`."""
    on_gpu = engine.device.startswith("cuda")
    most = fleet.max_replicas or fleet.replicas
    scale: dict[str, Any] = {"num_replicas": fleet.replicas}
    if most > fleet.replicas:
        scale = {
            "autoscaling_config": {
                "min_replicas": fleet.replicas, "max_replicas": most, "target_ongoing_requests": engine.max_batch / 2,
            }
        }  # fmt: skip
    made = serve.deployment(
        Replica,
        name="Replica",
        ray_actor_options={"num_cpus": engine.threads, "num_gpus": int(on_gpu)},
        max_ongoing_requests=engine.max_batch,  # the rest waits at the ingress for whichever is free first
        graceful_shutdown_timeout_s=server.drain_timeout,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=5,
        health_check_timeout_s=30,
        max_constructor_retry_count=TRIES,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        **scale,
    )
    return made.bind(engine, server)


class RayFleet:
    """A handle to the replicas; `worker.Fleet`."""

    info: dict[str, Any] = {}  # noqa: RUF012  what the metrics ask of an engine: replicas have their own

    def __init__(self, handle: Any, tokenizer: Tokenizer, verify: VerifyRule, receiver: Receiver) -> None:
        self.tokenizer, self.verify = tokenizer, verify
        self._write = handle.options(method_name="write")
        self._receiver = receiver
        self._calls: set[asyncio.Task[None]] = set()

    async def write(self, order: Order) -> AsyncGenerator[Hello | Said, None]:
        order.back = await self._receiver.open()
        with self._receiver.box(order.id) as box:
            response = self._write.remote(order)
            call = asyncio.create_task(_outcome(response, box))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
            ended = False
            try:
                while not ended:
                    answer = await box.get()
                    if isinstance(answer, Exception):
                        raise answer
                    ended = isinstance(answer, Said) and answer.last
                    yield answer
            finally:
                if not ended:
                    response.cancel()

    def close(self) -> None:
        self._receiver.close()


async def _outcome(response: Any, box: Box) -> None:
    """What Ray says of an order's call, for as long as its stream has not said the last of it."""
    try:
        why = await response
        if not why:
            await asyncio.sleep(LAST_SECONDS)  # the stream may be behind
        box.put_nowait(Said([], gone=why or "its last message is missing", last=True))
    except DeploymentUnavailableError:
        box.put_nowait(NotReady("no replica can be started: see Ray's log, and try again later"))
    except RayError as error:
        there = isinstance(error, RayTaskError | RequestCancelledError)
        box.put_nowait(error if there else Lost(f"it cannot be reached any more ({type(error).__name__})"))
    except Exception as error:  # noqa: BLE001  it is raised where the order's answers are taken
        box.put_nowait(error)


def furnished(handle: Any, engine: EngineConfig, service: Service, fleet: FleetConfig) -> RayFleet:
    """Set `service.loaded` by what a replica says of its model; the tokenizer is read here, no weights are."""
    seconds = fleet.ready_timeout
    try:
        facts: Facts = handle.describe.remote().result(timeout_s=seconds)
    except TimeoutError as error:
        raise LoadError(
            f"no replica was ready after {seconds:g} s: see `serve status` and Ray's logs"
        ) from error
    path = resolve(engine.target, "target")
    tokenizer = load_tokenizer(path, engine.chat_format, engine.chat_template)
    room = furnish(tokenizer, facts, service.config)
    service.loaded = replace(room, grammars=Recipes(room.grammars))
    assert isinstance(service.worker, RemoteWorker)
    service.metrics.registry.register(ReplicaMetrics(service.worker.replicas))
    host = "127.0.0.1" if fleet.ray_address is None else ray.util.get_node_ip_address()
    return RayFleet(handle, tokenizer, engine.verify, Receiver(host))


class Elsewhere:
    """`server/start.py`'s Place: the ingress is this process, the engines are replicas."""

    def __init__(self, config: FleetConfig) -> None:
        self._config = config
        self._deployed: str | None = None
        self._patience = CLOSING  # seconds

    def worker(self, load: Callable[[], Any], wanted: EngineConfig, config: ServerConfig) -> RemoteWorker:
        """Called on a thread that lives to the end: a cluster of our own is killed with the thread that started it."""
        engine, most = sized(wanted, self._config), self._config.max_replicas or self._config.replicas
        self._patience = config.drain_timeout + CLOSING
        join(self._config, most * (engine.threads or 1))
        return RemoteWorker(load, max_texts=config.max_texts)

    def load(self, wanted: EngineConfig, service: Service, say: Say) -> RayFleet:
        config, engine = self._config, sized(wanted, self._config)
        serve.start(proxy_location="Disabled")
        name = f"paceline-{service.model}"
        if name in serve.status().applications:
            raise UsageError(
                f"{name} runs on this cluster already: give another --model-name, or end the other one"
            )
        self._deployed = name
        say(f"{config.replicas} replicas of {engine.threads} threads are started on Ray {ray.__version__}")
        app = deployment(engine, service.config, config)
        (handle,) = serve.run_many(
            [serve.RunTarget(app, name=name, route_prefix=None)], wait_for_applications_running=False
        )
        _until_ready(name, config.ready_timeout, lambda: service.worker.state == "loading")
        return furnished(handle, engine, service, config)

    def close(self) -> None:
        """Take the replicas down, and the cluster if it is ours. Where Ray itself has died it would never answer."""
        if not ray.is_initialized():
            return
        closing = threading.Thread(target=self._take_down, name="paceline-close", daemon=True)
        closing.start()
        closing.join(self._patience)
        if closing.is_alive():
            log.warning(
                "Ray does not answer while its replicas are taken down: `ray stop --force` ends what is left"
            )

    def _take_down(self) -> None:
        if self._deployed is not None:
            serve.delete(self._deployed)
        if self._config.ray_address is None:
            serve.shutdown()
        ray.shutdown()


def join(config: FleetConfig, cores: int) -> None:
    """Join a Ray cluster, or start one of this machine alone with that many cores. Raises UsageError."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        if config.ray_address is not None and config.ray_address != "auto":
            host, _, port = config.ray_address.rpartition(":")
            with socket.create_connection(
                (host, int(port)), 5
            ):  # Ray tries for minutes, and ends the process then
                pass
        if config.ray_address is None:
            ray.init(
                address="local", num_cpus=cores, include_dashboard=False, object_store_memory=OBJECT_STORE,
                log_to_driver=False, logging_level="error",
            )  # fmt: skip
        else:
            ray.init(address=config.ray_address, log_to_driver=False, logging_level="error")
    except (OSError, RuntimeError, ValueError, OverflowError, RayError) as error:
        raise UsageError(
            f"cannot join Ray at {config.ray_address or 'this machine'} ({_first(str(error))}): check --ray-address, "
            f"and that the same Ray ({ray.__version__}) and Python run there"
        ) from error


def _until_ready(name: str, seconds: float, wanted: Callable[[], bool]) -> None:
    """Wait for one replica at least; the others may follow. Raises LoadError with what keeps it, NotReady if unwanted."""
    end = time.monotonic() + seconds
    while True:
        app = serve.status().applications.get(name)
        if app is not None:
            replicas = [d.replica_states for d in app.deployments.values()]
            if any(states.get("RUNNING", 0) for states in replicas):
                return
            if app.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                messages = [app.message, *(d.message for d in app.deployments.values())]
                raise LoadError(f"no replica could be started: {reason(messages)}")
        if not wanted():
            raise NotReady("the server is shutting down: try again later")
        if time.monotonic() > end:
            waits = "; ".join(d.message for d in app.deployments.values()) if app is not None else ""
            raise LoadError(
                f"no replica was ready after {seconds:g} s ({_first(waits) or 'still loading'}): check that the "
                "cluster has machines with enough cores, and see Ray's logs"
            )
        time.sleep(0.1)


def reason(messages: list[str]) -> str:
    """The exception that a replica's start ended with, out of the traceback that Serve shows."""
    for text in messages:
        errors = re.findall(r"^(?:\w+\.)*(\w*(?:Error|Exception))(?:\(\w+\))?: (.+)$", text, re.MULTILINE)
        if errors:
            kind, what = errors[-1]
            return what if kind in ("LoadError", "ConfigError", "WeightsError") else f"{kind}: {what}"
    return _first("\n".join(messages)) or "see Ray's logs"


def _first(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")[:300]
