"""Answers that outlive their connection: a page that is loaded again reads the same answer from its beginning.

A client that wants this names its request by a random id, in the header X-Paceline-Stream. GET /stream with the same
header gives the whole answer again and goes on with it, DELETE /stream ends it. What is held is bounded: by time while
nobody reads, by bytes of an answer, and by their number. Beyond the last two an answer lives as long as its connection.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.server.errors import ApiError
from paceline.server.params import refuse
from paceline.server.sse import until_disconnect

HEADER, PATH = "x-paceline-stream", "/stream"
_AHEAD = 64  # messages that the work may be ahead of its reader
_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Bounds:
    """`seconds` that nobody reads, `size` in bytes of an answer, `count` of them at a time."""

    seconds: float = 30.0
    size: int = 4 * 2**20
    count: int = 32


class _Answer:
    """What the application has sent for one request. It has one reader: who comes later takes the place."""

    def __init__(self, bounds: Bounds, forget: Callable[[], None]) -> None:
        self.left = asyncio.Event()  # nobody will read it any more: its work can end
        self.whole = True  # nothing of it has been let go
        self._bounds, self._forget = bounds, forget
        self._messages: list[Message] = []
        self._size = 0
        self._reader: object | None = None
        self._read = 0  # messages that the reader has
        self._ended = False
        self._news = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    async def add(self, message: Message) -> None:
        """The application's `send`. It waits for a reader that is slow, but not for one who may come back."""
        self._messages.append(message)
        self._size += len(message.get("body", b""))
        self.whole = self.whole and self._size <= self._bounds.size
        self._tell()
        if not self.whole and self._reader is None:
            self.give_up()
        while self._reader is not None and len(self._messages) - self._read > _AHEAD:
            await self._news.wait()

    def end(self) -> None:
        """Nothing more comes."""
        self._ended = True
        self._tell()

    def give_up(self) -> None:
        self.left.set()
        self._forget()

    async def read(self, send: Send) -> None:
        """Send all from the beginning and what comes. Returns at its end, or when somebody else reads."""
        me = self._reader = object()
        self._read = 0
        if self._timer is not None:
            self._timer.cancel()
        self._tell()
        try:
            while await self._next(me):
                message = self._messages[self._read]
                await send({**message})
                if self._reader is not me:
                    return
                self._read += 1
                if not self.whole:  # no other can read it: what is sent need not be held
                    del self._messages[: self._read]
                    self._read = 0
                self._tell()
                if message["type"] == "http.response.body" and not message.get("more_body"):
                    self.give_up()
                    return
        finally:
            if self._reader is me:
                self._leave()

    async def _next(self, me: object) -> bool:
        """Wait for a message that this reader does not have; whether there is one."""
        while self._reader is me and self._read == len(self._messages) and not self._ended:
            await self._news.wait()
        return self._reader is me and self._read < len(self._messages)

    def _leave(self) -> None:
        self._reader = None
        self._tell()
        if self.whole and not self.left.is_set():
            self._timer = asyncio.get_running_loop().call_later(self._bounds.seconds, self.give_up)
        else:
            self.give_up()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class Resumable:
    """ASGI middleware, behind the gate, which has checked the key: an answer is its key's, known by the salt."""

    def __init__(self, app: ASGIApp, bounds: Bounds | None = None) -> None:
        self._app, self._bounds = app, bounds or Bounds()
        self._answers: dict[tuple[str, str], _Answer] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the application's start and end
            await self._app(scope, receive, send)
            return
        try:
            await self._dispatch(scope, receive, send)
        except ApiError as error:
            await error.response()(scope, receive, send)

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        name, method = Headers(scope=scope).get(HEADER), scope["method"]
        if name is None or not (method == "POST" or scope["path"] == PATH):
            await self._app(scope, receive, send)
            return
        if _ID.fullmatch(name) is None:
            raise refuse(HEADER, "has to be 32 hexadecimal digits, drawn at random")
        key = (scope["state"]["salt"], name)
        answer = self._answers.get(key)
        if method == "POST":
            if answer is not None:
                raise refuse(HEADER, "is the id of another request: draw one for each")
            await self._begin(key, scope, receive, send)
        elif answer is None or not answer.whole:
            raise ApiError(
                404,
                f"there is no such answer: it has been read to its end, nobody read it for {self._bounds.seconds:.0f} s, "
                "or it is too long to be held",
                code="no_stream",
            )
        elif method == "DELETE":
            answer.give_up()
            await JSONResponse({"stopped": True})(scope, receive, send)
        else:
            await _listen(answer, receive, send)

    async def _begin(self, key: tuple[str, str], scope: Scope, receive: Receive, send: Send) -> None:
        if len(self._answers) >= self._bounds.count:
            await self._app(scope, receive, send)
            return

        def forget() -> None:
            self._answers.pop(key, None)

        answer = self._answers[key] = _Answer(self._bounds, forget)
        work = asyncio.ensure_future(self._work(answer, await receive(), scope))
        try:
            await _listen(answer, receive, send)
            await work
        finally:
            if not work.done():
                answer.give_up()
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)

    async def _work(self, answer: _Answer, body: Message, scope: Scope) -> None:
        given: list[Message] = [body]

        async def receiving() -> Message:
            if given:
                return given.pop()
            await answer.left.wait()
            return {"type": "http.disconnect"}

        try:
            await self._app(scope, receiving, answer.add)
        finally:
            answer.end()


async def _listen(answer: _Answer, receive: Receive, send: Send) -> None:
    try:
        await until_disconnect(receive, answer.read(send))
    except ClientDisconnect:
        return
