"""The gate in front of every route: host, key, origin, content type, size and time of bodies, safe headers.

Everything is refused by default: only /health, and /healthz, is open without a key.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import ipaddress
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.errors import UsageError
from paceline.memory import give_back_freed
from paceline.server.bodies import unpacked
from paceline.server.cors import Cors
from paceline.server.errors import ApiError
from paceline.server.paths import below, usual
from paceline.server.request_log import QUIET, Told, Write, line
from paceline.server.resumable import Resumable
from paceline.server.settings import ServerConfig

OPEN_PATHS = ("/health", "/healthz")
GONE = 499  # status of a client that left before it had an answer
LARGE = 2**18  # bytes of a body: reading it as text takes some hundred times as much for moments
NO_SEAT = "no seat"  # key of scope["state"]: this connection is one too many
_FORM = "application/x-www-form-urlencoded"
_BROWSER = {"origin", "referer", "cookie", "sec-fetch-site", "sec-fetch-mode", "sec-fetch-dest"}
_READ_ON = 4  # times the limit: a client that is still sending would not see why it is refused
_CLOSE = {"Connection": "close"}
SAFE = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "content-security-policy": (
        "default-src 'self'; img-src 'self' data:; media-src 'self' data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"  # no page makes HTML of a text
    ),
}
_HASHED = re.compile(r"sha256:([0-9a-fA-F]{64})")


class Keys:
    """API keys as SHA-256 digests; nothing else of them is kept."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest_of(key) for key in keys]

    @classmethod
    def read(cls, path: str | None) -> Keys:
        """One key per line, plain or as sha256:<64 hex digits>; # begins a comment. Raises UsageError."""
        if path is None:
            return cls([])
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise UsageError(f"--api-key-file {path} cannot be read ({why}): check the path") from error
        keys = [
            line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")
        ]
        if not keys:
            raise UsageError(f"--api-key-file {path} holds no key: write one per line")
        return cls(keys)

    @property
    def wanted(self) -> bool:
        return bool(self._digests)

    def find(self, authorization: str | None) -> str | None:
        """The prefix-cache scope of the key in this header, None if there is no right one. Constant time."""
        if not self._digests:
            return ""
        given = hashlib.sha256(_presented(authorization or "").encode("utf-8", "surrogateescape")).digest()
        matching = b""
        for digest in self._digests:
            matching = digest if hmac.compare_digest(digest, given) else matching
        return matching.hex()[:32] or None


def _digest_of(key: str) -> bytes:
    hashed = _HASHED.fullmatch(key)
    return bytes.fromhex(hashed[1]) if hashed else hashlib.sha256(key.encode()).digest()


