"""What became of a step, as the controller hears of it, and those steps that it has not learnt from yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ALIKE = 8  # steps at rest that are told as one


@dataclass(slots=True)
class RowRecord:
    sequence_id: int
    drafter: str
    drafted: int
    accepted: int
    confidence: list[float]
    reason: str | None
    learnt: bool = False  # what became of it is known to the controller already


@dataclass(slots=True)
class StepRecord:
    target_rows: int
    target_seconds: float
    draft_seconds: float
    other_seconds: float
    rows: list[RowRecord]
    context: int = 0  # tokens of all texts in it
    masked: bool = False  # a constraint took part: what its masks take says nothing about the machine's pace
    times: int = 1  # steps like this one that it stands for
    more_seconds: float = 0.0  # what the others of them took
    alike: int = 1  # steps in a row, up to this one, in which something was drafted, or nothing was

    @property
    def seconds(self) -> float:
        return self.target_seconds + self.draft_seconds + self.other_seconds


Asked = Mapping[
    int, int
]  # sequence id -> tokens that its drafter was asked for: it may have drawn more than were left


class Unlearnt:
    """Steps that have run since the controller last learnt. To learn at once from many is cheaper than from each."""

    def __init__(self) -> None:
        self.seen: list[tuple[StepRecord, Asked]] = []
        self.steps = 0
        self.drafted = False  # something was, in one of them
        self._resting: StepRecord | None = None
        self._last: tuple[bool, int] = (False, 0)  # whether the last step had drafts, and how many in a row

    def add(self, record: StepRecord, asked: Asked) -> None:
        drafted = any(row.drafted for row in record.rows)
        self._count(record, drafted)
        self.seen.append((record, asked))
        self.drafted = self.drafted or drafted
        self._resting = None

    def rested(self, record: StepRecord) -> None:
        """A step in which nobody was asked: of those in a row the last speaks for some, it is the warmest."""
        self._count(record, drafted=False)
        own = self._resting
        if (
            own is None
            or own.times == ALIKE
            or len(own.rows) != len(record.rows)
            or own.masked != record.masked
        ):
            self._resting = record
            self.seen.append((record, {}))
        else:
            own.times += 1
            own.more_seconds += own.seconds
            own.target_seconds, own.draft_seconds = record.target_seconds, record.draft_seconds
            own.other_seconds, own.context = record.other_seconds, record.context
            own.alike = record.alike

    def _count(self, record: StepRecord, drafted: bool) -> None:
        before, many = self._last
        record.alike = many + 1 if drafted == before else 1
        self._last = drafted, record.alike
        self.steps += 1

    def clear(self) -> None:
        self.seen.clear()
        self.steps, self.drafted, self._resting = 0, False, None
