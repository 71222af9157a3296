"""What a step costs on this machine: a staircase over target rows, and what drafting adds to it. Pure values, no torch.

Learnt at start-up (stopwatch.py) and corrected by every step that runs. Seconds everywhere. A busy machine enters
through `tempo`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import groupby
from statistics import median
from typing import NamedTuple

from paceline.engine.rounds import KEPT, DraftCost, Round, RoundCost
from paceline.engine.tempo import READING, Tempo, parts

TABLE_ROWS = 64  # beyond it the last slope goes on
DEFAULT_STEP = 5e-3  # only the ratios matter before the first real step
MEASURED = 1.0  # trust in a price that was measured: rounds of one text cannot tell a step from a token
ROUNDS = 0.9  # of what rounds for some number of texts take, for each round
MOST_CROWD = 2.5  # and the inverse of its least
KNOWN = 2.0  # rounds from which on a draft round is known
MASKS = 0.95  # of what masks take, for each step with some
RECOVER = 0.9995  # of its logarithm, for each plain step: what was dear once may be tried again


Chill = tuple[float, float]  # seconds: (of a round of one text, more for each further text)
Reach = tuple[
    float, float, float
]  # (seconds per token of a context, of that for each further row, tokens in `table`)


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
    row: float = 0.0  # and each of its rows,
    mask: float = 0.0  # and that a constraint takes to say what it allows there


_USUAL = Here()


def spread(rows: int, texts: int) -> int:
    """Of a step, by the rows that check drafts: 0 if it has none, 1 for up to one for each text, 2 for two or three, 3
    for four to seven, ...: what is wrong with the price of long copies says nothing about that of short drafts.
    """
    return (-((texts - rows) // max(texts, 1))).bit_length() if rows > texts else 0


@dataclass(frozen=True, slots=True)
class Costs:
    """What steps and draft rounds take, as measured at start-up, times what they take beside that now.

    table[n - 1]: seconds of a step of one text with n target rows, its draft apart, at a usual context. Each further
    text costs `text` more than its rows, a longer context `reach`: once for each text, since its rows share what is read
    of the cache, and a little for each further row. After a round of a drafter whose weights have taken the place of
    the target's in the caches it takes `chill` more. Without a profile (`measured` false) the first step sets the scale.

    What steps take beside that is the machine's pace, what reading the weights takes longer where others use the caches
    (the same for any number of rows: where plain steps are slow for it, further rows are cheap), the `level` of so many
    texts, by which their price is wrong, and the `drag` of steps that check drafts. `tempo` tells them apart.
    """

    table: tuple[float, ...]
    measured: bool = True
    tempo: Tempo = field(default_factory=Tempo)  # what steps take now, beside what they took at start-up
    text: float = 0.0  # what each further text in a step costs, beside its rows
    reach: Reach = (0.0, 0.0, 0.0)
    # steps with drafts since a plain one was seen, by number of texts: 1, 2 to 3, 4 to 7, ...
    stale: Mapping[int, int] = field(default_factory=dict)
    here: Here = _USUAL
    mask: float = 0.0  # seconds that a constraint takes to say what it allows in a row, lately
    chill: Mapping[str, Chill] = field(default_factory=dict)  # by drafter kind
    draft: Mapping[str, DraftCost] = field(default_factory=dict)  # by drafter kind, at pace 1
    rounds: Mapping[str, RoundCost] = field(default_factory=dict)  # the fits of `draft`
    crowds: Mapping[tuple[str, int], Crowd] = field(default_factory=dict)  # by kind and texts, as `stale`

    @property
    def pace(self) -> float:
        """What everything takes, as a multiple of what it took at start-up."""
        return self.tempo.pace

    @property
    def drag(self) -> float:
        """What steps of the texts at hand that check drafts take, as a multiple of what is expected beside plain ones."""
        return self.tempo.drag(self.here.texts.bit_length())

    @property
    def unseen(self) -> int:
        """Steps with drafts for the texts at hand since a plain one was seen."""
        return self.stale.get(self.here.texts.bit_length(), 0)

    def target(self, rows: int, kind: str = "", here: Here | None = None) -> float:
        """Seconds of a step with so many target rows, its draft apart, which is of such a drafter; of the texts at hand,
        or others.
        """
        return next(self.targets(rows, kind, here))

    def targets(self, rows: int, kind: str = "", here: Here | None = None, more: int = 1) -> Iterator[float]:
        """`target` of so many rows, of `more` than that, ...: a plan goes through dozens of them."""
        texts, base, row, mask = here or self.here
        reading, wide, times = self.tempo.means[READING], -1, 1.0
        while True:
            if (now := spread(rows, texts)) != wide:
                wide, times = now, self.tempo.times(texts.bit_length(), now, kind, 0.0)
            seconds = self._rung(rows) + base + row * rows
            yield (1.0 + reading * self._reading(seconds)) * times * seconds + mask * rows
            rows += more

    def _reading(self, seconds: float) -> float:
        """The share of a usual step of one row in one that takes so long: at short contexts it may be shorter still."""
        return min(self.table[0] / seconds, 1.0)

    def _rung(self, rows: int) -> float:
        """Of the table, which goes on as it ends."""
        last = len(self.table)
        if rows <= last:
            return self.table[max(rows, 1) - 1]
        return self.table[-1] + (self.table[-1] - self.table[last // 2 - 1]) / (last - last // 2) * (
            rows - last
        )

    def within(self, texts: int, context: int, masked: int = 0) -> Costs:
        """The costs of steps of so many texts, with so many tokens in all, `masked` of them under a constraint."""
        return replace(self, here=self.of(texts, context, masked))

    def of(self, texts: int, context: int, masked: int = 0) -> Here:
        """So many texts, with so many tokens in all, `masked` of them under a constraint."""
        base, row = self._beyond(texts, context)
        return Here(texts, max(base, -0.5 * self._rung(texts)), row, self.mask * masked / texts)

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

    def adding(self, rows: int, more: int, kind: str) -> float:
        """Seconds that `more` target rows, drafted by such a drafter, add to a step of `rows`."""
        return self.target(rows + more, kind) - self.target(rows)

    def observe_targets(self, seen: Seq[Step], each: int = 1, elapsed: float | None = None) -> Costs:
        """Learn from steps, of which each stands for so many, what they take beside their price. They, and others that
        tell nothing, took `elapsed` seconds. The staircase stays as it was measured: bent by what one number of rows
        seemed to differ by, it drifted away from the machine's within an hour. Steps beyond the table (prompts) say
        nothing about decoding.
        """
        steps = [
            step for step in seen if 0 < step.rows <= len(self.table) and 0.0 < step.seconds < float("inf")
        ]
        if steps and not self.measured:
            scale = steps[0].seconds / self.table[steps[0].rows - 1]
            return replace(self, table=tuple(v * scale for v in self.table), measured=True)
        if elapsed is None:
            elapsed = each * sum([step.seconds for step in steps], 0.0)
        if not elapsed:
            return self
        tempo, stale = self.tempo.after(elapsed / self.table[0]), dict(self.stale)
        for size, wide, _ in map(_alike, steps):
            stale[size] = stale.get(size, 0) + each if wide else 0
        for alike, group in groupby(sorted(steps, key=_alike), key=_alike):
            own = list(group)
            prices = [self._expected(step) for step in own]
            ratios = [step.seconds / price for step, price in zip(own, prices, strict=True)]
            tempo = tempo.seen(parts(*alike), self._reading(sum(prices) / len(prices)), ratios)
        return replace(self, tempo=tempo, stale=stale)

    def observe_masks(self, seen: Seq[float]) -> Costs:
        """Learn from steps what constraints take, in seconds for each row. One that prepares itself, or meets what it has
        not met, may take long: medians count.
        """
        if not seen:
            return self
        share = 1.0 - MASKS ** len(seen) if self.mask else 1.0
        return replace(self, mask=self.mask + share * (median(seen) - self.mask))

    def _expected(self, step: Step) -> float:
        """Seconds, as they were at start-up."""
        rows, _, kind, drafted, texts, context = step
        bare = expected = self.table[rows - 1]
        if texts:
            base, row = self._beyond(texts, context)
            expected += base + row * rows
        if kind is not None:
            expected += self._chill(kind, drafted)
        return max(expected, 0.5 * bare)

    def observe_rounds(self, kind: str, seen: Seq[Round]) -> Costs:
        """Learn from draft rounds of one kind. One that took far longer than expected counts as four times that.

        Many texts can take longer than the fit says, which was made for few: their keys and values fill the caches.
        """
        known = self.draft.get(kind) or DraftCost.like(self.target(1) / self.pace)
        base, step, token = self.rounds.get(kind) or known.guess
        crowds, pace, measured, took = dict(self.crowds), self.pace, self.is_measured(kind), []
        weight = known.sums[0]
        for steps, tokens, seconds, texts, warm in seen:
            where, expected = (kind, texts.bit_length()), base + step * steps + token * tokens
            crowd, rounds = crowds.get(where, Crowd())
            if warm and measured and expected > 0:
                over = seconds / (pace * crowd * expected)
                crowd *= min(over, 4.0) ** max(1 - ROUNDS, 1 / (rounds + 2))
                crowd = min(max(crowd, 1 / MOST_CROWD), MOST_CROWD)
                crowds[where] = Crowd(crowd, rounds + 1)
            taken = seconds / (pace * crowd)
            took.append((steps, tokens, min(taken, 4.0 * expected) if weight > KNOWN else taken))
            weight = KEPT * weight + 1.0
        return replace(self._with(kind, known.add(took)), crowds=crowds)

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


def _alike(step: Step) -> tuple[int, int, str]:
    """Steps that tell of the same."""
    texts = max(step.texts, 1)
    return texts.bit_length(), spread(step.rows, texts), step.kind or ""


def staircase(rows: Seq[int], seconds: Seq[float], length: int = TABLE_ROWS) -> tuple[float, ...]:
    """Dense table for 1..length rows from rungs: made non-decreasing (pooling neighbours), then interpolated."""
    pools: list[list[float]] = []  # [mean seconds, rungs in it]
    for value in seconds:
        pools.append([value, 1.0])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, m), (b, w) = pools[-2:]
            pools[-2:] = [[(a * m + b * w) / (m + w), m + w]]
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
