"""A whole draft round in one native call says exactly what its steps say one by one."""

from __future__ import annotations

import math
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.engine.picker import StepPicker
from paceline.ops import native
from paceline.ops.base import RoundStart, Stop

pytestmark = pytest.mark.skipif(not native.available(), reason="needs the compiled kernels")
MAKE = StepPicker.__init__
PROMPTS = ["class Stack:", "def parse(self, text):\n    return", "import os\n"]


def drafts(params: SamplingParams) -> list[list[list[int]]]:
    """Every proposal of every text, in order, with batches whose rows draft different numbers of tokens."""
    llm = LLM("demo", drafter="mtp", draft_tokens=5, max_model_len=256)
    out: list[list[list[int]]] = []
    for prompt in PROMPTS:
        out.append([d.proposed for d in llm.stream(prompt, params)])
    return out


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.8},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 40},
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 0.8, "repetition_penalty": 1.2},
        {"temperature": 0.8, "verify": "reject"},
    ],
    ids=str,
)
def test_one_call_equals_its_steps(params: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = []
    whole = native.NativeRunner.draft_round

    def counted(self: native.NativeRunner, *args: Any) -> Any:
        out = whole(self, *args)
        rounds.append(out is not None)
        return out

    monkeypatch.setattr(native.NativeRunner, "draft_round", counted)
    one = SamplingParams(max_tokens=24, seed=4, **params)
    together = drafts(one)
    simple = "repetition_penalty" not in params and "verify" not in params
    assert any(rounds) == simple  # edited logits and other rules go step by step
    monkeypatch.setattr(native.NativeRunner, "draft_round", lambda self, *args: None)
    assert drafts(one) == together
    assert any(proposal for text in together for proposal in text)


def planned(monkeypatch: pytest.MonkeyPatch, stop: Stop) -> None:
    """Let all rows of all rounds end as this stop says."""
    monkeypatch.setattr(
        StepPicker,
        "__init__",
        lambda self, requests, stops, *rest: MAKE(self, requests, [stop] * len(requests), *rest),
    )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_ends_where_its_confidence_does(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one call as step by step, side by side with rows that go on."""
    stop = Stop(16, (0.125, 0.25, 0.5, 1.0), ((0.2, 0.8),) * 12, price=0.05)
    planned(monkeypatch, stop)
    params = [SamplingParams(max_tokens=24, temperature=temperature, seed=i) for i in range(3)]

    def lengths(draft_tokens: int) -> tuple[list[list[int]], list[list[int]]]:
        llm = LLM("demo", drafter="mtp", draft_tokens=draft_tokens, max_model_len=256)
        texts = llm.generate(PROMPTS, params)
        return [t.token_ids for t in texts], [t.stats.drafted_by_position for t in texts]

    steps: list[int] = []
    whole = native.NativeRunner.draft_round

    def counted(self: native.NativeRunner, *args: Any) -> Any:
        out = whole(self, *args)
        steps.append(0 if out is None else len(out.tokens))
        return out

    monkeypatch.setattr(native.NativeRunner, "draft_round", counted)
    texts, together = lengths(6)
    assert set(steps) > {1, 2}  # rounds end as soon as nobody goes on,
    assert max(steps) == 5  # at the latest where a stop says no more
    assert all(counts == sorted(counts, reverse=True) and counts[0] > counts[-1] for counts in together)
    monkeypatch.setattr(native.NativeRunner, "draft_round", lambda self, *args: None)
    assert lengths(6) == (texts, together)
    assert lengths(0)[0] == texts


def test_a_stop_has_to_say_what_a_confidence_is_worth() -> None:
    llm = LLM("demo", drafter="mtp", draft_tokens=2, max_model_len=256)
    llm.generate(PROMPTS[0], SamplingParams(max_tokens=4))
    net, state = llm.engine.state.drafters["mtp"].net, llm.engine.state  # type: ignore[attr-defined]
    start, rule = RoundStart([5], [3], [0]), (0.0, 1, 4, 0, 1.0, -math.inf)
    with pytest.raises(ValueError, match="worth"):
        net.draft_round(start, state.hidden, state.cache, [rule], [Stop(4, (0.5,))])


def test_batches_with_different_lengths() -> None:
    each = [SamplingParams(max_tokens=20, temperature=0.8, seed=i, draft_tokens=i) for i in range(1, 6)]
    texts = [PROMPTS[i % 3] for i in range(5)]
    together = LLM("demo", drafter="mtp", max_model_len=256).generate(texts, each)
    alone = LLM("demo", drafter="none", max_model_len=256).generate(texts, each)
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert [len(c.stats.drafted_by_position) for c in together] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("apart", [False, True], ids=["one call", "step by step"])
def test_rows_that_are_worth_a_step_together_take_it(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gains 0.3 tokens net of its own price by each further one, and a call of the network takes 0.4 or 0.7."""
    if apart:
        monkeypatch.setattr(native.NativeRunner, "draft_round", lambda self, *args: None)

    def longest(texts: int, step: float) -> int:
        stop = Stop(16, (0.5, 0.5), ((1.0, 0.0),) * 12, price=0.2, step=step)
        planned(monkeypatch, stop)
        llm = LLM("demo", drafter="mtp", draft_tokens=6, max_model_len=256)
        done = llm.generate(PROMPTS[:texts], SamplingParams(max_tokens=16, ignore_eos=True, temperature=0))
        return max(len(text.stats.drafted_by_position) for text in done)

    assert longest(1, 0.4) == 1
    assert longest(1, 0.2) == 3  # nothing is known of the chances of a fourth
    assert longest(2, 0.4) == 3
    assert longest(2, 0.7) == 1
    assert longest(3, 0.7) == 3
