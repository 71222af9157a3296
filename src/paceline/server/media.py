"""Requests with pictures or sound before they are queued: in threads of their own, and so many at most."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from paceline.server.errors import ApiError
from paceline.server.schema import Message, TextPart
from paceline.turns import until

MOST = 66  # two whose files are decoded, and 64 that wait
T = TypeVar("T")
P = ParamSpec("P")


class MediaThreads:
    """A prompt of text alone never waits for a tower: it takes the event loop's own threads. Used on one event loop."""

    def __init__(self, most: int = MOST) -> None:
        self._threads, self._most, self._busy = ThreadPoolExecutor(most, "media"), most, 0

    async def run(self, seen: bool, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """What `work` returns; `seen`: it is about pictures or sound. Raises ApiError 503 if too many wait."""
        if not seen:
            return await asyncio.to_thread(work, *args, **named)
        if self._busy >= self._most:
            raise ApiError(
                503,
                f"{self._busy} requests with pictures or sound are being read: try again later",
                code="media_queue_full",
                headers={"Retry-After": "5"},
            )
        self._busy += 1
        left = threading.Event()
        reading = partial(until, left, partial(work, *args, **named))
        future = asyncio.get_running_loop().run_in_executor(self._threads, reading)
        future.add_done_callback(self._free)
        try:
            return await asyncio.shield(future)
        finally:
            left.set()

    def _free(self, future: asyncio.Future[T]) -> None:
        self._busy -= 1
        if not future.cancelled():
            future.exception()  # of a client that has gone nobody asks


def has_media(messages: list[Message]) -> bool:
    return any(
        isinstance(message.content, list) and any(map(_is_media, message.content)) for message in messages
    )


def _is_media(part: TextPart) -> bool:
    return part.media is not None
