"""What a draft-length policy is: it plans a step before the drafters run and observes it after verification."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal, Protocol

from paceline.control.reasons import NoDraftReason
from paceline.tree import Shape

NGRAM = "ngram"
Line = tuple[float, float]  # chance that a token is kept at confidence 0, and what it rises by until 1


def heat_of(temperature: float) -> int:
    """Which texts are learnt about together: 0 the greedy ones, then a number for each 0.2 of the temperature."""
    return 0 if temperature <= 0.0 else 1 + int(5.0 * min(temperature, 2.0))


def temperature_of(heat: int) -> float:
    """A temperature of texts that are learnt about together, which are not the greedy ones."""
    return (heat - 0.5) / 5.0


@dataclass(slots=True)  # not frozen: made for each row of each step
class PlanRow:
    """One decoding request of the step."""

    id: int
    draft_tokens: int | Literal["auto"]  # as the request or the engine has it; 0 disables drafting
    room: int  # tokens that may be drafted: the last one is always the target's own
    drafter: str | None = None  # the network drafter, if there is one
    drafter_max: int = 0  # tokens it can draft in this step at most
    heat: int = 0  # see `heat_of`: the higher it is, the more rarely drafts are kept
    tree: Shape | None = None  # how its drafts may branch
    follows: bool = True  # the drafter is handed states of this text in every step, whether it drafts or not
    unread: int = (
        0  # tokens that the drafter has to read before it drafts: a prompt, or what plain steps wrote
    )
    written: int = 0  # tokens of the answer so far


@dataclass(slots=True)  # not frozen: made for each row of each step
class Proposal:
    """Tokens that n-gram lookup found for a row at no cost to the network, by their confidences in 0..1."""

    confidence: tuple[float, ...]


@dataclass(slots=True)  # not frozen: made for each row of each step
class PlannedRow:
    drafter: str | None  # whose tokens the row takes; None: it drafts nothing
    limit: int  # tokens at most: what the policy makes of `draft_tokens`
    reason: NoDraftReason | None = None  # why limit is 0
    # that token 1, 2, ... is kept if those before it are; empty: the draft goes on until its limit
    chance: tuple[float, ...] = ()
    worth: tuple[Line, ...] = ()  # what the drafter's confidence is worth, by bin
    tree: Shape | None = None  # then `limit` counts all tokens of the tree


@dataclass(frozen=True, slots=True)
class StopRule:
    """Within a round a row goes on while its next token gains more than `price`, if all rows together gain `call`."""

    price: float = 0.0  # tokens that the step could have written in the time of one more drafted token
    call: float = 0.0  # the same, for one more call of the drafter, however many rows take part


@dataclass(frozen=True, slots=True)
class DraftPlan:
    rows: tuple[PlannedRow, ...]  # in the order of the rows that were given
    stop: StopRule = StopRule()


@dataclass(slots=True)  # not frozen: made for each row of each step
class RowOutcome:
    id: int
    drafter: str | None = None  # whose tokens were verified; None: nobody's
    drafted: int = 0
    accepted: int = 0
    confidence: tuple[float, ...] = ()  # of the drafted tokens
    # An n-gram proposal that the row did not take, beside what the target wrote: the confidences of the tokens that can
    # be compared, and how many of them agree
    unused: tuple[float, ...] = ()
    agreed: int = 0
    # Of a tree, whose first branch is above: whether its tokens were kept, the likeliest first, and how deep it was
    likeliest: tuple[bool, ...] = ()
    levels: int = 0

    @property
    def tokens(self) -> int:
        return len(self.likeliest) or self.drafted


@dataclass(frozen=True, slots=True)
class StepOutcome:
    rows: tuple[RowOutcome, ...]
    target_seconds: float  # the step without drafting
    draft_seconds: Mapping[str, float] = field(default_factory=dict)  # by network drafter
    prefill_rows: int = 0
    timed: bool = True  # False: something else ran in the step, its times say nothing

    @property
    def drafted(self) -> int:
        return sum([row.tokens for row in self.rows])


class DraftPolicy(Protocol):
    def plan(
        self, rows: Seq[PlanRow], free_proposals: Seq[Proposal | None], prefill_rows: int = 0
    ) -> DraftPlan:
        """Whose tokens each row takes, and how many; `free_proposals` has one entry for each row (None: nobody looked).

        `prefill_rows`: tokens of prompts in the same step.
        """
        ...

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a verified step."""
        ...

    def forget(self, id: int) -> None:
        """The request is gone: free what was kept for it."""
        ...
