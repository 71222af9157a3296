"""Plans of `auto`: how many tokens to draft for some texts, for how many steps that holds, and what is learnt meanwhile.

All thinking is in budget.py and learning.py; here is only what must persist from one plan to the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

from paceline.core import Sequence
from paceline.engine import budget as b
from paceline.engine import copies, learning
from paceline.engine.acceptance import KINDS, Kind
from paceline.engine.audit import Audit, hopeful
from paceline.engine.budget import Budget, Want
from paceline.engine.care import Care
from paceline.engine.choice import REST, Before, Choice, Kin, begun, caps_of, going_on, kin_of
from paceline.engine.costs import TABLE_ROWS, Profile
from paceline.engine.fixed import Limit
from paceline.engine.lookups import Copier, Lookups
from paceline.engine.records import RowRecord, Unlearnt
from paceline.sampling.shape import is_greedy

LITTLE = 8  # steps from which nothing is learnt yet where a plan is made only because texts came or went
PROBE_RUN = 3  # steps that a probe lasts while its tokens are kept


class Planner:
    """What a controller knows and has decided."""

    def __init__(
        self,
        profile: Profile,
        kinds: Seq[Kind] = KINDS,
        warn: Callable[[str], None] | None = None,
        default: Seq[str] = (),
        copier: Copier | None = None,
    ) -> None:
        self.budget = Budget(profile.costs(), tuple(kinds))
        self._default = tuple(default) or tuple(kind.name for kind in kinds)
        self._warn = warn or (lambda text: None)
        self._kinds = {kind.name: kind for kind in kinds}
        self._copying = {kind.name for kind in kinds if not kind.sequential}
        self._choices: dict[tuple[int, ...], Choice] = {}  # by the rows that were asked for together
        self._choice: Choice | None = None  # of the draft round that is going on
        self._used: list[Choice] = []  # in this step
        self._unlearnt = Unlearnt()
        self._audits: dict[tuple[int, bool], Audit] = {}  # by number of texts, and whether all are sampled
        self._audited: Audit | None = None  # of the texts that were last planned for
        self._others = 0  # rows of this step that belong to prompts being read
        self._lookups = Lookups(copier)
        self.planned = 0  # plans that were thought out
        self._plan_seconds = 0.0  # that one takes, lately
        self._care = Care()  # what was thought in a step took no draft round's time
        self._before = Before()
        self._gone: set[int] = set()  # texts that have ended: their last step is still to be learnt from

    @property
    def _now(self) -> int:
        return self.budget.step + self._unlearnt.steps

    def _decided(
        self,
        ids: tuple[int, ...],
        before: Choice | None,
        sequences: list[Sequence],
        wants: list[Want],
        most: int,
    ) -> Choice:
        """As it was a moment ago, or thought out anew."""
        begin, kin = time.perf_counter(), None
        if before is None:
            new = set(ids).difference(i for i, _ in self.budget.arms)
            kin = kin_of(sequences, wants, len(new)) if not self._others else None
            again = self._as_before(sequences, most, kin, new, self._now)
            if again is not None:
                self._care.thought += time.perf_counter() - begin
                return again
        choice = self._think(sequences, wants, most)
        self.planned += 1
        taken = time.perf_counter() - begin
        self._plan_seconds += 0.2 * (taken - self._plan_seconds) if self._plan_seconds else taken
        if kin:
            plain = self.budget.costs.target(len(ids))
            self._before.keep(kin, choice, self._now, self._plan_seconds / plain)
        if not self._others:
            self._before.drafts(kin_of(sequences, wants, len(ids)), choice)
        self._care.thought += time.perf_counter() - begin
        return choice

    def _as_before(
        self, sequences: list[Sequence], most: int, kin: Kin | None, new: set[int], now: int
    ) -> Choice | None:
        """What was decided for others a moment ago, or for some of them."""
        if self._others:
            return going_on(self._choice, [sequence.id for sequence in sequences], now)
        choice = self._before.others(kin, self._choice, caps_of(sequences, most), new, now) if kin else None
        for name in {*choice.looks, *choice.plans} if choice else ():
            self.budget = b.meet(self.budget, self._kinds[name], sequences)
        return choice

    def _think(self, sequences: list[Sequence], wants: list[Want], drafter_max: int) -> Choice:
        choice = begun(sequences, wants, drafter_max)
        before = self._choices.get(tuple(choice.ids))
        # probes, trials, measurements and rests are what they are for: what they took is learnt whenever they are over
        usual = not self.budget.probing and (before is None or (before.drafts and not before.trial))
        if not usual or self._unlearnt.enough:
            self._learn()
        elif before is not None or self._unlearnt.steps >= LITTLE:
            self._learn_rows(self._unlearnt.take_drafts())
        masked = sum([s.constraint is not None for s in sequences])
        choice.teaches = not (self._others or len(sequences) > TABLE_ROWS)
        choice.until, choice.sampled = self._now + REST, not any(is_greedy(s) for s in sequences)
        costs, context = self.budget.costs, sum([sequence.committed for sequence in sequences])
        here = costs.within(len(sequences), context, masked) if choice.caps else costs
        care = self._care.of(len(sequences))
        self.budget = replace(self.budget, costs=here, probing=frozenset(), care=care)
        chosen = sequences[0].params.drafter
        kinds = [self._kind(name) for name in (chosen.split("+") if chosen else self._default)]
        for kind in kinds:  # drafts of a length that was asked for teach, too
            self.budget = b.meet(self.budget, kind, sequences)
        if not choice.caps:
            return choice
        best: dict[int, Limit] = {}
        drafts = before is not None and before.hold and not before.trial
        margin = 1.0 if drafts else b.START
        texts, rows = len(sequences), choice.rows + self._others
        choice.plain = b.plain(here, choice.rows, texts)
        plain = texts / choice.plain
        free = [kind.name for kind in kinds if self._plan(kind, choice, margin, best) and not kind.sequential]
        rate = max([plan.rate for plan in choice.plans.values()], default=plain)
        looks = {name: copies.look(self.budget, name, rows, texts, rate) for name in free}
        self.budget, audit = replace(self.budget, costs=costs), self._audit(choice)
        if choice.rows == texts and choice.teaches and audit.due(here, rate / plain):
            self.budget = replace(self.budget, probing=frozenset())
            return choice.measuring(self._now + audit.steps(rate / plain), before)
        choice.looks = looks
        choice.out = [best.get(s.id, limit) for s, limit in zip(sequences, choice.out, strict=True)]
        planning = self._plan_seconds / here.target(choice.drafted_rows)
        choice.hold_for(before, planning, self.budget.probing, rate / plain)
        choice.until = self._now + (1 if self._others else choice.hold or REST)
        choice.probes = PROBE_RUN if self.budget.probing else 0
        return choice

    def _audit(self, choice: Choice) -> Audit:
        """Of such texts, which are planned for now: until others are, their steps count."""
        size = len(choice.ids).bit_length()
        audit = self._audits.setdefault((size, choice.sampled), Audit(choice.sampled, size))
        if audit is not self._audited:
            if self._audited is not None:
                self._audited.away(self._now)
            audit.back(self._now)
            self._audited = audit
        return audit

    def _kind(self, name: str) -> Kind:
        """A kind by name; a stranger's starts at what drafters usually reach."""
        if name not in self._kinds:
            self._kinds[name] = Kind(name)
            self.budget = replace(self.budget, kinds=(*self.budget.kinds, self._kinds[name]))
        return self._kinds[name]

    def _plan(self, kind: Kind, choice: Choice, margin: float, best: dict[int, Limit]) -> bool:
        """Plan for one kind, and say whether it could pay; in `best` a row gets the tokens of its most promising kind."""
        rows, texts = choice.rows + self._others, len(choice.ids)
        least = b.break_even(self.budget, kind, rows, texts, len(choice.caps))
        pays, limits = least < 1, choice.limits.setdefault(kind.name, {})
        if kind.sequential:
            best_chance = max([b.arm_of(self.budget, i, kind).accept[0] for i in choice.caps])
            caps = choice.caps if least < best_chance else {}
            plan = b.choose(self.budget, kind, caps, rows, texts, margin)
            if any(plan.limits.values()):
                self._audit(choice).paid(self._now)
            elif choice.teaches and not (choice.sampled and texts > 1):  # these hardly ever pay together
                hoping = replace(self.budget, costs=hopeful(self.budget.costs))
                trial = b.choose(hoping, kind, choice.caps, rows, texts, b.TRIED)
                choice.trial_due = self._audit(choice).next if any(trial.limits.values()) else float("inf")
                if self._now >= choice.trial_due:
                    self._audit(choice).tried(self._now)
                    plan, pays, choice.trial = trial, True, True
            choice.plans[kind.name] = plan
            for i in choice.caps if pays else ():
                self.budget, limits[i] = b.settle(self.budget, kind, i, plan.limits.get(i, 0), rows)
            choice.asked |= limits
        idle = b.PARKED_BY_COST if not pays else b.NO_CONFIDENCE if kind.sequential else b.NO_PROPOSAL
        for sequence_id in choice.caps:
            limit = limits.get(sequence_id, 0)
            if sequence_id not in best or limit > best[sequence_id][0]:
                best[sequence_id] = (limit, None if limit else idle)
        return pays

    def _learn_rows(self, rows: Seq[RowRecord]) -> None:
        """Learn what became of the drafts of some texts, before it is learnt what their steps took."""
        if rows:
            self.budget = learning.of_texts(self.budget, rows)

    def _learn_shown(self) -> None:
        """Learn what would have become of copies that were not checked."""
        if rows := self._lookups.take_shown():
            self.budget = learning.of_all(
                learning.of_texts(self.budget, rows, checked=False), rows, checked=False
            )

    def _learn(self) -> None:
        """Let `budget` learn from the steps since it last did, and drop the texts that have ended."""
        if not self._unlearnt.steps:
            return
        begin = time.perf_counter()
        self._learn_shown()
        self.budget, warnings = learning.alarm(learning.observe(self.budget, self._unlearnt.seen))
        self._care.learnt(*self._unlearnt.learnt(time.perf_counter() - begin))
        if self._gone:
            self.budget = learning.forget(self.budget, self._gone)
            self._lookups.gone(self._gone)
            self._gone.clear()
        for text in warnings:
            self._warn(text)
