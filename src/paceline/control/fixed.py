"""The policy of a fixed draft length."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate
from operator import mul

from paceline.control.base import NGRAM, DraftPlan, PlannedRow, PlanRow, Proposal, StepOutcome
from paceline.control.reasons import NoDraftReason

USUAL = 0.7  # chance that a network's token is kept if all before it were


class FixedPolicy:
    """Drafts k tokens whenever the request has room for them; a request's own number goes first."""

    def __init__(self, k: int) -> None:
        if k < 0:
            raise ValueError(f"a draft length of {k} is below 0: give 0 or more")
        self.k = k

    def plan(
        self, rows: Seq[PlanRow], free_proposals: Seq[Proposal | None], prefill_rows: int = 0
    ) -> DraftPlan:
        lengths = [self.k if row.draft_tokens == "auto" else row.draft_tokens for row in rows]
        both = zip(rows, free_proposals, lengths, strict=True)
        return DraftPlan(tuple([fixed_row(row, proposal, length) for row, proposal, length in both]))

    def observe(self, outcome: StepOutcome) -> None:
        """A fixed length learns nothing."""

    def forget(self, id: int) -> None:
        """Nothing is kept for a request."""


def fixed_row(row: PlanRow, proposal: Proposal | None, draft_tokens: int) -> PlannedRow:
    """`draft_tokens` tokens of the proposal or of the network, whichever promises more."""
    reason = no_draft(row, proposal, draft_tokens)
    if reason is not None:
        return PlannedRow(None, 0, reason)
    network = min(draft_tokens, row.drafter_max, row.room) if row.drafter is not None else 0
    confidence = proposal.confidence[: min(draft_tokens, row.room)] if proposal is not None else ()
    usual = sum([USUAL ** (j + 1) for j in range(network)])
    if confidence and sum(accumulate(confidence, mul)) >= usual:
        return PlannedRow(NGRAM, len(confidence))
    return PlannedRow(row.drafter, network, tree=row.tree)


def no_draft(row: PlanRow, proposal: Proposal | None, draft_tokens: int) -> NoDraftReason | None:
    """Why nothing can be drafted for a row, whatever a policy thinks; None if something can."""
    if draft_tokens == 0:
        return NoDraftReason.DISABLED
    if row.drafter is None and proposal is None:
        return NoDraftReason.NO_DRAFTER
    if row.room <= 0:
        return NoDraftReason.NO_ROOM
    proposed = proposal is not None and proposal.confidence
    return (
        None if proposed or (row.drafter is not None and row.drafter_max > 0) else NoDraftReason.NO_PROPOSAL
    )
