"""The controller of `auto`: it holds a `Budget` and asks it.

All thinking is in budget.py and learning.py; here is only what must persist between two steps and inside one draft round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace

from paceline.core import MAX_DRAFT_TOKENS, Draft, Sequence
from paceline.engine import budget as b
from paceline.engine import copies, learning
from paceline.engine.acceptance import KINDS, Kind
from paceline.engine.audit import Audit, hopeful
from paceline.engine.budget import Budget, Joined, Want
from paceline.engine.care import Care
from paceline.engine.choice import REST, Before, Choice, Kin, begun, caps_of, going_on, kin_of
from paceline.engine.copies import NOTHING, Found, Offer
from paceline.engine.costs import TABLE_ROWS, Profile
from paceline.engine.fixed import WHOLE, Limit, wanted, whole
from paceline.engine.lookups import Copier, Firsts, Lookups
from paceline.engine.records import RowRecord, StepRecord, Unlearnt
from paceline.ops.base import Stop
from paceline.ops.search import Watch
from paceline.sampling.shape import is_greedy

LITTLE = 8  # steps from which nothing is learnt yet where a plan is made only because texts came or went
PROBE_RUN = 3  # steps that a probe lasts while its tokens are kept


class AutoController:
    """Drafts what pays on this machine, for these requests, at this load.

    `kinds`: every drafter that may be asked. `default`: the names of those that a request without a drafter
    of its own uses, e.g. ("mtp", "ngram"). `warn` gets the acceptance alarm. `copier` looks at texts at rest.
    """

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
        self._choices: dict[tuple[int, ...], Choice] = {}  # by the rows that were asked for together
        self._choice: Choice | None = None  # of the draft round that is going on
        self._used: list[Choice] = []  # in this step
        self._unlearnt = Unlearnt()
        self._audits: dict[tuple[int, bool], Audit] = {}  # by number of texts, and whether all are sampled
        self._others = 0  # rows of this step that belong to prompts being read
        self._lookups = Lookups(copier)
        self._plan_seconds = 0.0  # that a plan takes, lately
        self._care = Care()  # what was thought in a step took no draft round's time
        self._before = Before()
        self._gone: set[int] = set()  # texts that have ended: their last step is still to be learnt from

    @property
    def _now(self) -> int:
        return self.budget.step + self._unlearnt.steps

    def limits(
        self, sequences: list[Sequence], wants: list[Want], drafter_max: int, others: int = 0
    ) -> list[Limit]:
        """One call per drafter and step: its rows. A decision holds for a few steps, thinking costs time too."""
        self._others = others
        ids = tuple([sequence.id for sequence in sequences])
        choice = self._choices.get(ids)
        if choice is None or self._now >= choice.until:
            begin = time.perf_counter()
            new = set(ids).difference(i for i, _ in self.budget.arms)
            kin = kin_of(sequences, wants, len(new)) if choice is None and not others else None
            again = self._as_before(sequences, drafter_max, kin, new, self._now) if choice is None else None
            choice = again or self._think(sequences, wants, drafter_max)
            if again is None:
                taken = time.perf_counter() - begin
                self._plan_seconds += 0.2 * (taken - self._plan_seconds) if self._plan_seconds else taken
                if kin:
                    plain = self.budget.costs.target(len(ids))
                    self._before.keep(kin, choice, self._now, self._plan_seconds / plain)
            self._choices[ids] = choice
            self._care.thought += time.perf_counter() - begin
        self._choice = choice
        self._used.append(choice)
        self._lookups.among(len(ids), sampled=choice.sampled, rests=not choice.drafts)
        here = choice.drafts or others or self._lookups.copier is None  # else `rest` looks
        looks = choice.looks and max(choice.look, 0 if choice.drafts else self._lookups.until) <= self._now
        return self._with_looks(choice, sequences) if here and looks else choice.out

    def rest(self, sequences: list[Sequence], rooms: list[int]) -> tuple[int, Draft | None]:
        choice, now, found = self._choice, self._now, None
        if choice is None or choice.drafts or now >= choice.until:
            return 0, None
        if choice.looked:  # in this step, in vain
            for name in choice.looks:
                self._lookups.in_vain(choice.limits[name], now)
                choice.limits[name] = {}
        elif choice.looks and now >= self._lookups.until:
            begin = time.perf_counter()
            rows = [(s, room) for s, room in zip(sequences, rooms, strict=True) if choice.caps.get(s.id)]
            firsts = {s.id: Firsts(self.budget, s.id, choice.looks) for s, _ in rows}
            due = {s.id: room for s, room in rows if self._lookups.due(s, now, firsts[s.id]) == now}
            if due and self._lookups.copier is None:
                choice.look = now
                return 0, None
            found = self._copies(sequences, due) if due else None
            if due and found is None:
                self._lookups.in_vain(due, now)
                self._lookups.timed(time.perf_counter() - begin, self.budget.costs.target(len(rooms)), now)
        if choice.looks:
            choice.look = self._lookups.next(choice.caps, now)
        steps = choice.left(now)
        if found is not None:
            choice.look = now  # whoever is asked next looks at once
        return steps, found

    def join(self, sequences: list[Sequence], wants: list[Want], most: int, untold: int) -> Joined | None:
        """By what was decided a moment ago for such texts. They are looked at when the others are."""
        last, now = self._choice, self._now + untold
        new = {s.id for s in sequences}.difference(last.caps if last else ())
        choice = self._as_before(sequences, most, kin_of(sequences, wants, len(new)), new, now)
        if choice is None or last is None or choice.drafts:
            return None
        self._choice, self._choices, choice.look = choice, {tuple(choice.ids): choice}, last.look
        for s in [s for s in sequences if s.id in new] if choice.looks else ():
            first = Firsts(self.budget, s.id, choice.looks)
            choice.look = min(choice.look, self._lookups.join(s, now, first))
        return choice.left(now), choice.reason

    def watch(self, sequences: list[Sequence]) -> Watch | None:
        choice = self._choice
        self._learn_rows(self._unlearnt.take_news())
        ours = [s for s in sequences if choice and choice.caps.get(s.id)]
        return self._lookups.watch(ours, self.budget, choice.looks) if choice else None

    def copies(self, sequences: list[Sequence], rooms: list[int]) -> Draft | None:
        choice, now, begin = self._choice, self._now, time.perf_counter()
        if choice is None or now < self._lookups.until:
            return None
        found = self._copies(sequences, {s.id: room for s, room in zip(sequences, rooms, strict=True)})
        if found is None:
            self._lookups.timed(time.perf_counter() - begin, self.budget.costs.target(len(rooms)), now)
        choice.look = now if found else self._lookups.next(choice.caps, now)
        return found

    def _copies(self, sequences: Seq[Sequence], rooms: Mapping[int, int]) -> Draft | None:
        """What is worth copying in this step, in those texts that there is room in."""
        choice, copier = self._choice, self._lookups.copier
        if choice is None or copier is None or copier.name not in choice.looks:
            return None
        caps, name = {s.id: min(choice.caps.get(s.id, 0), rooms.get(s.id, 0)) for s in sequences}, copier.name
        for sequence in sequences:
            self._lookups.told(sequence, self._now)
        found = self._lookups.found(sequences, caps)
        offers = self._offers(sequences, choice, name, found, wakes=not self._unlearnt.drafting)
        if not any(one.tokens for one in offers):
            return None
        choice.looked = True
        choice.limits[name] = {s.id: len(t) for s, (t, _) in zip(sequences, found, strict=True) if t}
        self._used.append(choice)
        return copies.draft(name, found, offers)

    def _with_looks(self, choice: Choice, sequences: list[Sequence]) -> list[Limit]:
        """All that a row has room for where something is looked up in this step: `offer` decides what is used.

        A look costs little beside a round of a network, so a row that would get one is looked up in every step.
        """
        now = self._now
        looked: dict[int, int] = {}
        choice.look = now + REST
        for sequence in sequences:
            i = sequence.id
            if not choice.caps.get(i):
                continue
            always = choice.asked.get(i, 0) > 0
            first = Firsts(self.budget, i, choice.looks)
            due = self._lookups.due(sequence, now, first, always=always)
            if due == now:
                looked[i] = choice.caps[i]
            choice.look = min(choice.look, now + 1 if always else max(due, now + 1))
        for name in choice.looks:
            choice.limits[name] = looked
        if not looked:
            return choice.out
        choice.looked = True
        return [
            (looked[i], None) if looked.get(i, 0) > limit else (limit, reason)
            for i, (limit, reason) in zip(choice.ids, choice.out, strict=True)
        ]

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
        margin = b.MARGIN if drafts else b.START[choice.sampled]
        texts, rows = len(sequences), choice.rows + self._others
        plain = texts / b.plain(here, choice.rows, texts)
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
        choice.hold_for(before, planning, self.budget.probing)
        choice.until = self._now + (1 if self._others else choice.hold or REST)
        choice.probes = PROBE_RUN if self.budget.probing else 0
        return choice

    def _audit(self, choice: Choice) -> Audit:
        return self._audits.setdefault((len(choice.ids).bit_length(), choice.sampled), Audit(choice.sampled))

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
            elif choice.teaches:
                hoping = replace(self.budget, costs=hopeful(self.budget.costs))
                trial = b.choose(hoping, kind, choice.caps, rows, texts, b.START[choice.sampled])
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

    def stop(self, sequence_id: int) -> Stop:
        if (choice := self._choice) is None:
            return WHOLE
        if sequence_id not in choice.stops:
            choice.stops[sequence_id] = b.stop_of(self.budget, choice.plans, sequence_id) or WHOLE
        return choice.stops[sequence_id]

    def offers(
        self, sequences: Seq[Sequence], kind: str, found: Seq[Found], *, anyway: bool
    ) -> list[tuple[int, float]]:
        """By row: (tokens worth checking, expected net gain in tokens) of proposals that cost nothing to make. `anyway`:
        others draft in this step, too.
        """
        choice = self._choice
        if choice is None or kind not in choice.looks:
            return [whole(confidence) for _, confidence in found]
        asked = {sequence.id for sequence in sequences} - choice.caps.keys()  # of a given length
        ours = [([], []) if s.id in asked else one for s, one in zip(sequences, found, strict=True)]
        wakes = None if anyway or asked else not self._unlearnt.drafting
        offers = self._offers(sequences, choice, kind, ours, wakes=wakes)
        rows = zip(sequences, found, offers, strict=True)
        return [whole(confidence) if s.id in asked else one[:2] for s, (_, confidence), one in rows]

    def _offers(
        self, sequences: Seq[Sequence], choice: Choice, kind: str, found: Seq[Found], *, wakes: bool | None
    ) -> list[Offer]:
        """What is worth checking. `wakes`: whether nothing was drafted before; None if others draft in this step, too."""
        if self._unlearnt.news:  # how long the next copy may be depends on the last one
            begin = time.perf_counter()
            self._learn_rows(self._unlearnt.take_news())
            self._care.thought += time.perf_counter() - begin
        if any(learning.teaches(self.budget, told) for told in self._lookups.shown):
            self._learn_rows(self._lookups.take_shown(), checked=False)
        look, offers = choice.looks[kind], [NOTHING] * len(found)
        for row, (sequence, (tokens, confidence)) in enumerate(zip(sequences, found, strict=True)):
            if tokens:
                arm = b.arm_of(self.budget, sequence.id, self._kinds[kind])
                offers[row] = copies.offer(self.budget, self._kinds[kind], arm, look, confidence)
        if wakes is not None and not copies.together(self.budget, look, offers, wakes=wakes):
            offers = [NOTHING] * len(found)
        for sequence, (tokens, confidence), one in zip(sequences, found, offers, strict=True):
            if tokens:
                self._lookups.judged(sequence, kind, tokens, confidence, checked=one.tokens > 0)
        return offers

    def asked(self, ids: Seq[int], kind: str, limits: list[int], gains: Seq[float]) -> list[int]:
        """What a drafter of `kind` has to draft of `limits`, by row, beside copies that gain so many tokens (0: none)."""
        choice = self._choice
        if choice is None or kind not in choice.plans:
            return wanted(limits, gains)
        arms = [b.arm_of(self.budget, i, self._kinds[kind]) for i in ids]
        fixed = any(n and i not in choice.caps for i, n in zip(ids, limits, strict=True))
        anyway = fixed or choice.trial or choice.probes > 0  # to see what comes of it
        return b.shared(choice.plans[kind], arms, limits, gains, anyway=anyway)

    def kind_limit(self, sequence_id: int, kind: str) -> int:
        """Tokens that a drafter of `kind` may propose for this row in this step."""
        choice = self._choice
        if choice is None or sequence_id not in choice.caps:
            return MAX_DRAFT_TOKENS  # its length was asked for
        return choice.limits.get(kind, {}).get(sequence_id, 0)

    def observe(self, record: StepRecord) -> None:
        begin, thought = time.perf_counter(), self._care.taken()
        record.draft_seconds = max(record.draft_seconds - thought, 0.0)
        self._unlearnt.add(record)
        self._unlearnt.news += [row for row in record.rows if learning.is_news(self.budget, row)]
        looked = [choice.limits[name] for choice in self._used if choice.looked for name in choice.looks]
        self._lookups.over(looked, record, self.budget, self._now)
        for choice in self._used:
            if choice.probes:
                kept = self.budget.probing & {row.sequence_id for row in record.rows if row.accepted}
                networks = [name for name in choice.limits if self._kinds[name].sequential]
                if choice.end_probes(kept, self.budget.probing, networks):
                    choice.until = self._now
            choice.looked = False
        self._used.clear()
        if len(self._unlearnt.seen) >= REST:  # mostly a plan is made before, which learns, too
            self._learn()
        taken = thought + time.perf_counter() - begin if self._unlearnt.drafting else None
        self._care.over(len(record.rows), record.times, taken)

    def _learn_rows(self, rows: Seq[RowRecord], *, checked: bool = True) -> None:
        """Learn what became of drafts, before it is learnt what their steps took."""
        if rows:
            self.budget = learning.observe_rows(self.budget, rows, checked=checked)

    def _learn(self) -> None:
        """Let `budget` learn from the steps since it last did, and drop the texts that have ended."""
        if not self._unlearnt.steps:
            return
        begin = time.perf_counter()
        self._learn_rows(self._lookups.take_shown(), checked=False)
        self.budget, warnings = learning.alarm(learning.observe(self.budget, self._unlearnt.seen))
        self._care.learnt(*self._unlearnt.learnt(time.perf_counter() - begin))
        if self._gone:
            self.budget = learning.forget(self.budget, self._gone)
            self._lookups.gone(self._gone)
            self._gone.clear()
        for text in warnings:
            self._warn(text)

    def forget(self, sequence_id: int) -> None:
        """A text ends within a step, before that step is observed: what is kept of it goes when that is learnt."""
        self._choices = {ids: choice for ids, choice in self._choices.items() if sequence_id not in ids}
        if self._unlearnt.drafted and self._unlearnt.enough:
            left = set(self._choice.ids if self._choice else ()) - self._gone - {sequence_id}
            if not left:
                self._learn()  # nothing may follow for long, and there may be something to say
        self._gone.add(sequence_id)
        self._lookups.forget(sequence_id)
