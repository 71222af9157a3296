"""The crown: under `match` the text is the same with any drafter or none, whatever else happens."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tokenizers import Regex
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from paceline.core import SamplingParams
from paceline.engine.engine import Engine
from paceline.text.tokenizer import Tokenizer
from testing import VOCAB, Setup, make_engine, prompts, run, tiny_tokenizer, totals

DRAFTERS = ["ngram", "lookahead", "mtp", "states", "model", "random", "scripted", "oracle"]
PARAMS = {
    "greedy": {},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1.2": {"temperature": 1.2},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "repetition": {"temperature": 0.7, "repetition_penalty": 1.3},
    "presence": {"temperature": 0.7, "presence_penalty": 0.7},
    "frequency": {"frequency_penalty": 0.9},
    "penalty window": {"temperature": 0.7, "repetition_penalty": 1.5, "penalty_last_n": 6},
    "bias": {"temperature": 0.7, "logit_bias": {3: 2.5, 5: -4.0}},
    "bad": {"bad_token_ids": (2, 3, 4)},
    "allowed": {"temperature": 1.0, "allowed_token_ids": (2, 5, 7, 11, 13)},
    "min_tokens": {"temperature": 1.0, "stop_token_ids": (2, 3, 4, 5), "min_tokens": 20},
    "stop token": {"temperature": 1.0, "stop_token_ids": (7,)},
    "typical_p": {"temperature": 1.0, "typical_p": 0.6},
    "top_n_sigma": {"temperature": 1.0, "top_n_sigma": 1.0},
    "xtc": {"temperature": 0.8, "xtc_probability": 0.5, "xtc_threshold": 0.1},
    "dynamic temperature": {"temperature": 1.0, "dynatemp_range": 0.9, "dynatemp_exponent": 1.5},
    "temperature last": {"temperature": 1.5, "min_p": 0.2, "temperature_last": True},
    "mirostat": {"temperature": 1.0, "mirostat": 2, "mirostat_tau": 2.0, "mirostat_eta": 0.5},
    "bad words": {"temperature": 1.0, "bad_words": ("v", "kk", "dae")},
    "banned strings": {"temperature": 1.0, "banned_strings": ("x", "ot", "dae")},
    "dry": {"dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_penalty_last_n": 40},
    "everything": {
        "temperature": 0.9, "top_k": 12, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1,
        "presence_penalty": 0.2, "frequency_penalty": 0.2, "logit_bias": {9: 1.0}, "logprobs": 3,
        "typical_p": 0.95, "top_n_sigma": 2.0, "xtc_probability": 0.3, "xtc_threshold": 0.2, "dynatemp_range": 0.5,
        "dry_multiplier": 0.5,
    },
}  # fmt: skip


def letters() -> Tokenizer:
    """Encodes letter by letter."""
    backend = Backend(WordLevel({chr(ord("a") + i): i for i in range(VOCAB)}, unk_token="a"))
    backend.pre_tokenizer = Split(Regex("."), "isolated")
    backend.decoder = Fuse()
    return Tokenizer(backend, {})


def engine_for(setup: Setup, params: SamplingParams) -> Engine:
    """With a tokenizer where texts are named."""
    named = params.bad_words or params.banned_strings
    return make_engine(setup, tokenizer=letters()) if named else make_engine(setup)


def plain(setup: Setup, texts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    setup = replace(setup, drafter="none", pages=200, prefix_cache=False)
    done = run(engine_for(setup, params), texts, params)
    return [c.token_ids for c in done]


def speculated(
    setup: Setup, texts: list[list[int]], params: SamplingParams
) -> tuple[list[list[int]], int, int]:
    if setup.drafter in ("scripted", "oracle"):
        setup = replace(setup, texts=[t + o for t, o in zip(texts, plain(setup, texts, params), strict=True)])
    done = run(engine_for(setup, params), texts, params)
    return [c.token_ids for c in done], *totals(done)


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_parameter_with_every_drafter(drafter: str, name: str) -> None:
    params = SamplingParams(max_tokens=30, seed=11, **PARAMS[name])
    texts = prompts(3, longest=24)
    setup = Setup(drafter=drafter, k=4)
    expected = plain(setup, texts, params)
    got, drafted, accepted = speculated(setup, texts, params)
    assert got == expected
    assert drafted > 0
    if drafter == "oracle":
        assert accepted == drafted
    if drafter == "scripted":
        assert 0 < accepted < drafted
    if PARAMS[name] and name != "stop token":  # the parameter changed something
        neutral = SamplingParams(max_tokens=30, seed=11, temperature=params.temperature)
        if name not in ("temperature 0.7", "temperature 1.2"):
            assert plain(setup, texts, neutral) != expected


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("k", [1, 2, 5, 8])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_draft_lengths_and_batches(drafter: str, k: int, batch: int) -> None:
    params = SamplingParams(max_tokens=24, seed=5, temperature=0.7)
    texts = prompts(batch, seed=k)
    setup = Setup(drafter=drafter, k=k)
    got, drafted, accepted = speculated(setup, texts, params)
    assert got == plain(setup, texts, params)
    assert drafted > 0
    if drafter != "oracle" and (drafter, k) not in (("scripted", 1), ("scripted", 2)):
        assert accepted < drafted


@pytest.mark.parametrize("drafter", ["mtp", "states", "model", "ngram", "lookahead", "scripted"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_preemption(drafter: str, temperature: float) -> None:
    params = SamplingParams(max_tokens=60, seed=8, temperature=temperature)
    texts = prompts(5, seed=4)
    setup = Setup(drafter=drafter, pages=13)
    expected = plain(setup, texts, params)
    if drafter == "scripted":
        setup = replace(setup, texts=[t + o for t, o in zip(texts, expected, strict=True)])
    engine = make_engine(setup)
    done = run(engine, texts, params)
    assert [c.token_ids for c in done] == expected
    assert engine.state.preemptions > 0
    assert totals(done)[0] > totals(done)[1] > 0


@pytest.mark.parametrize("drafter", ["none", "mtp", "states", "model", "ngram", "lookahead"])
def test_prefix_hits(drafter: str) -> None:
    params = SamplingParams(max_tokens=40, seed=8, temperature=0.7)
    stem = prompts(1, seed=2, longest=9)[0] * 50
    texts = [stem[:50] + t for t in prompts(4, seed=6, longest=9)]
    setup = Setup(drafter=drafter, prefix_cache=True, step_tokens=500)
    expected = plain(setup, texts, params)
    engine = make_engine(setup)
    for text, want in zip(texts, expected, strict=True):
        (done,) = run(engine, [text], params)
        assert done.token_ids == want
    assert done.stats.cached_prompt_tokens >= 48
    again = run(engine, texts, params)
    assert [c.token_ids for c in again] == expected
    assert all(c.stats.cached_prompt_tokens >= 48 for c in again)


@pytest.mark.parametrize("prefix", [False, True], ids=["no prefix", "prefix hit"])
@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "preempted"])
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("drafter", ["ngram", "mtp", "states", "model", "scripted"])
def test_batch_by_preemption_by_prefix(
    drafter: str, temperature: float, batch: int, tight: bool, prefix: bool
) -> None:
    """The full product. One text alone can only be preempted by a guest, which is there in every tight batch."""
    stem = [2 + (i * 7) % (VOCAB - 2) for i in range(34)]
    texts = [stem + t for t in prompts(batch, seed=batch, longest=8)]
    guests = prompts(2, seed=77, longest=12) if tight else []
    params = SamplingParams(max_tokens=22, seed=6, temperature=temperature)
    setup = Setup(
        drafter=drafter, prefix_cache=prefix, pages=6 if tight else 64, step_tokens=64, prefill_chunk=32
    )
    expected = plain(setup, texts + guests, params)
    if drafter == "scripted":
        setup = replace(setup, texts=[t + o for t, o in zip(texts + guests, expected, strict=True)])
    engine = make_engine(setup)
    if prefix:
        run(engine, texts[:1], replace(params, max_tokens=2))
    done = run(engine, texts + guests, params)
    assert [c.token_ids for c in done] == expected
    assert (engine.state.preemptions > 0) == tight
    assert not prefix or done[0].stats.cached_prompt_tokens == 32
    assert totals(done)[0] > totals(done)[1] >= 0


@pytest.mark.parametrize("k", [2, 5, 8])
@pytest.mark.parametrize("drafter", ["oracle", "scripted", "mtp", "states", "ngram"])
def test_stop_strings_inside_blocks(drafter: str, k: int) -> None:
    """Strings of one to three tokens, taken from the text itself at every place of a block."""
    (prompt,) = prompts(1, seed=6)
    tokenizer = tiny_tokenizer()
    free = plain(Setup(), [prompt], SamplingParams(max_tokens=30))[0]
    setup = Setup(drafter=drafter, k=k, texts=[prompt + free])
    for at in range(3, 20, 2):
        stop = (tokenizer.decode(free[at : at + 1 + at % 3]), "zz")
        params = SamplingParams(max_tokens=30, stop=stop, min_tokens=at % 2 * 3, logprobs=0)
        (want,) = run(make_engine(Setup(), tokenizer=tokenizer), [prompt], params)
        (got,) = run(make_engine(setup, tokenizer=tokenizer), [prompt], params)
        assert (got.text, got.token_ids, got.finish_reason) == (want.text, want.token_ids, want.finish_reason)
        assert len(got.logprobs or []) == len(got.origins) == len(got.token_ids)
        assert got.finish_reason == "stop"


def test_per_request_settings_in_one_batch() -> None:
    rng = random.Random(2)
    texts = prompts(8, seed=9)
    each = [
        SamplingParams(
            max_tokens=rng.randrange(1, 40),
            seed=i,
            temperature=rng.choice([0.0, 0.8]),
            draft_tokens=rng.choice([0, 1, 3, 8, None]),
            drafter=rng.choice([None, "none"]),
            logprobs=rng.choice([None, 2]),
        )
        for i in range(8)
    ]
    alone = [
        run(make_engine(Setup()), [t], replace(p, drafter=None))[0] for t, p in zip(texts, each, strict=True)
    ]
    together = run(make_engine(Setup(drafter="mtp", max_batch=3)), texts, each)
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert [len(c.logprobs or []) for c in together] == [len(c.logprobs or []) for c in alone]
    for a, b in zip(together, alone, strict=True):
        for x, y in zip(a.logprobs or [], b.logprobs or [], strict=True):
            assert x.token == y.token
            assert x.raw == pytest.approx(y.raw, abs=1e-6)
            assert [t for t, _ in x.top] == [t for t, _ in y.top]
            assert [p for _, p in x.top] == pytest.approx([p for _, p in y.top], abs=1e-6)
    for completion, params in zip(together, each, strict=True):
        if params.drafter == "none" or params.draft_tokens == 0:
            assert completion.stats.drafted == 0
            assert set(completion.stats.reasons) <= {"disabled by request", "prefill"}


@pytest.mark.parametrize("rule", ["match", "reject", "block"])
def test_ends_are_the_same_inside_a_block(rule: str) -> None:
    """The end token is taken from the model's own text, so that it falls inside accepted drafts."""
    texts = prompts(4, seed=3)
    params = SamplingParams(max_tokens=50, verify=rule)  # greedy: every rule is the same
    free = plain(Setup(), texts, params)
    for stop in {t for out in free for t in out[5:25]}:
        ends = replace(params, stop_token_ids=(stop,))
        expected = plain(Setup(), texts, ends)
        setup = Setup(drafter="oracle", k=8, texts=[t + o for t, o in zip(texts, free, strict=True)])
        done = run(make_engine(setup), texts, ends)
        assert [c.token_ids for c in done] == expected
        for c in done:
            assert stop not in c.token_ids[:-1]
            assert (c.finish_reason == "stop") == (c.token_ids[-1] == stop)
            assert c.stats.emitted == len(c.token_ids)


