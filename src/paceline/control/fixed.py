"""The policy of a fixed draft length."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate
from operator import mul

from paceline.control.base import DraftPlan, PlannedRow, PlanRow, Proposal, StepOutcome
from paceline.control.reasons import NoDraftReason

NGRAM = "ngram"
USUAL = 0.7  # chance that a network's token is kept if all before it were


class FixedPolicy:
    """Drafts k tokens whenever the request has room for them; a request's own number goes first."""

    def __init__(self, k: int) -> None:
        if k < 0:
            raise ValueError(f"a draft length of {k} is below 0: give 0 or more")
        self.k = k

    def plan(self, rows: Seq[PlanRow], free_proposals: Seq[Proposal | None]) -> DraftPlan:
        pairs = zip(rows, free_proposals, strict=True)
        return DraftPlan(tuple(self._row(row, proposal) for row, proposal in pairs))

    def _row(self, row: PlanRow, proposal: Proposal | None) -> PlannedRow:
        want = self.k if row.want == "auto" else row.want
        if want == 0:
            return PlannedRow(None, 0, NoDraftReason.DISABLED)
        if row.room <= 0:
            return PlannedRow(None, 0, NoDraftReason.NO_ROOM)
        network = min(want, row.drafter_max, row.room) if row.drafter is not None else 0
        found = proposal.confidence[: min(want, row.room)] if proposal is not None else ()
        usual = sum(USUAL ** (j + 1) for j in range(network))
        if found and sum(accumulate(found, mul)) >= usual:
            return PlannedRow(NGRAM, len(found))
        if network:
            return PlannedRow(row.drafter, network)
        return PlannedRow(None, 0, NoDraftReason.NO_PROPOSAL if row.drafter else NoDraftReason.NO_DRAFTER)

    def observe(self, outcome: StepOutcome) -> None:
        """A fixed length learns nothing."""

    def forget(self, id: int) -> None:
        """Nothing is kept for a request."""
