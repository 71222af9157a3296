"""Grammars over the tests' tokenizer, with and without Gemma's marks, and the calls that a text makes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.text.formats.events import CallArguments, CallStart
from paceline.text.formats.gemma_calls import GemmaCallParser
from paceline.text.grammar import Grammars
from paceline.text.tokenizer import Tokenizer
from paceline.text.vocabulary import Vocabulary
from server.fake_engine import MARKS, make_tokenizer


def grammars_of(tokenizer: Tokenizer, timeout: float = 5.0) -> Grammars:
    ids = {mark: tokenizer.token_id(mark) for mark in MARKS}
    marks = {mark: i for mark, i in ids.items() if i is not None}
    return Grammars(Vocabulary(tokenizer._backend.to_str(), 300, (1, 4)), marks, timeout)


@pytest.fixture(scope="module", params=[True, False], ids=["marks", "no marks"])
def setup(request: pytest.FixtureRequest) -> Iterator[tuple[Tokenizer, Grammars]]:
    tokenizer = make_tokenizer(request.param)
    grammars = grammars_of(tokenizer)
    yield tokenizer, grammars
    grammars.close()


def calls_and_text(text: str) -> tuple[list[tuple[str, Any]], str]:
    """The calls of a text, with their arguments as values, and what stands around them."""
    parser, calls, rest = GemmaCallParser(), [], ""
    for event in parser.feed(text) + parser.finish():
        match event:
            case CallStart(_, name):
                calls.append([name, ""])
            case CallArguments(_, piece):
                calls[-1][1] += piece
            case _:
                rest += event.text
    return [(name, json.loads(arguments)) for name, arguments in calls], rest


def calls_in(text: str) -> list[tuple[str, Any]]:
    """The calls of a text that holds nothing else."""
    calls, rest = calls_and_text(text)
    assert not rest, f"text outside of calls: {rest}"
    return calls
