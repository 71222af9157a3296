"""What a step costs on this machine: a staircase over target rows, and what drafting adds to it. Pure values, no torch.

Learnt at start-up (stopwatch.py) and corrected by every step that runs. Seconds everywhere. A busy machine enters
through the pace.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import exp, log
from typing import NamedTuple

from paceline.engine.rounds import DraftCost, Round, RoundCost

TABLE_ROWS = 64  # beyond it the last slope goes on
DEFAULT_STEP = 5e-3  # only the ratios matter before the first real step
MEASURED = 1.0  # trust in a price that was measured: rounds of one text cannot tell a step from a token
DECAY = 0.97  # of the pace, for each step seen
SETTLE = 0.95  # of the drag, likewise,
ROUNDS = 0.9  # and of what rounds for some number of texts take, for each round
FRESH = 32  # steps for which the pace of plain ones is still that of the machine
SPLIT = 0.7  # of what was thought of the pace since, for each plain step seen then
MOST_DRAG, MOST_CROWD, MOST_LEVEL = 2.0, 2.5, 2.5  # and the inverse of their least
RECOVER = 0.9995  # of its logarithm, for each plain step: what was dear once may be tried again
ARRIVED = 16  # plain steps of another number of texts than before that tell what such steps take beside those
ARRIVAL = 0.9  # of what was thought of that, for each of them,
ARRIVALS = 0.3  # and of what they tell, at least: less with each time


Chill = tuple[float, float]  # seconds: (of a round of one text, more for each further text)
Reach = tuple[
    float, float, float
]  # (seconds per token of a context, of that for each further row, tokens in `table`)

_NONE: Mapping[int, float] = {}


class Step(NamedTuple):
    """A step that ran, its draft apart."""

    rows: int
    seconds: float
    kind: str | None = None  # of the drafter that drafted before it
    drafted: int = 0  # texts that it drafted for
    texts: int = 0
    context: int = 0  # tokens of all texts


class Crowd(NamedTuple):
    """What draft rounds of some number of texts take."""

    value: float = 1.0  # as a multiple of what the fit of all rounds says
    seen: int = 0  # rounds: the first ones count for more than later ones


class Here(NamedTuple):
    """The texts at hand, see `within`."""

    texts: int = 1
    base: float = 0.0  # seconds that a step takes longer for them than one of a usual text,
    row: float = 0.0  # and each of its rows


_USUAL = Here()


class Drag(NamedTuple):
    """What steps of some number of texts that check drafts take now, where plain ones keep the pace."""

    values: Mapping[int, float] = _NONE  # by `spread` of their rows, as multiples of what is expected
    stale: int = FRESH  # such steps since a plain one was seen,
    since: Set[int] = frozenset()  # and their spreads

    def at(self, spread: int) -> float:
        """Of steps of such a spread: as of the nearest one that was seen."""
        values = self.values
        return values.get(spread) or (values[min(values, key=lambda k: abs(k - spread))] if values else 1.0)

    @property
    def value(self) -> float:
        """On the whole."""
        logs = [log(value) for value in self.values.values()]
        return exp(sum(logs) / len(logs)) if logs else 1.0

    def times(self, factor: float) -> Drag:
        return self._replace(values={k: v * factor for k, v in (self.values or {1: 1.0}).items()})


def spread(rows: int, texts: int) -> int:
    """Of a step, by the rows that check drafts: 0 if it has none, 1 for up to one for each text, 2 for two or three, 3
    for four to seven, ...: what is wrong with the price of long copies says nothing about that of short drafts.
    """
    return (-((texts - rows) // max(texts, 1))).bit_length() if rows > texts else 0


class Level(NamedTuple):
    """What steps of some number of texts take, beside those of one."""

    value: float = 1.0  # as a multiple of what is expected
    seen: int = 0  # times that it was seen


@dataclass(frozen=True, slots=True)
class Costs:
    """What steps and draft rounds take, as measured at start-up, times the pace of the machine now.

    table[n - 1]: seconds of a step of one text with n target rows, its draft apart, at a usual context. Each further
    text costs `text` more than its rows, a longer context `reach`: once for each text, since its rows share what is read
    of the cache, and a little for each further row. After a round of a drafter whose weights have taken the place of
    the target's in the caches it takes `chill` more. Without a profile (`measured` false) the first step sets the scale.

    Where the number of texts changes, plain steps before and after tell what is wrong with that: the machine's pace is
    one, so the difference is the `level` of so many texts.

    What drafts add to a step depends on what else the machine does: where others take its caches and bandwidth plain
    steps are slow and further rows cheap. `drag` follows that, where plain steps and such that check drafts are seen
    close enough to each other.
    """

    table: tuple[float, ...]
    measured: bool = True
    pace: float = 1.0  # what everything takes now, as a multiple of what it took at start-up
    text: float = 0.0  # what each further text in a step costs, beside its rows
    reach: Reach = (0.0, 0.0, 0.0)
    levels: Mapping[int, Level] = field(default_factory=dict)  # by number of texts: 1, 2 to 3, 4 to 7, ...
    paced: tuple[int, int] = (1, ARRIVED)  # by plain steps of so many texts, likewise, and by how many
    drags: Mapping[int, Drag] = field(default_factory=dict)  # by number of texts, likewise
    here: Here = _USUAL
    chill: Mapping[str, Chill] = field(default_factory=dict)  # by drafter kind
    draft: Mapping[str, DraftCost] = field(default_factory=dict)  # by drafter kind, at pace 1
    rounds: Mapping[str, RoundCost] = field(default_factory=dict)  # the fits of `draft`
    crowds: Mapping[tuple[str, int], Crowd] = field(default_factory=dict)  # by kind and texts, as `drags`

    @property
    def drag(self) -> Drag:
        """Of the texts at hand."""
        return self._drag(self.here.texts)

    def _drag(self, texts: int) -> Drag:
        return self.drags.get(texts.bit_length(), Drag())

    def target(self, rows: int) -> float:
        """Seconds of a step with so many target rows, its draft apart."""
        texts, base, row = self.here
        seconds = self._rung(rows)
        level = self._level(texts).value * (self.drag.at(spread(rows, texts)) if rows > texts else 1.0)
        return self.pace * level * (seconds + base + row * rows)

    def _level(self, texts: int) -> Level:
        return self.levels.get(texts.bit_length(), Level())

    def _rung(self, rows: int) -> float:
        """Of the table, which goes on as it ends."""
        last = len(self.table)
        if rows <= last:
            return self.table[max(rows, 1) - 1]
        return self.table[-1] + (self.table[-1] - self.table[last // 2 - 1]) / (last - last // 2) * (
            rows - last
        )

    def within(self, texts: int, context: int) -> Costs:
        """The costs of steps of so many texts, with so many tokens in all."""
        base, row = self._beyond(texts, context)
        return replace(self, here=Here(texts, max(base, -0.5 * self._rung(texts)), row))

    def _beyond(self, texts: int, context: int) -> tuple[float, float]:
        """(seconds, and those of each row) that so many texts, of so many tokens in all, take longer than a usual one."""
        once, more, usual = self.reach
        beyond = context / texts - usual
        return self.text * (texts - 1) + (once - more) * texts * beyond, more * beyond

    def drafting(self, kind: str, texts: int = 1) -> RoundCost:
        """What a round of so many texts adds to a step, besides the target's rows."""
        base, step, token = self.rounds.get(kind) or DraftCost.like(self.target(1) / self.pace).guess
        pace = self.pace * self.crowds.get((kind, self.here.texts.bit_length()), Crowd()).value
        return pace * base + self.pace * self._chill(kind, texts), pace * step, pace * token

    def is_measured(self, kind: str) -> bool:
        """Whether rounds of this kind were timed at start-up."""
        known = self.draft.get(kind)
        return known is not None and known.trust >= MEASURED

    def _chill(self, kind: str, texts: int) -> float:
        one, more = self.chill.get(kind, (0.0, 0.0))
        return one + more * (texts - 1)

    def adding(self, rows: int, more: int) -> float:
        """Seconds that `more` target rows add to a step of `rows`."""
        return self.target(rows + more) - self.target(rows)

    def observe_targets(self, seen: Seq[Step], each: int = 1) -> Costs:
        """Learn from steps, of which each stands for so many: from plain ones the pace, from those that check drafts the
        drag, or the pace if no plain one was seen for long. The staircase stays as it was measured: bent by what one
        number of rows seemed to differ by, it drifted away from the machine's within an hour. Steps beyond the table
        (prompts) say nothing about decoding.
        """
        steps = [
            step for step in seen if 0 < step.rows <= len(self.table) and 0.0 < step.seconds < float("inf")
        ]
        if not steps:
            return self
        if not self.measured:
            scale = steps[0].seconds / self.table[steps[0].rows - 1]
            return replace(self, table=tuple(v * scale for v in self.table), measured=True)
        texts, size = steps[-1].texts, steps[-1].texts.bit_length()
        # what steps took, over what is expected at pace 1 and without a drag
        plain: list[tuple[int, float]] = []  # with their number of texts
        drafted: dict[int, list[float]] = {}  # by their spread
        for step in steps:
            ratio, wide = step.seconds / self._expected(step), spread(step.rows, step.texts)
            if not wide:
                plain.append((step.texts, ratio))
            elif step.texts.bit_length() == size:
                drafted.setdefault(wide, []).append(ratio)
        costs = self
        for _, group in groupby(plain, key=lambda step: step[0].bit_length()):
            many, ratios = zip(*group, strict=True)
            costs = costs._at_rest(many[-1], ratios, each)
        told = costs._level(texts).value / self._level(texts).value  # now expected of such steps
        return costs._dragged(texts, {k: [r / told for r in own] for k, own in drafted.items()}, each)

    def _dragged(self, texts: int, drafted: Mapping[int, Seq[float]], each: int) -> Costs:
        """Learn from steps of so many texts that check drafts, which took so many times as long as is expected."""
        drag, pace, count = self._drag(texts), self.pace, each * sum(map(len, drafted.values()))
        values = dict(drag.values)
        if drafted and drag.stale >= FRESH:
            over = _typical([ratio / drag.at(wide) for wide, own in drafted.items() for ratio in own])
            pace *= min(max(over / pace, 0.25), 4.0) ** (1 - DECAY**count)
        for wide, own in drafted.items() if drag.stale < FRESH else ():
            value = drag.at(wide)
            value *= (_typical(own) / (pace * value)) ** (1 - SETTLE ** (each * len(own)))
            values[wide] = min(max(value, 1 / MOST_DRAG), MOST_DRAG)
        drag = Drag(values, drag.stale + count, drag.since | drafted.keys())
        return replace(self, pace=pace, drags={**self.drags, texts.bit_length(): drag})

    def _at_rest(self, texts: int, ratios: Seq[float], each: int) -> Costs:
        """Learn from plain steps of so many texts, which took so many times as long as is expected."""
        size, count, (before, many) = texts.bit_length(), each * len(ratios), self.paced
        many = many if size == before else 0
        values, stale, since = drag = self._drag(texts)
        values = {k: drag.at(k) for k in {*values, *since}}
        weight, news = 1 - DECAY**count, min(max(_typical(ratios) / self.pace, 0.25), 4.0)
        levels, correction = self.levels, 1.0
        if stale > FRESH:  # steps with drafts have set the pace: what it was wrong by is the drag's
            weight = max(weight, 1 - SPLIT ** len(ratios))
            correction = news**-weight
        elif size > 1 and many < ARRIVED:  # other steps have set it, just before
            level, seen = self._level(texts)
            told = news ** ((1 - ARRIVAL**count) * max(ARRIVALS, 1 / (seen + 1)))
            level = min(max(level * told, 1 / MOST_LEVEL), MOST_LEVEL)
            levels, news = {**levels, size: Level(level, seen + (many + count >= ARRIVED))}, news / told
        bound = log(MOST_DRAG)
        logs = {k: RECOVER**count * log(v * (correction if k in since else 1.0)) for k, v in values.items()}
        drag = Drag({k: exp(min(max(v, -bound), bound)) for k, v in logs.items()}, 0)
        return replace(
            self,
            pace=self.pace * news**weight,
            levels=levels,
            paced=(size, many + count),
            drags={**self.drags, size: drag},
        )

    def _expected(self, step: Step) -> float:
        """Seconds at pace 1 and without a drag."""
        rows, _, kind, drafted, texts, context = step
        bare = expected = self.table[rows - 1]
        if texts:
            base, row = self._beyond(texts, context)
            expected += base + row * rows
        if kind is not None:
            expected += self._chill(kind, drafted)
        return self._level(texts).value * max(expected, 0.5 * bare)

    def observe_rounds(self, kind: str, seen: Seq[Round]) -> Costs:
        """Learn from draft rounds of one kind. One that took far longer than expected counts as four times that.

        Many texts can take longer than the fit says, which was made for few: their keys and values fill the caches.
        """
        known = self.draft.get(kind) or DraftCost.like(self.target(1) / self.pace)
        base, step, token = self.rounds.get(kind) or known.guess
        crowds = dict(self.crowds)
        for steps, tokens, seconds, texts, warm in seen:
            where, expected = (kind, texts.bit_length()), base + step * steps + token * tokens
            crowd, rounds = crowds.get(where, Crowd())
            if warm and self.is_measured(kind) and expected > 0:
                over = seconds / (self.pace * crowd * expected)
                crowd *= min(over, 4.0) ** max(1 - ROUNDS, 1 / (rounds + 2))
                crowd = min(max(crowd, 1 / MOST_CROWD), MOST_CROWD)
                crowds[where] = Crowd(crowd, rounds + 1)
            taken = seconds / (self.pace * crowd)
            if known.sums[0] > 2.0:
                taken = min(taken, 4.0 * expected)
            known = known.add(steps, tokens, taken)
        return replace(self._with(kind, known), crowds=crowds)

    def idle(self, kind: str, steps: int) -> Costs:
        """A kind was not asked for so many steps: what was seen of it counts less."""
        known = self.draft.get(kind)
        if known is None:
            return self
        crowds = {
            where: crowd._replace(value=crowd.value ** (RECOVER**steps)) if where[0] == kind else crowd
            for where, crowd in self.crowds.items()
        }
        return replace(self._with(kind, known.faded(steps)), crowds=crowds)

    def _with(self, kind: str, cost: DraftCost) -> Costs:
        return replace(self, draft={**self.draft, kind: cost}, rounds={**self.rounds, kind: cost.fit()})


def _typical(ratios: Seq[float]) -> float:
    """The median, the lower of two."""
    return sorted(ratios)[(len(ratios) - 1) // 2]


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
    """What was measured on a machine for one target: steps by target rows, and `Costs` of draft rounds."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    measured: bool = True
    rounds: Mapping[str, RoundCost] = field(default_factory=dict)  # by drafter kind
    chill: Mapping[str, Chill] = field(default_factory=dict)
    text: float = 0.0
    reach: Reach = (0.0, 0.0, 0.0)

    def costs(self) -> Costs:
        draft = {kind: DraftCost(cost, MEASURED) for kind, cost in self.rounds.items()}
        table = staircase(self.rows, self.seconds)
        return Costs(
            table,
            self.measured,
            text=self.text,
            reach=self.reach,
            chill=self.chill,
            draft=draft,
            rounds=dict(self.rounds),
        )


def default_profile() -> Profile:
    """Before anything was measured: 1 row 5 ms, each further row a twelfth of that."""
    return Profile((1, 33), (DEFAULT_STEP, DEFAULT_STEP * (1 + 32 / 12)), measured=False)
