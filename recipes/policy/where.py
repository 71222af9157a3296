"""Where `auto` gains and loses time beside plain decoding: by what its steps did. For those who change the controller.

    python recipes/policy/where.py [--workload code] [--batch 4] [--temperature 0] [--rounds 3] [--seconds 2]

The bundled pair writes as in `paceline bench`, beside a twin that never drafts, in turns. Each kind of step is held
against what the twin took for as many tokens in the turn beside it; the last column adds up to what is gained or lost.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from paceline.assembly import build_engine
from paceline.bench import runner, workloads
from paceline.cli import bench as bench_command
from paceline.config import EngineConfig
from paceline.core import Delta
from paceline.engine.engine import Engine
from paceline.memory import freeze_objects

TOKENS, LONGEST = 128, 1024
LATELY = 24  # plain steps after drafts: what the drafter left in the caches is felt in them
DRAFTS, ENDS, ASKED, AFTER, REST = (
    "drafts are checked",
    "a text ends",
    "plans and looks",
    f"up to {LATELY} steps after drafts",
    "at rest",
)


@dataclass(slots=True)
class Step:
    watched: Watched
    seconds: float
    tokens: int
    did: str
    full: bool  # all places were taken by texts that had begun


@dataclass(slots=True, eq=False)
class Watched:
    """An engine whose steps are noted in a common log."""

    engine: Engine
    batch: int
    log: list[Step]
    asked: bool = False  # the controller was, in this step
    since: int = LATELY  # plain steps since drafts
    begun: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.engine.state.controller = Noted(self, self.engine.state.controller)

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    def add(self, *args: Any) -> None:
        self.engine.add(*args)

    def cancel(self, name: str) -> None:
        self.engine.cancel(name)

    def step(self) -> list[Delta]:
        self.asked, begin = False, time.perf_counter()
        deltas = self.engine.step()
        seconds = time.perf_counter() - begin
        drafts = any(delta.proposed for delta in deltas)
        self.since = 0 if drafts else self.since + 1
        did = (
            ENDS if any(delta.finish_reason for delta in deltas)
            else DRAFTS if drafts
            else ASKED if self.asked
            else AFTER if self.since <= LATELY
            else REST
        )  # fmt: skip
        names = {delta.request for delta in deltas}
        full = len(names) == self.batch and names <= self.begun
        self.begun |= names
        self.log.append(Step(self, seconds, sum(len(delta.token_ids) for delta in deltas), did, full))
        return deltas


class Noted:
    """A controller, for which it is noted when it has to decide."""

    def __init__(self, watched: Watched, controller: Any) -> None:
        self.watched, self.controller = watched, controller

    def __getattr__(self, name: str) -> Any:
        if name in ("limits", "rest", "copies"):
            self.watched.asked = True
        return getattr(self.controller, name)


def turns(log: list[Step], batch: int) -> Iterator[tuple[Watched, list[Step]]]:
    """Of each turn, the steps that count: `paceline bench` says why."""
    for watched, steps in groupby(log, key=lambda step: step.watched):
        written, counted = 0, []
        for step in steps:
            if step.full and written >= runner.COLD * batch:
                counted.append(step)
            written += step.tokens
        yield watched, counted


def told(log: list[Step], auto: Watched, totals: dict[str, list[float]]) -> None:
    """Add what a run shows to `totals`: by what steps did, their number, seconds, tokens and seconds over the twin's."""
    mine, twins = [], []
    for watched, steps in turns(log, auto.batch):
        (mine if watched is auto else twins).append(steps)
    for steps, beside in zip(mine, twins, strict=False):
        if not (tokens := sum(step.tokens for step in beside)):
            continue
        price = sum(step.seconds for step in beside) / tokens
        for step in steps:
            row = totals[step.did]
            for i, value in enumerate((1, step.seconds, step.tokens, step.seconds - step.tokens * price)):
                row[i] += value


def measure(args: argparse.Namespace) -> tuple[list[float], dict[str, list[float]]]:
    """(speed over the twin's by round, totals by what steps did)."""
    engine = build_engine(
        EngineConfig(target="demo", draft_tokens="auto", max_batch=2 * args.batch, max_model_len=LONGEST)
    )
    log: list[Step] = []
    auto, twin = (Watched(one, args.batch, log) for one in (engine, engine.twin()))
    bounds = workloads.Bounds(
        engine.state.target.vocab_size, LONGEST - TOKENS - 1, engine.tokenizer.special_ids
    )
    cell = runner.Cell(args.workload, args.batch, args.temperature)
    setting = runner.Setting(engine.info["drafter"], "auto")
    bench = runner.Bench(
        auto, twin, lambda name, count: workloads.prompts(name, engine.tokenizer, bounds, count),
        (cell,), (setting,), TOKENS, args.rounds, least=args.seconds,
    )  # fmt: skip
    engine.state.cache.touch(bench_command.TOUCHED)  # as `paceline bench` does, both
    freeze_objects()
    ratios, totals = [], defaultdict[str, list[float]](lambda: [0.0] * 4)
    for number in range(args.rounds):
        log.clear()
        ratios.append(runner.run_beside(bench, cell, setting, number)[0].ratio)
        told(log, auto, totals)
    return ratios, totals


def table(ratios: list[float], totals: dict[str, list[float]]) -> str:
    whole = sum(seconds for _, seconds, _, _ in totals.values())
    lines = ["speed over plain decoding, by round: " + ", ".join(f"{ratio:.3f}" for ratio in ratios)]
    lines.append(f"{'':28} {'steps':>7} {'ms/step':>9} {'tokens/step':>12} {'lost time':>10}")
    for did, (steps, seconds, tokens, over) in sorted(totals.items(), key=lambda row: -row[1][3]):
        lines.append(
            f"{did:28} {steps:7.0f} {1e3 * seconds / steps:9.3f} {tokens / steps:12.2f} {over / whole:+10.2%}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workload", choices=sorted(workloads.WORKLOADS), default="code")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="that a round lasts at least")
    args = parser.parse_args()
    if min(args.batch, args.rounds) < 1 or min(args.temperature, args.seconds) < 0:
        parser.error("batch and rounds are 1 or more, temperature and seconds 0 or more")
    print(table(*measure(args)))


if __name__ == "__main__":
    main()
