"""One step as arrays by row: the plan that is made on the host, and the result that comes back of the target.

Row b of B is one text: some of its pending tokens, and a draft behind them. A chain, a block and a tree differ in
`draft.parents` alone (see tree.py), and a text that does not draft has an empty one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paceline.control.reasons import NoDraftReason
from paceline.core import AdapterRows, Draft, TokenLogprob, Verdict
from paceline.drafters.base import Seen
from paceline.engine.request import RequestState
from paceline.engine.state import EngineState
from paceline.soft_tokens import MediaRows, media_rows

Found = tuple[list[int], list[float]]  # tokens of a proposal, and their confidences


@dataclass(slots=True, eq=False)
class StepPlan:
    requests: list[RequestState]  # [B]
    counts: list[int]  # [B] pending tokens that are computed, from the committed end of the text on
    last: list[bool]  # [B] they are all that is pending: a token is sampled behind them
    slots: list[int]  # [B] of the cache
    draft: Draft  # of B rows, with `q` and `parents`
    decoding: list[int]  # the rows that may draft: those with one pending token
    lookups: dict[int, Found] = field(default_factory=dict)  # found and not taken, by row
    seconds: dict[str, float] = field(default_factory=dict)  # that drafting took, by network drafter
    prefill_rows: int = 0

    def items(self) -> list[tuple[int, list[int]]]:
        """(sequence id, tokens to compute) by row, as `KVCache.tail` takes them."""
        out = []
        for request, count, drafted in zip(self.requests, self.counts, self.draft.tokens, strict=True):
            s = request.sequence
            out.append((s.id, s.tokens[s.committed : s.committed + count] + drafted))
        return out

    def media(self, starts: list[int]) -> MediaRows | None:
        """The rows of images and sound in the forward, whose texts begin at `starts`; None where there are none."""
        texts = [request.sequence for request in self.requests]
        if not any(text.media for text in texts):
            return None
        return media_rows([text.media for text in texts], [text.committed for text in texts], starts)

    def adapters(self, starts: list[int]) -> AdapterRows | None:
        """Which adapters the rows of texts that begin at `starts` are computed with; None where there are none."""
        blends = [request.sequence.adapters for request in self.requests]
        return AdapterRows(starts, blends) if any(blends) else None

    def take(self, row: int, draft: Draft, n: int, drafter: str) -> None:
        """Let `row` draft what row n of `draft` has."""
        own = self.draft
        own.tokens[row], own.confidence[row] = draft.tokens[n], draft.confidence[n]
        own.drafter[row], own.reasons[row] = drafter, None
        if draft.q is not None and own.q is not None:
            own.q[row] = draft.q[n] or None
        if draft.parents is not None and own.parents is not None:
            own.parents[row] = draft.parents[n]

    def give_up_drafts(self, reason: str) -> None:
        """Leave all drafts out; the rows that had one say why."""
        for row, tokens in enumerate(self.draft.tokens):
            if tokens:
                self.take(row, _nothing(1), 0, "none")
                self.draft.reasons[row] = reason

    def drop(self, row: int) -> None:
        """Leave a text out of the step."""
        d = self.draft
        by_row: list[list[Any] | None] = [self.requests, self.counts, self.last, self.slots]
        by_row += [d.tokens, d.confidence, d.q, d.reasons, d.drafter, d.parents]
        for values in by_row:
            if values is not None:
                del values[row]
        self.decoding = [b - (b > row) for b in self.decoding if b != row]
        self.lookups = {b - (b > row): lookup for b, lookup in self.lookups.items() if b != row}


def _nothing(rows: int) -> Draft:
    draft = Draft.empty(rows, NoDraftReason.PREFILL.value)
    draft.q, draft.parents = [None] * rows, [None] * rows
    return draft


def plan_step(state: EngineState) -> StepPlan:
    """The rows of the next step, without drafts yet."""
    work = state.scheduler.plan(state.admit, state.most)
    requests = [state.requests[w.sequence.id] for w in work]
    counts, last = [w.count for w in work], [w.last for w in work]
    slots = [state.cache.slot(w.sequence.id) for w in work]
    decoding = [b for b, w in enumerate(work) if w.last and w.count == 1]
    plan = StepPlan(requests, counts, last, slots, _nothing(len(work)), decoding)
    plan.prefill_rows = sum(counts) - len(decoding)
    return plan


@dataclass(slots=True, eq=False)
class StepResult:
    """What the target says of a step."""

    keep: list[int]  # [B] tokens of each row's tail that become committed
    verdicts: list[Verdict | None]  # [B] None: nothing was sampled (prefill) or the text failed
    logprobs: list[list[TokenLogprob]]  # [B][accepted + 1], empty if not asked for
    hidden_slots: list[tuple[int, int]] = field(default_factory=list)  # (cache slot, text position)
    hidden_rows: list[int] = field(default_factory=list)  # row of the hidden state that belongs there
    thresholds: dict[int, float] = field(
        default_factory=dict
    )  # of Mirostat after the step, by row of the plan
    # of drafts that are no trees, where a drafter's `on_verify` is called
    seen: list[tuple[RequestState, Seen]] = field(default_factory=list)

    @property
    def paths(self) -> list[list[int] | None]:
        """[B] of a tree, the places of its kept tokens."""
        return [None if verdict is None else verdict.path for verdict in self.verdicts]
