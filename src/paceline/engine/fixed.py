"""The controller of a fixed draft length."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from paceline.core import MAX_DRAFT_TOKENS, Sequence
from paceline.engine.budget import DISABLED, NO_DRAFTER, NO_ROOM, Want, room
from paceline.engine.records import StepRecord
from paceline.ops.base import Stop

Limit = tuple[int, str | None]
WHOLE = Stop(MAX_DRAFT_TOKENS)  # a draft of a fixed length does not end before it
USUAL = 0.7  # chance of a network's token to be kept, if all before it were


class FixedController:
    """Drafts k tokens whenever the text has room for them; a request's own number goes first."""

    def __init__(self, k: int) -> None:
        self.k = k

    def limits(
        self, sequences: list[Sequence], wants: list[Want], drafter_max: int, others: int = 0
    ) -> list[Limit]:
        return [
            fixed_limit(sequence, self.k if want == "auto" else want, drafter_max)
            for sequence, want in zip(sequences, wants, strict=True)
        ]

    def rest(self, sequences: list[Sequence], rooms: list[int]) -> tuple[int, None]:
        return 0, None

    def join(self, sequences: list[Sequence], wants: list[Want], most: int, untold: int) -> None:
        return None

    def watch(self, sequences: list[Sequence]) -> None:
        return None

    def copies(self, sequences: list[Sequence], rooms: list[int]) -> None:
        return None

    def stop(self, sequence_id: int) -> Stop:
        return WHOLE

    def offers(
        self, sequences: Seq[Sequence], kind: str, found: Seq[tuple[list[int], list[float]]], *, anyway: bool
    ) -> list[tuple[int, float]]:
        return [whole(confidence) for _, confidence in found]

    def asked(self, ids: Seq[int], kind: str, limits: list[int], gains: Seq[float]) -> list[int]:
        return wanted(limits, gains)

    def kind_limit(self, sequence_id: int, kind: str) -> int:
        return MAX_DRAFT_TOKENS

    def observe(self, record: StepRecord) -> None:
        pass

    def forget(self, sequence_id: int) -> None:
        pass


def fixed_limit(sequence: Sequence, want: int, drafter_max: int) -> Limit:
    if want == 0 or drafter_max == 0:
        return 0, DISABLED if want == 0 else NO_DRAFTER
    limit = min(want, drafter_max, room(sequence))
    return limit, None if limit else NO_ROOM


def wanted(limits: list[int], gains: Seq[float]) -> list[int]:
    """What a network is asked for, by row, of which nothing is known, beside copies that gain so many tokens."""
    usual = [sum(USUAL ** (j + 1) for j in range(limit)) for limit in limits]
    return [limit if own > gain else 0 for limit, own, gain in zip(limits, usual, gains, strict=True)]


def whole(confidence: list[float]) -> tuple[int, float]:
    """All of a proposal, and the tokens that its own confidence promises."""
    alive, total = 1.0, 0.0
    for value in confidence:
        alive *= value
        total += alive
    return len(confidence), total
