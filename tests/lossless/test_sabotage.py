"""The suite has teeth: each planted bug turns a small battery of the lossless tests red."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.core import ForwardBatch, SamplingParams, Sequence, Verdict
from paceline.drafters.assistant import MTPDrafter
from paceline.engine import emit as emitting
from paceline.engine import verify as verifying
from paceline.engine.state import EngineState
from paceline.kv.cache import KVCache
from paceline.kv.store import PAGE_SIZE
from paceline.sampling.history import Counts
from paceline.text.stream import Pushed, TextStream
from testing import Setup, TinyAssistant, TinyTarget, make_cache, make_engine, prompts, run, tiny_tokenizer

Patch = pytest.MonkeyPatch


def text_is_unchanged(setup: Setup, params: SamplingParams, count: int = 3) -> bool:
    texts = prompts(count, seed=6)
    plain = run(make_engine(replace(setup, drafter="none", pages=200)), texts, params)
    if setup.drafter == "scripted":
        setup = replace(setup, texts=[t + c.token_ids for t, c in zip(texts, plain, strict=True)])
    got = run(make_engine(setup), texts, params)
    return [c.token_ids for c in got] == [c.token_ids for c in plain]


def tight_memory_changes_nothing() -> bool:
    """Few pages, long texts: pages that left the window are used again, and texts are preempted."""
    return text_is_unchanged(
        Setup(drafter="mtp", pages=14), SamplingParams(max_tokens=70, temperature=0.7, seed=1), 5
    )


def drafts_are_those_of_a_clean_cache() -> bool:
    """Each proposal equals what the drafter says when the text so far is computed from scratch."""
    prompt = prompts(1, seed=6)[0]
    target = TinyTarget()
    engine = make_engine(Setup(k=3), MTPDrafter(TinyAssistant(target, error=20.0)))
    engine.add("a", prompt, SamplingParams(max_tokens=30, temperature=0.0))
    text, compared = list(prompt), 0
    while engine.has_work:
        for delta in engine.step():
            if delta.proposed:
                compared += 1
                if delta.proposed != _clean_draft(target, text, len(delta.proposed)):
                    return False
            text += delta.token_ids
    assert compared > 5
    return True


def _clean_draft(target: TinyTarget, text: list[int], k: int) -> list[int]:
    net, cache = TinyAssistant(target, error=20.0), make_cache()
    cache.open(0, text)
    with cache.tail([(0, text[:-1])]) as tail:
        hidden = target.forward(tail.rows(), cache)[-1:]
        tail.commit([len(text) - 1])
    out, token = [], text[-1]
    for _ in range(k):
        with cache.tail([(0, [token])]) as tail:
            step = net.step(tail.rows(), hidden, cache)
        token, hidden = int(step.logits[0].argmax()), step.hidden
        out.append(token)
    return out


def penalties_hold_inside_blocks() -> bool:
    params = SamplingParams(
        max_tokens=40, temperature=0.7, seed=2, repetition_penalty=1.4, frequency_penalty=0.5
    )
    return text_is_unchanged(Setup(drafter="scripted", k=6), params)


def a_stop_string_ends_the_text_inside_a_block() -> bool:
    prompt = prompts(1, seed=6)[0]
    plain = run(make_engine(Setup()), [prompt], SamplingParams(max_tokens=40))[0].token_ids
    tokenizer = tiny_tokenizer()
    stop = tokenizer.decode(plain[12:14])
    params = SamplingParams(max_tokens=40, stop=(stop,))
    expected = run(make_engine(Setup(), tokenizer=tokenizer), [prompt], params)[0]
    setup = Setup(drafter="oracle", k=8, texts=[prompt + plain])
    got = run(make_engine(setup, tokenizer=tokenizer), [prompt], params)[0]
    assert expected.finish_reason == "stop"
    return (got.text, got.token_ids) == (expected.text, expected.token_ids) and stop not in got.text


def plain_text_is_right() -> bool:
    return text_is_unchanged(
        Setup(drafter="scripted", k=5), SamplingParams(max_tokens=40, temperature=0.7, seed=4)
    )


def an_end_token_ends_the_text_inside_a_block() -> bool:
    params = SamplingParams(max_tokens=40, temperature=0.7, seed=4, stop_token_ids=(7, 9))
    prompt = prompts(3, seed=6)
    free = run(make_engine(Setup()), prompt, replace(params, stop_token_ids=()))
    plain = run(make_engine(Setup()), prompt, params)
    setup = Setup(drafter="oracle", k=6, texts=[t + c.token_ids for t, c in zip(prompt, free, strict=True)])
    return [c.token_ids for c in run(make_engine(setup), prompt, params)] == [c.token_ids for c in plain]


BATTERY = [
    an_end_token_ends_the_text_inside_a_block,
    plain_text_is_right,
    tight_memory_changes_nothing,
    drafts_are_those_of_a_clean_cache,
    penalties_hold_inside_blocks,
    a_stop_string_ends_the_text_inside_a_block,
]


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
    right = TinyAssistant.step

    def wrong(self: TinyAssistant, rows, hidden, cache):  # type: ignore[no-untyped-def]
        self.rounds = getattr(self, "rounds", 0) + 1
        if self.rounds % 3:
            rows = ForwardBatch(rows.tokens, rows.positions + 1, rows.slots, rows.starts)
        return right(self, rows, hidden, cache)

    right_draft = MTPDrafter.draft

    def draft(self: MTPDrafter, context):  # type: ignore[no-untyped-def]
        patch.setattr(TinyAssistant, "step", wrong)
        try:
            return right_draft(self, context)
        finally:
            patch.setattr(TinyAssistant, "step", right)

    patch.setattr(MTPDrafter, "draft", draft)


def feed_the_wrong_hidden_row(patch: Patch) -> None:
    right = verifying._keep

    def wrong(state, plan, b, verdict, row, out):  # type: ignore[no-untyped-def]
        right(state, plan, b, verdict, row, out)
        out.hidden_rows[-1] = row  # the first row, as if nothing had been accepted

    patch.setattr(verifying, "_keep", wrong)


def free_the_window_one_page_early(patch: Patch) -> None:
    def wrong(self: KVCache, kind: str, committed: int) -> int:
        window = self.layout.windows[kind]
        return 0 if window is None else max(0, committed - 1 - window + PAGE_SIZE) // PAGE_SIZE

    patch.setattr(KVCache, "_first_page", wrong)


def resume_a_preempted_text_on_stale_pages(patch: Patch) -> None:
    right = EngineState.admit

    def wrong(self: EngineState, sequence: Sequence) -> bool:
        again = self.requests[sequence.id].admitted > 0
        done = right(self, sequence)
        if done and again:
            with self.cache.tail([(sequence.id, sequence.tokens[:-1])]) as tail:
                tail.commit([len(sequence.tokens) - 1])
            sequence.committed = len(sequence.tokens) - 1
        return done

    patch.setattr(EngineState, "admit", wrong)


def count_refused_tokens(patch: Patch) -> None:
    right = Counts.with_draft

    def wrong(self: Counts, draft: list[int]) -> Counts:
        for token in draft:
            self._counts[self._slot(token)] += 1
        return right(self, draft)

    patch.setattr(Counts, "with_draft", wrong)


def miss_stops_inside_a_block(patch: Patch) -> None:
    right = TextStream.push

    def wrong(self: TextStream, tokens: list[int]) -> Pushed:
        stops, self._stops._stops = self._stops._stops, ()
        text = ""
        if len(tokens) > 1:
            text = right(self, tokens[:-1]).text
        self._stops._stops = stops
        last = right(self, tokens[-1:])
        return Pushed(text + last.text, len(tokens) - 1 + last.kept_tokens, last.stopped)

    patch.setattr(TextStream, "push", wrong)


def miss_end_tokens_inside_a_block(patch: Patch) -> None:
    right = emitting._cut

    def wrong(request, new, max_len):  # type: ignore[no-untyped-def]
        tokens, finish = right(request, new[-1:], max_len)
        return [*new[:-1], *tokens], finish

    patch.setattr(emitting, "_cut", wrong)


SABOTAGE = [
    keep_a_rejected_token,
    correct_one_row_late,
    advance_the_drafters_position,
    feed_the_wrong_hidden_row,
    free_the_window_one_page_early,
    resume_a_preempted_text_on_stale_pages,
    count_refused_tokens,
    miss_stops_inside_a_block,
    miss_end_tokens_inside_a_block,
]


@pytest.mark.parametrize("check", BATTERY, ids=lambda f: f.__name__)
def test_the_battery_passes(check: Callable[[], bool]) -> None:
    assert check()


@pytest.mark.parametrize("sabotage", SABOTAGE, ids=lambda f: f.__name__)
def test_the_battery_catches(sabotage: Callable[[Patch], None], monkeypatch: Patch) -> None:
    sabotage(monkeypatch)
    assert any(turns_red(check) for check in BATTERY), "the planted bug was not noticed"


def turns_red(check: Callable[[], bool]) -> bool:
    try:
        return not check()
    except (AssertionError, IndexError, KeyError, RuntimeError):
        return True  # it did not even get to the end


def test_row_bits_do_not_depend_on_neighbours() -> None:
    """What the harness relies on: `TinyTarget` gives a row the same bits alone and among others."""
    target, text = TinyTarget(), prompts(1, seed=8)[0]
    whole, single = make_cache(), make_cache()
    for cache in (whole, single):
        cache.open(0, text)
    with whole.tail([(0, text)]) as tail:
        together = target.forward(tail.rows(), whole)
    for i, token in enumerate(text):
        with single.tail([(0, [token])]) as tail:
            assert torch.equal(target.forward(tail.rows(), single)[0], together[i])
            tail.commit([1])
