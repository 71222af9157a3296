"""What a step costs on this machine: a staircase over target rows, draft calls, and the rest. Pure values, no
torch.

The staircase is learnt at start-up (`measure_costs`) and corrected by every step that runs. Seconds
everywhere. It does not know why a step is slow: context length and a busy machine enter through `drift`.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median

from paceline.errors import UsageError

PROFILE_ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32)
TABLE_ROWS = 64  # beyond it the last slope goes on
DEFAULT_STEP = 5e-3  # only the ratios matter before the first real step


@dataclass(frozen=True, slots=True)
class Line:
    """base + slope * x by decayed least squares; starts from a guess that weighs `weight` observations."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    @classmethod
    def guess(cls, y: float, weight: float = 0.5) -> Line:
        return cls(weight, weight, weight * y, weight, weight * y)

    def add(self, x: float, y: float, decay: float = 0.97) -> Line:
        """One more observation; one far above what was expected counts as four times that (a hiccup, not a
        law).
        """
        if self.weight > 2.0:
            y = min(y, 4.0 * self.at(x) + 1e-6)
        return Line(self.weight * decay + 1, self.x * decay + x, self.y * decay + y,
                    self.xx * decay + x * x, self.xy * decay + x * y)  # fmt: skip

    def fit(self) -> tuple[float, float]:
        """(base, slope), both at least 0. With one x only the slope is 0."""
        if self.weight <= 0:
            return 0.0, 0.0
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        spread = self.xx / self.weight - mean_x * mean_x
        if spread < 1e-3 * mean_x * mean_x:
            return max(mean_y, 0.0), 0.0
        slope = max(0.0, (self.xy / self.weight - mean_x * mean_y) / spread)
        slope = min(slope, mean_y / mean_x)
        return mean_y - slope * mean_x, slope

    def at(self, x: float) -> float:
        base, slope = self.fit()
        return base + slope * x


