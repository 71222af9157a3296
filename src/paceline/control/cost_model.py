"""What steps and draft rounds take on this machine: a table measured at load times slow factors.

One factor is for all steps, one more for steps that verify drafts, one for each drafter's rounds. One slow step does not
say which of them is wrong, so a step that verifies moves both of its factors, and a plain step separates them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

TABLE_ROWS = 64  # beyond it the last slope goes on
UNKNOWN_STEP = 5e-3  # seconds of a step before anything is measured: only ratios matter
RATE = 0.05  # of a factor's logarithm, for each step
REFERENCE_RATE = 0.25  # the same, for plain steps amid drafted ones: they are rare
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
        self._verifying = 1.0  # and those that verify, as a multiple of that
        self._factors: dict[str, float] = {}  # of draft rounds, by drafter

    def step_seconds(self, rows: int, verifying: bool) -> float:
        """Of a step with so many target rows, its draft apart."""
        return self._pace * (self._verifying if verifying else 1.0) * self._rung(rows)

    def steps(self, rows: int, more: int, verifying: bool) -> list[float]:
        """`step_seconds` of `rows`, `rows` + 1, ..., `rows` + `more`: a plan looks at dozens of them."""
        while len(self._table) < rows + more:
            self._table.append(self._rung(len(self._table) + 1))
        factor = self._pace * (self._verifying if verifying else 1.0)
        return [factor * value for value in self._table[max(rows, 1) - 1 : rows + more]]

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
            self._table = [scale * value for value in self._table]
        error = _error(seconds, self.step_seconds(rows, verifying))
        if verifying:
            # half of it may be the machine: then plain steps take longer, too
            self._pace *= math.exp(0.5 * RATE * error)
            self._verifying *= math.exp(0.5 * RATE * error)
        else:
            # drafted steps took what they took, whatever plain ones do: only the ratio between them was wrong
            rate = REFERENCE_RATE if rare else RATE
            self._pace *= math.exp(rate * error)
            if rare:
                self._verifying *= math.exp(-rate * error)

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
