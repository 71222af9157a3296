"""The two controllers: `FixedController` drafts what it is told, `AutoController` holds a `Budget` and asks
it.

All thinking is in budget.py; here is only what must persist between two steps and inside one draft round.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from paceline.core import MAX_DRAFT_TOKENS, Sequence
from paceline.engine import budget as b
from paceline.engine.acceptance import Kind, calibrated
from paceline.engine.budget import Budget, Plan, StepRecord, Want
from paceline.engine.costs import Profile

Limit = tuple[int, str | None]
REST = 16  # steps that a plan without drafts holds
LOOK = 16  # steps between two looks for something to copy, at most

MTP = Kind("mtp", (0.62, 0.7, 0.7, 0.68, 0.66))
MODEL = Kind("model", (0.65, 0.65, 0.62, 0.6))
NGRAM = Kind("ngram", (0.5, 0.7, 0.8, 0.85), sequential=False)
KINDS = (MTP, MODEL, NGRAM)


class FixedController:
    """Drafts k tokens whenever the text has room for them; a request's own number goes first."""

    def __init__(self, k: int) -> None:
        self.k = k

    def limits(self, sequences: list[Sequence], wants: list[Want], drafter_max: int) -> list[Limit]:
        return [
            _fixed(sequence, self.k if want == "auto" else want, drafter_max)
            for sequence, want in zip(sequences, wants, strict=True)
        ]

    def go_on(self, sequence_id: int, step: int, confidence: float) -> bool:
        return True

    def offer(self, sequence_id: int, kind: str, confidence: list[float]) -> tuple[int, float]:
        return _proposal(confidence)

    def expected(self, sequence_id: int, kind: str, length: int) -> float:
        return sum(0.7 ** (j + 1) for j in range(length))

    def kind_limit(self, sequence_id: int, kind: str) -> int:
        return MAX_DRAFT_TOKENS

    def observe(self, record: StepRecord) -> None:
        pass

    def forget(self, sequence_id: int) -> None:
        pass


def _fixed(sequence: Sequence, want: int, drafter_max: int) -> Limit:
    if want == 0 or drafter_max == 0:
        return 0, b.DISABLED if want == 0 else b.NO_DRAFTER
    limit = min(want, drafter_max, b.room(sequence))
    return limit, None if limit else b.NO_ROOM


def _proposal(confidence: list[float]) -> tuple[int, float]:
    """All of a proposal, and the tokens that its own confidence promises."""
    alive, total = 1.0, 0.0
    for value in confidence:
        alive *= value
        total += alive
    return len(confidence), total


@dataclass(frozen=True, slots=True)
class _Idle:
    """A plan without drafts that holds for these rows until a step."""

    ids: tuple[int, ...]
    until: int
    plan: Plan
    limits: dict[int, int]
    reason: str


