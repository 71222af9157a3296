"""Runs cells of a benchmark: within a round every setting of a cell stands between two runs of the baseline.

A machine that others use too is faster in one second than in the next; a setting is held against the mean of its two
neighbours, so what drifts evenly cancels. Settings change places from round to round.

Speed is that of decoding at a full batch: the tokens between the moment when every text has its first one and the
moment when the first text is done, over the time they took. What comes after, fewer and fewer texts side by side,
is the speed of smaller batches; the time of all of it is kept too (`seconds`).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal, Protocol

from paceline.bench.meters import EnergyMeter
from paceline.bench.workloads import Prompt
from paceline.core import Delta, SamplingParams, Stats


class Engine(Protocol):
    """What is measured: paceline.engine.engine.Engine, or a stand-in in tests."""

    @property
    def has_work(self) -> bool: ...

    def add(self, request_id: str, prompt_ids: list[int], params: SamplingParams, salt: str = "") -> None: ...

    def cancel(self, request_id: str) -> None: ...

    def step(self) -> list[Delta]: ...


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to run a cell. `none` is the baseline that every other one is held against."""

    drafter: str
    draft_tokens: int | Literal["auto"]

    @property
    def label(self) -> str:
        return self.drafter if self.drafter == "none" else f"{self.drafter} {self.draft_tokens}"


NONE = Setting("none", 0)


@dataclass(frozen=True, slots=True)
class Cell:
    workload: str
    batch: int
    temperature: float


@dataclass(slots=True)
class Run:
    """One measurement. Times in seconds."""

    cell: Cell
    setting: Setting
    round: int
    place: int = 0  # within its cell and round: the baselines at place - 1 and place + 1 are its neighbours
    tokens: int = 0
    seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    first_token: list[float] = field(default_factory=list)  # per text
    gaps: list[float] = field(default_factory=list)  # between deltas of one text, divided by their tokens
    steps: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)
    drafters: dict[str, int] = field(default_factory=dict)
    joules: float | None = None
    digest: str = ""  # of all texts: equal digests are equal tokens

    @property
    def speed(self) -> float:
        return self.decode_tokens / self.decode_seconds if self.decode_seconds > 0 else 0.0

    def add_stats(self, stats: Stats) -> None:
        self.steps += stats.steps
        for mine, theirs in (
            (self.drafted_by_position, stats.drafted_by_position),
            (self.accepted_by_position, stats.accepted_by_position),
        ):
            mine.extend([0] * (len(theirs) - len(mine)))
            for i, n in enumerate(theirs):
                mine[i] += n
        for counts, more in ((self.reasons, stats.reasons), (self.drafters, stats.drafters)):
            for key, n in more.items():
                counts[key] = counts.get(key, 0) + n


@dataclass(frozen=True, slots=True)
class Bench:
    """What to measure and with what."""

    engine: Engine
    prompts: Callable[[str, int], list[Prompt]]  # (workload, count)
    cells: tuple[Cell, ...]
    settings: tuple[Setting, ...]
    tokens: int = 128
    rounds: int = 5
    seconds: float = float("inf")  # no new run is begun after that
    energy: EnergyMeter | None = None


def run_once(bench: Bench, cell: Cell, setting: Setting, number: int, place: int = 0) -> Run:
    """Run one cell with one setting; requests that were begun are cancelled if it is broken off."""
    pool = bench.prompts(cell.workload, cell.batch + number)
    chosen = [pool[(number + i) % len(pool)] for i in range(cell.batch)]
    run = Run(cell, setting, number, place)
    before = bench.energy.read() if bench.energy else None
    ids = [f"{setting.label}-{number}-{i}" for i in range(cell.batch)]
    begin = time.perf_counter()
    try:
        for i, (name, prompt) in enumerate(zip(ids, chosen, strict=True)):
            bench.engine.add(name, prompt.tokens, _params(bench, cell, setting, prompt, i))
        _drive(bench.engine, run, begin, cell.batch)
    finally:
        for name in ids:
            bench.engine.cancel(name)
    if bench.energy and before is not None:
        run.joules = bench.energy.since(before)
    return run


def _params(bench: Bench, cell: Cell, setting: Setting, prompt: Prompt, index: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=bench.tokens,
        temperature=cell.temperature,
        seed=index,
        ignore_eos=True,
        drafter=setting.drafter,
        draft_tokens=setting.draft_tokens,
        reference=prompt.reference,
        constraint=prompt.constraint,
    )


def _drive(engine: Engine, run: Run, begin: float, texts: int) -> None:
    """Step until nothing is left, with a clock on every delta."""
    last: dict[str, float] = {}
    ids: dict[str, list[int]] = {}
    opened = closed = None  # (time, tokens): when all texts wrote, when the first was done
    while engine.has_work:
        deltas = engine.step()
        now = time.perf_counter()
        for delta in deltas:
            _note(run, delta, now, (begin, last))
            ids.setdefault(delta.request, []).extend(delta.token_ids)
        if opened is None and len(last) == texts:
            opened = (now, run.tokens)
        elif opened and closed is None and any(delta.finish_reason for delta in deltas):
            closed = (now, run.tokens)
    end = (time.perf_counter(), run.tokens)
    first, then = opened or (begin, 0), closed or end
    run.seconds, run.decode_seconds, run.decode_tokens = (
        end[0] - begin,
        then[0] - first[0],
        then[1] - first[1],
    )
    run.digest = hashlib.sha256(repr([ids[n] for n in sorted(ids, key=_number)]).encode()).hexdigest()[:16]


def _note(run: Run, delta: Delta, now: float, clock: tuple[float, dict[str, float]]) -> None:
    begin, last = clock
    if delta.error is not None:
        raise RuntimeError(f"a text failed while it was measured: {delta.error}")
    run.tokens += len(delta.token_ids)
    if delta.request not in last:
        run.first_token.append(now - begin)
    elif delta.token_ids:
        run.gaps.append((now - last[delta.request]) / len(delta.token_ids))
    last[delta.request] = now
    if delta.stats is not None:
        run.add_stats(delta.stats)


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])


def measure(bench: Bench, report: Callable[[Run], None] = lambda run: None) -> tuple[list[Run], str]:
    """(runs, "" or why it ended early). Settings change places from round to round; an interrupt keeps what
    is done.
    """
    runs: list[Run] = []
    begin = time.perf_counter()
    try:
        for setting in bench.settings:  # the first steps build plans and fill caches
            run_once(_short(bench), bench.cells[0], setting, 0)
        for number in range(bench.rounds):
            for cell in bench.cells:
                for place, setting in enumerate(_order(bench.settings, number)):
                    if runs and time.perf_counter() - begin > bench.seconds:
                        return runs, f"stopped after {bench.seconds:.0f} s as asked"
                    runs.append(run_once(bench, cell, setting, number, place))
                    report(runs[-1])
    except KeyboardInterrupt:
        return runs, "interrupted"
    return runs, ""


def _short(bench: Bench) -> Bench:
    return Bench(bench.engine, bench.prompts, bench.cells, bench.settings, tokens=min(bench.tokens, 16))


def _order(settings: Seq[Setting], by: int) -> list[Setting]:
    """The settings of a round, each between two baselines, begun with another one in each round."""
    others = [setting for setting in settings if setting != NONE]
    by %= max(len(others), 1)
    order = [NONE]
    for setting in (*others[by:], *others[:by]):
        order += [setting, NONE]
    return order


def runs_of_a_round(settings: Seq[Setting]) -> int:
    return len(_order(settings, 0))