@dataclass(frozen=True, slots=True)
class Costs:
    """table[n - 1]: seconds of a target forward with n rows, as profiled and corrected; `drift` multiplies
    all.
    """

    table: tuple[float, ...]
    drift: float = 1.0
    other: Line = field(default_factory=Line)  # over target rows: sampling, scheduling, text
    draft: tuple[tuple[str, Line], ...] = ()  # by drafter kind, over rows of one call: seconds a call

    def target(self, rows: int) -> float:
        """Seconds of a target forward."""
        last = len(self.table)
        if rows <= last:
            return self.table[max(rows, 1) - 1] * self.drift
        slope = (self.table[-1] - self.table[last // 2 - 1]) / (last - last // 2)
        return (self.table[-1] + slope * (rows - last)) * self.drift

    def drafting(self, kind: str) -> tuple[float, float]:
        """(base, slope over rows) of one draft call; before the first one a tenth of a target step is
        assumed.
        """
        for name, line in self.draft:
            if name == kind:
                return line.fit()
        return 0.1 * self.target(1), 0.0

    def observe_target(self, rows: int, seconds: float, other: float) -> Costs:
        """Learn from one step. Steps far beyond the table (prefill) say nothing about decoding."""
        if not 0 < rows <= 2 * len(self.table) or not 0.0 < seconds < float("inf"):
            return self
        ratio = min(max(seconds / self.target(rows), 0.25), 4.0)
        surprise = min(max(ratio, 0.5), 2.0)
        drift = self.drift * (1 + 0.1 * (surprise - 1))
        table = self.table
        if rows <= len(table):
            table = _bend(table, rows - 1, 0.05 * (surprise - 1))
        return replace(self, table=table, drift=drift, other=self.other.add(rows, max(other, 0.0)))

    def observe_draft(self, kind: str, rows: float, seconds: float) -> Costs:
        """Learn from draft calls of one kind: mean rows and mean seconds of a call."""
        if not 0.0 <= seconds < float("inf"):
            return self
        old = dict(self.draft)
        old[kind] = old.get(kind, Line()).add(rows, seconds)
        return replace(self, draft=tuple(old.items()))


def _bend(table: tuple[float, ...], at: int, change: float) -> tuple[float, ...]:
    """Multiply the entry `at` by 1 + change and its neighbours by half of it."""
    low, high = max(at - 1, 0), min(at + 2, len(table))
    near = tuple(v * (1 + (change if i == at else change / 2)) for i, v in enumerate(table[low:high], low))
    return table[:low] + near + table[high:]


def staircase(rows: Seq[int], seconds: Seq[float], length: int = TABLE_ROWS) -> tuple[float, ...]:
    """Dense table for 1..length rows from rungs: made non-decreasing (pooling neighbours), then interpolated."""
    pools: list[list[float]] = []  # [mean seconds, rungs in it]
    for value in seconds:
        pools.append([value, 1.0])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, m), (b, n) = pools[-2:]
            pools[-2:] = [[(a * m + b * n) / (m + n), m + n]]
    flat = [mean for mean, count in pools for _ in range(int(count))]
    table: list[float] = []
    for n in range(1, length + 1):
        right = next((i for i, r in enumerate(rows) if r >= n), len(rows) - 1)
        left = max(right - 1, 0) if rows[right] >= n else max(len(rows) - 4, 0)
        if left == right:
            table.append(flat[right])
            continue
        slope = (flat[right] - flat[left]) / (rows[right] - rows[left])
        table.append(flat[right] + slope * (n - rows[right]))
    return tuple(max(v, 1e-9) for v in table)


@dataclass(frozen=True, slots=True)
class Profile:
    """A machine's measured rungs for one target. `key` names machine, target and versions."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    key: str = ""

    def costs(self) -> Costs:
        return Costs(staircase(self.rows, self.seconds))


def default_profile() -> Profile:
    """Before anything was measured: 1 row 5 ms, each further row a twelfth of that."""
    return Profile(PROFILE_ROWS, tuple(DEFAULT_STEP * (1 + (n - 1) / 12) for n in PROFILE_ROWS))


def measure_costs(
    time_rows: Callable[[int], float], rows: Seq[int] = PROFILE_ROWS, limit: float = 2.0, key: str = ""
) -> Profile:
    """Medians of `time_rows(n)` (seconds of one target forward of n rows) in at most about `limit` seconds.

    Rungs are visited in rounds, so that a slow moment spreads over all of them, most telling first: a target
    too slow for all of them is described by those that fit (at least two). The first visit, which warms
    caches, does not count where there are more.
    """
    begin = time.perf_counter()
    chosen = sorted(set(rows), key=lambda n: (n not in (1, 5), n not in (2, 3, 9, 17), n))
    taken: dict[int, list[float]] = {n: [] for n in chosen}
    for n in chosen * 25:
        taken[n].append(time_rows(n))
        if time.perf_counter() - begin > limit and sum(map(bool, taken.values())) > 1:
            break
    rungs = sorted(n for n in chosen if taken[n])
    values = [median(taken[n][1:] or taken[n]) for n in rungs]
    return Profile(tuple(rungs), tuple(values), key)


def machine_key(target: str, versions: Seq[str]) -> str:
    """What a profile is valid for: processor, its core count, target and versions, in one line."""
    return " | ".join([platform.machine(), _processor(), f"{os.cpu_count()} cpus", target, *versions])


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )


def save_profile(profile: Profile, path: Path) -> None:
    """Write atomically; a profile that cannot be kept is only measured again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8"
    ) as out:
        json.dump(asdict(profile), out)
    os.replace(out.name, path)


def load_profile(path: Path, key: str) -> tuple[Profile | None, str]:
    """(profile, "") if `path` holds one for `key`, else (None, why it is ignored in one line)."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        profile = Profile(tuple(map(int, raw["rows"])), tuple(map(float, raw["seconds"])), str(raw["key"]))
    except FileNotFoundError:
        return None, f"no cost profile at {path.name}: measuring"
    except (OSError, ValueError, KeyError, TypeError) as problem:
        return None, f"cost profile {path.name} is unreadable ({problem!s:.80}): measuring again"
    if profile.key != key:
        return (
            None,
            f"cost profile {path.name} is for [{profile.key}], this is [{key}]: ignored, measuring again",
        )
    try:
        _check(profile)
    except UsageError as problem:
        return None, f"cost profile {path.name} is ignored: {problem}"
    return profile, ""


def _check(profile: Profile) -> None:
    rows, seconds = profile.rows, profile.seconds
    if not rows or len(rows) != len(seconds) or list(rows) != sorted(set(rows)) or rows[0] < 1:
        raise UsageError("its rows are not increasing numbers with one time each: delete it")
    if not all(0 < s < 3600 for s in seconds):
        raise UsageError("a time in it is not positive seconds: delete it")
