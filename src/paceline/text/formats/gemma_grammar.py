"""A Lark grammar, as llguidance reads it, for Gemma 4's tool calls with arguments that fit their schemas.

Of JSON schema it follows types, enum, const, properties, required, items, anyOf, oneOf, local $ref and lengths
of strings; anything else allows any value of the notation. Properties come in the order of the schema.
"""

from __future__ import annotations

import json
from typing import Any

from paceline.errors import UsageError
from paceline.text.formats.events import Tools
from paceline.text.formats.gemma_arguments import QUOTE
from paceline.text.formats.lark import Lark, either, literal

_MOST_OPTIONAL, _MOST_OPTIONS = (
    400,
    1500,
)  # llguidance follows 2000 rules at a time, an optional property takes four
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
        self.rules, self.mark = lark.rules, lark.mark
        self._named: dict[tuple[int, str], str] = {}  # (root schema, $ref) -> rule
        # A mark that is no token of its own has to be kept out of strings by its first character.
        self.text = "(.|\\n)" if QUOTE in lark.marks else "[^<]"

    def arguments(self, schema: dict[str, Any]) -> str:
        if not schema.get("properties"):
            return "object" if schema.get("additionalProperties", "properties" not in schema) else '"{" "}"'
        return self._object(schema, schema)

    def _value(self, schema: Any, root: dict[str, Any]) -> str:
        if not isinstance(schema, dict):
            return "value"
        if "$ref" in schema:
            return self._reference(str(schema["$ref"]), root)
        if "const" in schema or isinstance(schema.get("enum"), list):
            options = [schema["const"]] if "const" in schema else schema["enum"]
            return self._either([self._literal(option) for option in options])
        for word in ("anyOf", "oneOf", "allOf"):
            options = schema.get(word)
            if isinstance(options, list) and (word != "allOf" or len(options) == 1):
                return self._either([self._value(option, root) for option in options])
        kinds = schema.get("type")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        return self._either([self._of_type(kind, schema, root) for kind in kinds])

    def _of_type(self, kind: Any, schema: dict[str, Any], root: dict[str, Any]) -> str:
        if kind == "string":
            return self._string(schema)
        if kind == "array":
            item = self._value(schema.get("items"), root)
            empty = "" if isinstance(schema.get("minItems"), int) and schema["minItems"] > 0 else "?"
            return self._rule(f'"[" ({item} ("," {item})*){empty} "]"')
        if kind == "object":
            return self._object(schema, root) if schema.get("properties") else "object"
        simple = {"integer": "INTEGER", "number": "NUMBER", "boolean": '("true" | "false")', "null": '"null"'}
        return simple.get(kind, "value") if isinstance(kind, str) else "value"

    def _string(self, schema: dict[str, Any]) -> str:
        low, high = schema.get("minLength"), schema.get("maxLength")
        if not isinstance(low, int) and not isinstance(high, int):
            return "string"
        count = f"{{{low if isinstance(low, int) else 0},{high if isinstance(high, int) else ''}}}"
        name = f"TEXT_{len(self.rules)}"
        self.rules.append(f"{name}: /{self.text}{count}/")
        return f"({self.mark(QUOTE)} {name} {self.mark(QUOTE)})"

    def _object(self, schema: dict[str, Any], root: dict[str, Any]) -> str:
        """Properties in order, optional ones may be left out: two chains, with and without a comma first."""
        required = schema["required"] if isinstance(schema.get("required"), list) else []
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
            found: Any = root
            for step in reference.removeprefix("#/").split("/") if reference.startswith("#/") else ["?"]:
                found = found.get(step) if isinstance(found, dict) else None
            if found is None:
                return "value"
            name = self._named[key] = f"ref_{len(self._named)}"
            self.rules.append(f"{name}: {self._value(found, root)}")
        return self._named[key]

    def _literal(self, value: Any) -> str:
        if isinstance(value, str):
            return (
                f"({self.mark(QUOTE)} {literal(value)} {self.mark(QUOTE)})"
                if value
                else f"({self.mark(QUOTE)} {self.mark(QUOTE)})"
            )
        return (
            literal(json.dumps(value, separators=(",", ":")))
            if not isinstance(value, (dict, list))
            else "value"
        )

    def _either(self, options: list[str]) -> str:
        if len(options) > _MOST_OPTIONS:
            raise UsageError(f"a value has over {_MOST_OPTIONS} options: give fewer")
        return options[0] if len(options) == 1 else f"({' | '.join(options)})" if options else "value"

    def _rule(self, body: str) -> str:
        name = f"rule_{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name
