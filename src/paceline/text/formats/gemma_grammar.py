"""A Lark grammar, as llguidance reads it, for Gemma 4's tool calls with arguments that fit their schemas.

Schemas come as `text/schemas.py` makes them. What this notation cannot hold is refused by its name. Properties come in
the order of the schema.
"""

from __future__ import annotations

import json
from typing import Any

from paceline.errors import UsageError
from paceline.text.formats.events import Tools
from paceline.text.formats.gemma_arguments import QUOTE
from paceline.text.formats.lark import Lark, either, literal
from paceline.text.formats.values import UNHELD, needed, slashed, unheld, whole

_MOST_OPTIONAL, _MOST_OPTIONS = (
    400,
    1500,
)  # llguidance follows 2000 rules at a time, an optional property takes four
_NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_IMPLIED = {  # words of a schema without a type, and the type that they speak of
    **dict.fromkeys(("minLength", "maxLength", "pattern"), "string"), **dict.fromkeys(_NUMERIC, "number"),
    **dict.fromkeys(("properties", "required", "additionalProperties"), "object"),
    **dict.fromkeys(("items", "minItems", "maxItems"), "array"),
}  # fmt: skip
_NOTES = (
    "title",
    "description",
    "default",
    "examples",
    "$comment",
    "$schema",
    "$defs",
    "definitions",
    "discriminator",
)
_COMMON = """
value: string | NUMBER | "true" | "false" | "null" | array | object
array: "[" (value ("," value)*)? "]"
object: "{{" (pair ("," pair)*)? "}}"
pair: KEY ":" value
string: {quote} TEXT {quote}
KEY: /[A-Za-z_][A-Za-z0-9_]{{0,63}}/
NUMBER: /-?(0|[1-9][0-9]{{0,15}})(\\.[0-9]{{1,15}})?/
INTEGER: /-?(0|[1-9][0-9]{{0,15}})/
TEXT: /{text}*/
"""


def opened_calls(lark: Lark, tools: Tools) -> str:
    """Lark for one call between its opening mark and its closing one."""
    writer = _Writer(lark)
    rules = [
        lark.rule(f"{literal('call:' + name)} {writer.arguments(dict(schema))}")
        for name, schema in tools.items()
    ]
    lark.rules += _COMMON.format(quote=lark.mark(QUOTE), text=writer.text).strip().splitlines()
    return either(rules)


