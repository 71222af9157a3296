"""A draft model whose own K/V cache is too small gives up drafts, for as long as it is full, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.core import Completion, Draft, ForwardBatch, SamplingParams, Sequence
from paceline.drafters.base import DraftContext
from paceline.drafters.contract import GreedyPicker
from paceline.drafters.draft_model import ModelDrafter, _usual
from paceline.engine.engine import Engine
from paceline.kv.cache import KVCache
from paceline.kv.store import PAGE_SIZE
from testing import VOCAB, Setup, TinyTarget, make_cache, make_engine, prompts, run


class Counting(TinyTarget):
    """Counts the rows that it computes."""

    rows = 0

    def forward(self, rows: ForwardBatch, cache: KVCache) -> Any:
        self.rows += rows.count
        return super().forward(rows, cache)


def small(pages: int, sequences: int = 8, max_tokens: int = 512) -> ModelDrafter:
    return ModelDrafter(Counting(), make_cache(pages, sequences, max_tokens), VOCAB)


def plain(texts: list[list[int]], params: Any) -> list[list[int]]:
    return [c.token_ids for c in run(make_engine(Setup()), texts, params)]


def reasons_of(done: list[Completion]) -> set[str]:
    return {reason for c in done for reason in c.stats.reasons}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(("pages", "sequences"), [(0, 8), (1, 8), (3, 8), (7, 8), (12, 8), (64, 1), (64, 3)])
def test_a_full_cache_changes_no_text_and_parks_nobody(
    pages: int, sequences: int, temperature: float
) -> None:
    texts = prompts(6, seed=4)
    params = [SamplingParams(max_tokens=10 + 7 * i, temperature=temperature, seed=i) for i in range(6)]
    drafter = small(pages, sequences)
    done = run(make_engine(Setup(), drafter), texts, params)
    assert [c.token_ids for c in done] == plain(texts, params)
    assert not any(reason.startswith("drafter failed") for reason in reasons_of(done))
    assert any(c.stats.drafted for c in done) == (pages > 0)
    assert drafter.cache.open_sequences == 0


def steps(engine: Engine) -> list[set[str]]:
    """Which requests were drafted for, step by step."""
    out = []
    while engine.has_work:
        out.append({delta.request for delta in engine.step() if delta.proposed})
    return out


def test_the_newest_gives_way_and_drafts_again_when_there_is_room() -> None:
    first, second, *_ = prompts(2, seed=8, longest=8)
    drafter = small(5)
    engine = make_engine(Setup(k=2), drafter)
    engine.add("old", first, SamplingParams(max_tokens=48))
    engine.add("new", second, SamplingParams(max_tokens=160))
    drafted = steps(engine)
    both = [i for i, names in enumerate(drafted) if names == {"old", "new"}]
    only_old = [i for i, names in enumerate(drafted) if names == {"old"}]
    assert both
    assert only_old
    assert both[0] < only_old[-1]
    assert any(names == {"new"} for names in drafted[only_old[-1] :])


def test_what_does_not_fit_is_not_computed_again_and_again() -> None:
    texts = prompts(4, seed=6, longest=60)
    params = SamplingParams(max_tokens=40)
    roomy, tight = small(64), small(9)
    run(make_engine(Setup(), roomy), texts, params)
    run(make_engine(Setup(), tight), texts, params)
    assert 0 < tight.model.rows < 1.5 * roomy.model.rows  # type: ignore[attr-defined]


def test_a_text_beyond_the_draft_models_context_is_left_alone() -> None:
    (prompt,) = prompts(1, seed=6, longest=20)
    params = SamplingParams(max_tokens=90)
    drafter = small(64, max_tokens=64)
    (done,) = run(make_engine(Setup(), drafter), [prompt], params)
    assert [done.token_ids] == plain([prompt], params)
    assert done.stats.drafted > 0
    assert drafter.model.rows < len(prompt) + 90 + done.stats.drafted  # type: ignore[attr-defined]
    assert drafter.cache.open_sequences == 0


def ask(drafter: ModelDrafter, texts: dict[int, list[int]], limits: dict[int, int]) -> Draft:
    sequences = [Sequence(i, t, len(t), SamplingParams(), i, committed=len(t) - 1) for i, t in texts.items()]
    rows = len(sequences)
    return drafter.draft(
        DraftContext(
            sequences, [limits[i] for i in texts], [*range(rows)], None, [False] * rows, make_cache(1), GreedyPicker(rows)
        )
    )  # fmt: skip


def test_the_text_that_is_idle_for_longest_loses_its_memory_first() -> None:
    texts = {
        i: [2 + i] * (PAGE_SIZE - 4) for i in range(3)
    }  # one page each, two with a draft that crosses it
    drafter = small(3)
    assert all(ask(drafter, texts, dict.fromkeys(texts, 2)).tokens)
    ask(drafter, texts, {0: 2, 1: 0, 2: 0})
    ask(drafter, texts, {0: 0, 1: 0, 2: 2})  # so text 1 is idle for longest, then text 0
    assert [len(t) for t in ask(drafter, texts, {0: 0, 1: 0, 2: 8}).tokens] == [0, 0, 8]
    held = {i: i in drafter._written for i in texts}
    assert held == {0: True, 1: False, 2: True}


def test_what_was_refused_is_not_tried_before_memory_comes_free(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {i: [2 + i] * (2 * PAGE_SIZE) for i in range(2)}
    drafter = small(3)
    tried: list[str] = []
    fits = drafter.cache.fits
    monkeypatch.setattr(drafter.cache, "fits", lambda count: tried.append("fits") or fits(count))
    for _ in range(5):
        assert [len(t) for t in ask(drafter, texts, {0: 4, 1: 4}).tokens] == [4, 0]
    assert len(tried) == 2


def test_a_text_that_was_refused_takes_the_place_of_one_that_falls_idle() -> None:
    texts = {i: [2 + i] * (2 * PAGE_SIZE) for i in range(2)}
    drafter = small(3)
    assert [len(t) for t in ask(drafter, texts, {0: 4, 1: 4}).tokens] == [4, 0]
    assert [len(t) for t in ask(drafter, texts, {0: 4, 1: 4}).tokens] == [4, 0]
    assert [len(t) for t in ask(drafter, texts, {0: 0, 1: 4}).tokens] == [0, 4]


def test_a_text_that_ends_makes_room() -> None:
    texts = {i: [2 + i] * (2 * PAGE_SIZE) for i in range(2)}
    drafter = small(3)
    assert [len(t) for t in ask(drafter, texts, {0: 4, 1: 4}).tokens] == [4, 0]
    drafter.forget(0)
    del texts[0]
    assert [len(t) for t in ask(drafter, texts, {1: 4}).tokens] == [4]


def test_it_says_how_much_of_a_text_it_would_have_to_read() -> None:
    drafter = small(16)
    text = Sequence(1, [1 + i % 20 for i in range(40)], 40, SamplingParams(), 0)
    assert drafter.unread(text) == 39  # the last token is computed by any draft
    picker = GreedyPicker(1)
    drafter.draft(DraftContext([text], [2], [0], None, [False], drafter.cache, picker))
    text.tokens += picker.tokens[0][:1]
    assert drafter.unread(text) == 0
    text.tokens += [7] * 10  # plain steps
    assert drafter.unread(text) == 9  # all but the last
    drafter.draft(DraftContext([text], [1], [0], None, [False], drafter.cache, GreedyPicker(1)))
    drafter.forget(1)
    again = replace(text, id=2, tokens=text.tokens[:40])
    assert drafter.unread(again) == 39 - 39 // PAGE_SIZE * PAGE_SIZE  # whole pages are still known


class Narrow(TinyTarget):
    """The logits of the first tokens of `Counting` only; counts how often it is asked."""

    vocab_size = readable = VOCAB // 2
    asked = 0

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.asked += 1
        return super().logits(hidden)[:, : self.vocab_size]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_narrow_head_changes_no_text_and_is_left_where_a_text_needs_the_whole(temperature: float) -> None:
    texts = prompts(4, seed=4)
    base = SamplingParams(max_tokens=60, temperature=temperature, seed=1)
    usual, rare = range(VOCAB // 2), range(VOCAB // 2, VOCAB)
    for allowed, share in ((usual, 1.0), (rare, 0.0)):
        params = replace(base, allowed_token_ids=tuple(allowed))
        drafter, narrow = small(64), Narrow()
        drafter.narrow = narrow
        done = run(make_engine(Setup(), drafter), texts, params)
        assert [c.token_ids for c in done] == plain(texts, params)
        assert all(set(c.token_ids) <= set(allowed) for c in done)
        drafted, accepted = (sum(getattr(c.stats, name) for c in done) for name in ("drafted", "accepted"))
        assert accepted > 0
        if share:
            assert narrow.asked > 10
        else:  # but for the first tokens, which tell nothing yet
            assert 0 < narrow.asked < 30 < drafted


def test_how_many_rare_tokens_need_the_whole_head() -> None:
    prompt, usual, rare = [VOCAB - 1] * 50, 2, VOCAB - 1

    def fits(written: list[int]) -> bool:
        return _usual(Sequence(1, prompt + written, len(prompt), SamplingParams(), 1), VOCAB // 2)

    assert fits([])
    assert fits([rare] * 4)
    assert not fits([rare] * 5)
    assert fits([usual] * 45 + [rare] * 5)
    assert not fits([usual] * 1000 + [rare] * 13)
    assert fits([rare] * 1000 + [usual] * 128)  # the last tokens count
