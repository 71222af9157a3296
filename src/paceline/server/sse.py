"""Server-sent events, and work that ends when its client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.server.errors import as_api_error

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves (then ClientDisconnect is raised)."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends chunks as they come. An error before the first one is raised, so that it gets its own status.

    That holds for the first `patience` seconds. Then the headers are sent, and `waiting` each `pause` seconds until the
    first chunk: proxies end a connection on which nothing moves while a long prompt is read.
    """

    media_type = "text/event-stream"
    patience, pause = 0.5, 5.0
    waiting = b": waiting\n\n"

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        super().__init__(None, 200, {"X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send(send))
        except ClientDisconnect:
            return

    def failure(self, error: Exception) -> bytes:
        """What is sent of an error after the first chunk."""
        return event(as_api_error(error).envelope())

    async def _send(self, send: Send) -> None:
        async with aclosing(self._chunks) as chunks:  # type: ignore[type-var]
            first = asyncio.ensure_future(anext(chunks))
            try:
                await asyncio.wait({first}, timeout=self.patience)
                error = first.exception() if first.done() else None
                if error is not None:
                    raise error
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await self._rest(first, chunks, send)
            finally:
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _rest(self, first: asyncio.Future[bytes], chunks: AsyncIterator[bytes], send: Send) -> None:
        try:
            while not first.done():
                if self.waiting:
                    await send({"type": "http.response.body", "body": self.waiting, "more_body": True})
                await asyncio.wait({first}, timeout=self.pause)
            await send({"type": "http.response.body", "body": first.result(), "more_body": True})
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except Exception as error:  # noqa: BLE001  the status is sent: the error goes into the stream
            await send({"type": "http.response.body", "body": self.failure(error), "more_body": True})
