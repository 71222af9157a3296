"""Failures stay where they happen, nothing leaks, and what is impossible is refused with a next step."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from paceline.core import Draft, SamplingParams
from paceline.drafters.base import DraftContext
from paceline.engine.engine import Engine
from paceline.errors import PromptError, UsageError
from testing import (
    VOCAB,
    OracleDrafter,
    RandomDrafter,
    Setup,
    make_engine,
    prompts,
    run,
    tiny_tokenizer,
    totals,
)


def idle(engine: Engine) -> bool:
    cache = engine.state.cache
    cache.prefix.clear()
    free = all(pool.free == pool.count for pool in cache.pools.values())
    return free and cache.open_sequences == 0 and not engine.state.requests and not engine.has_work


class ThirdParty(RandomDrafter):
    """A drafter whose answer a test decides."""

    name = "third_party"

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer, self.asked = answer, 0

    def draft(self, context: DraftContext) -> Draft:
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        rows = len(context.sequences)
        return Draft([list(self.answer)] * rows, [[0.5] * len(self.answer)] * rows)


NONSENSE = {
    "raises": RuntimeError("boom"),
    "out of range": [VOCAB],
    "negative": [-1],
    "too long": [1] * 9,
    "no number": ["x"],
    "boolean": [True],
}


@pytest.mark.parametrize("answer", NONSENSE.values(), ids=NONSENSE)
def test_a_drafter_that_fails_is_parked_and_the_text_stays_right(answer: Any) -> None:
    texts, params = prompts(2), SamplingParams(max_tokens=12, temperature=0.7, seed=3)
    expected = run(make_engine(Setup()), texts, params)
    third_party = ThirdParty(answer)
    got = run(make_engine(Setup(), third_party), texts, params)
    assert [c.token_ids for c in got] == [c.token_ids for c in expected]
    assert third_party.asked <= 2  # once for each text at most
    for c in got:
        assert c.stats.drafted == 0
        assert any(reason.startswith("drafter failed") for reason in c.stats.reasons)


@pytest.mark.parametrize("drafter", ["none", "mtp", "model", "random"])
def test_nan_ends_one_request_and_no_other(drafter: str) -> None:
    """Token 3 poisons every text that holds it; its pages are used again by others afterwards."""
    clean = [[t for t in text if t != 3] or [2] for text in prompts(3)]
    params = SamplingParams(max_tokens=20, temperature=0.7, seed=3, bad_token_ids=(3,))
    expected = run(make_engine(Setup()), clean, params)
    engine = make_engine(Setup(drafter=drafter, poison=3, pages=30))
    for _ in range(2):
        got = run(engine, [clean[0], [5, 3, 5], *clean[1:]], params)
        assert got[1].finish_reason == "error"
        assert "NaN" in (got[1].error or "")
        assert [got[i].token_ids for i in (0, 2, 3)] == [c.token_ids for c in expected]
    assert idle(engine)


def test_cancellation_at_any_moment_frees_everything() -> None:
    rng = random.Random(4)
    engine = make_engine(Setup(drafter="mtp", pages=40, max_batch=4, prefix_cache=True))
    params = SamplingParams(max_tokens=25, temperature=1.0, seed=1)
    alone = {i: run(make_engine(Setup()), [p], params)[0].token_ids for i, p in enumerate(prompts(12))}
    cancelled, texts = set(), {i: [] for i in alone}
    for i, prompt in enumerate(prompts(12)):
        engine.add(str(i), prompt, params)
    while engine.has_work:
        for delta in engine.step():
            texts[int(delta.request)] += delta.token_ids
        if rng.random() < 0.15:
            victim = rng.randrange(12)
            engine.cancel(str(victim))
            cancelled.add(victim)
    assert 0 < len(cancelled) < 12
    for i, text in texts.items():
        assert text == alone[i][: len(text)]
        assert i in cancelled or text == alone[i]
    assert idle(engine)


def test_a_text_too_large_for_the_cache_fails_alone() -> None:
    engine = make_engine(Setup(pages=3, max_batch=2))
    long, short = [2] * 60, [2, 3]
    got = run(engine, [long, short], SamplingParams(max_tokens=10))
    assert got[0].finish_reason == "error"
    assert "cache_memory" in (got[0].error or "")
    assert got[1].token_ids == run(make_engine(Setup()), [short], SamplingParams(max_tokens=10))[0].token_ids
    assert idle(engine)


def test_long_prompts_do_not_starve_decoding() -> None:
    engine = make_engine(Setup(prefill_chunk=3, step_tokens=50))
    engine.add("short", [2], SamplingParams(max_tokens=30))
    engine.step()
    engine.add("long", [2] * 60, SamplingParams(max_tokens=2))
    for _ in range(10):
        assert [d.request for d in engine.step()] == ["short"]


BAD_REQUESTS: list[tuple[list[Any], dict[str, Any], str]] = [
    ([], {}, "empty"),
    ([VOCAB], {}, f"0 to {VOCAB - 1}"),
    ([-1], {}, "token id -1"),
    ([2.5], {}, "token id 2.5"),
    ([2] * 512, {}, "context holds 512"),
    ([2], {"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
    ([2], {"stop_token_ids": (99,)}, "stop_token_ids"),
    ([2], {"drafter": "mpt"}, "not loaded"),
    ([2], {"stop": ("x",)}, "tokenizer"),
]


@pytest.mark.parametrize(("prompt", "params", "message"), BAD_REQUESTS, ids=[m for _, _, m in BAD_REQUESTS])
def test_impossible_requests_are_refused(prompt: list[Any], params: dict[str, Any], message: str) -> None:
    engine = make_engine(Setup())
    with pytest.raises((PromptError, UsageError), match=message):
        engine.add("x", prompt, SamplingParams(**params))
    assert idle(engine)


BAD_PARAMS = [
    {"temperature": -1.0}, {"temperature": float("nan")}, {"temperature": "hot"}, {"top_p": -0.5}, {"top_p": 1.5},
    {"top_k": -2}, {"min_p": 2.0}, {"repetition_penalty": 0.0}, {"n": 0}, {"max_tokens": 0}, {"max_tokens": 2.5},
    {"max_tokens": True}, {"min_tokens": 9, "max_tokens": 5}, {"draft_tokens": 17}, {"draft_tokens": "many"},
    {"verify": "lossy"}, {"typical_epsilon": 0}, {"typical_epsilon": 1.5}, {"typical_delta": float("nan")},
    {"stop": ("",)}, {"logprobs": -1}, {"logit_bias": {1: float("inf")}},
    {"allowed_token_ids": (2,), "bad_token_ids": (2,)}, {"allowed_token_ids": ()}, {"seed": 2**65}, {"constraint": 5},
]  # fmt: skip


HUGE = 10**5000  # Python does not write it
NUMBERS = ("seed", "temperature", "top_p", "min_p", "n", "logprobs", "min_tokens", "repetition_penalty",
           "presence_penalty", "frequency_penalty", "draft_tokens")  # fmt: skip


def test_a_number_of_thousands_of_digits_is_named_as_that() -> None:
    for name in NUMBERS:
        with pytest.raises(UsageError, match=f"{name}=a number of thousands of digits is"):
            SamplingParams(**{name: HUGE})
    with pytest.raises(UsageError, match=r"logit_bias.a number of thousands of digits.=a number of"):
        SamplingParams(logit_bias={HUGE: HUGE})
    engine = make_engine(Setup())
    ids = ("bad_token_ids", "allowed_token_ids", "stop_token_ids", "reference")
    for prompt, params in [([HUGE], {}), *(([2], {name: (HUGE,)}) for name in ids)]:
        with pytest.raises(UsageError, match="has token id a number of thousands of digits"):
            engine.add("x", prompt, SamplingParams(**params))
    assert idle(engine)
    engine.add("x", [2], SamplingParams(max_tokens=HUGE, top_k=HUGE))  # as many as fit, and all of them


@pytest.mark.parametrize("params", BAD_PARAMS, ids=str)
def test_impossible_parameters_are_refused_and_named(params: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(params)).split("_")[0]):
        SamplingParams(**params)


def test_the_same_request_id_twice_is_refused() -> None:
    engine = make_engine(Setup())
    engine.add("x", [2], SamplingParams())
    with pytest.raises(UsageError, match="already running"):
        engine.add("x", [2], SamplingParams())


def test_a_constraint_that_cannot_be_made_leaves_no_trace() -> None:
    engine, made = make_engine(Setup()), []

    def make() -> Any:
        if made:
            raise ValueError("no grammar")
        made.append(1)

    with pytest.raises(ValueError, match="no grammar"):
        engine.add("x", [2], SamplingParams(n=2, constraint=make))
    assert idle(engine)
    engine.add("x", [2], SamplingParams(max_tokens=2))
    assert engine.has_work


def test_unseeded_requests_differ_and_report_their_seed() -> None:
    params = SamplingParams(max_tokens=20, temperature=1.2)
    a, b = run(make_engine(Setup(drafter="mtp")), [[2, 3], [2, 3]], params)
    assert a.seed != b.seed
    assert a.token_ids != b.token_ids
    again = run(make_engine(Setup()), [[2, 3]], SamplingParams(max_tokens=20, temperature=1.2, seed=a.seed))[
        0
    ]
    assert again.token_ids == a.token_ids


def test_stats_and_origins_tell_what_happened() -> None:
    prompt, params = prompts(1)[0], SamplingParams(max_tokens=21)
    plain = run(make_engine(Setup()), [prompt], params)[0]
    assert plain.stats.reasons == {"prefill": 1, "no drafter": 20}
    oracle = OracleDrafter([prompt + plain.token_ids])
    done = run(make_engine(Setup(k=4), oracle), [prompt], params)[0]
    assert done.origins.count("draft") == done.stats.accepted == totals([done])[0] == 16
    assert done.stats.steps == 5
    assert done.stats.tokens_per_step == pytest.approx(21 / 5)
    assert done.stats.drafted_by_position == done.stats.accepted_by_position == [4, 4, 4, 4]
    assert done.stats.drafters == {"oracle": 4}


def test_text_streams_and_stop_strings_cut_ids_and_logprobs_alike() -> None:
    tokenizer = tiny_tokenizer()
    prompt = prompts(1)[0]
    free = run(make_engine(Setup(), tokenizer=tokenizer), [prompt], SamplingParams(max_tokens=30))[0]
    assert free.text == tokenizer.decode(free.token_ids, begins=False)
    stop = free.text[10:12]
    oracle = OracleDrafter([prompt + free.token_ids])
    params = SamplingParams(max_tokens=30, stop=(stop,), logprobs=1)
    done = run(make_engine(Setup(k=8), oracle, tokenizer=tokenizer), [prompt], params)[0]
    assert done.finish_reason == "stop"
    assert done.text == free.text[: free.text.index(stop)]
    assert len(done.token_ids) == len(done.logprobs or []) == len(done.origins) == done.stats.emitted


def test_hidden_states_are_kept_only_for_drafters_that_need_them() -> None:
    assert make_engine(Setup(drafter="ngram")).state.hidden is None
    assert isinstance(make_engine(Setup(drafter="mtp")).state.hidden, torch.Tensor)
