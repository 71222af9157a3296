"""What a drafter is: it sees a read-only context (see guard.py) and returns tokens, whoever wrote it.

Under the rule `match` nothing that a drafter does can change the text, only the speed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from paceline.core import Draft, Sequence
from paceline.kv.cache import KVCache
from paceline.ops.base import Drawn, Rule, Stop
from paceline.ops.uploads import upload


class Leaf(NamedTuple):
    """The end of a branch of a row's draft."""

    row: int
    node: int  # the place of its last token in the draft; -1: nothing is drafted yet
    token: int
    source: int = 0  # the row of the logits that its last token was drawn from


class Picker(Protocol):
    """Draws draft tokens as each row's request samples, with the noise that its verification rule allows."""

    def pick(
        self,
        rows: Seq[int],
        step: int,
        logits: torch.Tensor,
        ids: torch.Tensor | None = None,
        sure: Seq[float] | None = None,
    ) -> list[int]:
        """Token for each of `rows` at draft position `step` from logits [b, V], or [b, C] of candidates `ids`.

        `sure` [b]: the logit of the drafter's own word for 1 - TV of its distribution and the target's, if it has one.
        """
        ...

    def best(self, row: int, scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(scores, ids) of the `count` tokens of scores [V] from among which the row's next one is to be picked, on the
        host: the best ones with the noise that its rule allows, where its request is simple.
        """
        ...

    def rules(self, rows: Seq[int]) -> list[Rule] | None:
        """How to draw the first draft token of each of `rows`, if all are simple: rule `match`, no edits of the logits.

        Then a drafter may draw a whole round itself and hand it over with `take`. None: use `pick`.
        """
        ...

    def stop(self, row: int) -> Stop:
        """Where the row's draft ends for want of confidence, as `go_on` would say, counted from what is picked so far."""
        ...

    def take(self, row: int, tokens: list[int], confidence: list[float]) -> None:
        """Tokens that were drawn by the row's rule, as far as its stop let."""
        ...

    def go_on(self, rows: Seq[int], step: int) -> list[int]:
        """Those of `rows`, which may draft on, for which the token after `step` is still worth its cost, as the plan's
        stop rule says.
        """
        ...

    def width(self, row: int) -> int:
        """How many tokens may stand beside each other in the row's draft; 1: it is a chain. For drafters that `grow`."""
        ...

    def grow(self, leaves: Seq[Leaf], logits: torch.Tensor, ids: torch.Tensor | None = None) -> list[Leaf]:
        """In place of `pick` and `go_on`, for trees: the branches to go on with, from logits as in `pick` after each of
        `leaves`, all at one depth. It writes to them. No branch: the draft is done.
        """
        ...

    def draft(self, drafter: str) -> Draft:
        """What has been picked so far."""
        ...


def take_round(picker: Picker, rows: Seq[int], drawn: Drawn) -> None:
    """Hand the picker a whole round that was drawn for `rows` in one call."""
    for i, row in enumerate(rows):
        tokens = [step[i] for step in drawn.tokens if step[i] >= 0]
        picker.take(row, tokens, [step[i] for step in drawn.confidence[: len(tokens)]])


@dataclass(slots=True)
class DraftContext:
    sequences: list[Sequence]  # B rows, each with exactly one pending token
    limits: list[int]  # [B] tokens wanted at most, >= 0
    slots: list[int]  # [B] rows of the target cache's page tables
    states: (
        torch.Tensor | None
    )  # [max_sequences, H] by slot: the target's hidden state at position committed - 1
    has_hidden: list[bool]  # [B]
    cache: KVCache  # the target's: read only
    picker: Picker

    def within(self, limits: list[int]) -> DraftContext:
        """The same with other limits."""
        return DraftContext(
            self.sequences, limits, self.slots, self.states, self.has_hidden, self.cache, self.picker
        )

    def hidden(self, rows: Seq[int]) -> torch.Tensor | None:
        """The hidden states [b, H] of `rows`, a copy; None if no drafter needs them."""
        if self.states is None:
            return None
        slots = [self.slots[row] for row in rows]
        if self.states.device.type == "cpu" and self.states.dtype == torch.float32:
            return torch.from_numpy(self.states.numpy()[slots])  # in a tenth of torch's time
        return self.states.index_select(0, upload(slots, self.states.device))


@dataclass(slots=True)
class Kept:
    """Rows of one text that have become part of it, with the target's hidden states of them."""

    sequence: Sequence  # with the token after the last of them
    first: int  # position of the first of them
    step: Seq[torch.Tensor]  # [rows of the step, hidden size] for each tap; overwritten by the next step
    at: range | None = None  # which rows of it; None: all

    def __len__(self) -> int:
        return len(self.step[0]) if self.at is None else len(self.at)

    @property
    def states(self) -> list[torch.Tensor]:
        """[n, hidden size] for each tap; overwritten by the next step: copy what is wanted."""
        return (
            list(self.step) if self.at is None else [part[self.at.start : self.at.stop] for part in self.step]
        )


@dataclass(frozen=True, slots=True)
class Seen:
    """The target's tokens at the rows of a draft that was verified, also behind the first refused token."""

    sequence: Sequence  # with what was kept
    first: int  # the place of the first drafted token in the text
    drafted: tuple[int, ...]
    chosen: tuple[
        int, ...
    ]  # the target's tokens in these places, and the one after; fewer where it could say none


class Drafter(ABC):
    """Derive from it: what is not said there has the defaults of a drafter without a memory.

    Two hooks bring news of a text after a step, each with what it asks for: `on_commit` the rows that were kept with
    hidden states of the target, `on_verify` the target's tokens at all rows of a draft.
    """

    name: str
    max_tokens: int  # of a draft
    needs_hidden: bool = False  # `DraftContext.states` has the target's last hidden state of each text
    branches: bool = False  # its drafts may be trees, as `Picker.width` says
    blind: bool = False  # it embeds tokens itself, so it is not asked for texts with pictures
    # hidden states for `on_commit`: after so many decoder layers of the target, or FINAL; empty: it is not called
    taps: Seq[int] = ()
    observes: bool = False  # whether `on_verify` is called

    @abstractmethod
    def draft(self, context: DraftContext) -> Draft:
        """Propose up to limits[b] tokens for each row b."""

    def forget(self, sequence_id: int) -> None:  # noqa: B027  a drafter may keep nothing
        """The sequence is gone: free what was kept for it. May be called twice."""

    def begin(self, sequence: Sequence) -> int:
        """A text is to be computed: how many of its first rows `on_commit` need not bring, since they are still known.

        The target computes the others even where it remembers them itself. len(sequence.tokens) or more: none is needed.
        """
        return len(sequence.tokens)

    def unread(self, sequence: Sequence) -> int:
        """Tokens of the text that it has to compute before it can draft, the last one apart: they take time, too."""
        return 0

    def lacks(self, sequence: Sequence) -> str | None:
        """Why it cannot draft for a text now, as a reason of control/reasons.py; None if it can."""
        return None

    def on_commit(self, news: list[Kept]) -> None:  # noqa: B027
        """Rows of some texts were kept: each row of a text once and in order, prompts included, refused drafts never."""

    def on_verify(self, seen: list[Seen]) -> None:  # noqa: B027
        """Drafts of some texts were verified.

        Not under the rules `reject` and `block`, where sampling is on: noise of a place may not be used twice.
        """
