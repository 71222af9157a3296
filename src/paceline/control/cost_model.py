"""What steps and draft rounds take on this machine: a table measured at load times slow factors.

One factor is for all steps, one for each drafter's rounds. Steps that verify drafts have one for each number of rows,
since what a further row takes is what a table gets wrong: it was measured on a short text, and perhaps beside other work.
One slow step does not say which factor is wrong, so a step that verifies moves both of its own, and a plain step
separates them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

TABLE_ROWS = 64  # beyond it the last slope goes on
KNOTS = tuple([1 << n for n in range(7)])  # numbers of rows, up to TABLE_ROWS, with a factor of their own
UNKNOWN_STEP = 5e-3  # seconds of a step before anything is measured: only ratios matter
RATE = 0.05  # of a factor's logarithm, for each step
REFERENCE_RATE = 0.25  # the same, for plain steps amid drafted ones: they are rare
BEGUN = 3.0  # verifying steps that the table counts for: the first ones of a size move its factor faster
NEAR = 0.25  # share of rows below which one size says nothing of another
SMALL = 0.01  # sum of what logarithms have moved, below which no plan is another
# Plain steps after which what verifying ones took is trusted less, and how much of it is left
FADE_AFTER, FADE = 64, 0.9
OUTLIER = 2.0  # a step that took more than this multiple of its price counts as this much


class DraftCost(NamedTuple):
    """Seconds of a drafter's round: base + call * calls + token * tokens."""

    base: float
    call: float
    token: float


