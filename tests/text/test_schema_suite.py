"""A public suite of schemas, as response_format and as tools: what is written fits, or the keyword is named.

Models are played by chance over byte tokens, and each value of the suite that does not fit is tried as an answer.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest

from families import tokenizer_of
from paceline.errors import UsageError
from paceline.text.chat import ChatTemplate
from paceline.text.formats.choose import format_of
from paceline.text.formats.lark import Lark
from paceline.text.grammar import to_grammar
from paceline.text.schema_formats import FORMATS
from paceline.text.schemas import held, held_arguments
from paceline.text.tokenizer import Tokenizer
from text.test_formats import run
from text.test_schemas import BACKEND, LIBRARY

LINES = (
    (Path(__file__).parent / "suites" / "json_schema_2020_12.jsonl").read_text(encoding="utf-8").splitlines()
)
SUITE: list[tuple[str, str, Any, list[tuple[Any, bool]]]] = [json.loads(line) for line in LINES]
CHECKER = jsonschema.FormatChecker(formats=())
CHECKER.checkers = {
    k: v for k, v in jsonschema.Draft202012Validator.FORMAT_CHECKER.checkers.items() if k in FORMATS
}


def compiled(library: Any, grammar: str) -> Any:
    matcher = llguidance.LLMatcher(library, grammar, log_level=0)
    matcher.compute_bitmask()
    if matcher.is_error():
        raise UsageError(str(matcher.get_error()).partition("\n<state>")[0])
    return matcher


def words(schema: Any) -> set[str]:
    if isinstance(schema, list):
        return set().union(*map(words, schema))
    return set(schema).union(*map(words, schema.values())) if isinstance(schema, dict) else set()


def or_refusal(schema: Any, make: Callable[[], Any]) -> Any:
    """What is made of a schema; None where it is refused by the name of one of its words."""
    try:
        return make()
    except UsageError as error:
        message = str(error)
    assert any(word in message for word in words(schema) | {"schema"}), (schema, message)
    return None


def format_matcher(schema: Any) -> Any:
    return compiled(LIBRARY, to_grammar("json", json.dumps(held(schema))))


def accepts(matcher: Any, value: Any) -> bool:
    text = json.dumps(value, ensure_ascii=False)
    for token in BACKEND.encode(text).ids:
        if matcher.is_stopped() or not matcher.consume_token(token):
            return False
    return bool(matcher.is_accepting())


def test_as_response_format_no_value_that_does_not_fit_is_let_through() -> None:
    held_ones = right = 0
    for file, about, schema, values in SUITE:
        matcher = or_refusal(schema, partial(format_matcher, schema))
        if matcher is None:
            continue
        held_ones += 1
        for value, fits in values:
            let = accepts(matcher.deep_copy(), value)
            assert fits or not let, (file, about, schema, value)
            right += fits and let
    assert (held_ones, right) > (200, 600)


def chosen(matcher: Any, tokenizer: Tokenizer, closing: set[int], seed: int) -> str | None:
    """A text by chance; None for one that does not end soon."""
    rng, ids = random.Random(seed), list[int]()
    while not matcher.is_stopped() and len(ids) < 200:
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        assert not matcher.is_error(), matcher.get_error()
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[: tokenizer.vocab_size]).tolist()
        if 1 in allowed:
            break
        allowed = [i for i in allowed if not tokenizer.token_text(i).isspace()] or allowed
        ends = [i for i in allowed if i in closing]
        token = rng.choice(ends if ends and (rng.random() < 0.3 or len(ids) > 60) else allowed)
        assert matcher.consume_token(token)
        ids.append(token)
    return tokenizer.decode(ids, skip_special=False) if len(ids) < 200 else None


def maker_of(name: str) -> Callable[[dict[str, Any], int], str | None]:
    tokenizer = tokenizer_of(name)
    calls = format_of(tokenizer).calls
    ChatTemplate.of(tokenizer).close()
    assert calls is not None
    ids = {mark: tokenizer.token_id(mark) for mark in calls.marks}
    marks = {mark: i for mark, i in ids.items() if i is not None}
    library = llguidance.LLTokenizer(tokenizer.to_json(), n_vocab=tokenizer.vocab_size, eos_token=1)
    closing = {i for i in range(tokenizer.vocab_size) if tokenizer.token_text(i) in '"]}>'} | set(
        marks.values()
    )

    def made(schema: dict[str, Any], seed: int) -> str | None:
        lark = Lark(marks)
        inside = calls.unit(lark, {"f": held_arguments(schema)}, 1)
        start = lark.text(f"start: {lark.mark(calls.opening)} {inside} {lark.mark(calls.closing)}")
        grammar = str(llguidance.LLMatcher.grammar_from_lark(start))
        return chosen(compiled(library, grammar), tokenizer, closing, seed)

    return made


@pytest.mark.parametrize("name", ["families/glm4moe", "google_v5", "families/mistral_small_3_2"])
def test_as_tools_what_is_called_fits(name: str) -> None:
    """In tags, in Gemma's notation and in JSON: the argument is the schema, or the schema is the arguments'."""
    made = maker_of(name)
    tokenizer = tokenizer_of(name)
    chat = format_of(tokenizer)
    ChatTemplate.of(tokenizer).close()
    called = 0
    for _, about, schema, _ in SUITE:
        whole = isinstance(schema, dict) and (
            "properties" in schema or "$defs" in schema or '"#' in json.dumps(schema)
        )
        inner = {
            "type": "object",
            "properties": {"x": schema},
            "required": ["x"],
            "additionalProperties": False,
        }
        arguments = schema if whole else inner
        text = or_refusal(arguments, partial(made, arguments, len(about)))
        if text is None:
            continue
        thought, said, [(_, written)] = run(chat, [text], False, {"f": arguments})
        assert (thought, said) == ("", "")
        jsonschema.Draft202012Validator(arguments, format_checker=CHECKER).validate(json.loads(written))
        called += 1
    assert called > 150
