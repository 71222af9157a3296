"""Sums up runs: one row per cell and setting, and what they say together. Pure."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from paceline.bench.runner import NONE, Cell, Run, Setting
from paceline.bench.stats import Spread, quantile, spread

GAPS = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)


@dataclass(frozen=True, slots=True)
class Line:
    """One cell with one setting, over all rounds. `ratio`: its speed over that of `none` beside it; for `none` itself how
    far noise alone goes.
    """

    cell: Cell
    setting: Setting
    speed: float  # tokens per second, median
    ratio: Spread | None
    tokens_per_step: float
    acceptance: list[float]  # by position, of the drafted ones
    first_token: float  # seconds, median
    gap: float  # seconds per token between deltas, median
    gap_p95: float
    joules_per_token: float | None
    same_text: bool | None  # as `none` beside it, in every round; None: not compared
    reasons: dict[str, int]
    drafters: dict[str, int]


def lines(runs: Seq[Run]) -> list[Line]:
    """In the order of measurement."""
    groups: dict[tuple[Cell, Setting], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.cell, run.setting), []).append(run)
    return [_line(cell, setting, group) for (cell, setting), group in groups.items()]


def _line(cell: Cell, setting: Setting, group: list[Run]) -> Line:
    ratios = [run.ratio for run in group if run.ratio > 0]
    gaps = sorted(gap for run in group for gap in run.gaps) or [0.0]
    joules = [run.joules / run.tokens for run in group if run.joules is not None and run.tokens]
    drafted = _sum([run.drafted_by_position for run in group])
    accepted = _sum([run.accepted_by_position for run in group])
    steps = sum(run.steps for run in group)
    return Line(
        cell,
        setting,
        median(run.speed for run in group),
        spread(ratios) if ratios else None,
        sum(run.tokens for run in group) / steps if steps else 0.0,
        [a / d for a, d in zip([*accepted, *[0] * len(drafted)], drafted, strict=False) if d],
        median([t for run in group for t in run.first_token] or [0.0]),
        median(gaps),
        quantile(gaps, 0.95),
        median(joules) if joules else None,
        None if any(run.same_text is None for run in group) else all(run.same_text for run in group),
        _merge([run.reasons for run in group]),
        _merge([run.drafters for run in group]),
    )


def _sum(rows: list[list[int]]) -> list[int]:
    out = [0] * max(map(len, rows), default=0)
    for row in rows:
        for i, n in enumerate(row):
            out[i] += n
    return out


def _merge(rows: list[dict[str, int]]) -> dict[str, int]:
    out: dict[str, int] = {}
    for row in rows:
        for key, n in row.items():
            out[key] = out.get(key, 0) + n
    return out


AS_FAST = 0.98  # of none: what is not below it is not slower
ENOUGH = 5  # ratios, from which an interval of their median says something


@dataclass(frozen=True, slots=True)
class Held:
    """How often a setting was as fast as none, and where it surely was not."""

    cells: int
    fast: int
    surely_slow: list[tuple[float, Cell]]  # the 95% interval of the median ratio ends below `AS_FAST`

    def say(self, name: str) -> list[str]:
        out = [f"{name}: at {AS_FAST} of none or more in {self.fast} of {self.cells} cells."]
        if self.surely_slow:
            named = "; ".join(f"{_name(cell)} ({ratio:.2f})" for ratio, cell in self.surely_slow)
            out.append(f"{name}: surely below that (95% of what its median may be) in {named}.")
        return out


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a user wants to know first. Ratios of medians; None where nothing was there to compare."""

    worst_auto: tuple[float, Cell] | None  # auto against none
    worst_against_fixed: tuple[float, Cell, str] | None  # auto against the best fixed length of its cell
    best: tuple[float, Cell, str] | None
    all_same_text: bool | None  # None: not compared
    noise: tuple[float, Cell] | None = None  # none against itself
    auto: Held | None = None
    itself: Held | None = None  # none
    typical: tuple[float, float, float, str] | None = None  # least, median, most of a setting over its cells

    def say(self) -> list[str]:
        out = []
        if self.typical:
            low, middle, high, label = self.typical
            fast = f"{middle:.2f} times as fast" if abs(middle - 1) > 0.02 else "no faster and no slower"
            texts = ", and every text stays the same" if self.all_same_text else ""
            out.append(
                f"Typically speculation makes this model {fast} here ({label}; {low:.2f} to {high:.2f}){texts}."
            )
        if self.best:
            ratio, cell, label = self.best
            out.append(f"At best {label} is {ratio:.2f} times none ({_name(cell)}).")
        if self.worst_auto:
            ratio, cell = self.worst_auto
            out.append(f"auto against none, worst cell: {ratio:.2f} ({_name(cell)}).")
        if self.worst_against_fixed:
            ratio, cell, label = self.worst_against_fixed
            out.append(
                f"auto against the best fixed length, worst cell: {ratio:.2f} ({_name(cell)}; {label})."
            )
        if self.noise:
            ratio, cell = self.noise
            out.append(f"none against itself, held in the same way, worst cell: {ratio:.2f} ({_name(cell)}).")
        if self.auto:
            out += self.auto.say("auto")
            out += self.itself.say("none against itself") if self.itself else []
        if self.all_same_text is False:
            out.append(
                "Some texts differ from those without a drafter: `paceline check` says whether it is a bug."
            )
        return out


