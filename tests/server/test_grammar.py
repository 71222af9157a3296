"""Grammars: valid text whatever is sampled, looking ahead changes nothing, bounded in time."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import numpy as np
import pytest

from paceline.chat.forms import Limits, checked_schema
from paceline.core import Constraint
from paceline.errors import UsageError
from paceline.text.grammar import GrammarConstraint, Grammars
from paceline.text.phases import AfterThinking, BoundedThinking
from paceline.text.tokenizer import Tokenizer
from server.fake_engine import make_tokenizer
from server.grammars import calls_in, grammars_of

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"], "additionalProperties": False,
}  # fmt: skip


def sample(tokenizer: Tokenizer, constraint: Constraint, seed: int, bored: int = 60) -> str:
    """Text of random allowed tokens; after `bored` tokens those that close things are preferred."""
    rng, out = random.Random(seed), []
    for _ in range(3000):
        mask = constraint.masks([])[0]
        assert mask is not None
        assert mask.shape == (300,)
        allowed = np.flatnonzero(mask).tolist()
        closing = [i for i in allowed if i in (1, 4) or tokenizer.token_text(i) in '"}]|,<>:' or i < 10]
        token = rng.choice(closing if closing and len(out) > bored else allowed)
        constraint.commit([token])
        if token in (1, 4):
            return "".join(tokenizer.token_text(i) for i in out)
        out.append(token)
    raise AssertionError("the grammar did not end")


@pytest.mark.parametrize("seed", range(8))
def test_any_sample_fits_the_schema(setup: tuple[Tokenizer, Grammars], seed: int) -> None:
    tokenizer, grammars = setup
    value = json.loads(sample(tokenizer, grammars.compile("json", json.dumps(SCHEMA))(), seed))
    assert 0 <= value["age"] <= 150
    assert isinstance(value["name"], str)
    assert set(value) <= {"name", "age", "tags"}


def test_a_mask_is_computed_once_however_a_draft_is_asked_about(
    setup: tuple[Tokenizer, Grammars], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter asks after each token that it draws, a verifier for all of them, a tree along each of its branches."""
    tokenizer, grammars = setup
    computed: list[int] = []
    made = GrammarConstraint._mask
    monkeypatch.setattr(GrammarConstraint, "_mask", lambda self: computed.append(1) or made(self))
    ids = tokenizer.encode('{"name":"ab","age":12}', add_bos=False)
    constraint, fresh = (grammars.compile("json", json.dumps(SCHEMA))() for _ in range(2))
    whole = fresh.masks(ids[:8])
    computed.clear()
    for size in range(9):
        found = constraint.masks(ids[:size])
        assert all(np.array_equal(a, b) for a, b in zip(found, whole[: size + 1], strict=True))
    assert len(computed) == 9
    wrong = next(int(i) for i in np.flatnonzero(~whole[5]))
    assert len(constraint.masks([*ids[:5], wrong, *ids[5:8]])) == 10
    assert len(computed) == 9
    constraint.commit(ids[:3])
    for size in (5, 2, 4, 5):
        found = constraint.masks(ids[3 : 3 + size])
        assert all(np.array_equal(a, b) for a, b in zip(found, whole[3 : 4 + size], strict=True))
    assert len(computed) == 9 + 6


def test_looking_ahead_changes_nothing(setup: tuple[Tokenizer, Grammars]) -> None:
    tokenizer, grammars = setup
    text = '{"name":"ab","age":12}'
    ids = tokenizer.encode(text, add_bos=False)
    constraint = grammars.compile("json", json.dumps(SCHEMA))()
    one_by_one = []
    for token in ids:
        constraint.masks([5, 6, 7])
        one_by_one.append(constraint.masks([])[0])
        ahead = constraint.masks([token, 250, 250])
        assert len(ahead) == 4
        constraint.commit([token])
    one_by_one.append(constraint.masks([])[0])
    whole = grammars.compile("json", json.dumps(SCHEMA))().masks(ids)
    for a, b in zip(one_by_one, whole, strict=True):
        assert a is not None
        assert b is not None
        assert (a == b).all()
    assert np.flatnonzero(one_by_one[-1]).tolist() == [1, 4]


def test_the_grammar_may_end_inside_a_block(setup: tuple[Tokenizer, Grammars]) -> None:
    tokenizer, grammars = setup
    ids = tokenizer.encode("ab", add_bos=False)
    constraint = grammars.compile("regex", "ab")()
    masks = constraint.masks([*ids, 1, 20, 21])
    assert len(masks) == 6
    assert masks[2] is not None
    assert np.flatnonzero(masks[2]).tolist() == [1, 4]
    constraint.commit([*ids, 1])
    assert np.flatnonzero(constraint.masks([20])[0]).tolist() == [1, 4]


TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object", "required": ["city", "unit"],
        "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer"},
                       "unit": {"enum": ["C", "F"]}, "at": {"$ref": "#/$defs/Point"}},
        "$defs": {"Point": {"type": "object", "properties": {
            "x": {"type": "number"}, "next": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]}}}},
    },
    "ping": {"type": "object", "properties": {}},
}  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_forced_calls_parse_and_fit(setup: tuple[Tokenizer, Grammars], seed: int) -> None:
    tokenizer, grammars = setup
    text = sample(tokenizer, grammars.compile_call(TOOLS, 3)(), seed, bored=30)
    calls = calls_in(text)
    assert 1 <= len(calls) <= 3
    for name, value in calls:
        if name == "get_weather":
            assert value["unit"] in ("C", "F")
            assert isinstance(value["city"], str)
            assert isinstance(value.get("days", 0), int)
        else:
            assert value == {}


def test_thinking_comes_before_the_grammar() -> None:
    tokenizer = make_tokenizer()
    grammars = grammars_of(tokenizer)
    opening, closing = tokenizer.token_id("<|channel>"), tokenizer.token_id("<channel|>")
    assert opening is not None
    assert closing is not None
    ab = tokenizer.encode("ab", add_bos=False)
    make = grammars.compile("regex", "ab")
    constraint = AfterThinking(make(), (opening, closing), False)
    first = constraint.masks([opening, 50, closing, *ab])
    assert first[0] is not None
    assert set(np.flatnonzero(first[0])) == {opening, ab[0]}
    assert first[1] is None
    assert np.flatnonzero(first[3]).tolist() == [ab[0]]
    constraint.commit([opening, 50])
    constraint.commit([closing, ab[0]])
    assert np.flatnonzero(constraint.masks([])[0]).tolist() == [ab[1]]
    direct = AfterThinking(make(), (opening, closing), False)
    assert np.flatnonzero(direct.masks(ab)[1]).tolist() == [ab[1]]
    direct.commit(ab)
    assert np.flatnonzero(direct.masks([])[0]).tolist() == [1, 4]
    grammars.close()


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("most", [0, 2, 5])
def test_a_thought_ends_at_its_budget(inside: bool, most: int) -> None:
    """And looking ahead along a draft says what is said token by token, wherever the draft goes."""
    size, opening, closing = 12, 10, 11

    class Even:
        def masks(self, draft: list[int]) -> list[np.ndarray]:
            return [np.arange(size) % 2 == 0] * (len(draft) + 1)

        def commit(self, tokens: list[int]) -> None:
            pass

    for inner in (None, Even()):
        rng = random.Random(most)
        for _ in range(40):
            written = BoundedThinking(inner, (opening, closing), inside, most, size)
            draft = [rng.choice((3, 4, 5, opening, closing)) for _ in range(14)]
            ahead, left = written.masks(draft), most if inside else None
            for i, token in enumerate([*draft, 0]):
                (mask,) = written.masks([])
                assert (mask is None) == (ahead[i] is None)
                assert mask is None or np.array_equal(mask, ahead[i])
                if left == 0:
                    assert np.flatnonzero(mask).tolist() == [closing]
                else:
                    assert (mask is None) if inner is None else mask[0]
                written.commit([token])
                left = (
                    most
                    if token == opening
                    else None
                    if token == closing or left is None
                    else max(0, left - 1)
                )


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json", '{"type":"nonsense"}'), ("json", '{"type":"string","pattern":"("}'), ("json", "[1]"),
        ("json", '{"$ref":"#/$defs/missing"}'), ("lark", "start: ("), ("regex", "(a"), ("json", '{"type":5}'),
    ],
)  # fmt: skip
def test_bad_grammars_are_refused(setup: tuple[Tokenizer, Grammars], kind: str, source: str) -> None:
    with pytest.raises(UsageError):
        setup[1].compile(kind, source)


def test_a_grammar_that_takes_too_long_is_killed_and_the_next_one_works() -> None:
    grammars = grammars_of(make_tokenizer(), timeout=0.5)
    grammars.compile("regex", "ab")
    text = {"type": "string"}
    patterns = [[{**text, "pattern": f"^(a|b){{1,{i + 40}}}c.*{j}$"} for j in range(40)] for i in range(40)]
    slow = {"oneOf": [{"properties": {f"p{j}": p for j, p in enumerate(row)}} for row in patterns]}
    begin = time.monotonic()
    with pytest.raises(UsageError):
        grammars.compile("json", json.dumps(slow))
    assert time.monotonic() - begin < 20
    assert isinstance(grammars.compile("regex", "abc")(), GrammarConstraint)
    grammars.close()


def test_deep_schemas_are_refused_without_recursion() -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = {"a": deep}
    with pytest.raises(UsageError, match="deeper"):
        checked_schema(deep, "x", Limits(32))
    checked_schema({"a": [{"b": 1}]}, "x", Limits(3))
    while deep:  # taken apart in a loop: the interpreter's own way of freeing it is recursive
        deep = deep["a"]
