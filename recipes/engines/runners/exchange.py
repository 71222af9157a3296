"""What a runner and `run.py` say to each other: JSON lines. A runner needs nothing but its engine and this file.

A runner is called as `python RUNNER.py '{"model": …, "draft": …, "mode": …, "drafts": 4, "threads": 2, "parallel":
1}'`. It writes one line `{"engine": NAME, "version": …, "settings": …}` once it is ready. Then it reads questions,
a JSON line each (`{"id": …, "prompt": [ids], "max_tokens": n, "temperature": t, "seed": s}`). An empty line ends a
batch: the questions of a batch are answered side by side, each with `{"id": …, "tokens": [ids], "seconds": s}`, in
any order.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Setup:
    """How an engine is to be started."""

    model: str
    draft: str | None
    mode: str
    drafts: int
    threads: int
    parallel: int
    context: int


@dataclass(frozen=True)
class Question:
    id: str
    prompt: list[int]
    max_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True)
class Answer:
    id: str
    tokens: list[int]
    seconds: float


def setup() -> Setup:
    """The setup that the command line gives."""
    given = json.loads(sys.argv[1])
    return Setup(**given)


class Channel:
    """Lines to `run.py`. Made before the engine is imported, so that nothing of an engine's output gets among them."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def write(self, **values: Any) -> None:
        self._out.write(json.dumps(values) + "\n")
        self._out.flush()

    def ready(self, engine: str, version: str, settings: str) -> None:
        self.write(engine=engine, version=version, settings=settings)

    def serve(self, answer: Callable[[Sequence[Question]], Iterator[Answer]]) -> None:
        """Answer the questions up to each empty line side by side, until the input ends."""
        waiting: list[Question] = []
        for line in sys.stdin:
            if line.strip():
                waiting.append(Question(**json.loads(line)))
                continue
            for reply in answer(waiting):
                self.write(id=reply.id, tokens=reply.tokens, seconds=reply.seconds)
            waiting = []
