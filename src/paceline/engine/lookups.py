"""Which texts are searched for something to copy, and what is learnt from copies that were not checked."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from paceline.core import Sequence
from paceline.engine import budget as b
from paceline.engine import copies
from paceline.engine.budget import Budget
from paceline.engine.copies import Found, Look
from paceline.engine.quiet import LOOK, Quiet
from paceline.engine.records import RowRecord, StepRecord
from paceline.engine.unchecked import Unchecked
from paceline.ops.search import Watch
from paceline.sampling.shape import is_greedy

# Of so many steps many texts are watched in one: where looks at so many have brought less than they took, and else.
EVERY = 16, 4
NEVER = 1 << 40  # a step


class Copier(Protocol):
    """A drafter whose proposals are looked up: they cost next to nothing, and follow from the text alone."""

    name: str

    def peek(self, sequence: Sequence) -> bool:
        """Whether `look` may find something, for less than it takes."""
        ...

    def look(self, sequence: Sequence, limit: int) -> Found:
        """Up to `limit` tokens."""
        ...

    @property
    def rungs(self) -> list[list[float]]:
        """What it can be sure of: the confidence of each token, by how much of the text was found, rising."""
        ...

    def watch(self, texts: Seq[tuple[Sequence, Seq[float]]], need: float, every: int) -> Watch:
        """Of texts with what a copy is worth by `rungs`, until all copies that there are are worth more than `need`."""
        ...


class Firsts(NamedTuple):
    """What became of first copies in texts like one, of these kinds."""

    budget: Budget
    sequence_id: int
    names: Collection[str]

    def lost(self) -> bool:
        """None is kept, and this text has not come to its own."""
        return copies.loses_first(*self)

    def kept(self) -> bool:
        """Nearly all are."""
        return copies.keeps_first(*self)


class Lookups:
    def __init__(self, copier: Copier | None) -> None:
        """Without a `copier` there may be something to copy whenever a look is due."""
        self.copier = copier
        self._quiet = Quiet()
        self._unchecked = Unchecked()
        self._few = False  # so few texts are at hand that they are watched in every step while they rest,
        self._rests = False  # and they do
        # texts that most likely go on as something that they were given, at last
        self._followed: set[int] = set()
        self.shown: list[RowRecord] = []  # what would have become of copies that were not checked
        self._offered: set[int] = set()  # texts for which something was found in this step

    def told(self, sequence: Sequence, now: int) -> int:
        """Note what would have become of a copy that was not checked. If that is waited for, tokens until it is seen."""
        awaited, told = self._unchecked.awaited(sequence.id), self._unchecked.told(sequence)
        if isinstance(told, int):
            return told if awaited else 0
        self.shown.append(told)
        if told.accepted == told.drafted:
            self._quiet.wake(sequence.id)
        elif awaited:
            self._quiet.hush(sequence.id, now, watched=self._leaves(sequence.id))
        return 0

    def take_shown(self) -> list[RowRecord]:
        shown, self.shown = self.shown, []
        return shown

    def later(self, sequence: Sequence, first: Firsts) -> bool:
        """Whether it is looked at sparingly."""
        return self._quiet.sparing(sequence.id) or _later(sequence, first)

    def finds(self, sequence: Sequence, now: int) -> bool:
        """Whether there may be something to copy, where that is asked in every step."""
        if sequence.id in self._unchecked:
            self.told(sequence, now)
        return self.peek(sequence)

    def due(self, sequence: Sequence, now: int, first: Firsts) -> int:
        """`now` if there may be something to copy and a look is due, else the step of the next."""
        wait = self.told(sequence, now)
        due = self._awaited(sequence.id, now + wait) if wait else self._next(sequence, now, first)
        return self.look(sequence, now) if due <= now else due

    def _next(self, sequence: Sequence, now: int, first: Firsts) -> int:
        """The step of the next look, where nothing is waited for."""
        due = self._quiet.due(sequence.id, now)
        if due is None:
            later = _later(sequence, first)
            # few that rest are watched in every step
            soon = (self._quiet.pays and not (self._few and self._rests)) or _follows(sequence, first)
            due = now
            if later or not soon:
                watched = self._leaves(sequence.id)
                due = self._quiet.hush(sequence.id, now, sampled=later, watched=watched)
        return due

    def join(self, sequence: Sequence, now: int, first: Firsts) -> int:
        """The step of the first look at a new text beside others that rest: when they are looked at, or as soon as its
        prompt is read, if it most likely goes on as something that it was given.
        """
        later = _later(sequence, first)
        if _follows(sequence, first):
            return max(now + 1, self.until)
        due = self._quiet.hush(sequence.id, now, sampled=later, watched=self.copier is not None)
        return NEVER if self._few and not later else due

    def peek(self, sequence: Sequence) -> bool:
        """Whether there may be something to copy."""
        return self.copier is None or self.copier.peek(sequence)

    def watch(self, sequences: Iterable[Sequence], budget: Budget, looks: Mapping[str, Look]) -> Watch | None:
        """What tells when there is something worth copying in these texts; None if there cannot be.

        Many are watched in some steps only, more often if some of them most likely go on as something that they were
        given. Texts that are searched later are not: of sampled text next to nothing is kept, whatever a match promises.
        """
        copier = self.copier
        look = looks.get(copier.name) if copier is not None else None
        if copier is None or look is None:
            return None
        kind = next(kind for kind in budget.kinds if kind.name == copier.name)
        firsts = [(s, Firsts(budget, s.id, looks)) for s in sequences]
        self._followed = {s.id for s, first in firsts if _follows(s, first)}
        arms = [(s, b.arm_of(budget, s.id, kind)) for s, first in firsts if not _later(s, first)]
        if self._few:  # a first copy that will not be kept is not checked, but the next ones may be worth it
            arms = [(s, arm._replace(copied=True) if copies.is_lost(budget, arm) else arm) for s, arm in arms]
        worth = [(s, copies.worth(budget, kind, arm, look, copier.rungs)) for s, arm in arms]
        if all(own[-1] <= 0 for _, own in worth):
            return None
        every = 1 if self._few else EVERY[self._quiet.pays or bool(self._followed)]
        return copier.watch(worth, copies.needed(budget, look), every)

    def look(self, sequence: Sequence, now: int) -> int:
        """`now` if there may be something to copy, else the step of the next look."""
        if self.peek(sequence):
            return now
        watched = self._leaves(sequence.id)
        return self._quiet.hush(sequence.id, now, sampled=not is_greedy(sequence), watched=watched)

    def found(self, sequences: Iterable[Sequence], caps: Mapping[int, int]) -> list[Found]:
        """By text, what may be copied, so many tokens at most."""
        copier = self.copier
        return [
            copier.look(s, caps[s.id])
            if copier is not None and caps[s.id] > 0 and copier.peek(s)
            else ([], [])
            for s in sequences
        ]

    def judged(
        self, sequence: Sequence, kind: str, tokens: list[int], confidence: list[float], *, checked: bool
    ) -> None:
        """What is proposed for a text is `checked` in this step, or it is seen later what would have become of it."""
        self._offered.add(sequence.id)
        if checked:
            self._unchecked.forget(sequence.id)
        else:
            self._unchecked.add(sequence, kind, tokens, confidence)

    def over(
        self, looked: Seq[Mapping[int, int]], record: StepRecord, copying: Set[str], plain: float, now: int
    ) -> None:
        """A step is, in which these texts were looked at, by kind and decision, for drafters that are `copying`; a plain
        one takes so many seconds.
        """
        if looked:
            self._told(record, copying, plain, now)
        for texts in looked:
            for row in record.rows:
                if row.accepted and row.drafter in copying:
                    self._quiet.wake(row.sequence_id)
                elif row.sequence_id in texts and not self._unchecked.awaited(row.sequence_id):
                    i = row.sequence_id
                    lost = row.drafter not in copying and i in self._offered and not self._quiet.sparing(i)
                    self._quiet.hush(i, now, 2 if lost else LOOK)
        self._offered.clear()

    def in_vain(self, looked: Iterable[int], now: int) -> None:
        """Nothing that was found in this step is worth checking, and texts rest."""
        for sequence_id in looked:
            if not self._unchecked.awaited(sequence_id):
                self._quiet.hush(sequence_id, now, watched=self._watches(sequence_id))

    def next(self, texts: Iterable[int], now: int) -> int:
        """The step, after this one, in which one of these texts has to be looked at again."""
        steps = []
        for i in texts:
            if self._few and not self._quiet.sparing(i):
                continue  # it is watched in every step
            awaited = self._unchecked.awaited(i)
            steps.append(
                self._awaited(i, now + awaited) if awaited else self._quiet.due(i, now + 1) or now + 1
            )
        return max(min(steps, default=NEVER), self.until)

    @property
    def until(self) -> int:
        """The step before which nobody is looked at, since looks at so many texts were in vain."""
        return 0 if self._few else self._quiet.until

    def among(self, texts: int, *, sampled: bool, rests: bool) -> None:
        """So many texts are at hand. `rests`: no network drafts for any of them."""
        self._quiet.among(texts, sampled=sampled)
        self._few, self._rests = self.copier is not None and texts <= copies.FEW_TEXTS, rests

    def _watches(self, sequence_id: int) -> bool:
        return self._rests and self.copier is not None

    def _leaves(self, sequence_id: int) -> bool:
        """Whether it is left to the watch to say when there is something to copy: where looks have brought little."""
        return self._watches(sequence_id) and not (self._quiet.pays or sequence_id in self._followed)

    def _awaited(self, sequence_id: int, step: int) -> int:
        """The step in which it is looked at what became of a copy that this one has shown: with others where looks have
        brought little, but for a text that most likely goes on as something that it was given.
        """
        return step if sequence_id in self._followed else self._quiet.common(step)

    def timed(self, look: float, step: float, now: int) -> None:
        """A look has taken so many seconds in vain, and a step takes so many without one."""
        self._quiet.timed(look, step, now)

    def _told(self, record: StepRecord, copying: Set[str], plain: float, now: int) -> None:
        """A step with looks is over: what it took if they were in vain, or what copies have brought."""
        drafters = record.drafters
        if not drafters and record.draft_seconds > 0:
            self.timed(record.draft_seconds, record.checking, now)
        elif drafters and drafters <= copying and record.tells:
            kept = sum([row.accepted for row in record.rows])
            self._quiet.brought(1 + kept / len(record.rows) - record.seconds / plain)

    def forget(self, sequence_id: int) -> None:
        """A text ends, and may still be part of a step that is not over."""
        self._unchecked.forget(sequence_id)

    def gone(self, texts: Iterable[int]) -> None:
        for sequence_id in texts:
            self._quiet.forget(sequence_id)


def _later(sequence: Sequence, first: Firsts) -> bool:
    """Sampled text is searched later, too, if nothing was given to copy from."""
    return not is_greedy(sequence) and (not sequence.reference or first.lost())


def _follows(sequence: Sequence, first: Firsts) -> bool:
    """Whether a text goes on as something that it was given, most likely."""
    return bool(sequence.reference) and first.kept()