@dataclass(frozen=True, slots=True)
class CostTable:
    """What was measured at load: seconds of steps by target rows, and of draft rounds by drafter."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    drafts: Mapping[str, DraftCost] = field(default_factory=dict)
    measured: bool = True

    def dense(self, length: int = TABLE_ROWS) -> list[float]:
        """Seconds of 1..length rows: neighbours that fall are pooled, gaps interpolated, the last slope goes on."""
        pools: list[tuple[float, int]] = []
        for value in self.seconds:
            pools.append((value, 1))
            while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
                (a, m), (b, n) = pools[-2:]
                pools[-2:] = [((a * m + b * n) / (m + n), m + n)]
        flat = [mean for mean, count in pools for _ in range(count)]
        out, right = [], 0
        for n in range(1, length + 1):
            while right < len(flat) - 1 and self.rows[right] < n:
                right += 1
            left = max(right - 1, 0)
            slope = (flat[right] - flat[left]) / max(self.rows[right] - self.rows[left], 1)
            out.append(max(flat[right] + slope * (n - self.rows[right]), 1e-9))
        return out


def unmeasured() -> CostTable:
    """Where nothing could be measured: rows are cheap at first, as where memory is what a step waits for."""
    rows = (1, 2, 3, 5, 9, 17, 33)
    return CostTable(rows, tuple([UNKNOWN_STEP * (1.0 + 0.06 * (n - 1)) for n in rows]), measured=False)


class CostModel:
    def __init__(self, table: CostTable) -> None:
        self._table = table.dense()
        self._drafts = dict(table.drafts)
        self._scaled = table.measured  # else the first step sets the scale
        self._timed = set(table.drafts) if table.measured else set[str]()
        self._pace = 1.0  # what plain steps take, as a multiple of the table,
        # and those that verify, as a multiple of that: its logarithm by KNOTS, and how many steps showed it
        self._bends, self._seen = [0.0] * len(KNOTS), [0.0] * len(KNOTS)
        self._verifying: list[float] = []  # the table of steps that verify; empty: it is to be made
        self._moved = 0.0  # how far a logarithm has moved since
        self._idle = 0  # plain steps since one that verified
        self._factors: dict[str, float] = {}  # of draft rounds, by drafter

    def step_seconds(self, rows: int, verifying: bool) -> float:
        """Of a step with so many target rows, its draft apart."""
        return self.steps(rows, 0, True)[0] if verifying else self._pace * self._rung(rows)

    def steps(self, rows: int, more: int, verifying: bool) -> list[float]:
        """`step_seconds` of `rows`, `rows` + 1, ..., `rows` + `more`: a plan looks at dozens of them."""
        while len(self._table) < rows + more:
            self._table.append(self._rung(len(self._table) + 1))
        table = self._bent() if verifying else self._table
        return [self._pace * value for value in table[max(rows, 1) - 1 : rows + more]]

    def _bent(self) -> list[float]:
        """The table of steps that verify: one with more rows takes no less."""
        if len(self._verifying) < len(self._table) or self._moved > SMALL:
            bends: list[float] = []
            for (left, low), (right, high) in pairwise(zip(KNOTS, self._bends, strict=True)):
                bends += [low + (high - low) * n / (right - left) for n in range(right - left)]
            bends += [self._bends[-1]] * (len(self._table) - len(bends))
            bent = [math.exp(bend) * value for bend, value in zip(bends, self._table, strict=True)]
            self._verifying, self._moved = list(accumulate(bent, max)), 0.0
        return self._verifying

    def row_seconds(self, rows: int, more: int) -> float:
        """What a target row costs beside `rows` others, where `more` of its kind verify."""
        few, many = (self.step_seconds(rows + n, True) for n in (more, 3 * more))
        return (many - few) / (2 * more)

    def draft_cost(self, drafter: str) -> DraftCost:
        """Of a round, now. A drafter that was never timed is guessed at a tenth of a plain step for each call."""
        known = self._drafts.get(drafter)
        if known is None:
            known = DraftCost(0.02 * self._table[0], 0.1 * self._table[0], 0.01 * self._table[0])
        factor = self._factors.get(drafter, 1.0)
        return DraftCost(*[factor * seconds for seconds in known])

    def draft_seconds(self, drafter: str, calls: int, tokens: int) -> float:
        if not calls:
            return 0.0
        base, call, token = self.draft_cost(drafter)
        return base + call * calls + token * tokens

    def observe(self, rows: int, verifying: bool, seconds: float, *, rare: bool = False) -> None:
        """A step without prompts. `rare`: a plain one amid steps with drafts."""
        if not 0.0 < seconds < math.inf or not 0 < rows <= TABLE_ROWS:
            return
        if not self._scaled:
            scale, self._scaled = seconds / self._rung(rows), True
            self._table, self._verifying = [scale * value for value in self._table], []
        error = _error(seconds, self.step_seconds(rows, verifying))
        if verifying:
            # some of it may be the machine: then plain steps take longer, too
            self._pace *= math.exp(0.5 * RATE * error)
            self._bend(rows, error)
            return
        # drafted steps took what they took, whatever plain ones do: only the ratio between them was wrong
        rate = REFERENCE_RATE if rare else RATE
        self._pace *= math.exp(rate * error)
        if rare:
            self._bends, self._verifying = [bend - rate * error for bend in self._bends], []
        else:
            self._fade()

    def _bend(self, rows: int, error: float) -> None:
        """A step of `rows` that verified took longer than its price: so do others, the less so the more they differ."""
        for i, knot in enumerate(KNOTS):
            near = min(knot, rows) / max(knot, rows)
            if near < NEAR:
                continue
            self._seen[i] += near
            moved = near * max(0.5 * RATE, 1.0 / (BEGUN + self._seen[i])) * error
            self._bends[i] += moved
            self._moved += abs(moved)
        self._idle = 0

    def _fade(self) -> None:
        """A plain step: what was seen of others grows old."""
        self._idle += 1
        if self._idle % FADE_AFTER == 0:
            self._bends, self._verifying = [FADE * bend for bend in self._bends], []

    def observe_draft(self, drafter: str, calls: int, tokens: int, seconds: float) -> None:
        """A round of a drafter: `calls` of its network, `tokens` of all rows."""
        expected = self.draft_seconds(drafter, calls, tokens)
        if not 0.0 < seconds < math.inf or not expected > 0.0:
            return
        if drafter not in self._timed:
            self._timed.add(drafter)
            self._factors[drafter] = self._factors.get(drafter, 1.0) * seconds / expected
        else:
            self._factors[drafter] = self._factors.get(drafter, 1.0) * math.exp(
                RATE * _error(seconds, expected)
            )

    def _rung(self, rows: int) -> float:
        """Of the table, which goes on as it ends."""
        if rows <= len(self._table):
            return self._table[max(rows, 1) - 1]
        last = TABLE_ROWS
        slope = (self._table[last - 1] - self._table[last // 2 - 1]) / (last - last // 2)
        return self._table[last - 1] + slope * (rows - last)


def _error(seconds: float, expected: float) -> float:
    return math.log(min(max(seconds / expected, 1.0 / OUTLIER), OUTLIER))


def table_of(rows: Seq[int], seconds: Seq[float], drafts: Mapping[str, DraftCost] | None = None) -> CostTable:
    """Raises ValueError for what is no table."""
    if not rows or len(rows) != len(seconds) or list(rows) != sorted(set(rows)) or rows[0] < 1:
        raise ValueError("row counts have to rise, with one time for each")
    times = [*seconds, *[part for cost in (drafts or {}).values() for part in cost]]
    if not all(0.0 <= value < math.inf for value in times) or min(seconds) <= 0.0:
        raise ValueError("times have to be seconds above 0")
    return CostTable(tuple(rows), tuple(seconds), dict(drafts or {}))
