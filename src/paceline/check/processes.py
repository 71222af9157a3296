"""Whether a fresh process computes the same bits as any other: of logits, soft tokens, drafts and texts.

What varies from process to process is what may change in which order things start: threads, what start-up measured,
how busy the machine is, what was computed before, and what others left behind when they were killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline import child
from paceline.check.again import Order
from paceline.check.certificate import Divergence, Finding
from paceline.errors import CapacityError, PacelineError

NAME = "the same bits in every process"
PATIENCE = 900.0  # seconds that one process may take
BUSY = "while True: pass"


@dataclass(frozen=True, slots=True)
class Circumstance:
    """How a process is started. `threads`: 0 for as many as the others; `kept`: with a profile of the ones before."""

    name: str
    threads: int = 0
    kept: bool = False
    busy: bool = False
    killed: bool = False  # another one is killed first, in the middle of its work
    stopped: bool = False  # for a second, in the middle of its work
    first: str = ""


CIRCUMSTANCES = (
    Circumstance("alone"),
    Circumstance("one thread", threads=1),
    Circumstance("under a busy neighbour", busy=True),
    Circumstance("pictures first", first="pictures"),
    Circumstance("with the profile of another", kept=True),
    Circumstance("three threads", threads=3),
    Circumstance("after preemption", first="preemption"),
    Circumstance("after a killed one", kept=True, killed=True),
    Circumstance("stopped for a second", stopped=True),
    Circumstance("three threads, busy, pictures first", threads=3, busy=True, first="pictures"),
    Circumstance("killed, busy, after preemption", kept=True, killed=True, busy=True, first="preemption"),
)


@dataclass(slots=True)
class Starts:
    """What was seen so far."""

    processes: int = 0
    killed: int = 0
    circumstances: Counter[str] = field(default_factory=Counter)
    arithmetic: str = ""
    first: dict[str, str] = field(
        default_factory=dict
    )  # what was computed -> the digest of the first process
    different: dict[str, list[str]] = field(
        default_factory=dict
    )  # -> the circumstances in which it was another


def compare(
    order: Order, count: int, seen: Starts, report: Callable[[int], None] = lambda n: None, begin: int = 0
) -> None:
    """Start `count` processes, one after the other, in the circumstances from `begin` on.

    Raises PacelineError if one cannot load, RuntimeError if one ends before it is done.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        for i in range(count):
            asked = CIRCUMSTANCES[(begin + i) % len(CIRCUMSTANCES)]
            _add(seen, asked, start(order, asked, Path(folder), random.Random(begin + i)))
            report(i + 1)


def _add(seen: Starts, asked: Circumstance, digests: dict[str, str]) -> None:
    seen.processes, seen.killed = seen.processes + 1, seen.killed + asked.killed
    seen.circumstances[asked.name] += 1
    arithmetic = digests.pop("arithmetic", "")
    seen.arithmetic = seen.arithmetic or arithmetic
    plain = (
        arithmetic.startswith("plain torch") and asked.threads
    )  # keeps its bits for one number of threads alone
    for what, bits in digests.items():
        name = f"{what} by {asked.threads} threads" if plain and not what.endswith("threads") else what
        if bits != seen.first.setdefault(name, bits):
            seen.different.setdefault(name, []).append(asked.name)


def start(order: Order, asked: Circumstance, folder: Path, lots: random.Random) -> dict[str, str]:
    """What a process in that circumstance computed, and its arithmetic."""
    options = dict(order.options) | {"profile_dir": str(folder) if asked.kept else "none"}
    if asked.threads:
        options["threads"] = asked.threads
    order = replace(order, options=options, first=asked.first)
    fill = lots.randrange(1, 256)
    with _busy() if asked.busy else contextlib.nullcontext():
        if asked.killed:
            with _running(order, fill) as (process, _):
                time.sleep(0.2 * lots.random())
                process.kill()
        with _running(order, fill) as (process, loaded):
            if asked.stopped:
                _pause(process, 0.1 * lots.random())
            return _line(process) | {"arithmetic": loaded}


@contextlib.contextmanager
def _busy() -> Iterator[None]:
    """As many processes that compute as there are processors."""
    others = [subprocess.Popen([sys.executable, "-I", "-c", BUSY]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


@contextlib.contextmanager
def _running(order: Order, fill: int) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that has loaded, and its arithmetic. It is over afterwards.

    glibc fills what it allots and takes back with the byte `fill`: memory that is read before it is set shows.
    """
    env = shutil.which("env")
    filled = [env, f"MALLOC_PERTURB_={fill}"] if env else []
    process = subprocess.Popen(
        [*filled, *child.command("paceline.check.again")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(order.to_json())
            process.stdin.close()
        yield process, _line(process)["loaded"]
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


def _line(process: subprocess.Popen[str]) -> dict[str, str]:
    assert process.stdout is not None
    assert process.stderr is not None
    line = process.stdout.readline()
    if not line:
        trace = process.stderr.read().strip().splitlines()
        raise RuntimeError(
            f"a process ended with {process.wait()}: {trace[-1] if trace else 'it said nothing'}"
        )
    digests: dict[str, str] = json.loads(line)
    if "error" in digests:
        kind = CapacityError if digests["kind"] == CapacityError.__name__ else PacelineError
        raise kind(f"a process could not do it: {digests['error']}")
    return digests


def _pause(process: subprocess.Popen[str], after: float) -> None:
    time.sleep(after)
    if hasattr(signal, "SIGSTOP"):
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.0)
        process.send_signal(signal.SIGCONT)


def finding(seen: Starts) -> Finding:
    counts: dict[str, Any] = {"processes": seen.processes, "killed before": seen.killed}
    counts |= {f"{what}: different": len(seen.different.get(what, [])) for what in seen.first}
    covered = {"circumstances": ", ".join(seen.circumstances), "compared": ", ".join(seen.first)}
    if seen.different:
        what, where = next(iter(seen.different.items()))
        first = Divergence(
            case=where[0], position=0, plain_token=-1, other_token=-1, plain_text="", other_text="", gap=None,
            noise_floor=0.0, kind="bug", what=f"{what} of this process are not those of the first one",
        )  # fmt: skip
        words = f"another process computed other {' and '.join(seen.different)}"
        return Finding(NAME, "refuted", words, counts, first, covered)
    if seen.processes < 2:
        return Finding(NAME, "not shown", "one process alone was started", counts, None, covered)
    return Finding(NAME, "holds", "all bits were those of the first process", counts, None, covered)
