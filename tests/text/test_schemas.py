"""Schemas that people write: what a grammar of them writes fits them, or they are refused with the keyword's name."""

from __future__ import annotations

import datetime
import enum
import json
import pathlib
import random
import uuid
from typing import Annotated, Any, Literal

import jsonschema
import llguidance
import numpy as np
import pydantic
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from paceline.errors import UsageError
from paceline.text.grammar import to_grammar
from paceline.text.schemas import held, held_arguments

END = 256


def _vocabulary() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate([*alphabet, "<end>"])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return backend


BACKEND = _vocabulary()
LIBRARY = llguidance.LLTokenizer(BACKEND.to_str(), n_vocab=END + 1, eos_token=END)
BLANK = {i for i in range(END) if BACKEND.decode([i]).isspace()}
CLOSING = {i for i in range(END) if BACKEND.decode([i]) in '"]}'}


def written(schema: Any, seed: int, most: int = 600) -> str | None:
    """A text that the grammar of `schema` lets a model of byte tokens write by chance; None for one that does not end."""
    grammar = to_grammar("json", json.dumps(held(schema)))
    matcher = llguidance.LLMatcher(LIBRARY, grammar, log_level=0)
    if matcher.is_error():
        raise UsageError(matcher.get_error().partition("\n<state>")[0])
    rng, ids = random.Random(seed), list[int]()
    while not matcher.is_stopped():
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error():
            raise UsageError(matcher.get_error().partition("\n<state>")[0])
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[: END + 1]).tolist()
        if not allowed or (END in allowed and (rng.random() < 0.5 or len(ids) > 60)):
            break
        allowed = [i for i in allowed if i != END]
        allowed = [i for i in allowed if i not in BLANK] or allowed
        closing = [i for i in allowed if i in CLOSING]
        at = rng.choice(closing if closing and (rng.random() < 0.2 or len(ids) > 80) else allowed)
        assert matcher.consume_token(at)
        ids.append(at)
        if len(ids) > most:
            return None
    return str(BACKEND.decode(ids))


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog"] = "dog"
    barks: bool | None = None


class Pair(pydantic.BaseModel):
    kind: Literal["pair"] = "pair"
    inner: list[Annotated[Cat | Pair, pydantic.Field(discriminator="kind")]] = pydantic.Field(max_length=2)


class Owner(pydantic.BaseModel):
    pet: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Many(pydantic.BaseModel):
    when: datetime.datetime
    day: datetime.date
    at: datetime.time
    long: datetime.timedelta
    id: uuid.UUID
    secret: pydantic.SecretStr
    path: pathlib.Path
    raw: bytes
    url: pydantic.HttpUrl | None
    scores: dict[str, float]
    both: tuple[int, str]
    colours: set[Colour]
    any: Any
    few: int = pydantic.Field(ge=3, lt=9)
    some: float = pydantic.Field(gt=0, multiple_of=0.25)
    word: str = pydantic.Field(pattern="^[a-z]{2,4}$")
    one: Literal[1, "x", None]


class Bag(pydantic.BaseModel):
    words: set[str]


MODELS = [Owner, Pair, Many]


@pytest.mark.parametrize("model", MODELS)
def test_pydantic_reads_what_fits_its_schema(model: type[pydantic.BaseModel]) -> None:
    schema = model.model_json_schema()
    for seed in range(5):
        text = written(schema, seed, 1500)
        if text is not None:
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))
            if model is not Many:  # its bytes and paths may hold what only pydantic refuses
                model.model_validate_json(text)


