"""One engine for many callers, in one thread or in several: whoever waits for a delta steps the engine for all.

A call has an inbox for the deltas of its requests. Nobody keeps the engine between two deltas, so that streams that are
read in turn, or left half read, hinder no other. A request of a call that is closed is cancelled before the next step.
Closing takes no lock that could be held already: the garbage collector may do it in the middle of a step.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.core import Delta, SamplingParams
from paceline.engine.engine import Engine
from paceline.engine.request import RequestState
from paceline.errors import RequestFailed

WAKE_SECONDS = 1.0  # a waiting call looks after that long by itself; normally it is woken


@dataclass(slots=True, eq=False)
class Call:
    """What one caller has asked for. Only its owner's thread uses it, but for the inbox."""

    inbox: queue.SimpleQueue[Delta | Exception | None] = field(default_factory=queue.SimpleQueue)
    open: set[str] = field(default_factory=set)  # requests without a last delta
    states: dict[str, list[RequestState]] = field(default_factory=dict)  # request -> its texts
    left: dict[str, int] = field(default_factory=dict)  # request -> texts without a last delta
    tokens: dict[tuple[str, int], int] = field(default_factory=dict)  # (request, text) -> tokens received
    waiting: bool = False  # on the inbox: wake it when the engine is free
    closed: bool = False


class SharedEngine:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._turn = threading.Lock()  # held while the engine is touched, never while somebody reads a delta
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # before the next step
        self._calls: dict[str, Call] = {}  # request -> its call; changed by the holder of the turn only
        self._names = itertools.count(1)

    def add(self, call: Call, prompt_ids: list[int], params: SamplingParams) -> str:
        """Queue a request; its name. What is wrong with it is raised by `receive`."""
        name = f"llm-{next(self._names)}"
        call.open.add(name)
        call.left[name] = params.n
        self._commands.put(lambda: self._add(call, name, prompt_ids, params))
        return name

    def receive(self, call: Call) -> Delta:
        """The next delta of one of the call's open requests, computed if it is not there.

        Raises what went wrong: a request that cannot run, a step that failed, tokens that a failed step has lost.
        """
        while True:
            answer = self._look(call)
            if isinstance(answer, Exception):
                raise answer
            if answer is not None:
                return self._counted(call, answer)

    def close(self, call: Call) -> None:
        """Cancel what is left of a call; at any moment, from any thread, more than once."""
        call.closed = True
        self._commands.put(lambda: self._cancel(call))
        self._settle()

    def _look(self, call: Call) -> Delta | Exception | None:
        """Take from the inbox, or step the engine if nobody else does; None: look again."""
        if not call.inbox.empty():
            return call.inbox.get()
        call.waiting = True  # before the try: who has the turn wakes those that wait when it gives it back
        try:
            if not self._take_turn(call):
                return call.inbox.get(timeout=WAKE_SECONDS)
        except queue.Empty:
            pass
        finally:
            call.waiting = False
        return None

    def _take_turn(self, call: Call) -> bool:
        """Make a step, unless another does."""
        if not self._turn.acquire(blocking=False):
            return False
        try:
            self._obey()
            if call.inbox.empty():
                if not any(self._engine.has(name) for name in call.open):
                    raise RequestFailed("a step failed and tokens were lost: ask again")
                for delta in self._engine.step():
                    if (owner := self._calls.get(delta.request)) is not None:
                        owner.inbox.put(delta)
        finally:
            self._give_back(call)
        return True

    def _give_back(self, own: Call | None) -> None:
        self._turn.release()
        for call in list(self._calls.values()):
            if call is not own and call.waiting and call.inbox.empty():
                call.inbox.put(None)
        self._settle()

    def _settle(self) -> None:
        """Cancel requests that were closed during another caller's step, now or when that step ends."""
        while not self._commands.empty() and self._turn.acquire(blocking=False):
            try:
                self._obey()
            finally:
                self._turn.release()

    def _obey(self) -> None:
        while not self._commands.empty():
            self._commands.get()()

    def _add(self, call: Call, name: str, prompt_ids: list[int], params: SamplingParams) -> None:
        if call.closed:
            return
        try:
            self._engine.add(name, prompt_ids, params)
        except Exception as error:  # noqa: BLE001  it is raised where the request was made
            call.inbox.put(error)
            return
        self._calls[name], call.states[name] = call, self._engine.texts(name)

    def _cancel(self, call: Call) -> None:
        for name in call.states:
            self._engine.cancel(name)
            self._calls.pop(name, None)

    def _counted(self, call: Call, delta: Delta) -> Delta:
        """Return the delta; raise if an earlier one was lost in a step that failed for another caller."""
        key = (delta.request, delta.index)
        call.tokens[key] = call.tokens.get(key, 0) + len(delta.token_ids)
        if delta.stats is not None and delta.stats.emitted != call.tokens[key]:
            raise RequestFailed("a step failed and tokens were lost: ask again")
        if delta.finish_reason is not None:
            call.left[delta.request] -= 1
            if not call.left[delta.request]:
                call.open.discard(delta.request)
        return delta