class AutoController:
    """Drafts what pays on this machine, for these requests, at this load.

    `kinds`: every drafter that may be asked. `default`: the names of those that a request without a drafter
    of its own uses, e.g. ("mtp", "ngram"). `warn` gets the acceptance alarm.
    """

    def __init__(
        self,
        profile: Profile,
        kinds: Seq[Kind] = KINDS,
        warn: Callable[[str], None] | None = None,
        default: Seq[str] = (),
    ) -> None:
        self.budget = Budget(profile.costs(), tuple(kinds))
        self._default = tuple(default) or tuple(kind.name for kind in kinds)
        self._warn = warn
        self._kinds = {kind.name: kind for kind in kinds}
        self._plans: dict[str, Plan] = {}
        self._limits: dict[str, dict[int, int]] = {}
        self._planned = 0  # target rows of this step as far as `limits` knows
        self._others = 0  # rows of the step before that it did not know: prompts being read
        self._quiet: dict[int, tuple[int, int]] = {}  # rows with nothing to copy: (steps to wait, until when)
        self._idle: dict[str, _Idle] = {}  # kinds that pay for no row at present
        self._zeros: tuple[tuple[int, ...], int, list[Limit]] = ((), 0, [])  # the same for all kinds
        self._alive: dict[int, float] = {}  # survival of each row's draft so far in this round

    def limits(self, sequences: list[Sequence], wants: list[Want], drafter_max: int) -> list[Limit]:
        """One call per drafter and step: its rows. When none of them pays, that holds for the next few steps."""
        ids = tuple([sequence.id for sequence in sequences])
        if self._zeros[0] == ids and self.budget.step < self._zeros[1]:
            self._planned += len(ids)
            return self._zeros[2]
        out: list[Limit] = []
        caps: dict[int, int] = {}
        rows = len(sequences) + self._others
        for sequence, want in zip(sequences, wants, strict=True):
            limit, reason = _fixed(sequence, MAX_DRAFT_TOKENS if want == "auto" else want, drafter_max)
            out.append((limit, reason))
            if want == "auto" and limit:
                caps[sequence.id] = limit
            else:
                rows += limit
        self._alive.clear()
        self._plans.clear()
        self._limits.clear()
        if self.budget.probing:
            self.budget = replace(self.budget, probing=frozenset())
        self._planned += sum(limit + 1 for limit, _ in out) - sum(caps.values())
        if not caps:
            return out
        chosen = sequences[0].params.drafter
        names = chosen.split("+") if chosen else self._default
        best: dict[int, Limit] = {}
        for name in names:
            idle = self._idle.get(name)
            if idle is not None and idle.ids == ids and self.budget.step < idle.until:
                self._plans[name], self._limits[name] = idle.plan, idle.limits
                best |= {i: (0, idle.reason) for i in caps if not best.get(i, (0, None))[0]}
            else:
                self._plan(self._kind(name), caps, (rows, len(sequences)), best)
                self._rest(name, ids, best)
        out = [best.get(sequence.id, limit) for sequence, limit in zip(sequences, out, strict=True)]
        if len(caps) == len(ids) and all(name in self._idle for name in names):
            self._zeros = (ids, min(self._idle[name].until for name in names), out)
        return out

    def _rest(self, name: str, ids: tuple[int, ...], best: dict[int, Limit]) -> None:
        """If a kind pays for none of these rows, do not think about it again for a few steps."""
        if any(self._limits[name].values()):
            self._idle.pop(name, None)
        else:
            reason = next(iter(best.values()))[1] or b.NO_CONFIDENCE
            until = self.budget.step + REST
            if not self._kinds[name].sequential:
                until = min((self._quiet.get(i, (0, 0))[1] for i in ids), default=until)
            self._idle[name] = _Idle(ids, until, self._plans[name], self._limits[name], reason)

    def _kind(self, name: str) -> Kind:
        """A kind by name; a stranger's starts at what drafters usually reach."""
        if name not in self._kinds:
            self._kinds[name] = Kind(name)
            self.budget = replace(self.budget, kinds=(*self.budget.kinds, self._kinds[name]))
        return self._kinds[name]

    def _plan(self, kind: Kind, caps: dict[int, int], size: tuple[int, int], best: dict[int, Limit]) -> None:
        """Plan for one kind; in `best` a row gets as many tokens as its most promising kind wants.

        What can be looked up for nothing is asked for in full: `offer` decides when the proposal is seen.
        """
        rows, texts = size
        pays = b.could_pay(self.budget, kind, rows, texts, len(caps))
        plan = b.choose(self.budget, kind, caps if pays and kind.sequential else {}, rows, texts)
        limits = {}
        for sequence_id, cap in caps.items():
            limit = cap if pays and self._quiet.get(sequence_id, (0, 0))[1] <= self.budget.step else 0
            if kind.sequential and pays:
                planned = plan.limits[sequence_id]
                self.budget, limit = b.settle(self.budget, kind, sequence_id, planned, rows)
            limits[sequence_id] = limit
            if limit >= best.get(sequence_id, (0, None))[0]:
                idle = b.NO_CONFIDENCE if kind.sequential else b.NO_PROPOSAL
                reason = None if limit else idle if pays else b.PARKED_BY_COST
                best[sequence_id] = (limit, reason)
        self._plans[kind.name], self._limits[kind.name] = plan, limits

    def go_on(self, sequence_id: int, step: int, confidence: float) -> bool:
        for name, plan in self._plans.items():
            kind = self._kinds[name]
            if kind.sequential and sequence_id in plan.limits:
                survival = self._alive.get(sequence_id, 1.0) * self._calibrated(name, confidence)
                self._alive[sequence_id] = survival
                return b.worth(plan, b.arm_of(self.budget, sequence_id, kind), step, survival)
        return True  # a fixed length

    def _calibrated(self, name: str, confidence: float) -> float:
        return calibrated(self.budget.bins.get(name), confidence)

    def offer(self, sequence_id: int, kind: str, confidence: list[float]) -> tuple[int, float]:
        """(tokens worth checking, expected net gain in tokens) of a proposal that costs nothing to make."""
        plan, known = self._plans.get(kind), self._kinds.get(kind)
        if plan is None or known is None or sequence_id not in self._limits[kind]:
            return _proposal(confidence)
        plan = replace(plan, rate=max(other.rate for other in self._plans.values()))
        return b.offer(self.budget, known, b.arm_of(self.budget, sequence_id, known), plan, confidence)

    def expected(self, sequence_id: int, kind: str, length: int) -> float:
        """Expected net gain in tokens of `length` tokens that a drafter of `kind` would still have to
        draft.
        """
        plan, known = self._plans.get(kind), self._kinds.get(kind)
        if plan is None or known is None:
            return sum(0.7 ** (j + 1) for j in range(length))
        length = min(length, self._limits[kind].get(sequence_id, length))
        return b.expected(self.budget, known, b.arm_of(self.budget, sequence_id, known), plan, length)

    def kind_limit(self, sequence_id: int, kind: str) -> int:
        """Tokens that a drafter of `kind` may propose for this row in this step."""
        return self._limits.get(kind, {}).get(sequence_id, MAX_DRAFT_TOKENS)

    def observe(self, record: StepRecord) -> None:
        asked: dict[int, int] = {}
        for kind in self.budget.kinds:
            if kind.sequential:
                asked |= self._limits.get(kind.name, {})
        known = sum(row.drafted + 1 for row in record.rows) or self._planned + sum(asked.values())
        self._others, self._planned = max(record.target_rows - known, 0), 0
        self.budget, warnings = b.alarm(b.observe(self.budget, record, asked))
        self._look(record)
        for text in warnings:
            if self._warn:
                self._warn(text)

    def _look(self, record: StepRecord) -> None:
        """Look less often for something to copy where there was nothing: every 2nd, 4th, 8th, 16th step."""
        for kind in self.budget.kinds:
            asked = {} if kind.sequential else self._limits.get(kind.name, {})
            for row in record.rows if asked else ():
                if row.drafter == kind.name and row.accepted:
                    self._quiet.pop(row.sequence_id, None)
                elif asked.get(row.sequence_id):
                    wait = min(2 * self._quiet.get(row.sequence_id, (1, 0))[0], LOOK)
                    due = (self.budget.step // wait + 1) * wait  # all rows at the same steps
                    self._quiet[row.sequence_id] = (wait, due)

    def forget(self, sequence_id: int) -> None:
        self._quiet.pop(sequence_id, None)
        self.budget = b.forget(self.budget, sequence_id)

    def metrics(self) -> dict[str, float]:
        """Counters for a metrics page; names are stable."""
        out: dict[str, float] = {"steps": self.budget.step, "seconds": self.budget.seconds}
        for kind, totals in self.budget.totals.items():
            out[f"drafted.{kind}"], out[f"accepted.{kind}"] = totals.drafted, totals.accepted
        out.update({f"undrafted.{reason}": count for reason, count in self.budget.reasons.items()})
        return out