class _Writer:
    def __init__(self, lark: Lark) -> None:
        self.rules, self.mark, self._lark = lark.rules, lark.mark, lark
        self._named: dict[tuple[int, str], str] = {}  # (root schema, $ref) -> rule
        # A mark that is no token of its own has to be kept out of strings by its first character.
        self.text = "(.|\\n)" if QUOTE in lark.marks else "[^<]"

    def arguments(self, schema: dict[str, Any]) -> str:
        self._check(schema)
        if {"$ref", "allOf", "anyOf", "oneOf", "const", "enum"} & set(schema):
            return self._value(schema, schema)
        if not schema.get("properties"):
            return (
                self._pairs(schema, schema)
                if schema.get("additionalProperties", "properties" not in schema)
                else '"{" "}"'
            )
        return self._object(schema, schema)

    @staticmethod
    def _check(schema: dict[str, Any]) -> None:
        for word in UNHELD:
            if word in schema:
                raise unheld(word)

    def _value(self, schema: Any, root: dict[str, Any]) -> str:
        if not isinstance(schema, dict):
            if schema is False:
                raise UsageError("a schema of false cannot be held: leave the property out")
            return "value"
        self._check(schema)
        if "$ref" in schema:
            if set(schema) - {"$ref", *_NOTES}:
                return self._value(self._merged({**schema, "allOf": [{"$ref": schema["$ref"]}]}, root), root)
            return self._reference(str(schema["$ref"]), root)
        if "const" in schema or isinstance(schema.get("enum"), list):
            options = [schema["const"]] if "const" in schema else schema["enum"]
            return self._either([self._literal(option) for option in options])
        if isinstance(schema.get("allOf"), list):
            return self._value(self._merged(schema, root), root)
        for word in ("anyOf", "oneOf"):
            options = schema.get(word)
            if isinstance(options, list):
                base = {k: v for k, v in schema.items() if k != word and k not in _NOTES}
                joined = [
                    self._merged({**base, "allOf": [option]}, root) if set(base) - {"type"} else option
                    for option in options
                ]
                return self._either([self._value(option, root) for option in joined])
        implied = list(dict.fromkeys(kind for word, kind in _IMPLIED.items() if word in schema))
        kinds = schema.get("type", implied or None)
        kinds = kinds if isinstance(kinds, list) else [kinds]
        return self._either([self._of_type(kind, schema, root) for kind in kinds])

    def _merged(self, schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
        """The parts of allOf in one. Raises UsageError where two of them say different things."""
        out = {k: v for k, v in schema.items() if k not in ("allOf", "$ref")}
        patterns = [out.pop("pattern")] if "pattern" in out else []
        parts = [self._found(given, root) for given in schema["allOf"]]
        _check_closed([schema, *parts])
        if not all(isinstance(part, dict) or part is True for part in parts):
            raise unheld("allOf")
        for part in (part for part in parts if isinstance(part, dict)):
            for word, value in (self._merged(part, root) if "allOf" in part else part).items():
                if word == "pattern":
                    patterns += value if isinstance(value, list) else [value]
                elif word == "required":
                    out[word] = list(dict.fromkeys([*out.get(word, []), *value]))
                elif word == "properties" and not set(out.get(word, {})) & set(value):
                    out[word] = {**out.get(word, {}), **value}
                elif word in _NOTES or word == "additionalProperties":
                    out.setdefault(word, value)
                elif out.setdefault(word, value) != value:
                    raise UsageError(
                        f"allOf with two values of {word} cannot be held in this model's notation of calls: write one"
                    )
        return out | ({"pattern": patterns} if patterns else {})

    def _found(self, schema: Any, root: dict[str, Any]) -> Any:
        for _ in range(8):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
                return schema
            node: Any = root
            for step in schema["$ref"].removeprefix("#/").split("/"):
                node = node.get(step) if isinstance(node, dict) else None
            rest = {k: v for k, v in schema.items() if k != "$ref"}
            schema = node if not set(rest) - set(_NOTES) else {**rest, "allOf": [node]}
        return schema

    def _of_type(self, kind: Any, schema: dict[str, Any], root: dict[str, Any]) -> str:
        if kind == "string":
            return self._string(schema)
        if kind == "array":
            return self._array(schema, root)
        if kind == "object":
            return self._object(schema, root) if schema.get("properties") else self._pairs(schema, root)
        if kind in ("integer", "number") and any(word in schema for word in _NUMERIC):
            words = {word: schema[word] for word in _NUMERIC if word in schema}
            return self._lark.json({"type": kind} | words)
        simple = {"integer": "INTEGER", "number": "NUMBER", "boolean": '("true" | "false")', "null": '"null"'}
        return simple.get(kind, "value") if isinstance(kind, str) else "value"

    def _array(self, schema: dict[str, Any], root: dict[str, Any]) -> str:
        low, high = schema.get("minItems"), schema.get("maxItems")
        low = low if isinstance(low, int) else 0
        if high == 0 or schema.get("items") is False:
            return '("[" "]")'
        item = self._value(schema.get("items"), root)
        more = f"{{{max(0, low - 1)},{high - 1 if isinstance(high, int) else ''}}}"
        return self._rule(f'"[" ({item} ("," {item}){more}){"" if low else "?"} "]"')

    def _pairs(self, schema: dict[str, Any], root: dict[str, Any]) -> str:
        """An object of any keys, with values of one schema."""
        needed(schema)
        inner = schema.get("additionalProperties")
        if inner is False:
            return '("{" "}")'
        value = self._value(inner, root)
        if value == "value":
            return "object"
        return self._rule(f'"{{" (KEY ":" {value} ("," KEY ":" {value})*)? "}}"')

    def _string(self, schema: dict[str, Any]) -> str:
        low, high, patterns = schema.get("minLength"), schema.get("maxLength"), schema.get("pattern", [])
        bounds = isinstance(low, int) or isinstance(high, int)
        if not bounds and not patterns:
            return "string"
        count = (
            f"{{{low if isinstance(low, int) else 0},{high if isinstance(high, int) else ''}}}"
            if bounds
            else "*"
        )
        patterns = patterns if isinstance(patterns, list) else [patterns]
        parts = [f"/{self.text}{count}/", *slashed([whole(pattern) for pattern in patterns])]
        name = f"TEXT_{len(self.rules)}"
        self.rules.append(f"{name}: {' & '.join(parts)}")
        return f"({self.mark(QUOTE)} {name} {self.mark(QUOTE)})"

    def _object(self, schema: dict[str, Any], root: dict[str, Any]) -> str:
        """Properties in order, optional ones may be left out: two chains, with and without a comma first."""
        required = needed(schema)
        properties = list(schema["properties"].items()) if isinstance(schema["properties"], dict) else []
        if sum(name not in required for name, _ in properties) > _MOST_OPTIONAL:
            raise UsageError(f"an object has over {_MOST_OPTIONAL} optional properties: make some required")
        first, rest = '""', '""'
        for name, inner in reversed(properties):
            pair = self._rule(f"{literal(str(name) + ':')} {self._value(inner, root)}")
            skip = name not in required
            first = self._rule(f"{pair} {rest}" + (f" | {first}" if skip else ""))
            rest = self._rule(f'"," {pair} {rest}' + (f" | {rest}" if skip else ""))
        return self._rule(f'"{{" {first} "}}"')

    def _reference(self, reference: str, root: dict[str, Any]) -> str:
        key = (id(root), reference)
        if key not in self._named:
            node: Any = root
            for step in reference.removeprefix("#/").split("/") if reference.startswith("#/") else ["?"]:
                node = node.get(step) if isinstance(node, dict) else None
            if node is None:
                raise UsageError(f"$ref {reference[:80]!r} is not within the schema: put it under $defs")
            name = self._named[key] = f"ref_{len(self._named)}"
            self.rules.append(f"{name}: {self._value(node, root)}")
        return self._named[key]

    def _literal(self, value: Any) -> str:
        """A value of enum or const, as the notation writes it."""
        if isinstance(value, str):
            return f"({self.mark(QUOTE)} {literal(value) + ' ' if value else ''}{self.mark(QUOTE)})"
        if isinstance(value, list):
            inner = ' "," '.join(map(self._literal, value))
            return f'("[" {inner} "]")'
        if isinstance(value, dict):
            inner = ' "," '.join(f"{literal(key + ':')} {self._literal(item)}" for key, item in value.items())
            return f'("{{" {inner} "}}")'
        return literal(json.dumps(value))

    def _either(self, options: list[str]) -> str:
        if len(options) > _MOST_OPTIONS:
            raise UsageError(f"a value has over {_MOST_OPTIONS} options: give fewer")
        return options[0] if len(options) == 1 else f"({' | '.join(options)})" if options else "value"

    def _rule(self, body: str) -> str:
        name = f"rule_{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name


def _check_closed(parts: list[Any]) -> None:
    """Raise UsageError where one part of allOf takes no properties of another."""
    objects = [part for part in parts if isinstance(part, dict)]
    names = [set(part.get("properties") or ()) for part in objects]
    for part, own in zip(objects, names, strict=True):
        more = part.get("additionalProperties", True)
        is_open = more is True or (isinstance(more, dict) and "$ref" in more)
        if not is_open and own != set().union(*names):
            raise UsageError(
                "additionalProperties within allOf cannot be held: say it once, for all properties"
            )
