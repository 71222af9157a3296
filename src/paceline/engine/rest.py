"""Steps in which nothing is drafted, because the controller said so for a while or nobody may: it is not asked, which
takes time, too, and hears of several of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.core import Draft
from paceline.engine.budget import PREFILL, Controller
from paceline.engine.records import RowRecord, StepRecord
from paceline.engine.scheduler import Work
from paceline.ops.search import Watch

ALIKE = 64  # steps at rest that are told as one,
TYPICAL = 8  # at most, a quarter of them, the last ones, of which the medians speak for all
ALWAYS = 1 << 40  # steps: nobody may draft for these texts


class Ran(NamedTuple):
    """A step that is over, with the moments when it began, had its drafts, knew its tokens and had given them out."""

    work: list[Work]
    records: list[RowRecord]
    rows: int  # of the target
    begin: float
    drafted: float
    looked: float
    end: float
    odd: bool = False  # a text ended in it, or a prompt was read beside texts that rest
    masking: float = 0.0  # seconds that constraints took to say what they allow, before its tokens were known


def told(steps: Seq[Ran]) -> StepRecord:
    """Steps that are alike as one: medians of the last ones speak for all, the first may be cold. Odd steps speak only
    where there are no others, or else count as if they had been as the others were.
    """
    usual = [step for step in steps if not step.odd]
    speak = usual or steps
    work, records, rows = speak[-1][:3]
    target, draft, other, masks = _typical(speak[-min(TYPICAL, (len(speak) + 3) // 4) :])
    record = StepRecord(
        rows,
        target,
        draft,
        other,
        records if all(w.last for w in work) else [],
        sum([w.sequence.committed for w in work]),
        sum([w.sequence.constraint is not None for w in work]),
        masks,
        len(steps),
        odd=not usual,
    )
    each = sum([step.end - step.begin for step in speak]) / len(speak)
    record.more_seconds = each * len(steps) - record.seconds
    return record


def _typical(steps: Seq[Ran]) -> tuple[float, float, float, float]:
    """Seconds of the target, of the drafts, of all else and of masks: medians, the lower of two."""
    parts = [
        (ran.looked - ran.drafted - ran.masking, ran.drafted - ran.begin, ran.end - ran.looked, ran.masking)
        for ran in steps
    ]
    if len(parts) == 1:
        return parts[0]
    middle = (len(parts) - 1) // 2
    target, draft, other, masks = [sorted(seconds)[middle] for seconds in zip(*parts, strict=True)]
    return target, draft, other, masks


def nothing(reasons: list[str | None]) -> Draft:
    """No draft for any row, with the reason of each."""
    rows = len(reasons)
    return Draft([[] for _ in reasons], [[] for _ in reasons], [None] * rows, reasons, [""] * rows)


@dataclass(slots=True)
class Rest:
    """Of some texts, for so many steps."""

    ids: list[int]
    steps: int
    empty: Draft  # what is drafted in each of them
    drafter: str | None = None  # that all of them are written with; None: nobody may draft
    watch: Watch | None = None  # may end it before it is over
    untold: list[Ran] = field(default_factory=list)
    paused: bool = False  # a prompt was read in the last step: it holds if the same texts go on

    def holds(self, work: list[Work], controller: Controller) -> bool:
        """Whether `work` is of these texts and nothing has to be drafted; a look alone does not end it."""
        self.paused = False
        if self.ids != [w.sequence.id if w.count == 1 and w.last else None for w in work]:
            return False
        if self.steps == 0:
            self.steps = controller.go_on_resting([w.sequence for w in work], len(self.untold))
        if self.steps and self.watch is not None and self.watch.finds():
            return not controller.pays([w.sequence for w in work], len(self.untold))
        return self.steps > 0

    def newcomers(self, work: list[Work]) -> bool:
        """Whether some of `work` have taken the place of as many that have ended. They may still read prompts."""
        return (
            self.drafter is not None
            and len(work) == len(self.ids)
            and not {w.sequence.id for w in work} <= set(self.ids)
        )

    def go_on(self, work: list[Work], steps: int, reason: str | None, watch: Watch | None) -> None:
        """For so many steps, with those that are new, for the same `reason`."""
        self.watch = watch
        known = dict(zip(self.ids, self.empty.reasons, strict=True))
        self.ids = [w.sequence.id for w in work]
        self.steps, self.empty = steps, nothing([known.get(i, reason) for i in self.ids])

    def draft(self) -> Draft:
        self.steps -= 1
        return self.empty

    def pause(self, work: list[Work]) -> Draft | None:
        """Nothing to draft for `work`, if it reads prompts beside texts that rest."""
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
        record = told(self.untold) if self.untold else None
        self.untold.clear()
        return record
