"""Runs cells of a benchmark: each setting writes beside a twin of its engine that never drafts, in turns of a few tokens.

A machine that others use too is faster in one second than in the next, by up to two times. So a setting and its baseline
write the same texts at the same time, over the same weights and in one cache, in turns that end after the same tokens,
with a clock of its own each: who begins has as many turns as the other, each of which begins with cold caches. What the
machine does to one it does to the other, and their ratio stays. `none` is run in this way too: its ratio says how far
from 1 noise alone goes. One text of a small model is written in less time than another process takes away at once, so a
run goes on with further texts until it has lasted.

Speed is that of decoding at a full batch: the tokens between the moment when every text has its first one and the moment
when the first text of either is done, over the time they took. What comes after, fewer and fewer texts side by side, is
the speed of smaller batches; the time of all of it is kept too (`seconds`).
"""

from __future__ import annotations

import hashlib
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from paceline.bench.meters import EnergyMeter
from paceline.bench.stats import spread
from paceline.bench.workloads import Prompt
from paceline.core import Delta, SamplingParams, Stats

TURN = 32  # tokens of each text
MOST_ROUNDS = 20  # times as many as were asked for, where ratios have to be known well
PROMPTS = 8  # different ones that a run of many texts has, where a workload has as many


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
    """One measurement. Times in seconds, of its own turns only."""

    cell: Cell
    setting: Setting
    round: int
    tokens: int = 0
    seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    plain_speed: float = 0.0  # tokens per second of the baseline beside it, over as many tokens
    first_token: list[float] = field(default_factory=list)  # per text
    gaps: list[float] = field(default_factory=list)  # between deltas of one text, divided by their tokens
    steps: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)
    drafters: dict[str, int] = field(default_factory=dict)
    joules: float | None = None
    digest: str = ""  # of all texts: equal digests are equal tokens
    same_text: bool = True  # as the baseline's

    @property
    def speed(self) -> float:
        return self.decode_tokens / self.decode_seconds if self.decode_seconds > 0 else 0.0

    @property
    def ratio(self) -> float:
        """Its speed over that of the baseline beside it, 0 if either wrote too little to say."""
        return self.speed / self.plain_speed if self.plain_speed > 0 else 0.0

    def add_stats(self, stats: Run | Stats) -> None:
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

    def add(self, other: Run) -> None:
        """Further texts of the same run."""
        self.tokens, self.seconds = self.tokens + other.tokens, self.seconds + other.seconds
        self.decode_tokens += other.decode_tokens
        self.decode_seconds += other.decode_seconds
        self.first_token += other.first_token
        self.gaps += other.gaps
        self.add_stats(other)
        if other.joules is not None:
            self.joules = (self.joules or 0.0) + other.joules
        self.digest = _digest(self.digest + other.digest)


@dataclass(frozen=True, slots=True)
class Bench:
    """What to measure and with what. `plain`: the twin of `engine` that never drafts."""

    engine: Engine
    plain: Engine
    prompts: Callable[[str, int], list[Prompt]]  # (workload, count)
    cells: tuple[Cell, ...]
    settings: tuple[Setting, ...]
    tokens: int = 128
    rounds: int = 5
    seconds: float = float("inf")  # no new run is begun after that
    least: float = 0.0  # seconds of a run: it goes on with further texts until then
    within: float = float("inf")  # further rounds of what is not known that well, see `unsure`
    energy: EnergyMeter | None = None


class _Side:
    """One of the two engines with its texts, its clock, and what it has written so far."""

    def __init__(self, engine: Engine, run: Run, energy: EnergyMeter | None, first: int) -> None:
        self.engine, self.run, self.energy = engine, run, energy
        self.names = [f"{run.setting.label}-{run.round}-{first + i}" for i in range(run.cell.batch)]
        self.ids: dict[str, list[int]] = {name: [] for name in self.names}
        self.last: dict[str, float] = {}  # by text: when its last token came
        self.trace: list[tuple[int, float]] = []  # (tokens, seconds) after every step that wrote
        self.opened: int | None = None  # places in `trace`: every text has its first token,
        self.closed: int | None = None  # and the first text is done

    def begin(self, requests: list[tuple[list[int], SamplingParams]]) -> None:
        start = time.perf_counter()
        for name, (prompt, params) in zip(self.names, requests, strict=True):
            self.engine.add(name, prompt, params)
        self.run.seconds += time.perf_counter() - start

    def go_on(self, until: int) -> None:
        """A turn: steps until `until` tokens are written, or one writes nothing; with a meter, as long as it needs."""
        run, begin, before = self.run, time.perf_counter(), self.energy.read() if self.energy else None
        start, least = begin - run.seconds, self.energy.resolution if self.energy else 0.0
        while self.engine.has_work:
            deltas = self.engine.step()
            now = time.perf_counter() - start
            self._note(deltas, now)
            if not deltas or (run.tokens >= until and now - run.seconds >= least):
                break
        run.seconds = time.perf_counter() - start
        if self.energy and before is not None:
            run.joules = (run.joules or 0.0) + self.energy.since(before)

    def _note(self, deltas: list[Delta], now: float) -> None:
        run, last = self.run, self.last
        for delta in deltas:
            if delta.error is not None:
                raise RuntimeError(f"a text failed while it was measured: {delta.error}")
            run.tokens += len(delta.token_ids)
            self.ids[delta.request].extend(delta.token_ids)
            if delta.request not in last:
                run.first_token.append(now)
            elif delta.token_ids:
                run.gaps.append((now - last[delta.request]) / len(delta.token_ids))
            last[delta.request] = now
            if delta.stats is not None:
                run.add_stats(delta.stats)
        if deltas:
            self.trace.append((run.tokens, now))
            if self.opened is None and len(last) == run.cell.batch:
                self.opened = len(self.trace) - 1
            if self.closed is None and any(delta.finish_reason for delta in deltas):
                self.closed = len(self.trace) - 1

    def window(self, tokens: int) -> tuple[int, float]:
        """(tokens, seconds) of decoding at a full batch, at most until `tokens` are written."""
        first = self.trace[self.opened or 0]
        end = bisect_left(self.trace, (tokens, 0.0), hi=len(self.trace) - 1)
        then = self.trace[end]
        return max(then[0] - first[0], 0), max(then[1] - first[1], 0.0)


