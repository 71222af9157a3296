"""Decodes files in processes of our own (media/decoding.py), which are killed if they take too much."""

from __future__ import annotations

import base64
import queue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import PromptError
from paceline.media.pixels import Cut, Pixels
from paceline.text.helper import Helper

MEMORY = 2**30  # bytes that decoding one file may take
TIMEOUT = 10.0  # seconds for one file
AT_ONCE = 2  # files


class Decoder:
    """Thread-safe. A process starts at the first use, and another one after it was killed."""

    def __init__(self, *, memory: int = MEMORY, timeout: float = TIMEOUT) -> None:
        self._limit = f"{timeout:g} seconds or {memory // 2**20} MiB"
        self._free: queue.LifoQueue[Helper] = queue.LifoQueue()  # the last used one has begun already
        for _ in range(AT_ONCE):
            self._free.put(Helper("paceline.media.decoding", lambda: {"memory": memory}, timeout))

    def pixels(self, data: bytes, cut: Cut) -> Pixels:
        """As `read_pixels`. Raises PromptError."""
        budget = {"budget": cut.budget, "patch": cut.patch, "pooling": cut.pooling}
        answer = self._ask("picture", data, budget)
        height, width = answer["seen"]
        return Pixels(answer["height"], answer["width"], base64.b64decode(answer["rgb"]), (height, width))

    def size(self, data: bytes) -> tuple[int, int]:
        """As `size_of`. Raises PromptError."""
        height, width = self._ask("size", data, {})["size"]
        return height, width

    def samples(self, data: bytes) -> NDArray[np.float32]:
        """As `read_samples`. Raises PromptError."""
        return np.frombuffer(base64.b64decode(self._ask("sound", data, {})["samples"]), np.float32)

    def _ask(self, what: str, data: bytes, more: dict[str, int]) -> dict[str, Any]:
        helper = self._free.get()
        try:
            answer = helper.ask({"what": what, "data": base64.b64encode(data).decode(), **more})
        finally:
            self._free.put(helper)
        if answer is None:
            raise PromptError(f"decoding the file takes more than {self._limit}: send a smaller one")
        if "refused" in answer:
            raise PromptError(answer["refused"])
        return dict(answer)
