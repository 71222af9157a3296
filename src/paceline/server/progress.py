"""How far prompts have been read, for clients that show it: `return_progress`, in the words of llama.cpp's server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.engine.engine import Engine
    from paceline.engine.request import RequestState


@dataclass(frozen=True, slots=True)
class Progress:
    """Tokens of a prompt: all, found in the prefix cache, and read so far, with what was found."""

    total: int
    cached: int
    processed: int
    seconds: float

    def fields(self) -> dict[str, Any]:
        return {
            "total": self.total, "cache": self.cached, "processed": self.processed,
            "time_ms": round(self.seconds * 1000),
        }  # fmt: skip


class Watchers:
    """Requests that want to know. `add` and `remove` from any thread, `find` and `look` on the worker's around a step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: dict[str, Callable[[Progress], None]] = {}
        self._last: dict[str, int] = {}

    def add(self, request_id: str, notify: Callable[[Progress], None]) -> None:
        with self._lock:
            self._wanted[request_id] = notify

    def remove(self, request_id: str) -> None:
        with self._lock:
            self._wanted.pop(request_id, None)
            self._last.pop(request_id, None)

    def find(self, engine: Engine) -> list[RequestState]:
        """The first text of each such request: before the step, which may end it."""
        if not self._wanted:
            return []
        with self._lock:
            return [engine.texts(request_id)[0] for request_id in self._wanted if engine.has(request_id)]

    def look(self, requests: list[RequestState]) -> None:
        """Notify each request whose prompt has moved on."""
        with self._lock:
            for text in requests:
                total, notify = text.sequence.prompt_len, self._wanted.get(text.request_id)
                processed = min(text.sequence.committed, total)
                if notify is None or processed <= self._last.get(text.request_id, 0):
                    continue
                self._last[text.request_id] = processed
                seconds = time.perf_counter() - text.submitted
                notify(Progress(total, text.stats.cached_prompt_tokens, processed, seconds))