def _digest(data: object) -> str:
    return hashlib.sha256(repr(data).encode()).hexdigest()[:16]


def run_beside(bench: Bench, cell: Cell, setting: Setting, number: int) -> tuple[Run, Run]:
    """(run, its baseline) of one cell, over as many texts as it takes to last."""
    pool = bench.prompts(cell.workload, max(cell.batch + number, PROMPTS))
    run, plain = _write(bench, cell, setting, number, pool, 0)
    first = cell.batch
    while run.seconds + plain.seconds < 2 * bench.least:
        more, beside = _write(bench, cell, setting, number, pool, first)
        run.add(more)
        plain.add(beside)
        first += cell.batch
    run.plain_speed, run.same_text = plain.speed, run.digest == plain.digest
    return run, plain


def _write(
    bench: Bench, cell: Cell, setting: Setting, number: int, pool: list[Prompt], first: int
) -> tuple[Run, Run]:
    """(run, its baseline) of a batch of texts, the first of which has that number; requests that were begun are
    cancelled if it is broken off.
    """
    chosen = [pool[(number + first + i) % len(pool)] for i in range(cell.batch)]
    run, plain = Run(cell, setting, number), Run(cell, NONE, number)
    sides = [_Side(bench.engine, run, bench.energy, first), _Side(bench.plain, plain, bench.energy, first)]
    order = sides[::-1] if (number + first // cell.batch) % 2 else sides  # who begins
    turn = TURN * cell.batch
    try:
        _read(order[-1].engine, [p.tokens for p in chosen])  # neither begins with its own Python warm
        for side in order:
            params = [_params(bench, cell, side.run.setting, p, first + i) for i, p in enumerate(chosen)]
            side.begin([(p.tokens, own) for p, own in zip(chosen, params, strict=True)])
        while any(side.engine.has_work for side in sides):
            until = (min(run.tokens, plain.tokens) // turn + 1) * turn
            for side in order:
                side.go_on(until)
    finally:
        for side in sides:
            for name in side.names:
                side.engine.cancel(name)
    full = min(side.trace[-1 if side.closed is None else side.closed][0] for side in sides)
    for side in sides:
        side.run.decode_tokens, side.run.decode_seconds = side.window(full)
        side.run.digest = _digest(list(side.ids.values()))
    return run, plain


def _read(engine: Engine, prompts: list[list[int]]) -> None:
    """Leave prompts in the prefix cache, or whoever begins would read them for the other one, too."""
    names = [f"read-{i}" for i in range(len(prompts))]
    try:
        for name, prompt in zip(names, prompts, strict=True):
            engine.add(name, prompt, SamplingParams(max_tokens=1, drafter="none"))
        while engine.has_work:
            engine.step()
    finally:
        for name in names:
            engine.cancel(name)


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


def unsure(runs: Seq[Run], within: float) -> list[tuple[Cell, Setting]]:
    """What has a median ratio that is not known to within such a share of it (95%, bootstrapped), in order."""
    if within == float("inf"):
        return []
    ratios: dict[tuple[Cell, Setting], list[float]] = {}
    for run in runs:
        if run.ratio > 0:
            ratios.setdefault((run.cell, run.setting), []).append(run.ratio)
    known = {key: spread(values) for key, values in ratios.items()}
    return [key for key, s in known.items() if s.count < 2 or s.ci_high - s.ci_low > 2 * within * s.median]


def measure(bench: Bench, report: Callable[[Run], None] = lambda run: None) -> tuple[list[Run], str]:
    """(runs, each followed by its baseline; "" or why it ended early). Settings change places from round to round; an
    interrupt keeps what is done.
    """
    runs: list[Run] = []
    begin = time.perf_counter()
    try:
        for setting in bench.settings:  # the first steps build plans and fill caches
            run_beside(replace(bench, tokens=min(bench.tokens, 16)), bench.cells[0], setting, 0)
        for number, cell, setting in _to_run(bench, runs):
            if runs and time.perf_counter() - begin > bench.seconds:
                return runs, f"stopped after {bench.seconds:.0f} s as asked"
            runs += run_beside(bench, cell, setting, number)
            report(runs[-2])
    except KeyboardInterrupt:
        return runs, "interrupted"
    return runs, ""


def _to_run(bench: Bench, runs: Seq[Run]) -> Iterator[tuple[int, Cell, Setting]]:
    """(round, cell, setting): the rounds that were asked for, then further ones as far as `runs` are unsure by then."""
    for number in range(bench.rounds):
        by = number % len(bench.settings)
        for cell in bench.cells:
            for setting in (*bench.settings[by:], *bench.settings[:by]):
                yield number, cell, setting
    number = bench.rounds
    while number < MOST_ROUNDS * bench.rounds and (rest := unsure(runs, bench.within)):
        yield from ((number, cell, setting) for cell, setting in rest)
        number += 1
