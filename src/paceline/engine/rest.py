"""Steps in which nothing is drafted, because the controller said so for a while or nobody may: it is not asked, which
takes time, too, and hears of several of them at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.core import Draft, Sequence
from paceline.engine.budget import PREFILL
from paceline.engine.records import RowRecord, StepRecord
from paceline.engine.scheduler import Work
from paceline.ops.search import Watch

ALIKE = 64  # steps at rest that are told as one,
TYPICAL = 8  # at most, a quarter of them, the last ones, of which the medians speak for all
ALWAYS = 1 << 40  # steps: nobody may draft for these texts


class Took(NamedTuple):
    """Seconds of a step."""

    target: float
    draft: float
    other: float
    masks: float  # what constraints took to say what they allow

    @classmethod
    def between(cls, begin: float, drafted: float, looked: float, end: float, masking: float) -> Took:
        """Of the moments when it began, had its drafts, knew its tokens (`masking` seconds of that were masks) and had
        given them out.
        """
        return cls(looked - drafted - masking, drafted - begin, end - looked, masking)


class Ran(NamedTuple):
    """A step that is over."""

    work: list[Work]
    records: list[RowRecord]
    rows: int  # of the target
    took: Took
    odd: bool = False  # a text ended in it, or a prompt was read beside texts that rest


class Untold:
    """Steps that are alike, as one: medians of the last ones speak for all, the first may be cold. Odd steps speak only
    where there are no others, or else count as if they had been as the others were. Of each next to nothing is kept:
    what lies about for many steps has left the caches when it is let go.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._last: Ran | None = None  # of those that speak
        self._speak = 0
        self._seconds = 0.0  # of all that speak
        self._typical: deque[Took] = deque(maxlen=TYPICAL)

    def add(self, ran: Ran) -> None:
        self.steps += 1
        if self._last is not None and self._last.odd != ran.odd:
            if ran.odd:
                return
            self._speak, self._seconds = 0, 0.0
            self._typical.clear()
        self._last = ran
        self._speak += 1
        self._seconds += sum(ran.took)
        self._typical.append(ran.took)

    def record(self) -> StepRecord:
        """Of one step at least."""
        assert self._last is not None
        took = _median(list(self._typical)[-min(TYPICAL, (self._speak + 3) // 4) :])
        record = told(self._last._replace(took=took), self.steps)
        record.more_seconds = self._seconds / self._speak * self.steps - record.seconds
        return record


def _median(steps: Seq[Took]) -> Took:
    """By part, the lower of two."""
    if len(steps) == 1:
        return steps[0]
    middle = (len(steps) - 1) // 2
    return Took(*[sorted(seconds)[middle] for seconds in zip(*steps, strict=True)])


def told(ran: Ran, times: int = 1) -> StepRecord:
    """A step as the controller hears of it, which stands for so many."""
    work, records, rows, took, odd = ran
    return StepRecord(
        rows,
        took.target,
        took.draft,
        took.other,
        records if all(w.last for w in work) else [],
        sum([w.sequence.committed for w in work]),
        sum([w.sequence.constraint is not None for w in work]),
        took.masks,
        times,
        odd=odd,
    )


def nothing(reasons: list[str | None]) -> Draft:
    """No draft for any row, with the reason of each."""
    rows = len(reasons)
    return Draft([[] for _ in reasons], [[] for _ in reasons], [None] * rows, reasons, [""] * rows)


@dataclass(slots=True)
class Rest:
    """Of some texts, for so many steps, before the controller is asked again. What a watch finds is copied meanwhile."""

    ids: list[int]
    steps: int
    empty: Draft  # what is drafted in each of them
    drafter: str | None = None  # that all of them are written with; None: nobody may draft
    watch: Watch | None = None  # tells where there may be something to copy
    copied: bool = False  # in the last step: what follows may be copied, too, and nobody watches yet
    # by text, the tokens that it has if all that was copied is kept; 0 where nothing was
    ends: list[int] = field(default_factory=list)
    untold: Untold = field(default_factory=Untold)
    paused: bool = False  # a prompt was read in the last step: it holds if the same texts go on

    def holds(self, work: list[Work]) -> bool:
        """Whether `work` is of these texts."""
        self.paused = False
        return self.ids == [w.sequence.id if w.count == 1 and w.last else None for w in work]

    def stirs(self) -> bool:
        """Whether there may be something worth copying. Asked once in a step."""
        return self.copied or (self.watch is not None and self.watch.finds())

    def lost(self, sequences: Seq[Sequence]) -> bool:
        """Whether something was copied in the last step, and of none of these texts all of it was kept."""
        return bool(self.ends) and all(
            len(s.tokens) < end for s, end in zip(sequences, self.ends, strict=True) if end
        )

    def newcomers(self, work: list[Work]) -> bool:
        """Whether some of `work` have taken the place of as many that have ended. They may still read prompts."""
        return (
            self.drafter is not None
            and len(work) == len(self.ids)
            and not {w.sequence.id for w in work} <= set(self.ids)
        )

    def go_on(self, work: list[Work], steps: int, reason: str | None) -> None:
        """For so many steps, with those that are new, for the same `reason`. 0: they have to be looked at in this one."""
        self.watch, self.copied, self.ends = None, steps == 0, []
        known = dict(zip(self.ids, self.empty.reasons, strict=True))
        self.ids = [w.sequence.id for w in work]
        self.steps, self.empty = steps, nothing([known.get(i, reason) for i in self.ids])

    def draft(self, sequences: Seq[Sequence], copies: Draft | None = None) -> Draft:
        """Of the next step: mostly nothing."""
        self.steps -= 1
        self.copied = copies is not None
        if copies is None:
            self.ends = []
            return self.empty
        self.ends = [
            len(t) and len(s.tokens) + len(t) + 1 for s, t in zip(sequences, copies.tokens, strict=True)
        ]
        return copies

    def pause(self, work: list[Work]) -> Draft | None:
        """Nothing to draft for `work`, if it reads prompts beside texts that rest, and copy nothing just now."""
        if self.copied:
            return None
        known = dict(zip(self.ids, self.empty.reasons, strict=True))
        decoding = [w.count == 1 and w.last for w in work]
        if self.steps == 0 or all(decoding):
            return None
        if any(own and w.sequence.id not in known for w, own in zip(work, decoding, strict=True)):
            return None
        self.paused = True
        return nothing(
            [known[w.sequence.id] if own else PREFILL for w, own in zip(work, decoding, strict=True)]
        )

    def tell(self) -> StepRecord | None:
        """What the controller has not heard of yet."""
        untold, self.untold = self.untold, Untold()
        return untold.record() if untold.steps else None
