"""Rank 0's view of the others: processes of this machine that it starts, sends forwards to, and ends.

A rank's line to rank 0 is a pair of sockets. It ends when the line is closed, so none is left when rank 0 is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import time
import weakref
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Self

from paceline import child
from paceline.config import EngineConfig
from paceline.errors import EngineLost, PacelineError, UsageError
from paceline.files import fingerprint
from paceline.models.config import parse_target, read_config
from paceline.models.shards import Shard, split_of
from paceline.models.target import GraphTarget
from paceline.ops.base import Group, Runner
from paceline.ops.native import default_threads, why_not
from paceline.ops.runners import pick_device
from paceline.parallel.group import PATIENCE, MemoryGroup, TorchGroup, first_line, open_store, shared_memory
from paceline.parallel.messages import Failed, Forward, Order, Ready
from paceline.parallel.runner import SharedRunner

LOADING = 1800.0  # seconds that the others may take longer to load than rank 0
GRACE = 3.0  # seconds for a process that fails to end


class Alone:
    """One process computes the whole target."""

    group: Group | None = None
    shard: tuple[int, int] | None = None
    ranks = 1

    def over(self, runner: Runner, arithmetic: str) -> tuple[Runner, str]:
        return runner, arithmetic

    def meet(self, target: GraphTarget) -> None:
        """There is nobody to wait for."""

    def watch(self) -> None:
        """There is nobody to look after."""

    def close(self) -> None:
        """There is nobody to end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(slots=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    line: Connection
    said: Failed | None = None

    def hear(self, seconds: float) -> Ready | Failed | None:
        """What it says within so many seconds; None: nothing, or it has ended without a word."""
        try:
            word = self.line.recv() if self.line.poll(seconds) else None
        except (EOFError, OSError):
            return None
        if isinstance(word, Failed):
            self.said = word
        return word


class Team(Alone):
    def __init__(self, config: EngineConfig, target: Path, assistant: Path | None) -> None:
        """Start the other ranks, which load beside rank 0. Raises UsageError."""
        self.ranks = config.tensor_parallel
        Shard.of(split_of(parse_target(read_config(target))), 0, self.ranks)
        self.shard = 0, self.ranks
        native_here = config.native and why_not() is None and pick_device(config.device).type == "cpu"
        memory = shared_memory(self.ranks) if native_here else None
        self._store, self._group = self._meeting(memory)
        self.group = self._group
        self._arithmetic = self._lost = ""
        self._members: list[_Rank] = []
        self._end = weakref.finalize(self, _end, self._members)  # at the end of the process, too
        for rank in range(1, self.ranks):
            port = None if self._store is None else self._store.port
            self._members.append(_start(Order(config, target, assistant, rank, port, memory)))
        if memory is not None:
            os.close(memory)

    def _meeting(self, memory: int | None) -> tuple[Any, MemoryGroup | TorchGroup]:
        """(the store by which the ranks find each other, how they add up)."""
        if memory is not None:
            return None, MemoryGroup(0, self.ranks, memory, self._look)
        return open_store(), TorchGroup(0, self.ranks)

    def _look(self) -> None:
        if any(member.process.poll() is not None for member in self._members):
            raise EngineLost("another rank is gone")

    def over(self, runner: Runner, arithmetic: str) -> tuple[Runner, str]:
        """The runner that has the others compute along, and what it is."""
        self._arithmetic = arithmetic
        return SharedRunner(runner, self), f"{arithmetic}, {self.ranks} ranks"

    def meet(self, target: GraphTarget) -> None:
        """Wait until all have loaded, and connect. Raises what a rank raised while it loaded, and EngineLost."""
        end, mine = time.monotonic() + LOADING, facts(self._arithmetic, target)
        for member in self._members:
            word = None
            while word is None and time.monotonic() < end and member.process.poll() is None:
                word = member.hear(1.0)
            word = word or member.hear(0)
            if isinstance(word, Failed) and word.error is not None:
                raise type(word.error)(f"rank {member.number}: {word.error}")
            if not isinstance(word, Ready):
                raise EngineLost(self._explain("it did not load in time"))
            if word.facts != mine:
                raise UsageError(
                    f"rank {member.number} computes otherwise than rank 0 ({word.facts}; {mine}): use one build of "
                    "paceline for all, and leave the model's files alone while they are loaded"
                )
        self._group.connect(self._store, target.device)

    def watch(self) -> None:
        """Raises EngineLost if a rank has ended."""
        try:
            self._look()
        except EngineLost as error:
            raise self.lose(error) from None

    def send(self, forward: Forward) -> None:
        if self._lost:
            raise EngineLost(self._lost)
        message = ForkingPickler.dumps(forward)
        for member in self._members:
            member.line.send_bytes(message)

    def lose(self, error: BaseException) -> BaseException:
        """What happened in the middle of a forward, after which the ranks are out of step."""
        if not self._lost:
            self._lost = self._explain(first_line(error))
            _end(self._members)
        if isinstance(error, Exception) and (
            isinstance(error, OSError | EngineLost) or not isinstance(error, PacelineError)
        ):
            return EngineLost(self._lost)
        return error

    def _explain(self, seen: str) -> str:
        """Who has ended, and why, in words."""
        end = time.monotonic() + GRACE
        while time.monotonic() < end and all(member.process.poll() is None for member in self._members):
            time.sleep(0.05)
        time.sleep(0.2)  # who loses a rank ends, too: the first one is to be named
        gone = [member for member in self._members if member.process.poll() is not None]
        for member in gone:
            if member.said is None:
                member.hear(0)
        gone.sort(key=lambda member: member.said is not None and member.said.peer)
        then = "the engine cannot go on: start paceline again"
        if not gone:
            return f"the {self.ranks} ranks are out of step ({seen}; they wait {PATIENCE:.0f} s for each other): {then}"
        first = gone[0]
        code = first.process.returncode
        why = first.said.text if first.said is not None else f"exit code {code}"
        if code < 0:
            why = f"killed by {signal.Signals(-code).name}" + (
                "; is there enough memory?" if code == -9 else ""
            )
        return f"rank {first.number} of {self.ranks} has ended ({why}), {then}"

    def close(self) -> None:
        self._lost = self._lost or "the engine is closed: make a new one"
        self._end()


def gather(config: EngineConfig, target: Path, assistant: Path | None) -> Alone:
    """The ranks that `config` asks for. Raises UsageError."""
    return Alone() if config.tensor_parallel == 1 else Team(config, target, assistant)


def per_rank(config: EngineConfig) -> EngineConfig:
    """The same with each rank's share of the threads."""
    if config.tensor_parallel == 1:
        return config
    threads = config.threads or default_threads()
    return replace(config, threads=max(1, threads // config.tensor_parallel))


def facts(arithmetic: str, target: GraphTarget) -> str:
    """What must be the same at all ranks, in one line."""
    heads = [layer.kv_heads for layer in target.layout.layers]
    return f"{arithmetic}, K/V {target.kv_dtype}, {sum(heads)} K/V heads, weights {fingerprint(target.path)}"


def _start(order: Order) -> _Rank:
    here, there = socket.socketpair()
    with there:
        # a rank that reads no more must not hold up rank 0 for ever
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(PATIENCE), 0))
        process = subprocess.Popen(
            child.command("paceline.rank", str(there.fileno())),
            pass_fds=[there.fileno(), *([] if order.memory is None else [order.memory])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C is for rank 0
        )
    line = Connection(here.detach())
    with contextlib.suppress(OSError):  # it is seen to have ended when it is waited for
        line.send(order)
    return _Rank(order.rank, process, line)


def _end(members: list[_Rank]) -> None:
    for member in members:
        member.line.close()
        member.process.kill()  # it has nothing to put away, and may be far from looking at its line
    for member in members:
        member.process.wait()
