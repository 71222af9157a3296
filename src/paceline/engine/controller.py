"""The controller of `auto`: what it says in each step, by the plan that holds and by what there is to copy."""

from __future__ import annotations

import time
from collections.abc import Mapping, Set
from collections.abc import Sequence as Seq

from paceline.core import MAX_DRAFT_TOKENS, Draft, Sequence
from paceline.engine import budget as b
from paceline.engine import copies, learning
from paceline.engine.budget import Joined, Want
from paceline.engine.choice import REST, Choice, kin_of
from paceline.engine.copies import NOTHING, Found, Offer
from paceline.engine.fixed import WHOLE, Limit, wanted, whole
from paceline.engine.lookups import Firsts
from paceline.engine.planner import Planner
from paceline.engine.records import StepRecord
from paceline.ops.base import Stop
from paceline.ops.search import Watch


class AutoController(Planner):
    """Drafts what pays on this machine, for these requests, at this load.

    `kinds`: every drafter that may be asked. `default`: the names of those that a request without a drafter
    of its own uses, e.g. ("mtp", "ngram"). `warn` gets the acceptance alarm. `copier` looks at texts at rest.
    """

    def limits(
        self, sequences: list[Sequence], wants: list[Want], drafter_max: int, others: int = 0
    ) -> list[Limit]:
        """One call per drafter and step: its rows. A decision holds for a few steps, thinking costs time too."""
        self._others, now = others, self._now
        ids = tuple([sequence.id for sequence in sequences])
        choice = self._choices.get(ids)
        if choice is None or now >= choice.until:
            choice = self._choices[ids] = self._decided(ids, choice, sequences, wants, drafter_max)
        if choice is not self._choice or others:
            self._lookups.among(len(ids), sampled=choice.sampled, rests=not choice.drafts)
        self._choice = choice
        self._used.append(choice)
        if not choice.looks or choice.look > now:
            return choice.out
        here = choice.drafts or ((others or self._lookups.copier is None) and self._lookups.until <= now)
        return self._with_looks(choice, sequences) if here else choice.out  # else `rest` looks

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
            first = Firsts(self.budget, i, choice.looks)
            if choice.asked.get(i, 0) > 0 and not self._lookups.later(sequence, first):
                if self._lookups.finds(sequence, now):
                    looked[i] = choice.caps[i]
                choice.look = now + 1
                continue
            due = self._lookups.due(sequence, now, first)
            if due == now:
                looked[i] = choice.caps[i]
            choice.look = min(choice.look, max(due, now + 1))
        for name in choice.looks:
            choice.limits[name] = looked
        if not looked:
            return choice.out
        choice.looked = True
        return [
            (looked[i], None) if looked.get(i, 0) > limit else (limit, reason)
            for i, (limit, reason) in zip(choice.ids, choice.out, strict=True)
        ]

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
        ours, wakes = found, None if anyway else not self._unlearnt.drafting
        asked: Set[int] = set()
        if choice.rows > len(choice.ids):  # of a given length
            asked = {sequence.id for sequence in sequences} - choice.caps.keys()
            ours = [([], []) if s.id in asked else one for s, one in zip(sequences, found, strict=True)]
            wakes = None
        offers = self._offers(sequences, choice, kind, ours, wakes=wakes)
        if not asked:
            return [one[:2] for one in offers]
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
        if self._lookups.shown and any(learning.teaches(self.budget, told) for told in self._lookups.shown):
            self._learn_shown()
        look, own, budget = choice.looks[kind], self._kinds[kind], self.budget
        offers = [
            copies.offer(budget, own, b.arm_of(budget, s.id, own), look, confidence) if tokens else NOTHING
            for s, (tokens, confidence) in zip(sequences, found, strict=True)
        ]
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
        fixed = choice.rows > len(choice.ids)  # some are of a given length
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
        if not self._copying.isdisjoint(record.drafters):
            self._unlearnt.news += [row for row in record.rows if learning.is_news(self.budget, row)]
        looked, plain = [], 0.0
        for choice in self._used:
            if choice.looked:
                looked += [choice.limits[name] for name in choice.looks]
                choice.looked, plain = False, choice.plain
            if choice.probes:
                kept = self.budget.probing & {row.sequence_id for row in record.rows if row.accepted}
                networks = [name for name in choice.limits if self._kinds[name].sequential]
                if choice.end_probes(kept, self.budget.probing, networks):
                    choice.until = self._now
                self._choice = None  # it may draft nothing any more: another one, then
        self._lookups.over(looked, record, self._copying, plain, self._now)
        self._used.clear()
        if len(self._unlearnt.seen) >= REST:  # mostly a plan is made before, which learns, too
            self._learn()
        taken = thought + time.perf_counter() - begin if self._unlearnt.drafting else None
        self._care.over(len(record.rows), record.times, taken)

    def forget(self, sequence_id: int) -> None:
        """A text ends within a step, before that step is observed: what is kept of it goes when that is learnt."""
        self._choices = {ids: choice for ids, choice in self._choices.items() if sequence_id not in ids}
        if self._unlearnt.drafted and self._unlearnt.enough:
            left = set(self._choice.ids if self._choice else ()) - self._gone - {sequence_id}
            if not left:
                self._learn()  # nothing may follow for long, and there may be something to say
        self._gone.add(sequence_id)
        self._lookups.forget(sequence_id)
