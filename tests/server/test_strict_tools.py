"""Strict tools that the model may choose: free text, but a call that has begun fits its schema."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest

from paceline.core import SamplingParams
from paceline.text.formats.gemma_arguments import CLOSE
from paceline.text.formats.gemma_calls import OPEN
from paceline.text.grammar import Grammars
from paceline.text.phases import InsideCalls
from paceline.text.tokenizer import Tokenizer
from server.fake_engine import FakeEngine, make_tokenizer
from server.grammars import calls_and_text, grammars_of
from server.serving import served
from testing import VOCAB, Setup, make_engine, prompts, run, totals

SCHEMA = {
    "type": "object", "required": ["city", "unit"],
    "properties": {"city": {"type": "string", "maxLength": 6}, "unit": {"enum": ["C", "F"]},
                   "days": {"type": "integer"}},
}  # fmt: skip
TOOLS: dict[str, dict[str, Any]] = {"get_weather": SCHEMA, "other": {}}


def written(tokenizer: Tokenizer, grammars: Grammars, before: str, seed: int) -> list[int]:
    """`before`, then random allowed tokens until the call it opens is closed; short strings are preferred."""
    constraint, rng = grammars.compile_strict(TOOLS)(), random.Random(seed)
    out = tokenizer.encode(before, add_bos=False)
    constraint.commit(out)
    for _ in range(2000):
        mask = constraint.masks([])[0]
        assert mask is not None
        allowed = np.flatnonzero(mask).tolist()
        closing = [i for i in allowed if tokenizer.token_text(i) in '"}]|,<>:' or i < 10]
        token = rng.choice(closing if closing and len(out) > 60 else allowed)
        constraint.commit([token])
        out.append(token)
        if tokenizer.decode(out, skip_special=False).endswith(CLOSE):
            return out
    raise AssertionError("the call did not end")


@pytest.mark.parametrize("seed", range(6))
def test_a_call_that_begins_fits_and_free_text_is_free(setup: tuple[Tokenizer, Grammars], seed: int) -> None:
    tokenizer, grammars = setup
    ids = written(tokenizer, grammars, "Let me see <|tool. " + OPEN, seed)
    calls, text = calls_and_text(tokenizer.decode(ids, skip_special=False))
    assert text == "Let me see <|tool. "
    [(name, value)] = calls
    assert name in TOOLS
    if name == "get_weather":
        assert value["unit"] in ("C", "F")
        assert isinstance(value["city"], str)
        assert isinstance(value.get("days", 0), int)


def test_masks_along_a_draft_are_those_of_writing_it(setup: tuple[Tokenizer, Grammars]) -> None:
    """Across both borders, and twice: free, call, free, call, free."""
    tokenizer, grammars = setup
    ids = written(tokenizer, grammars, "ab" + OPEN, 1) + written(tokenizer, grammars, "c" + OPEN, 2)
    ids += tokenizer.encode("end", add_bos=False)
    whole = grammars.compile_strict(TOOLS)().masks(ids)
    assert len(whole) == len(ids) + 1
    for size in (1, 3, 7):
        constraint = grammars.compile_strict(TOOLS)()
        for at in range(0, len(ids), size):
            block = ids[at : at + size]
            constraint.masks([250, 250, *block])
            for ahead, expected in zip(constraint.masks(block), whole[at:], strict=False):
                assert (ahead is None) == (expected is None)
                assert ahead is None or (ahead == expected).all()
            constraint.commit(block)


def test_what_is_not_a_known_tool_cannot_be_called(setup: tuple[Tokenizer, Grammars]) -> None:
    tokenizer, grammars = setup
    ids = tokenizer.encode(OPEN + "call:x", add_bos=False)
    masks = grammars.compile_strict(TOOLS)().masks(ids)
    mask = masks[len(ids) - 1]
    assert mask is not None
    assert not mask[ids[-1]]
    assert {tokenizer.token_text(int(i)) for i in np.flatnonzero(mask)} == {"g", "o"}


@pytest.mark.parametrize("draft_tokens", [0, 7])
def test_the_server_holds_calls_of_strict_tools_to_their_schema(draft_tokens: int) -> None:
    tokenizer = make_tokenizer()
    grammars = grammars_of(tokenizer)
    function = {"name": "get_weather", "parameters": SCHEMA, "strict": True}
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "x"}], "max_tokens": 400, "seed": 3,
        "speculation": {"draft_tokens": draft_tokens},
        "tools": [{"type": "function", "function": function}],
    }  # fmt: skip
    try:
        with served(FakeEngine(tokenizer, script="Sure. " + OPEN), grammars=grammars) as s:
            choice = s.post("/v1/chat/completions", **body).json()["choices"][0]
            assert choice["message"]["content"] == "Sure. "
            [call] = choice["message"]["tool_calls"]
            assert call["function"]["name"] == "get_weather"
            assert json.loads(call["function"]["arguments"])["unit"] in ("C", "F")
            off = s.post("/v1/chat/completions", **body, tool_choice="none").json()["choices"][0]
            assert "tool_calls" not in off["message"]
            function["strict"] = False
            s.post("/v1/chat/completions", **body)
            assert s.engine.last_params is not None
            assert s.engine.last_params.constraint is None
    finally:
        grammars.close()


class TwoOrMore:
    """Inside a call of the tiny vocabulary: two to four of the tokens 5 to 8, then the closing one."""

    def __init__(self) -> None:
        self.count = 0

    def masks(self, draft: Seq[int]) -> list[np.ndarray | None]:
        out: list[np.ndarray | None] = []
        for count in range(self.count, self.count + len(draft) + 1):
            mask = np.zeros(VOCAB, dtype=bool)
            mask[5:9] = count < 4
            mask[4] = count >= 2
            out.append(mask)
        return out

    def commit(self, tokens: Seq[int]) -> None:
        self.count += len(tokens)


@pytest.mark.parametrize("drafter", ["ngram", "mtp", "model", "random"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_text_is_the_same_for_every_drafter(drafter: str, temperature: float) -> None:
    """Calls open and close inside drafted blocks."""
    params = SamplingParams(
        max_tokens=60, temperature=temperature, seed=11, ignore_eos=True, logit_bias={3: 2.0},
        constraint=lambda: InsideCalls(TwoOrMore, 3, 4),
    )  # fmt: skip
    texts = prompts(4)
    plain = run(make_engine(Setup()), texts, params)
    drafted = run(make_engine(Setup(drafter=drafter, k=6)), texts, params)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    assert totals(drafted)[0] > 0
    calls = 0
    for completion in plain:
        inside: int | None = None
        for token in completion.token_ids:
            if inside is None:
                inside = 0 if token == 3 else None
            elif inside >= 2 and token == 4:
                inside, calls = None, calls + 1
            else:
                assert 5 <= token <= 8
                inside += 1
                assert inside <= 4
    assert calls > 0
