"""Whose turn it is to compute: the steps of an engine, or slices of other work that has the same processor.

Two thread pools on the same cores hinder each other far more than taking turns does.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol, TypeVar

from paceline.errors import RequestFailed

T = TypeVar("T")
TURN = 0.02  # seconds of slices in a row, at least, where steps wait: changing over costs some tenths of a millisecond
IDLE = 0.01  # seconds without a step after which the engine counts as idle
_WANTED: ContextVar[Callable[[], bool]] = ContextVar("wanted", default=lambda: True)


class Turns:
    """Steps and slices take turns; while both have work each has half of the time. Safe to use from any thread."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._changed = clock, threading.Condition()
        self._busy = False
        self._waiting = self._coming = 0  # who has slices, who has steps
        self._given = False  # the next turn is theirs
        self._owed = 0.0  # seconds of steps before it is
        self._stepped = float("-inf")  # when the last step ended

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step of the engine: waits while slices have the turn."""
        with self._changed:
            self._coming += 1
            try:
                while self._busy or (self._given and self._waiting):
                    self._changed.wait()
                self._busy = True
            finally:
                self._coming -= 1
        begin = self._clock()
        try:
            yield
        finally:
            with self._changed:
                self._busy, self._stepped = False, self._clock()
                self._owed -= self._stepped - begin
                if self._waiting:
                    self._given = self._owed <= 0
                    self._changed.notify_all()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Around slices: waits until steps have had as much time as the slices before."""
        with self._changed:
            self._waiting += 1
            try:
                while self._busy or not (self._given or self._idle()):
                    self._changed.wait(IDLE)
                self._busy, self._given = True, False
            finally:
                self._waiting -= 1
                self._changed.notify_all()
        begin = self._clock()
        try:
            yield
        finally:
            with self._changed:
                self._busy, self._owed = False, self._clock() - begin
                self._changed.notify_all()

    def _idle(self) -> bool:
        return not self._coming and self._clock() - self._stepped > IDLE

    def run(self, slices: Generator[None, None, T]) -> T:
        """What the slices return. Raises RequestFailed once nobody wants it any more."""
        while True:
            if not _WANTED.get()():
                slices.close()
                raise RequestFailed("the request was given up while its pictures were being read")
            with self.beside():
                end = self._clock() + TURN
                try:
                    next(slices)
                    while self._clock() < end:
                        next(slices)
                except StopIteration as done:
                    result: T = done.value
                    return result


class TakesTurns(Protocol):
    turns: Turns  # with the steps of the engine beside which it computes


@contextmanager
def wanted_while(wanted: Callable[[], bool]) -> Iterator[None]:
    """`Turns.run` in here, in this thread, gives up once `wanted` says False."""
    token = _WANTED.set(wanted)
    try:
        yield
    finally:
        _WANTED.reset(token)


def until(left: threading.Event, work: Callable[[], T]) -> T:
    """What `work` returns; pictures that it reads are given up once `left` is set."""
    with wanted_while(lambda: not left.is_set()):
        return work()


async def in_thread(work: Callable[..., T], *args: Any) -> T:
    """`asyncio.to_thread`; if the caller is cancelled, pictures that `work` reads are given up, too."""
    left = threading.Event()
    try:
        return await asyncio.to_thread(until, left, partial(work, *args))
    finally:
        left.set()