A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
KIND_A = {"type": "object", "properties": {"k": {"const": "a"}, "v": {"type": "string"}}}
KIND_B = {"type": "object", "properties": {"k": {"enum": ["b", "c"]}}, "required": ["k"]}
FITS: list[Any] = [
    *(
        {"type": "string", "format": name}
        for name in (
            "date",
            "time",
            "date-time",
            "duration",
            "email",
            "hostname",
            "ipv4",
            "ipv6",
            "uuid",
            "uri",
            "iri",
            "uri-reference",
            "json-pointer",
            "relative-json-pointer",
            "idn-email",
            "password",
            "path",
            "binary",
            "byte",
            "int32",
            "regex-of-mine",
            7,
        )
    ),
    {"type": "string", "format": "date", "pattern": "^2024"},
    {"type": "array", "items": {"type": "string", "format": "phone"}, "maxItems": 2.0},
    {"oneOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]},
    {"oneOf": [A, B]},
    {"oneOf": [A]},
    {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], "$defs": {"A": A, "B": B}},
    {"oneOf": [KIND_A, KIND_B]},
    {"oneOf": [KIND_A, KIND_B], "discriminator": {"propertyName": "k"}},
    {"oneOf": [{"const": 1}, {"enum": [2, "x"]}]},
    {"type": "object", "properties": {"x": {"oneOf": [A, KIND_B]}}},
    {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 2},
    {"type": "array", "items": {"$ref": "#/$defs/E"}, "uniqueItems": True, "$defs": {"E": {"enum": [1, 2]}}},
    {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True},
    {"type": "array", "uniqueItems": False},
    {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "maxItems": 1},
    {"type": "number"},
    {"type": "integer"},
    {"type": ["number", "null"]},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    {"type": "integer", "minimum": 3, "maximum": 5},
    {"type": "number", "multipleOf": 0.01},
    {"type": "integer", "multipleOf": 7},
    {"type": "number", "minimum": 1e-12, "maximum": 1},
    {},
    {"type": "object"},
    {"type": "array"},
    {"minimum": 3},
    {"nullable": True},
    {"allOf": [A, B]},
    {"anyOf": [A, B], "title": "x", "description": "y", "examples": [1], "$comment": "z"},
    {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False},
    {
        "type": "object",
        "properties": {"oneOf": {"type": "string"}, "format": {"type": "integer"}},
        "required": ["oneOf"],
    },
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
    {
        "type": "object",
        "propertyNames": {"type": "string"},
        "additionalProperties": {"type": "number"},
    },  # zod's record
    {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": A, "required": ["a"]},
    {"type": "object", "propertyNames": {"pattern": "^x[0-9]$"}, "additionalProperties": {"type": "boolean"}},
    {**A, "unevaluatedProperties": False},
    {"type": "string", "then": {"type": "null"}},
]


@pytest.mark.parametrize("schema", FITS, ids=lambda schema: json.dumps(schema)[:60])
def test_what_is_written_fits(schema: Any) -> None:
    checker = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    texts = [text for text in (written(schema, seed) for seed in range(6)) if text is not None]
    assert texts
    for text in texts:
        checker.validate(json.loads(text))


@pytest.mark.parametrize(
    ("schema", "digits"),
    [
        ({"type": "number"}, 25),
        ({"type": "integer"}, 16),
        ({"type": "string", "format": "date-time"}, 14 + 9 + 4),
        ({}, 25),
        ({"type": "string", "format": "duration"}, 6),
        ({"type": "object"}, 25),
        ({"type": "array"}, 25),
    ],
)
def test_digits_end(schema: Any, digits: int) -> None:
    """A small model writes them until max_tokens, else."""
    matcher = llguidance.LLMatcher(LIBRARY, to_grammar("json", json.dumps(held(schema))), log_level=0)
    opening = {"object": '{"x":', "array": "["}.get(schema.get("type"), "")
    for token in BACKEND.encode(opening).ids:
        assert matcher.consume_token(token)
    run = 0
    for wanted in ["9", "1", "0", ".", "-", ":", "T", "P", '"', "+", "Z"] * 200:
        if matcher.is_stopped() or run > 60:
            break
        for character in ("9", "1", "0"):
            (token,) = BACKEND.encode(character).ids
            while run <= 60 and matcher.validate_tokens([token]) and matcher.consume_token(token):
                run += 1
        (token,) = BACKEND.encode(wanted).ids
        if matcher.validate_tokens([token]):
            matcher.consume_token(token)
    assert 0 < run <= digits


REFUSED = [
    ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "uniqueItems"),
    (Bag.model_json_schema(), "words: uniqueItems"),
    ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 3}, "minItems"),
    (
        {"oneOf": [{"type": "string"}, {"type": "string", "format": "uri"}]},
        "oneOf has options that can fit at the same time",
    ),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ({"oneOf": [True, {"type": "string"}]}, "oneOf"),
    ({"oneOf": [A, B], "anyOf": [A]}, "oneOf"),
    ({"not": {"type": "string"}}, "not"),
    ({"if": A, "then": B}, '"if", "then"'),
    ({"type": "array", "contains": {"type": "integer"}}, "contains"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"type": "object", "propertyNames": {"maxLength": 3}}, "propertyNames"),
    ({"anyOf": [A, B], "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"$ref": "https://example.org/x.json"}, r"\$ref 'https://example.org/x.json' is not within the schema"),
    ({"type": "integer", "minimum": 10**20}, "minimum and maximum are held from"),
    ({"type": "number", "minimum": 10**16}, "minimum and maximum are held from"),
    ({"type": "integer", "minimum": 2**60 + 1, "maximum": 2**60 + 2}, "minimum and maximum leave no number"),
    ({"properties": {"x": {"$id": "http://x.org/y", "type": "string"}}}, r"x: \$id"),
]


@pytest.mark.parametrize(("schema", "words"), REFUSED, ids=[words[:30] for _, words in REFUSED])
def test_what_cannot_be_held_is_refused_by_name(schema: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        written(schema, 0)


@pytest.mark.parametrize("kind", [None, 5, {}, "string", []])
def test_arguments_whose_type_is_no_object_are_refused(kind: Any) -> None:
    with pytest.raises(UsageError, match="is object for the arguments of a tool"):
        held_arguments({"type": kind, "properties": {}})
