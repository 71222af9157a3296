"""Values of arguments that stand between tags, as text or as JSON, so that what is read fits the argument's schema.

A text stands there as it is. Where a value may be of several types and its schema says more than these, it is written as
JSON, strings in quotes: the parsers read that, too. What cannot be held is refused by its name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.errors import UsageError
from paceline.text.formats.kinds import kinds_of, resolved
from paceline.text.formats.lark import Lark, either, escaped, literal

UNHELD = (
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "prefixItems", "patternProperties",
    "propertyNames", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies",
    "uniqueItems", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef",
)  # fmt: skip
_NOTES = frozenset(
    {"title", "description", "default", "examples", "$comment", "$schema", "$defs", "definitions", "discriminator",
     "deprecated", "readOnly", "writeOnly", "nullable", "format"}
)  # fmt: skip
_DEPTH = 16
_ELSEWHERE = re.compile(r'"\$ref": "(?!#/(?:\$defs|definitions)/)([^"]*)"')
_SLASH = re.compile(r"(?<!\\)/")
_BOUNDS = {10**15, -(10**15), 1e-9}  # that schemas.py gives to numbers without any


def unheld(word: str) -> UsageError:
    return UsageError(f"{word} cannot be held in this model's notation of calls: leave it out")


def properties_of(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The properties of an object's schema that can be written one by one, and the required ones. Raises UsageError."""
    if isinstance(schema.get("$ref"), str):
        target = resolved(schema["$ref"], schema)
        beside = set(schema) - _NOTES - {"$ref", "type"}
        if not isinstance(target, Mapping) or beside or isinstance(target.get("$ref"), str):
            raise unheld("$ref")
        schema = target
    for word in (*UNHELD, "allOf", "anyOf", "oneOf", "const", "enum"):
        if word in schema:
            raise unheld(word)
    given = schema.get("properties")
    properties = dict(given) if isinstance(given, Mapping) else {}
    return {name: inner for name, inner in properties.items() if inner is not False}, needed(schema)


def needed(schema: Mapping[str, Any]) -> list[str]:
    """The required properties of an object's schema, all of which it declares. Raises UsageError."""
    given, required = schema.get("properties"), schema.get("required")
    properties = given if isinstance(given, Mapping) else {}
    names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    for name in names:
        if properties.get(name, False) is False:
            raise UsageError(f"required: {name[:80]!r} is no property that can be given: declare it")
    return names


def value(lark: Lark, schema: Mapping[str, Any], key: str, end: str, json_only: bool = False) -> str:
    """Lark for the value of one argument and the text `end` that closes it; as JSON if `json_only`. Raises UsageError."""
    properties = schema.get("properties")
    inner = properties.get(key) if isinstance(properties, Mapping) else None
    inner = inner if isinstance(inner, Mapping) else {}
    kinds = kinds_of(schema, key) if not json_only else frozenset[str]()
    if kinds == {"string"} or (kinds == {"string", "null"} and not _plain(inner)):
        null = [f"{literal('null')} {lark.spelled(end)}"] if "null" in kinds else []
        return either([*null, *(_text(lark, string, end) for string in _strings(inner, schema, 0))])
    if "string" in kinds and _plain(inner):
        return _free(lark, ["(?s:.*)"], end)
    return f"{lark.json(_alone(inner, schema))} {lark.spelled(end)}"


