"""Bugs that other engines had, each planted by patching one function of ours. Test-only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from paceline.core import ForwardBatch, Sequence, Verdict
from paceline.drafters import assistant
from paceline.engine import emit as emitting
from paceline.engine import step as stepping
from paceline.engine import verify as verifying
from paceline.engine.plan import StepPlan
from paceline.engine.state import EngineState
from paceline.kv.cache import KVCache
from paceline.kv.prefix import PrefixIndex
from paceline.kv.store import PAGE_SIZE
from paceline.sampling import verify
from paceline.sampling.history import Counts
from paceline.text.stream import Pushed, TextStream

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]


def keep_a_rejected_token(patch: Patch) -> None:
    right = verifying.verify_match

    def wrong(tokens: list[int], draft: list[int], *rest: Any) -> Verdict:
        verdict = right(tokens, draft, *rest)
        if verdict.accepted < len(draft):
            return Verdict(verdict.accepted + 1, tokens[verdict.accepted + 1])
        return verdict

    patch.setattr(verifying, "verify_match", wrong)


def correct_one_row_late(patch: Patch) -> None:
    right = verifying.verify_match

    def wrong(tokens: list[int], draft: list[int], *rest: Any) -> Verdict:
        verdict = right(tokens, draft, *rest)
        return Verdict(verdict.accepted, tokens[min(verdict.accepted + 1, len(draft))])

    patch.setattr(verifying, "verify_match", wrong)


def advance_the_drafters_position(patch: Patch) -> None:
    def draft(self: assistant.MTPDrafter, context: Any) -> Any:
        steps = iter(range(99))

        def rows(tokens: Any, positions: Any, slots: Any, starts: Any) -> ForwardBatch:
            return ForwardBatch(tokens, positions + next(steps), slots, starts)

        patch.setattr(assistant, "ForwardBatch", rows)
        return right(self, context)

    right = assistant.MTPDrafter.draft
    patch.setattr(assistant.MTPDrafter, "draft", draft)
    patch.setattr(assistant.MTPDrafter, "_whole_round", lambda *_: False)


def feed_the_wrong_hidden_row(patch: Patch) -> None:
    right = EngineState.keep_hidden

    def wrong(self: EngineState, slots: Any, hidden: Any, rows: list[int]) -> None:
        right(self, slots, hidden, [max(row - 1, 0) for row in rows])

    patch.setattr(EngineState, "keep_hidden", wrong)


def free_the_window_one_page_early(patch: Patch) -> None:
    def wrong(self: KVCache, kind: str, committed: int) -> int:
        window = self.layout.windows[kind]
        return 0 if window is None else max(0, committed - 1 - window + PAGE_SIZE) // PAGE_SIZE

    leaves = KVCache._leaves
    patch.setattr(KVCache, "_first_page", wrong)
    patch.setattr(KVCache, "_leaves", lambda *args: leaves(*args) - PAGE_SIZE)


def resume_a_preempted_text_on_stale_pages(patch: Patch) -> None:
    right = EngineState.admit

    def wrong(self: EngineState, sequence: Sequence) -> bool:
        again = self.requests[sequence.id].admitted > 0
        done = right(self, sequence)
        if done and again:
            rest = sequence.tokens[sequence.committed : -1]
            with self.cache.tail([(sequence.id, rest)]) as tail:
                tail.commit([len(rest)])
            sequence.committed = len(sequence.tokens) - 1
        return done

    patch.setattr(EngineState, "admit", wrong)


def draft_what_was_drafted_before_preemption(patch: Patch) -> None:
    propose, preempt = stepping.propose, EngineState.preempt
    last: dict[int, list[int]] = {}
    stale: dict[int, list[int]] = {}

    def wrong(state: EngineState, plan: StepPlan) -> None:
        propose(state, plan)
        draft = plan.draft
        for i, request in enumerate(plan.requests):
            if draft.tokens[i]:
                old = stale.pop(request.sequence.id, draft.tokens[i])
                last[request.sequence.id] = draft.tokens[i]
                draft.tokens[i] = (old + draft.tokens[i])[: len(draft.tokens[i])]

    def remember(self: EngineState, sequence: Sequence) -> None:
        stale[sequence.id] = last.get(sequence.id, [])
        preempt(self, sequence)

    patch.setattr(stepping, "propose", wrong)
    patch.setattr(EngineState, "preempt", remember)


def count_refused_tokens(patch: Patch) -> None:
    right = Counts.with_draft

    def wrong(self: Counts, draft: list[int]) -> Counts:
        for token in draft:
            slot = self._slot(token)  # may replace the arrays
            self._counts[slot] += 1
        return right(self, draft)

    patch.setattr(Counts, "with_draft", wrong)


def miss_stop_strings_inside_a_block(patch: Patch) -> None:
    right = TextStream.push

    def wrong(self: TextStream, tokens: list[int]) -> Pushed:
        stops, self._stops._stops = self._stops._stops, ()
        text = right(self, tokens[:-1]).text if len(tokens) > 1 else ""
        self._stops._stops = stops
        last = right(self, tokens[-1:])
        return Pushed(text + last.text, len(tokens) - 1 + last.kept_tokens, last.stopped)

    patch.setattr(TextStream, "push", wrong)


def miss_end_tokens_inside_a_block(patch: Patch) -> None:
    right = emitting._cut

    def wrong(request: Any, new: list[int], max_len: int) -> Any:
        tokens, finish = right(request, new[-1:], max_len)
        return [*new[:-1], *tokens], finish

    patch.setattr(emitting, "_cut", wrong)


def tell_log_probabilities_of_another_row(patch: Patch) -> None:
    right = emitting._delta

    def wrong(request: Any, new: Any, origins: Any, logprobs: list[Any], text: str) -> Any:
        if len(logprobs) > 1:
            own = [(x.raw, x.shaped) for x in logprobs]
            logprobs = [replace(x, raw=own[i - 1][0], shaped=own[i - 1][1]) for i, x in enumerate(logprobs)]
        return right(request, new, origins, logprobs, text)

    patch.setattr(emitting, "_delta", wrong)


def take_pages_of_another_text(patch: Patch) -> None:
    """As if the prefix index compared hashes, and they collided."""

    def wrong(self: PrefixIndex, tokens: list[int], salt: str) -> list[Any]:
        path: list[Any] = []
        parent: object = salt
        for end in range(PAGE_SIZE, len(tokens), PAGE_SIZE):
            begin = tokens[end - PAGE_SIZE]
            node = next(
                (n for k, n in self._nodes.items() if k[0] == parent and k[1][0] == begin),
                None,
            )
            if node is None or node.key[1][0] != begin:
                break
            path.append(node)
            parent = node
        return path

    patch.setattr(PrefixIndex, "match", wrong)


def _inside_a_block(change: Callable[[list[Any]], list[Any]]) -> Plant:
    """Change how the rows after the first draft token are shaped."""

    def plant(patch: Patch) -> None:
        right = verifying.logit_rows

        def wrong(request: Any, draft: list[int]) -> list[Any]:
            rows = right(request, draft)
            return [rows[0], *change(rows)]

        patch.setattr(verifying, "logit_rows", wrong)

    return plant


def _without(**neutral: Any) -> Plant:
    return _inside_a_block(lambda rows: [replace(r, params=replace(r.params, **neutral)) for r in rows[1:]])


INSIDE: dict[str, Plant] = {
    "filters only at the first position": _without(top_k=0, top_p=1.0, min_p=0.0),
    "logit_bias and bad tokens only at the first position": _without(logit_bias={}, bad_token_ids=()),
    "presence and frequency only at the first position": _without(
        presence_penalty=0.0, frequency_penalty=0.0
    ),
    "constraint stands still": _inside_a_block(
        lambda rows: [replace(r, mask=rows[0].mask) for r in rows[1:]]
    ),
    "min_tokens only at the first position": _inside_a_block(
        lambda rows: [replace(r, stop_ids=()) for r in rows[1:]]
    ),
    "one noise for a whole block": _inside_a_block(
        lambda rows: [replace(r, position=rows[0].position) for r in rows[1:]]
    ),
}


def accept_everything(patch: Patch) -> None:
    patch.setattr(verify, "_ratios", lambda p, q, draft: [1.0] * len(draft))


TEXT: dict[str, Plant] = {
    plant.__name__: plant
    for plant in (
        keep_a_rejected_token, correct_one_row_late, free_the_window_one_page_early,
        resume_a_preempted_text_on_stale_pages, count_refused_tokens, miss_stop_strings_inside_a_block,
        miss_end_tokens_inside_a_block, tell_log_probabilities_of_another_row, take_pages_of_another_text,
    )
} | INSIDE  # fmt: skip
DRAFTS: dict[str, Plant] = {
    plant.__name__: plant
    for plant in (
        advance_the_drafters_position, feed_the_wrong_hidden_row, draft_what_was_drafted_before_preemption
    )
}  # fmt: skip
LAW: dict[str, Plant] = {"accept_everything": accept_everything}
