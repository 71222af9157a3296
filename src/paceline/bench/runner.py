"""Runs cells of a benchmark: each setting writes beside a twin of its engine that never drafts, in turns of a few tokens.

A machine that others use too is faster in one second than in the next, by up to two times. So a setting and its baseline
write the same texts at the same time, over the same weights and in one cache, in turns that end after the same tokens,
with a clock of its own each: who begins has as many turns as the other. What the machine does to one it does to the
other, and their ratio stays. `none` is run in this way too: its ratio says how far from 1 noise alone goes. What the one
leaves in the caches is not the other's, so the first tokens of each turn are not counted: plain steps right after a
drafter's take up to half as long again, which made drafts seem 5% better than they are.

As many texts as the batch has are in flight all the time, as in a server that is asked for more than it can do at once:
where one is done the next begins, until the run has lasted. Texts are of different lengths, or those of the baseline
would all end in one step and those of a drafter one by one. Speed is that of decoding at a full batch: the steps that
begin with so many texts, each with its first token, over as many tokens by both. A prompt that is being read, and the
last texts, fewer and fewer side by side, are not in it; the time of all of it is kept too (`seconds`).
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

TURN = 64  # tokens of each text,
COLD = 16  # of which so many are not counted, nor more than a quarter of a text
GOLDEN = (5**0.5 - 1) / 2
MANY = 1 << 30  # texts: as many as there is time for
MOST_ROUNDS = 20  # times as many as were asked for, where ratios have to be known well
PROMPTS = 8  # different ones that a run of many texts has, where a workload has as many


Texts = Callable[
    [int, "Setting"], tuple[list[int], SamplingParams]
]  # the prompt of a text by its number, and how


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
    same_text: bool | None = True  # as the baseline's; None: not compared, since verdicts are forced

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


@dataclass(frozen=True, slots=True)
class Bench:
    """What to measure and with what. `plain`: the twin of `engine` that never drafts."""

    engine: Engine
    plain: Engine
    prompts: Callable[[str, int], list[Prompt]]  # (workload, count)
    cells: tuple[Cell, ...]
    settings: tuple[Setting, ...]
    tokens: int = 128  # of a text, at most: see `length`
    rounds: int = 5
    seconds: float = float("inf")  # no new run is begun after that
    least: float = 0.0  # seconds of a run: it goes on with further texts until then
    within: float = float("inf")  # further rounds of what is not known that well, see `unsure`
    energy: EnergyMeter | None = None
    forced: bool = False  # drafts are kept by chance, so texts differ


class _Side:
    """One of the two engines with its texts, its clock, and what it has written so far."""

    def __init__(self, engine: Engine, run: Run, energy: EnergyMeter | None, texts: Texts) -> None:
        self.engine, self.run, self.energy, self._texts = engine, run, energy, texts
        self.ids: dict[str, list[int]] = {}  # by text, in the order in which they began
        self.began: dict[str, float] = {}  # texts without a token yet: when that was
        self.last: dict[str, float] = {}  # texts with one: when the last came
        self.trace: list[tuple[int, float]] = [
            (0, 0.0)
        ]  # (tokens, seconds) at a full batch, after every step of it

    def fill(self, texts: int) -> None:
        """Begin texts until the batch is full, or as many have begun in all."""
        start, run = time.perf_counter(), self.run
        while len(self.began) + len(self.last) < run.cell.batch and len(self.ids) < texts:
            number = len(self.ids)
            name = f"{run.setting.label}-{run.round}-{number}"
            prompt, params = self._texts(number, run.setting)
            self.ids[name], self.began[name] = [], run.seconds
            self.engine.add(name, prompt, params)
        run.seconds += time.perf_counter() - start

    def go_on(self, until: int, texts: int, cold: int = 0) -> None:
        """A turn: steps until `until` tokens are written, or one writes nothing; with a meter, as long as it needs. Until
        `cold` tokens of it are written nothing is counted.
        """
        run, before = self.run, self.energy.read() if self.energy else None
        warm = run.tokens + cold
        least = run.seconds + (self.energy.resolution if self.energy else 0.0)
        while self.engine.has_work:
            begin, written, full = time.perf_counter(), run.tokens, len(self.last) == run.cell.batch
            deltas = self.engine.step()
            taken = time.perf_counter() - begin
            run.seconds += taken
            self._note(deltas)
            if full and written >= warm:
                tokens, seconds = self.trace[-1]
                self.trace.append((tokens + run.tokens - written, seconds + taken))
            self.fill(texts)
            if not deltas or (run.tokens >= until and run.seconds >= least):
                break
        if self.energy and before is not None:
            run.joules = (run.joules or 0.0) + self.energy.since(before)

    def _note(self, deltas: list[Delta]) -> None:
        run, last = self.run, self.last
        for delta in deltas:
            if delta.error is not None:
                raise RuntimeError(f"a text failed while it was measured: {delta.error}")
            run.tokens += len(delta.token_ids)
            self.ids[delta.request].extend(delta.token_ids)
            if delta.request not in last:
                run.first_token.append(run.seconds - self.began.pop(delta.request))
            elif delta.token_ids:
                run.gaps.append((run.seconds - last[delta.request]) / len(delta.token_ids))
            last[delta.request] = run.seconds
            if delta.stats is not None:
                run.add_stats(delta.stats)
            if delta.finish_reason is not None:
                del last[delta.request]

    def window(self, tokens: int) -> tuple[int, float]:
        """(tokens, seconds) of decoding at a full batch, until `tokens` are written."""
        return self.trace[bisect_left(self.trace, (tokens, 0.0), hi=len(self.trace) - 1)]


def _digest(texts: object) -> str:
    return hashlib.sha256(repr(texts).encode()).hexdigest()[:16]


def run_beside(bench: Bench, cell: Cell, setting: Setting, number: int) -> tuple[Run, Run]:
    """(run, its baseline) of one cell, over as many texts as it takes to last; requests that were begun are cancelled if
    it is broken off.
    """
    pool = bench.prompts(cell.workload, max(cell.batch, PROMPTS))

    def texts(index: int, setting: Setting) -> tuple[list[int], SamplingParams]:
        prompt = pool[(number + index) % len(pool)]
        return prompt.tokens, _params(bench, cell, setting, prompt, index)

    run, plain = Run(cell, setting, number), Run(cell, NONE, number)
    sides = [_Side(bench.engine, run, bench.energy, texts), _Side(bench.plain, plain, bench.energy, texts)]
    order = sides[::-1] if number % 2 else sides  # who begins
    turn, cold = TURN * cell.batch, min(COLD, bench.tokens // 4) * cell.batch
    try:
        _read(order[-1].engine, [p.tokens for p in pool])  # neither begins with its own Python warm
        for side in order:
            side.fill(cell.batch)
        while any(side.engine.has_work for side in sides):
            lasts = run.seconds + plain.seconds < 2 * bench.least
            most = MANY if lasts else max(len(side.ids) for side in sides)
            until = (min(run.tokens, plain.tokens) // turn + 1) * turn
            for side in order:
                side.go_on(until, most, cold)
    finally:
        for side in sides:
            for name in side.ids:
                side.engine.cancel(name)
    tokens = min(side.trace[-1][0] for side in sides)
    for side in sides:
        side.run.decode_tokens, side.run.decode_seconds = side.window(tokens)
        side.run.digest = _digest(list(side.ids.values()))
    run.plain_speed = plain.speed
    run.same_text = None if bench.forced else run.digest == plain.digest
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
        max_tokens=length(bench.tokens, index),
        temperature=cell.temperature,
        seed=index,
        ignore_eos=True,
        drafter=setting.drafter,
        draft_tokens=setting.draft_tokens,
        reference=prompt.reference,
        constraint=prompt.constraint,
    )


def length(most: int, index: int) -> int:
    """Tokens of a text: all lengths between half of `most` and that, evenly and in no order."""
    return max(round(most * (1 - 0.5 * (index * GOLDEN % 1))), 2)


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
                return (
                    runs,
                    f"the time of {bench.seconds:.0f} s was up, so some cells have fewer rounds (--seconds gives more)",
                )
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
