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
TOGETHER = 0.5  # of what a step and its draft round both took more: the machine is slower than a while ago
RATE = 0.05  # of a factor's logarithm, for each step
REFERENCE_RATE = 0.25  # the same, for plain steps amid drafted ones: they are rare
DRAFTS_BEGUN = 1.0  # rounds of a drafter that its measured price counts for
BEGUN = 3.0  # verifying steps that the table counts for: the first ones of a size move its factor faster
NEAR = 0.25  # share of rows below which one size says nothing of another
SMALL = 0.01  # sum of what logarithms have moved, below which no plan is another
# Plain steps after which what verifying ones took is trusted less, and how much of it is left
FADE_AFTER, FADE = 64, 0.9
ENOUGH = 64  # steps whose prices are worth keeping for the next start
READING = 0.25  # of a drafter's call and token: what it takes to read a token, until it was seen reading
READ_ENOUGH = 16  # tokens that a drafter reads at once, from which on its time says what one takes
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
    trusted: bool = True  # timed often enough, and alike; else the first rounds that run set the price

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
        self._table, self._measured = table.dense(), table
        self._steps = 0  # that were seen
        self._drafts = dict(table.drafts)
        self._scaled = table.measured  # else the first step sets the scale
        # rounds that showed a drafter's factor; a drafter that is not here takes its first round for its price
        self._rounds = dict.fromkeys(table.drafts if table.measured and table.trusted else (), 0.0)
        self._pace = 1.0  # what plain steps take, as a multiple of the table,
        # and those that verify, as a multiple of that: its logarithm by KNOTS, and how many steps showed it
        self._bends, self._seen = [0.0] * len(KNOTS), [0.0] * len(KNOTS)
        self._verifying: list[float] = []  # the table of steps that verify; empty: it is to be made
        self._shared = 0.0  # of the logarithm of the last step's error, what its draft round had, too
        self._moved = 0.0  # how far a logarithm has moved since
        self._idle = 0  # plain steps since one that verified
        self._factors: dict[str, float] = {}  # of draft rounds, by drafter
        self._reading: dict[str, float] = {}  # seconds of a token that a drafter reads, as it was last seen

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
        factor = self._pace * self._factors.get(drafter, 1.0)
        return DraftCost(*[factor * seconds for seconds in known])

    def draft_seconds(self, drafter: str, calls: int, tokens: int) -> float:
        if not calls:
            return 0.0
        base, call, token = self.draft_cost(drafter)
        return base + call * calls + token * tokens

    def reading_seconds(self, drafter: str, tokens: int) -> float:
        """Of what a drafter has to read before it drafts."""
        if not tokens:
            return 0.0
        cost = self.draft_cost(drafter)
        return tokens * self._reading.get(drafter, READING * (cost.call + cost.token))

    def observe_reading(self, drafter: str, tokens: int, seconds: float, drafting: float) -> None:
        """A round that took `seconds` and read `tokens` first; the rest of it takes `drafting` by its price."""
        if tokens >= READ_ENOUGH and drafting < seconds < math.inf:
            self._reading[drafter] = (seconds - drafting) / tokens

    def observe(self, rows: int, verifying: bool, seconds: float, *, rare: bool = False) -> None:
        """A step without prompts. `rare`: a plain one amid steps with drafts."""
        if not 0.0 < seconds < math.inf or not 0 < rows <= TABLE_ROWS:
            return
        self._steps += 1
        if not self._scaled:
            scale, self._scaled = seconds / self._rung(rows), True
            self._table, self._verifying = [scale * value for value in self._table], []
        error = _error(
            seconds, self.step_seconds(rows, verifying) * math.exp(self._shared if verifying else 0.0)
        )
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

    def observe_machine(
        self, rows: int, seconds: float, rounds: Mapping[str, tuple[int, int, float]]
    ) -> None:
        """Before the other two, of a step that verified and the rounds before it, as (calls, tokens, seconds) by drafter:
        what all of them took more, or less, is the machine's.
        """
        self._shared = 0.0
        pairs = [(seconds, self.step_seconds(rows, True))]
        for drafter, (calls, tokens, took) in rounds.items():
            pairs.append((took, self.draft_seconds(drafter, calls, tokens)))
            if drafter not in self._rounds:
                return
        if len(pairs) < 2 or not all(0.0 < took < math.inf and expected > 0.0 for took, expected in pairs):
            return
        errors = [math.log(took / expected) for took, expected in pairs]
        common = max(min(errors), 0.0) + min(max(errors), 0.0)
        self._pace *= math.exp(TOGETHER * common)
        self._shared = (1.0 - TOGETHER) * common

    def _bend(self, rows: int, error: float) -> None:
        """A verifying step was slower than predicted: raise the price of nearby sizes too."""
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
        """A plain step: corrections from verifying steps lose weight with time."""
        self._idle += 1
        if self._idle % FADE_AFTER == 0:
            self._bends, self._verifying = [FADE * bend for bend in self._bends], []
            self._rounds = {name: FADE * rounds for name, rounds in self._rounds.items()}

    def observe_draft(
        self, drafter: str, calls: int, tokens: int, seconds: float, *, behind: bool = False
    ) -> None:
        """A round of a drafter: `calls` of its network, `tokens` of all rows.

        `behind`: it first read what it had missed of a text, so only a round below its price says something.
        """
        expected = self.draft_seconds(drafter, calls, tokens) * math.exp(self._shared)
        if not 0.0 < seconds < math.inf or not expected > 0.0 or (behind and seconds >= expected):
            return
        factor = self._factors.get(drafter, 1.0)
        if drafter not in self._rounds:
            self._factors[drafter] = factor * seconds / expected
        else:
            rate = max(RATE, 1.0 / (DRAFTS_BEGUN + self._rounds[drafter]))
            # what took longer may have been disturbed; what took less shows that it can
            self._factors[drafter] = factor * math.exp(
                rate * min(_error(seconds, expected), math.log(seconds / expected))
            )
        self._rounds[drafter] = self._rounds.get(drafter, 0.0) + 1.0

    def learnt(self) -> CostTable:
        """The table with the corrections of measured steps; the original one until enough were measured."""
        if self._steps < ENOUGH:
            return self._measured
        rows = self._measured.rows
        drafts = {
            name: self.draft_cost(name)
            for name in self._rounds
            if name in self._drafts or name in self._factors
        }
        return table_of(rows, [self.step_seconds(n, n > 1) for n in rows], drafts)

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