def _presented(authorization: str) -> str:
    """The key in a Bearer header, or the password in a Basic one (what a browser asks its user for)."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return ""


class Gate:
    """ASGI middleware. A passed request has its whole body in memory and scope["state"]["salt"] set."""

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        keys: Keys,
        count: Callable[[str, int], None],
        write: Write | None = None,
        limit: Callable[[], int] | None = None,
    ) -> None:
        """`count` is told the path and the status of every answer, `write` a line for each request. `limit`: most bytes
        of a body, where it is not the config's.
        """
        self._limit = limit or (lambda: config.max_body)
        self._app, self._config, self._keys, self._count, self._write = (
            Resumable(app), config, keys, count, write,
        )  # fmt: skip
        self._cors = Cors(config.cors_origins)
        self._hosts = {"localhost", config.host.lower(), *(host.lower() for host in config.allowed_hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        root = self._config.root_path or ""
        if root and scope["path"] == root and scope["method"] in ("GET", "HEAD"):
            # the page's own addresses are relative
            await RedirectResponse(f"{root}/", 307, dict(SAFE))(scope, receive, send)
            return
        scope["path"] = usual(below(scope["path"], root))
        told, begin, last = Told(), time.monotonic(), [0]
        scope.setdefault("state", {})["told"] = told

        def started(status: int) -> None:
            last[0] = status
            self._count(scope["path"], status)

        try:
            await self._pass(scope, receive, send, started)
        finally:
            if self._write is not None and scope["method"] not in QUIET:
                status = last[0] or GONE
                self._write(line(scope["method"], scope["path"], status, time.monotonic() - begin, told))

    async def _pass(self, scope: Scope, receive: Receive, send: Send, started: Callable[[int], None]) -> None:
        headers = Headers(scope=scope)
        more = SAFE | self._cors.headers(headers)
        send = _with_headers(send, more, started)
        try:
            self._check_seat(scope)
            self._check_size(scope)
            _check_framing(scope, headers)
            self._check_host(headers)
            preflight = self._cors.preflight(scope["method"], headers)
            if preflight is not None:
                await preflight(scope, receive, send)
                return
            scope.setdefault("state", {})["salt"] = self._check_key(scope, headers)
            self._check_origin(scope, headers)
            body = await self._read(headers, receive)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        except _Gone:
            return
        try:
            await self._app(scope, replay(body, receive), send)
        finally:
            if len(body) >= LARGE:
                asyncio.get_running_loop().run_in_executor(None, give_back_freed)

    def _check_seat(self, scope: Scope) -> None:
        if scope.get("state", {}).get(NO_SEAT):
            raise ApiError(
                503,
                f"all {self._config.max_connections} connections are in use: try again later",
                code="too_many_connections",
                headers={"Retry-After": "1"},
            )

    def _check_size(self, scope: Scope) -> None:
        """The head as a whole; the parser itself bounds only what comes in more than one piece."""
        size = len(scope.get("raw_path", b"")) + len(scope["query_string"])
        size += sum(len(name) + len(value) for name, value in scope["headers"])
        if size > self._config.max_header:
            raise ApiError(
                431, f"the request's head is over {self._config.max_header} bytes", code="too_large"
            )

    def _check_host(self, headers: Headers) -> None:
        """Names have to be on the list; a plain IP address cannot be the work of a rebinding name server."""
        host = headers.get("host", "")
        name = _name_in(host)
        if name in self._hosts:
            return
        try:
            ipaddress.ip_address(name)
        except ValueError:
            raise ApiError(
                421,
                "this Host is not served here: start the server with --allowed-host to add it",
                code="bad_host",
            ) from None

    def _check_key(self, scope: Scope, headers: Headers) -> str:
        if scope["path"] in OPEN_PATHS:
            return ""
        own = headers.get("x-api-key")  # as Anthropic's clients send it
        salt = self._keys.find(headers.get("authorization") or (f"Bearer {own}" if own else None))
        if salt is None:
            browser = scope["method"] == "GET" and "text/html" in headers.get("accept", "")
            scheme = 'Basic realm="paceline: any name, the API key as password"' if browser else "Bearer"
            raise ApiError(
                401,
                "a valid API key is needed: send Authorization: Bearer <key>",
                code="invalid_api_key",
                headers={"WWW-Authenticate": scheme},
            )
        return salt

    def _check_origin(self, scope: Scope, headers: Headers) -> None:
        """Other sites' pages may not use a browser's rights, and forms cannot send JSON."""
        if scope["method"] in ("GET", "HEAD"):
            return
        origin = headers.get("origin")
        foreign = origin is not None and origin.partition("://")[2] != headers.get("host")
        foreign = foreign or headers.get("sec-fetch-site") in ("cross-site", "same-site")
        if foreign and not self._cors.allows(headers):
            raise ApiError(
                403,
                "requests from pages of other origins are refused: start the server with --cors-origin to allow one",
                code="foreign_origin",
            )
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        if scope["path"].startswith("/api/") and kind == _FORM and not _BROWSER & set(headers.keys()):
            # `curl -d`, as in Ollama's documentation: a form of a browser says where it comes from
            others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
            scope["headers"] = [*others, (b"content-type", b"application/json")]
        elif has_body and kind != "application/json":
            raise ApiError(
                415,
                "the body has to be JSON: send the header Content-Type: application/json",
                code="bad_content_type",
            )

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        limit = self._limit()
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 18 or int(length) > _READ_ON * limit:
            raise self._too_large()
        body, size = bytearray(), 0
        try:
            async with asyncio.timeout(self._config.body_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Gone
                    piece = message.get("body", b"")
                    size += len(piece)
                    if size <= limit:
                        body += piece
                    elif size > _READ_ON * limit or not message.get("more_body"):
                        raise self._too_large()
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            raise ApiError(408, "the body came too slowly", code="slow", headers=_CLOSE) from None
        encoding = headers.get("content-encoding", "")
        return await asyncio.to_thread(unpacked, encoding, bytes(body), limit) if encoding else bytes(body)

    def _too_large(self) -> ApiError:
        message = f"the body is over {self._limit()} bytes"
        return ApiError(413, message, code="too_large", headers=_CLOSE)


def _check_framing(scope: Scope, headers: Headers) -> None:
    """Raise ApiError 400 where two servers could differ on where the body ends, and so on what the next request is."""
    if "transfer-encoding" not in headers:
        return
    if "content-length" in headers or scope["http_version"] == "1.0":
        other = "Content-Length" if "content-length" in headers else "HTTP/1.0"
        raise ApiError(
            400,
            f"Transfer-Encoding beside {other} is refused: send one of them",
            code="bad_http",
            headers=_CLOSE,
        )


class _Gone(Exception):
    """The client has left."""


def _name_in(host: str) -> str:
    """The name or address of a Host header without its port, empty if it is none."""
    if not re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_.\-]+)(:\d{1,5})?", host):
        return ""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:  # brackets around what is no address
        return ""


def replay(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def replayed() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


def _with_headers(send: Send, more: dict[str, str], started: Callable[[int], None]) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            started(message["status"])
            headers = MutableHeaders(scope=message)
            for name, value in more.items():
                headers.setdefault(name, value)
        await send(message)

    return sending
