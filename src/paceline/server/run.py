"""From a config to a running process: bind first, load behind it, drain on SIGTERM."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import stat
import time
from types import FrameType
from typing import Any, Protocol

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline.engine.worker import State
from paceline.errors import PacelineError, UsageError
from paceline.server.errors import ApiError
from paceline.server.paths import below
from paceline.server.security import NO_SEAT, OPEN_PATHS, SAFE
from paceline.server.settings import ServerConfig

MOST_CHUNKS, LEAST_OF_CHUNK = 4096, 64  # of a body; bytes in each, on average, where there are more


def bind(config: ServerConfig) -> socket.socket:
    """The listening socket. Raises UsageError if the address cannot be had, or its certificate cannot be used."""
    check_certificate(config)
    if config.uds is not None:
        return _bind_file(config.uds, config.max_connections)
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # asyncio sets TCP_NODELAY only where the protocol is named; without it answers wait 40 ms for the client's ACK.
    server = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((config.host, config.port))
        server.listen(config.max_connections)
    except OSError as error:
        server.close()
        where = f"{config.host}:{config.port}"
        raise UsageError(
            f"cannot listen on {where} ({error.strerror}): choose another --port or --host"
        ) from error
    server.setblocking(False)
    return server


def _bind_file(path: str, most: int) -> socket.socket:
    """A Unix socket. A file that a server left behind is replaced; one that somebody listens on is not."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_left_over(path):
            os.unlink(path)
        server.bind(path)
        server.listen(most)
    except OSError as error:
        server.close()
        why = error.strerror or str(error)
        raise UsageError(f"cannot listen on {path} ({why}): choose another --uds") from error
    server.setblocking(False)
    return server


def _is_left_over(path: str) -> bool:
    """Whether it is a socket on which nobody listens."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.connect(path)
    except ConnectionRefusedError:
        return True
    except FileNotFoundError:
        return False
    return False


def check_certificate(config: ServerConfig) -> None:
    """Raise UsageError for a certificate or a key that https cannot be spoken with."""
    if config.ssl_certfile is None:
        return
    given = f"--ssl-certfile {config.ssl_certfile}"
    given += f" with --ssl-keyfile {config.ssl_keyfile}" if config.ssl_keyfile else ""

    def no_password() -> str:
        raise UsageError(f"{given}: the key has a password: store it without one, readable by this user only")

    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, no_password)
    except (OSError, ValueError) as error:  # SSLError is one
        why = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"{given} cannot be used ({why}): give PEM files of a certificate and its key"
        ) from error


class Runs(Protocol):
    """What stands behind the server: a worker, or all of several models."""

    @property
    def state(self) -> State: ...

    @property
    def error(self) -> Exception | None: ...

    def start(self) -> None: ...

    def drain(self) -> None: ...

    def close(self) -> None: ...

    def join(self, timeout: float | None = None) -> bool: ...


class PatientServer(uvicorn.Server):
    """The first signal drains: open requests are finished, new ones get 503. The second one ends at once."""

    def __init__(self, config: uvicorn.Config, worker: Runs, drain_timeout: float) -> None:
        super().__init__(config)
        self._worker, self._drain_timeout = worker, drain_timeout
        self._give_up_at: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._give_up_at is not None:
            self.should_exit = self.force_exit = True
            return
        self._give_up_at = time.monotonic() + self._drain_timeout
        self._worker.drain()

    async def on_tick(self, counter: int) -> bool:
        over = self._give_up_at is not None and time.monotonic() > self._give_up_at
        if over or self._worker.state in ("closed", "failed"):
            self.should_exit = True
        return await super().on_tick(counter)


class Seats:
    """How many connections may ask for something. One that comes later does not unseat one that is there."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken: set[Any] = set()

    def take(self, connection: Any) -> bool:
        """Whether the connection has a seat, now or since an earlier request."""
        if connection not in self._taken and len(self._taken) >= self._most:
            return False
        self._taken.add(connection)
        return True

    def leave(self, connection: Any) -> None:
        self._taken.discard(connection)


class Reader(h11.Connection):
    """Reads no body that comes in many tiny chunks: each costs more than the bytes in it."""

    _chunks = _bytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._chunks += 1
            self._bytes += len(event.data)
            if self._chunks > MOST_CHUNKS and self._bytes < LEAST_OF_CHUNK * self._chunks:
                raise h11.RemoteProtocolError("the body comes in too many small chunks")
        return event


class WatchfulProtocol(H11Protocol):
    """Closes connections whose request head does not come in time, and tells the gate which have no seat."""

    head_timeout = 10.0
    root = ""
    seats: Seats
    _head_timer: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = Reader(h11.SERVER, self.config.h11_max_incomplete_event_size or 2**16)
        self._inner, self.app = self.app, self._seated

    async def _seated(self, scope: Any, receive: Any, send: Any) -> None:
        if (
            below(scope["path"], self.root) not in OPEN_PATHS
        ):  # whoever watches the server's health needs no seat
            scope["state"][NO_SEAT] = not self.seats.take(self)
        await self._inner(scope, receive, send)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch(True)

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch(False)
        self.seats.leave(self)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        self._watch(self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0]))

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP. Whoever works on this connection's request learns that the client is gone."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer = ApiError(400, "this is not valid HTTP", code="bad_http").response()
            headers = [*answer.raw_headers, (b"connection", b"close")]
            headers += [(name.encode(), value.encode()) for name, value in SAFE.items()]
            for event in (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=bytes(answer.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch(self, waiting: bool) -> None:
        if waiting and self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout, self.transport.close)
        elif not waiting and self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def settings(app: ASGIApp, config: ServerConfig) -> uvicorn.Config:
    """How uvicorn is run. Its own limit of connections is off: it would answer in plain text. It warns only of what
    strangers send (bad HTTP, offers of HTTP/2 or WebSockets): each has its answer, and none fills the log."""
    mine = {
        "head_timeout": config.header_timeout, "seats": Seats(config.max_connections), "root": config.root_path or "",
    }  # fmt: skip
    return uvicorn.Config(
        app,
        http=type("Protocol", (WatchfulProtocol,), mine),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
        h11_max_incomplete_event_size=config.max_header,
        timeout_graceful_shutdown=5,
    )


def run(app: ASGIApp, worker: Runs, config: ServerConfig, listening: socket.socket) -> None:
    """Serve until told to stop. Raises what the worker failed with."""
    worker.start()
    PatientServer(settings(app, config), worker, config.drain_timeout).run(sockets=[listening])
    worker.close()
    worker.join(10)
    if worker.error is not None:
        if isinstance(worker.error, PacelineError):
            raise worker.error
        raise PacelineError(f"the engine stopped: {worker.error!r}") from worker.error
