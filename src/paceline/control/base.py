"""What a draft-length policy is: it plans a step before the drafters run and observes it after verification."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal, Protocol

from paceline.control.reasons import NoDraftReason


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One decoding request of the step."""

    id: int
    want: int | Literal["auto"]  # tokens that the request asks for; 0 disables drafting
    room: int  # tokens that may be drafted: the last one is always the target's own
    drafter: str | None = None  # the network drafter, if there is one
    drafter_max: int = 0  # tokens it drafts at most


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that n-gram lookup found for a row at no cost to the network, by their confidences in 0..1."""

    confidence: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PlannedRow:
    drafter: str | None  # whose tokens the row takes; None: it drafts nothing
    limit: int  # tokens at most
    reason: NoDraftReason | None = None  # why limit is 0


@dataclass(frozen=True, slots=True)
class DraftPlan:
    rows: tuple[PlannedRow, ...]  # in the order of the rows that were given


@dataclass(frozen=True, slots=True)
class RowOutcome:
    id: int
    drafter: str | None
    accepted: int
    confidence: tuple[float, ...] = ()  # of the drafted tokens


@dataclass(frozen=True, slots=True)
class StepOutcome:
    rows: tuple[RowOutcome, ...]
    target_seconds: float
    draft_seconds: dict[str, float] = field(default_factory=dict)  # by drafter
    prefill_rows: int = 0


class DraftPolicy(Protocol):
    def plan(self, rows: Seq[PlanRow], free_proposals: Seq[Proposal | None]) -> DraftPlan:
        """Whose tokens each row takes, and how many; `free_proposals` has one entry for each row."""
        ...

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a verified step."""
        ...

    def forget(self, id: int) -> None:
        """The request is gone: free what was kept for it."""
        ...
