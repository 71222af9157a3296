"""Strict tools that the model may choose: free text, but a call that has begun fits its schema."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence as Seq
from typing import Any

import jsonschema
import numpy as np
import pytest

from paceline.core import SamplingParams
from paceline.text.formats.gemma_arguments import CLOSE
from paceline.text.formats.gemma_calls import OPEN
from paceline.text.grammar import Grammars
from paceline.text.phases import InsideCalls
from paceline.text.schemas import held_arguments
from paceline.text.tokenizer import Tokenizer
from server.fake_engine import FakeEngine, make_tokenizer
from server.grammars import calls_and_text, calls_in, grammars_of
from server.serving import served
from server.test_grammar import sample
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


HELD: list[dict[str, Any]] = [
    {"x": {"type": "integer", "minimum": 1, "maximum": 3}},
    {"x": {"type": "number", "exclusiveMinimum": 0, "multipleOf": 0.5}},
    {"x": {"type": "string", "pattern": "^[a-c]{2}$"}},
    {"x": {"type": "string", "pattern": "^[ab]{0,2}b/[ab]*$", "maxLength": 5}},
    {"x": {"type": "string", "format": "date"}},
    {"x": {"type": "string", "format": "uri"}},
    {"x": {"type": "string", "format": "phone"}},
    {"x": {"allOf": [{"type": "string", "minLength": 2}, {"pattern": "^a"}]}},
    {"x": {"type": "integer", "multipleOf": 7}},
    {
        "x": {
            "allOf": [
                {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]},
                {"properties": {"b": {"type": "null"}}, "required": ["b"]},
            ]
        }
    },
    {"x": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}},
    {"x": {"type": "array", "maxItems": 0}},
    {"x": {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True, "minItems": 1}},
    {"x": {"const": {"k": [1, "v", None]}}},
    {
        "x": {
            "oneOf": [
                {"type": "object", "properties": {"k": {"const": "a"}}},
                {"type": "object", "properties": {"k": {"const": "b"}}},
            ]
        }
    },
    {"x": {"type": "object", "additionalProperties": {"type": "integer", "minimum": 5, "maximum": 9}}},
    {"x": {"type": ["integer", "null"]}},
    {
        "x": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "additionalProperties": False,
            "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
        }
    },
]


@pytest.mark.parametrize("properties", HELD, ids=lambda given: json.dumps(given["x"])[:50])
def test_arguments_fit_whatever_the_schema_says(
    setup: tuple[Tokenizer, Grammars], properties: dict[str, Any]
) -> None:
    """The same schemas as for an answer, in the model's notation."""
    tokenizer, grammars = setup
    schema = {"type": "object", "properties": properties, "required": ["x"]}
    make = grammars.compile_call({"f": held_arguments(schema)}, 1)
    for seed in range(4):
        [(name, value)] = calls_in(sample(tokenizer, make(), seed, bored=30))
        assert name == "f"
        jsonschema.Draft202012Validator(schema).validate(value)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("inner", "word"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {"type": "integer"}}, "contains"),
        ({"if": {"type": "string"}, "then": {"maxLength": 3}}, "if"),
        ({"type": "object", "minProperties": 1}, "minProperties"),
        ({"oneOf": [{"type": "string"}, {"type": "string"}]}, "oneOf"),
        ({"allOf": [{"type": "string", "maxLength": 1}, {"maxLength": 2}]}, "allOf"),
    ],
)
def test_what_cannot_be_held_is_refused_by_name(inner: dict[str, Any], word: str, strict: bool) -> None:
    """Of strict tools, and of tools that have to be called; others take any arguments."""
    tokenizer = make_tokenizer()
    grammars = grammars_of(tokenizer)
    tool = {"name": "f", "strict": strict, "parameters": {"type": "object", "properties": {"x": inner}}}
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": tool}],
    }
    with served(FakeEngine(tokenizer), grammars=grammars) as s:
        for choice in ("auto", "required"):
            answer = s.post("/v1/chat/completions", tool_choice=choice, max_tokens=3, **body)
            if choice == "auto" and not strict:
                assert answer.status_code == 200, answer.text
            else:
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools"), answer.text
                assert word in answer.json()["error"]["message"]
    grammars.close()


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
