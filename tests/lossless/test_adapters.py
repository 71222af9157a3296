"""Adapters by request: a text is that of no drafter and of no neighbour, and shares no K/V with other adapters' texts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.core import SamplingParams
from testing import Setup, make_engine, prompts, run, totals

NAMES = ("a", "b")
BLENDS: list[dict[str, float]] = [{}, {"a": 1.0}, {"b": 1.0}, {"a": 0.5, "b": -1.0}]
DRAFTERS = ["ngram", "lookahead", "mtp", "states", "model", "random", "scripted", "oracle"]


def asked(temperature: float, **more: object) -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=30, seed=7, temperature=temperature, lora=blend, **more)  # type: ignore[arg-type]
        for blend in BLENDS
    ]


def alone(texts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    """Each text by itself, without a drafter, without shared prefixes."""
    engine = make_engine(Setup(pages=200), adapters=NAMES)
    return [run(engine, [text], one)[0].token_ids for text, one in zip(texts, params, strict=True)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_side_by_side_with_every_drafter(drafter: str, temperature: float) -> None:
    texts, params = [prompts(1, seed=3)[0]] * len(BLENDS), asked(temperature)
    expected = alone(texts, params)
    assert len({tuple(text) for text in expected}) == len(BLENDS), "each blend writes a text of its own"
    setup = Setup(drafter=drafter)
    if drafter in ("scripted", "oracle"):
        setup = replace(setup, texts=[t + o for t, o in zip(texts, expected, strict=True)])
    done = run(make_engine(setup, adapters=NAMES), texts, params)
    assert [one.token_ids for one in done] == expected
    drafted, accepted = totals(done)
    assert drafted >= accepted
    assert drafted > 0


@pytest.mark.parametrize("drafter", ["mtp", "states"])
def test_trees(drafter: str) -> None:
    texts, params = prompts(len(BLENDS), seed=5), asked(0.0)
    done = run(make_engine(Setup(drafter=drafter, tree=(3, 2), pages=200), adapters=NAMES), texts, params)
    assert [one.token_ids for one in done] == alone(texts, params)


@pytest.mark.parametrize("drafter", ["none", "states", "model"])
def test_prefixes_are_shared_under_one_blend_only(drafter: str) -> None:
    stem = prompts(1, seed=2, longest=9)[0] * 50
    texts, params = [stem[:50]] * len(BLENDS), asked(0.8)
    expected = alone(texts, params)
    engine = make_engine(
        Setup(drafter=drafter, prefix_cache=True, step_tokens=500, pages=200), adapters=NAMES
    )
    for cached in (0, 48):
        for text, one, want in zip(texts, params, expected, strict=True):
            (done,) = run(engine, [text], one)
            assert done.token_ids == want
            assert done.stats.cached_prompt_tokens == cached, one.lora


@pytest.mark.parametrize("drafter", ["mtp", "ngram"])
def test_preemption(drafter: str) -> None:
    texts, params = prompts(len(BLENDS), seed=4), [replace(one, max_tokens=60) for one in asked(1.0)]
    engine = make_engine(Setup(drafter=drafter, pages=11), adapters=NAMES)
    done = run(engine, texts, params)
    assert [one.token_ids for one in done] == alone(texts, params)
    assert engine.state.preemptions > 0
