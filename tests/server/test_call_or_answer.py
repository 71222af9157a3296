"""response_format together with tools: the model calls a tool, or answers in the format, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from paceline.errors import UsageError
from paceline.text.formats.gemma_calls import OPEN
from paceline.text.grammar import Grammars
from paceline.text.tokenizer import Tokenizer
from server.fake_engine import FakeEngine, make_tokenizer
from server.grammars import calls_in, grammars_of
from server.serving import served
from server.test_grammar import SCHEMA, TOOLS, sample


def test_any_sample_is_calls_or_the_answer(setup: tuple[Tokenizer, Grammars]) -> None:
    tokenizer, grammars = setup
    make = grammars.compile_either("json", json.dumps(SCHEMA), TOOLS, 2)
    called = answered = 0
    for seed in range(24):
        text = sample(tokenizer, make(), seed, bored=30)
        if text.startswith(OPEN):
            called += 1
            calls = calls_in(text)
            assert 1 <= len(calls) <= 2
            for name, arguments in calls:
                assert arguments == {} if name == "ping" else arguments["unit"] in ("C", "F")
        else:
            answered += 1
            value = json.loads(text)
            assert 0 <= value["age"] <= 150
            assert set(value) <= {"name", "age", "tags"}
    assert called
    assert answered


@pytest.mark.parametrize("text", ['{"name":"ab","age":12}', OPEN + "call:ping{}<tool_call|>"])
def test_masks_along_a_draft_are_those_of_writing_it(setup: tuple[Tokenizer, Grammars], text: str) -> None:
    """From the first token, which decides, to behind the end; other drafts in between leave no trace."""
    tokenizer, grammars = setup
    make = grammars.compile_either("json", json.dumps(SCHEMA), TOOLS, 1)
    ids = [*tokenizer.encode(text, add_bos=False), 1]
    whole = make().masks(ids)
    other = tokenizer.encode(OPEN + "call:get", add_bos=False)
    for size in (1, 3, 7):
        constraint = make()
        for at in range(0, len(ids), size):
            constraint.masks(other)
            constraint.masks([250, 250])
            for ahead, expected in zip(constraint.masks(ids[at : at + size]), whole[at:], strict=False):
                assert ahead is not None
                assert (ahead == expected).all()
            constraint.commit(ids[at : at + size])
    assert whole[-1] is not None
    assert np.flatnonzero(whole[-1]).tolist() == [1, 4]


@pytest.mark.parametrize(
    ("kind", "source", "text"),
    [("lark", 'start: "yes" | calls\ncalls: "no"', "no"), ("regex", "n[ou]", "nu")],
)
def test_other_grammars_can_be_the_answer(
    setup: tuple[Tokenizer, Grammars], kind: str, source: str, text: str
) -> None:
    tokenizer, grammars = setup
    ids = tokenizer.encode(text, add_bos=False)
    make = grammars.compile_either(kind, source, TOOLS, 1)
    for masks in (make().masks([*ids, 1]), make().masks(tokenizer.encode(OPEN, add_bos=False))):
        assert all(mask is not None for mask in masks)
    assert [bool(m[i]) for m, i in zip(make().masks(ids), [*ids, 1], strict=True) if m is not None] == [
        True
    ] * 3


@pytest.mark.parametrize("source", ["start: @nothing", "start: ("])
def test_answers_that_cannot_be_compiled_are_refused(setup: tuple[Tokenizer, Grammars], source: str) -> None:
    with pytest.raises(UsageError):
        setup[1].compile_either("lark", source, TOOLS, 1)


FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def test_the_server_takes_both_and_either_comes() -> None:
    """The fake engine picks among the allowed tokens by seed; `strict` tells whose arguments are held."""
    tokenizer = make_tokenizer()
    grammars = grammars_of(tokenizer)
    functions = [{"name": name, "parameters": schema, "strict": True} for name, schema in TOOLS.items()]
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "x"}], "max_tokens": 450, "response_format": FORMAT,
        "tools": [{"type": "function", "function": function} for function in functions],
    }  # fmt: skip
    try:
        with served(FakeEngine(tokenizer), grammars=grammars) as s:
            reasons = set()
            for seed in range(12):
                for more in ({"tool_choice": "auto"}, {"parallel_tool_calls": False}):
                    choice = s.post("/v1/chat/completions", **body, **more, seed=seed).json()["choices"][0]
                    message, reason = choice["message"], choice["finish_reason"]
                    if reason == "length":
                        continue
                    reasons.add(reason)
                    if reason == "stop":
                        assert 0 <= json.loads(message["content"])["age"] <= 150
                        assert "tool_calls" not in message
                        continue
                    assert message["content"] is None
                    assert len(message["tool_calls"]) <= (1 if "parallel_tool_calls" in more else 8)
                    for call in message["tool_calls"]:
                        arguments = json.loads(call["function"]["arguments"])
                        assert call["function"]["name"] == "ping" or arguments["unit"] in ("C", "F")
            assert reasons == {"stop", "tool_calls"}
            for choice, wanted in (("none", "{"), ("required", OPEN)):
                s.post("/v1/chat/completions", **(body | {"tool_choice": choice, "max_tokens": 1}))
                assert s.engine.last_params is not None
                assert s.engine.last_params.constraint is not None
                [mask] = s.engine.last_params.constraint().masks([])
                assert [tokenizer.token_text(i) for i in np.flatnonzero(mask).tolist()] == [wanted]
            for kind, source in (("regex", "("), ("grammar", "start: @answer")):
                bad = body | {"response_format": {"type": kind, kind: source}}
                for choice in ("auto", "required"):
                    refused = s.post("/v1/chat/completions", **bad, tool_choice=choice)
                    assert refused.json()["error"]["param"] == f"response_format.{kind}"
    finally:
        grammars.close()
