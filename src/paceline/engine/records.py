"""What became of a step, as the controller hears of it, and those steps that it has not learnt from yet."""

from __future__ import annotations

from dataclasses import dataclass, field

MANY = 48  # steps from which it is learnt what they took: one hardly tells, and to learn takes as long as for many
LEARNING = 0.005  # of the time that this may take, at most
FEW = 2  # steps without drafts (a prompt is read, there is nothing to copy) leave the caches as they are


@dataclass(slots=True)
class RowRecord:
    sequence_id: int
    drafter: str
    drafted: int
    accepted: int
    confidence: list[float]
    reason: str | None
    learnt: bool = False  # what became of it is known to the controller already, as far as its text goes
    first: bool = False  # it was its text's first copy: whether anything of it was kept is counted for itself


@dataclass(slots=True)
class StepRecord:
    target_rows: int
    target_seconds: float
    draft_seconds: float
    other_seconds: float
    rows: list[RowRecord]
    context: int = 0  # tokens of all texts in it
    masked: int = 0  # texts of them that are under a constraint,
    mask_seconds: float = 0.0  # and what their masks took, beside the target
    times: int = 1  # steps like this one that it stands for
    more_seconds: float = 0.0  # what all of them took, less `seconds`
    # steps in a row, up to this one, in which something was drafted, but for a `FEW`, or in which nothing was
    alike: int = 1
    odd: bool = False  # all of them were: a text ended, to let go of it takes as long as two steps of `demo`
    drafters: frozenset[str] = field(init=False)  # those that something was drafted by
    # whether prompts were read beside the texts: of their rows, of which one is judged at most, nothing is known
    reading: bool = field(init=False)

    def __post_init__(self) -> None:
        drafted = [row for row in self.rows if row.drafted]
        self.drafters = frozenset([row.drafter for row in drafted])
        self.reading = self.target_rows > len(self.rows) + sum([row.drafted for row in drafted])

    @property
    def seconds(self) -> float:
        return self.checking + self.draft_seconds

    @property
    def checking(self) -> float:
        """Seconds without its draft."""
        return self.target_seconds + self.mask_seconds + self.other_seconds

    @property
    def tells(self) -> bool:
        """Whether it shows what such steps take."""
        return not (self.reading or self.odd)


class Unlearnt:
    """Steps that have run since the controller last learnt. To learn at once from many is cheaper than from each."""

    def __init__(self) -> None:
        self.seen: list[StepRecord] = []
        self.steps = 0
        self.drafted = 0  # steps of them in which something was
        self.news: list[RowRecord] = []  # drafts that change what is worth drafting next
        self._seconds = 0.0  # that they took,
        self._learning = 0.0  # and that to learn takes, lately
        self._last: tuple[bool, int] = (False, 0)  # whether the last step had drafts, and how many in a row
        self._run = 0  # steps with drafts in a row, at last

    @property
    def drafting(self) -> bool:
        """Whether something was drafted in the last step."""
        return self._last[0]

    def add(self, record: StepRecord) -> None:
        drafted = bool(record.drafters)
        before, many = self._last
        if drafted != before:
            many = self._run if drafted and many <= FEW else 0
        record.alike = many + record.times
        self._last = drafted, record.alike
        if drafted:
            self._run = record.alike
        self.seen.append(record)
        self._seconds += record.seconds + record.more_seconds
        self.steps += record.times
        self.drafted += drafted

    def take_news(self) -> list[RowRecord]:
        """To be learnt from now."""
        news, self.news = self.news, []
        return _taken(news)

    def take_drafts(self) -> list[RowRecord]:
        return _taken([row for record in self.seen for row in record.rows if row.drafted])

    @property
    def enough(self) -> bool:
        """Whether there are so many that it is worth learning what they took."""
        return self.steps >= MANY and self._seconds * LEARNING >= self._learning

    def learnt(self, taken: float) -> tuple[int, int, float]:
        """From all of them, in so many seconds: (texts of the last one, steps with drafts, those seconds)."""
        what = len(self.seen[-1].rows) if self.seen else 0, self.drafted, taken
        self._learning += 0.2 * (taken - self._learning) if self._learning else taken
        self._seconds = 0.0
        self.seen.clear()
        self.news.clear()
        self.steps = self.drafted = 0
        return what


def _taken(rows: list[RowRecord]) -> list[RowRecord]:
    """Those that nothing was learnt from; now they are."""
    new = [row for row in rows if not row.learnt]
    for row in new:
        row.learnt = True
    return new