def _alone(inner: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of one argument with the definitions that it may refer to. Raises UsageError for other references."""
    made = {**_definitions(root), **inner}
    if match := _ELSEWHERE.search(json.dumps(made)):
        raise UsageError(
            f"$ref '{match[1][:80]}' cannot be held in this model's notation: put it under $defs"
        )
    return made


def _plain(schema: Any) -> bool:
    """Whether a schema says no more than types: any text is one of its values then, or reads as one."""
    if not isinstance(schema, Mapping):
        return schema is not False
    for word, value in schema.items():
        if word in ("anyOf", "oneOf"):
            if not (isinstance(value, list) and all(map(_plain, value))):
                return False
        elif word == "$ref" or (word in ("items", "additionalProperties") and isinstance(value, Mapping)):
            target = value if word == "$ref" else value.get("$ref")
            if target != "#/$defs/paceline-any":
                return False
        elif (
            word not in _NOTES
            and word != "type"
            and not (isinstance(value, int | float) and value in _BOUNDS)
        ):
            return False
    return True


def _strings(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[list[Mapping[str, Any]]]:
    """The ways to be a string that fits: schemas without references or choices, all of which hold."""
    if depth > _DEPTH:
        raise unheld("$ref")
    if not isinstance(schema, Mapping):
        if schema is not False:
            yield []
        return
    if "string" not in kinds_of({"properties": {"x": schema}, **_definitions(root)}, "x"):
        return
    own = {k: v for k, v in schema.items() if k not in ("$ref", "allOf", "anyOf", "oneOf")}
    for word in UNHELD[:4]:
        if word in own:
            raise unheld(word)
    ways: list[list[Mapping[str, Any]]] = [[own]]
    parts: list[list[Any]] = [[part] for part in schema.get("allOf") or []]
    if isinstance(schema.get("$ref"), str):
        parts.append([resolved(schema["$ref"], root)])
    parts += [list(schema[word]) for word in ("anyOf", "oneOf") if isinstance(schema.get(word), list)]
    for options in parts:
        inner_ways = [way for option in options for way in _strings(option, root, depth + 1)]
        ways = [[*outer, *other] for outer in ways for other in inner_ways]
    yield from ways


def _definitions(root: Mapping[str, Any]) -> dict[str, Any]:
    return {word: root[word] for word in ("$defs", "definitions") if word in root}


def _text(lark: Lark, parts: Sequence[Mapping[str, Any]], end: str) -> str:
    """A string that fits all of `parts`, without quotes, and `end`."""
    patterns = [pattern for part in parts for pattern in _patterns(part)]
    listed = [_listed(part) for part in parts if "const" in part or isinstance(part.get("enum"), list)]
    if not listed:
        return _free(lark, patterns or ["(?s:.*)"], end)
    texts = [text for text in listed[0] if all(text in other for other in listed[1:])]
    if not texts:
        raise UsageError("enum: none of the values fits what the schema says beside it")
    if not patterns:
        return f"({' | '.join(map(literal, texts))}) {lark.spelled(end)}"
    rule = lark.rule(" & ".join([f"({' | '.join(map(literal, texts))})", *slashed(patterns)]), "TEXT")
    return f"{rule} {lark.spelled(end)}"


def _listed(schema: Mapping[str, Any]) -> list[str]:
    values = [schema["const"]] if "const" in schema else schema["enum"]
    return [value for value in values if isinstance(value, str)]


def _patterns(schema: Mapping[str, Any]) -> Iterator[str]:
    """Regular expressions of whole texts that fit a schema of strings."""
    low, high, given = schema.get("minLength"), schema.get("maxLength"), schema.get("pattern")
    if isinstance(given, str):
        yield whole(given)
    if isinstance(low, int) or isinstance(high, int):
        yield f"(?s:.){{{low if isinstance(low, int) else 0},{high if isinstance(high, int) else ''}}}"


def whole(pattern: str) -> str:
    """A pattern of JSON schema, which may fit anywhere, as one of a whole text."""
    lead = "" if pattern.startswith("^") else "(?s:.*)"
    tail = "" if pattern.endswith("$") and not pattern.endswith(r"\$") else "(?s:.*)"
    inner = pattern.removeprefix("^")
    return f"{lead}(?:{inner if tail else inner.removesuffix('$')}){tail}"


def _free(lark: Lark, patterns: Sequence[str], end: str) -> str:
    """A text that fits all patterns, and `end`."""
    marked = [at for mark in lark.marks if (at := end.find(mark)) >= 0]
    if marked:  # a token, which no text holds
        before, rest = end[: min(marked)].lstrip("\n"), end[min(marked) :]
        text = lark.rule(" & ".join(slashed(patterns, escaped(before))), "TEXT")
        return (
            f"{text}{'?' if not before and all(map(_takes_nothing, patterns)) else ''} {lark.spelled(rest)}"
        )
    return lark.rule(" & ".join(slashed(patterns, escaped(end))), "value[lazy]")


def slashed(patterns: Sequence[str], end: str = "") -> list[str]:
    """Regular expressions between slashes, each with `end` behind it."""
    return [f"/{re.sub(_SLASH, chr(92) + '/', pattern)}{end}/" for pattern in patterns]


def _takes_nothing(pattern: str) -> bool:
    """Whether an empty text fits."""
    try:
        return re.fullmatch(pattern, "") is not None
    except re.error:  # in words that llguidance alone knows
        return False
