"""What a step costs on this machine: a staircase over target rows, draft calls, and the rest. Pure values, no
torch.

Learnt at start-up (`measure_costs`, stopwatch.py) and corrected by every step that runs. Seconds everywhere. Why a step
is slow it does not know: a long context and a busy machine enter through the pace.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from statistics import median

PROFILE_ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32)
FEW_ROWS, WARM = 6, 8  # steps of few rows, and how many are timed in a row
TABLE_ROWS = 64  # beyond it the last slope goes on
DEFAULT_STEP = 5e-3  # only the ratios matter before the first real step
FADE = 0.998  # of what was seen of a drafter, for each step without it
MEASURED = 4.0  # trust in a price that was measured: rounds of one text cannot tell a step from a token
DECAY = 0.97  # of the pace, for each step seen


@dataclass(frozen=True, slots=True)
class Line:
    """base + slope * x by decayed least squares."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

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


Chill = tuple[float, float]  # seconds: (of a round of one text, more for each further text)
RoundCost = tuple[float, float, float]  # seconds of a draft round: (base, per step, per token)


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Seconds of a draft round = base + step * steps + token * tokens, by decayed least squares from a guess.

    `steps`: calls of the network in a row, the longest draft of the round; `tokens`: of all rows together.
    """

    guess: RoundCost
    trust: float = 0.2  # rounds that each of four points of the guess counts for
    sums: tuple[float, ...] = (0.0,) * 9  # of weight, s, t, ss, st, tt, y, sy, ty

    @classmethod
    def like(cls, seconds: float) -> DraftCost:
        """Before anything was measured: small shares of a target step. A cost thought too high is never tried."""
        return cls((0.1 * seconds, 0.04 * seconds, 0.005 * seconds))

    def faded(self, steps: int) -> DraftCost:
        """Nothing was drafted for so many steps: the guess gains weight, or one bad moment would last for ever."""
        return replace(self, sums=tuple(v * FADE**steps for v in self.sums))

    def add(self, steps: float, tokens: float, seconds: float, decay: float = 0.96) -> DraftCost:
        """One more round. One that took far longer than expected counts as four times that."""
        if self.sums[0] > 2.0:
            seconds = min(seconds, 4.0 * self.at(steps, tokens))
        s, t, y = steps, tokens, seconds
        new = (1.0, s, t, s * s, s * t, t * t, y, s * y, t * y)
        return replace(self, sums=tuple(decay * old + more for old, more in zip(self.sums, new, strict=True)))

    def fit(self) -> RoundCost:
        """(base, step, token), none negative. The guess stands for a little evidence in every direction."""
        base, step, token = self.guess
        n, s, t, ss, st, tt, y, sy, ty = self.sums
        for steps, tokens in ((1, 1), (4, 4), (1, 8), (4, 32)):
            w, v = self.trust, base + step * steps + token * tokens
            n, s, t, y = n + w, s + w * steps, t + w * tokens, y + w * v
            ss, st, tt = ss + w * steps * steps, st + w * steps * tokens, tt + w * tokens * tokens
            sy, ty = sy + w * steps * v, ty + w * tokens * v
        a, b, c = ss - s * s / n, st - s * t / n, tt - t * t / n
        e, f = sy - s * y / n, ty - t * y / n
        step = (e * c - f * b) / (a * c - b * b)
        token = (f * a - e * b) / (a * c - b * b)
        if step < 0:
            step, token = 0.0, max(f / c, 0.0)
        elif token < 0:
            step, token = max(e / a, 0.0), 0.0
        base = (y - step * s - token * t) / n
        if base < 0:  # a line through the origin, as steep as the rounds say
            scale = y / (step * s + token * t)
            return 0.0, step * scale, token * scale
        return base, step, token

    def at(self, steps: float, tokens: float) -> float:
        base, step, token = self.fit()
        return base + step * steps + token * tokens


@dataclass(frozen=True, slots=True)
class Costs:
    """What steps and draft rounds take, as measured at start-up, times the pace of the machine now.

    table[n - 1]: seconds of a bare target forward with n rows; a step takes base + slope * table[rows] (choosing tokens,
    colder caches), and `chill` more after a round of a drafter whose weights have taken the place of the target's in
    the caches. Without a profile (`measured` false) the first step sets the scale.
    """

    table: tuple[float, ...]
    measured: bool = True
    base: float = 0.0
    slope: float = 1.0
    pace: float = 1.0  # what everything takes now, as a multiple of what it took at start-up
    chill: Mapping[str, Chill] = field(default_factory=dict)  # by drafter kind
    other: Line = field(default_factory=Line)  # seconds over target rows: emission, scheduling
    rest: tuple[float, float] = (0.0, 0.0)  # `other` as (base, per row)
    draft: Mapping[str, DraftCost] = field(default_factory=dict)  # by drafter kind, at pace 1
    rounds: Mapping[str, RoundCost] = field(default_factory=dict)  # the fits of `draft`

    def target(self, rows: int) -> float:
        """Seconds of a target step."""
        last = len(self.table)
        if rows <= last:
            return self.pace * (self.base + self.slope * self.table[max(rows, 1) - 1])
        more = (self.table[-1] - self.table[last // 2 - 1]) / (last - last // 2)
        return self.pace * (self.base + self.slope * (self.table[-1] + more * (rows - last)))

    def drafting(self, kind: str, texts: int = 1) -> RoundCost:
        """What a round of so many texts adds to a step, besides the target's rows."""
        base, step, token = self.rounds.get(kind) or DraftCost.like(self.target(1) / self.pace).guess
        return self.pace * (base + self._chill(kind, texts)), self.pace * step, self.pace * token

    def _chill(self, kind: str | None, texts: int) -> float:
        one, more = self.chill.get(kind or "", (0.0, 0.0))
        return one + more * (texts - 1)

    def adding(self, rows: int, more: int) -> float:
        """Seconds that `more` target rows add to a step of `rows`."""
        return max(self.target(rows + more) - self.target(rows), 0.0) + more * self.rest[1]

    def observe_targets(self, seen: Seq[tuple[int, float, str | None, int]]) -> Costs:
        """Learn from steps: (rows, seconds, the kind that drafted before, for how many texts).

        Their typical ratio to what was expected is the pace; what one number of rows differs by bends the staircase.
        Steps beyond the table (prompts) say nothing about decoding.
        """
        steps = [step for step in seen if 0 < step[0] <= len(self.table) and 0.0 < step[1] < float("inf")]
        if not steps:
            return self
        if not self.measured:
            rows, seconds, _, _ = steps[0]
            scale = seconds / self.table[rows - 1]
            return replace(self, table=tuple(v * scale for v in self.table), measured=True)
        expected = {shape: self.target(shape[0]) + self.pace * self._chill(*shape[1:])
                    for shape in {(rows, kind, texts) for rows, _, kind, texts in steps}}  # fmt: skip
        ratios = [seconds / expected[rows, kind, texts] for rows, seconds, kind, texts in steps]
        typical = min(max(sorted(ratios)[len(ratios) // 2], 0.25), 4.0)
        last = steps[-1][0]
        same = sorted(ratio for ratio, step in zip(ratios, steps, strict=True) if step[0] == last)
        surprise = min(max(same[len(same) // 2] / typical, 0.5), 2.0) - 1
        table = _bend(self.table, last - 1, 0.01 * min(len(same), 10) * surprise)
        return replace(self, pace=self.pace * typical ** (1 - DECAY ** len(ratios)), table=table)

    def observe_other(self, rows: int, seconds: float) -> Costs:
        """Learn from what a step takes besides the models."""
        if not 0 < rows <= len(self.table) or not 0.0 <= seconds < float("inf"):
            return self
        other = self.other.add(rows, seconds)
        return replace(self, other=other, rest=other.fit())

    def observe_draft(self, kind: str, steps: float, tokens: float, seconds: float) -> Costs:
        """Learn from a draft round of one kind."""
        if not 0.0 <= seconds < float("inf"):
            return self
        known = self.draft.get(kind) or DraftCost.like(self.target(1) / self.pace)
        return self._with(kind, known.add(steps, tokens, seconds / self.pace))

    def idle(self, kind: str, steps: int) -> Costs:
        """A kind was not asked for so many steps: what was seen of it counts less."""
        known = self.draft.get(kind)
        return self if known is None else self._with(kind, known.faded(steps))

    def _with(self, kind: str, cost: DraftCost) -> Costs:
        return replace(self, draft={**self.draft, kind: cost}, rounds={**self.rounds, kind: cost.fit()})


def _bend(table: tuple[float, ...], at: int, change: float) -> tuple[float, ...]:
    """Multiply entry `at` by 1 + change and those within a third of it by less, and keep the steps rising."""
    rows = at + 1
    low, high = max(int(rows * 0.75) - 1, 0), min(int(rows * 1.34) + 1, len(table))
    reach = 0.3 * rows + 1
    near = [v * (1 + change * max(0.0, 1 - abs(i - at) / reach)) for i, v in enumerate(table[low:high], low)]
    floor, ceiling = (table[low - 1] if low else 0.0), (table[high] if high < len(table) else float("inf"))
    for i, value in enumerate(near):
        floor = max(floor, min(value, ceiling))
        near[i] = floor
    return table[:low] + tuple(near) + table[high:]


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
    """What was measured on a machine for one target: rungs of bare forwards, and `Costs` of steps and draft rounds."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    measured: bool = True
    base: float = 0.0
    slope: float = 1.0
    rounds: Mapping[str, RoundCost] = field(default_factory=dict)  # by drafter kind
    chill: Mapping[str, Chill] = field(default_factory=dict)

    def costs(self) -> Costs:
        draft = {kind: DraftCost(cost, MEASURED) for kind, cost in self.rounds.items()}
        table = staircase(self.rows, self.seconds)
        return Costs(
            table,
            self.measured,
            self.base,
            self.slope,
            chill=self.chill,
            draft=draft,
            rounds=dict(self.rounds),
        )


def default_profile() -> Profile:
    """Before anything was measured: 1 row 5 ms, each further row a twelfth of that."""
    seconds = tuple(DEFAULT_STEP * (1 + (n - 1) / 12) for n in PROFILE_ROWS)
    return Profile(PROFILE_ROWS, seconds, measured=False)


def burst(time_rows: Callable[[int], float], rows: int, runs: int) -> float:
    """Typical seconds of the second half of `runs` forwards in a row: what comes after another size is slower."""
    taken = [time_rows(rows) for _ in range(runs)]
    return median(taken[runs // 2 :])


def measure_costs(
    time_rows: Callable[[int], float], rows: Seq[int] = PROFILE_ROWS, limit: float = 2.0
) -> Profile:
    """The least `time_rows(n)` (seconds of one target forward of n rows) in at most about `limit` seconds.

    First 1 and 5 rows, then rounds of all rungs, so that a slow moment spreads over them: a target too slow for a round
    is described by the rungs that fit (at least two). A round goes down and stays a while at few rows, since a step of
    one row comes after others like it, not after one of 32, from which the caches recover within a dozen steps. Of
    what is timed in a row, the second half counts.
    """
    begin = time.perf_counter()
    falling = sorted(set(rows), reverse=True)
    taken: dict[int, list[float]] = {n: [] for n in falling}
    for n in [n for n in (1, 5) if n in taken] + falling * 25:
        taken[n].append(burst(time_rows, n, (WARM if n <= FEW_ROWS else 2) if taken[falling[0]] else 1))
        if time.perf_counter() - begin > limit and sum(map(bool, taken.values())) > 1:
            break
    rungs = sorted(n for n in taken if taken[n])
    values = [min(taken[n]) for n in rungs]  # what else the machine does can only slow a forward down
    return Profile(tuple(rungs), tuple(values))