def test_length_and_context_limits_hold_inside_a_block() -> None:
    texts = prompts(2, seed=3, longest=10)
    for limit in range(1, 12):
        params = SamplingParams(max_tokens=limit)
        expected = plain(Setup(), texts, params)
        texted = [
            t + o for t, o in zip(texts, plain(Setup(), texts, SamplingParams(max_tokens=30)), strict=True)
        ]
        done = run(make_engine(Setup(drafter="oracle", k=8, texts=texted)), texts, params)
        assert [c.token_ids for c in done] == expected
        assert {c.finish_reason for c in done} == {"length"}
    short = make_engine(Setup(drafter="oracle", k=8, texts=texted, max_tokens=20))
    done = run(short, texts, SamplingParams(max_tokens=100))
    assert [len(c.prompt_token_ids) + len(c.token_ids) for c in done] == [20, 20]
    assert {c.finish_reason for c in done} == {"length"}


def test_siblings_share_the_prompt_and_differ() -> None:
    engine = make_engine(Setup(drafter="mtp", prefix_cache=True))
    prompt = [t % VOCAB for t in range(40)]
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=1, n=3)
    done = engine.run({"a": (prompt, params)})["a"]
    assert [c.index for c in done] == [0, 1, 2]
    assert len({tuple(c.token_ids) for c in done}) == 3
    assert done[0].token_ids == run(make_engine(Setup()), [prompt], replace(params, n=1))[0].token_ids
    assert all(c.stats.cached_prompt_tokens == 32 for c in done[1:])