def _name(cell: Cell) -> str:
    return f"{cell.workload}, batch {cell.batch}, temperature {cell.temperature:g}"


def _held(table: Seq[Line]) -> Held | None:
    known = [(line.ratio, line.cell) for line in table if line.ratio]
    slow = [(r.median, cell) for r, cell in known if r.count >= ENOUGH and r.ci_high < AS_FAST]
    fast = sum([r.median >= AS_FAST for r, _ in known])
    return Held(len(known), fast, sorted(slow, key=lambda p: p[0])) if known else None


def verdict(table: Seq[Line]) -> Verdict:
    drafting = [line for line in table if line.ratio and line.setting != NONE]
    autos = [line for line in drafting if line.setting.draft_tokens == "auto"]
    fixed = [line for line in drafting if line.setting.draft_tokens != "auto"]
    worst = min(
        ((line.ratio.median, line.cell) for line in autos if line.ratio), key=lambda p: p[0], default=None
    )
    against = []
    for line in autos:
        rivals = [x for x in fixed if x.cell == line.cell]
        if rivals and line.ratio and len({x.setting for x in rivals}) > 1:
            best = max(rivals, key=lambda x: x.ratio.median if x.ratio else 0.0)
            if best.ratio:
                against.append((line.ratio.median / best.ratio.median, line.cell, best.setting.label))
    return Verdict(
        worst,
        min(against, key=lambda p: p[0], default=None),
        max(
            [(line.ratio.median, line.cell, line.setting.label) for line in drafting if line.ratio],
            key=lambda p: p[0],
            default=None,
        ),
        None if any(line.same_text is None for line in table) else all(line.same_text for line in table),
        min(
            [(line.ratio.median, line.cell) for line in table if line.ratio and line.setting == NONE],
            key=lambda p: p[0],
            default=None,
        ),
        _held(autos),
        _held([line for line in table if line.setting == NONE]),
        _typical(autos or drafting),
    )


def _typical(table: Seq[Line]) -> tuple[float, float, float, str] | None:
    """What to expect of auto, or of whatever was measured instead, over all cells alike."""
    ratios = [line.ratio.median for line in table if line.ratio]
    labels = {line.setting.label for line in table}
    label = next(iter(labels)) if len(labels) == 1 else "any setting"
    return (min(ratios), median(ratios), max(ratios), label) if ratios else None


def to_json(runs: Seq[Run], extra: dict[str, Any]) -> dict[str, Any]:
    """Everything that was measured, with its summary and `extra` (provenance, roofline, staircase)."""
    table = lines(runs)
    return {
        **extra,
        "verdict": verdict(table).say(),
        "lines": [asdict(line) for line in table],
        "runs": [_told(run) for run in runs],
    }


def _told(run: Run) -> dict[str, Any]:
    """All of a run, but of its thousands of waits between tokens how they are distributed: by share of them, seconds."""
    record, gaps = asdict(run), sorted(run.gaps)
    record["gaps"] = {str(share): quantile(gaps, share) for share in GAPS if gaps}
    return record
