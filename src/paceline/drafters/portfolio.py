"""Several drafters as one: each row takes the proposal with the higher expected gain, never both.

A proposal that costs nothing to look up (n-gram) is made first, for every row; the network drafts only for
the rows where that one does not beat what the network gains on average, and for none where a round would not
pay for itself. The choice looks at text that
stands already, never at tokens that the network has drawn: it is non-anticipating and stays exact under
`reject` and `block`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from paceline.core import Draft, Sequence
from paceline.drafters.base import DraftContext, Drafter
from paceline.drafters.guard import ask


class Judge(Protocol):
    """What the controller knows of a row. Gains are tokens, net of what drafting and checking them costs."""

    def offers(
        self, sequences: Seq[Sequence], kind: str, found: Seq[tuple[list[int], list[float]]], *, anyway: bool
    ) -> list[tuple[int, float]]:
        """By row: (tokens worth checking, their gain) of proposals that were made for nothing, as (tokens, confidence).
        `anyway`: others may draft in this step, too.
        """
        ...

    def asked(self, ids: Seq[int], kind: str, limits: list[int], gains: Seq[float]) -> list[int]:
        """Tokens that `kind` has to draft, by row: none or its limit, beside proposals with such a gain (0: none)."""
        ...

    def kind_limit(self, sequence_id: int, kind: str) -> int:
        """Tokens that `kind` may propose for this row in this step."""
        ...


class Portfolio:
    """`free` proposes at no cost and at one go; `paid` (a network, or None) drafts token by token."""

    def __init__(self, free: Drafter, paid: Drafter | None, judge: Judge) -> None:
        self.free, self.paid, self.judge = free, paid, judge
        self.name = f"{paid.name}+{free.name}" if paid else free.name
        self.max_tokens = max(free.max_tokens, paid.max_tokens if paid else 0)
        self.needs_hidden = free.needs_hidden or (paid is not None and paid.needs_hidden)

    def draft(self, context: DraftContext) -> Draft:
        free_limits = [
            min(k, self.free.max_tokens, self.judge.kind_limit(sequence.id, self.free.name))
            for k, sequence in zip(context.limits, context.sequences, strict=True)
        ]
        paid_limits = [self._paid_limit(row, context) for row in range(len(context.limits))]
        if self.paid is not None and not any(free_limits):
            return ask(self.paid, context.within(paid_limits))
        proposed = ask(self.free, context.within(free_limits))
        found = list(zip(proposed.tokens, proposed.confidence, strict=True))
        offers = self.judge.offers(context.sequences, self.free.name, found, anyway=any(paid_limits))
        if self.paid is not None and any(paid_limits):
            gains = [gain if length else 0.0 for length, gain in offers]
            if any(gains):
                ids = [sequence.id for sequence in context.sequences]
                paid_limits = self.judge.asked(ids, self.paid.name, paid_limits, gains)
        for row, (worth, _) in enumerate(offers):
            length = 0 if paid_limits[row] else worth
            if proposed.tokens[row] and not length:
                proposed.reasons[row] = "no confidence"
            _cut(proposed, row, length)
        if self.paid is None or not any(paid_limits):
            return proposed
        return _merged(proposed, ask(self.paid, context.within(paid_limits)), self.paid.name)

    def _paid_limit(self, row: int, context: DraftContext) -> int:
        if self.paid is None or not (context.has_hidden[row] or not self.paid.needs_hidden):
            return 0
        allowed = self.judge.kind_limit(context.sequences[row].id, self.paid.name)
        return min(context.limits[row], self.paid.max_tokens, allowed)

    def forget(self, sequence_id: int) -> None:
        self.free.forget(sequence_id)
        if self.paid is not None:
            self.paid.forget(sequence_id)


def _cut(draft: Draft, row: int, length: int) -> None:
    del draft.tokens[row][length:]
    del draft.confidence[row][length:]


def _merged(first: Draft, second: Draft, name: str) -> Draft:
    """`first` where it has tokens, `second` elsewhere."""
    rows = range(len(first.tokens))
    own = [bool(first.tokens[row]) for row in rows]
    q = [None if own[row] or second.q is None else second.q[row] for row in rows]
    return Draft(
        [first.tokens[row] if own[row] else second.tokens[row] for row in rows],
        [first.confidence[row] if own[row] else second.confidence[row] for row in rows],
        q,
        [None if own[row] or second.tokens[row] else first.reasons[row] for row in rows],
        [first.drafter[row] if own[row] else name for row in rows],
    )
