"""JSON schemas with integers that no float holds, written out in Lark: llguidance reads a schema's numbers as floats.

Only what stands around such an integer is written here: objects (their properties in order, no others), arrays, `anyOf`
and references. All else is a schema within the grammar, as before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from paceline.errors import UsageError

_NOTES = {"title", "description", "default", "examples", "$comment", "$schema", "$id", "$defs", "definitions"}
_OBJECT = {"type", "properties", "required", "additionalProperties"} | _NOTES
_ARRAY = {"type", "items", "minItems", "maxItems"} | _NOTES


class Lark(Protocol):
    """Rules under way (formats/lark.py)."""

    rules: list[str]

    def rule(self, body: str, kind: str = "rule") -> str: ...

    def json(self, schema: Mapping[str, Any]) -> str: ...


def is_exact(value: Any) -> bool:
    """Whether every integer in a value, however deep, is one that a float holds."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if (
            isinstance(item, int)
            and abs(item) > 2**53
            and (item.bit_length() > 1023 or int(float(item)) != item)
        ):
            return False
        waiting += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
    return True


def constants_exact(schema: Any) -> bool:
    """Whether the constants of a schema are; its bounds are the business of schemas.py."""
    waiting = [schema]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            if not (is_exact(item.get("const")) and is_exact(item.get("enum"))):
                return False
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item
    return True


class Exact:
    """The rules of one schema in a grammar under way."""

    def __init__(self, lark: Lark, root: Mapping[str, Any]) -> None:
        self._lark, self._root = lark, root
        self._shared = {
            name: root[name] for name in ("$defs", "definitions") if isinstance(root.get(name), dict)
        }
        self._known: dict[str, str] = {}  # a reference -> its rule
        self._large = self._references()
        self._space = lark.rule(r"/[ \n\t\r]{1,16}/", "SPACE") + "?"

    def value(self, schema: Any) -> str:
        """The name of a rule for the values of a schema. Raises UsageError."""
        if not self._needs(schema):
            plain = (
                {**schema, **self._shared}
                if isinstance(schema, dict)
                else {"not": {}}
                if schema is False
                else {}
            )
            return self._lark.json(plain)
        if "const" in schema:
            return self._lark.rule(literal(json.dumps(schema["const"], ensure_ascii=False)))
        words = set(schema) - _NOTES
        if isinstance(schema.get("enum"), list):
            listed = [literal(json.dumps(option, ensure_ascii=False)) for option in schema["enum"]]
            return self._lark.rule(" | ".join(listed))
        if words == {"anyOf"}:
            return self._lark.rule(" | ".join(self.value(option) for option in schema["anyOf"]))
        if words == {"$ref"}:
            return self._reference(str(schema["$ref"]))
        if (
            schema.get("type") == "object"
            and not words - _OBJECT
            and isinstance(schema.get("properties"), dict)
        ):
            return self._object(schema)
        if schema.get("type") == "array" and not words - _ARRAY:
            return self._array(schema)
        raise UsageError(
            f"integers over 2**53 are not held beside {', '.join(sorted(words))[:80]}: make them strings"
        )

    def _needs(self, schema: Any) -> bool:
        if not isinstance(schema, dict):
            return False
        inner = {k: v for k, v in schema.items() if k not in ("$defs", "definitions")}
        return not constants_exact(inner) or bool(_refs(inner) & self._large)

    def _references(self) -> set[str]:
        """References whose definitions hold large integers, directly or through others."""
        places = {
            f"#/{where}/{name}": place
            for where, inside in self._shared.items()
            for name, place in inside.items()
        }
        large = {ref for ref, place in places.items() if not constants_exact(place)}
        while more := {ref for ref, place in places.items() if ref not in large and _refs(place) & large}:
            large |= more
        if not constants_exact({k: v for k, v in self._root.items() if k not in self._shared}):
            large.add("#")
        return large

    def _reference(self, ref: str) -> str:
        if ref not in self._known:
            self._known[ref] = name = f"ref_{len(self._known)}"
            at: Any = self._root
            for step in ref.removeprefix("#").strip("/").split("/") if ref != "#" else []:
                at = at.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(at, dict) else None
            if not isinstance(at, dict):
                raise UsageError(f"$ref {ref[:80]!r} is not within the schema: put it under $defs")
            self._lark.rules.append(f"{name}: {self.value(at)}")
        return self._known[ref]

    def _object(self, schema: Mapping[str, Any]) -> str:
        """`rest` are the properties from one on, behind another or (`first`) as the first."""
        names = list(schema["properties"])
        needed = set(schema.get("required") or ())
        if needed - set(names):
            raise UsageError(
                "integers over 2**53 are not held beside required properties without a schema: add it"
            )
        space, rest, first = self._space, '""', self._space
        for name in reversed(names):
            key, value = literal(json.dumps(name, ensure_ascii=False)), self.value(schema["properties"][name])
            pair = f'{key} {space} ":" {space} {value}'
            behind, alone = f'"," {space} {pair} {space} {rest}', f"{space} {pair} {space} {rest}"
            may = name not in needed
            rest, first = (
                self._lark.rule(f"{behind} | {rest}" if may else behind),
                self._lark.rule(f"{alone} | {first}" if may else alone),
            )
        return self._lark.rule(f'"{{" {first} "}}"')

    def _array(self, schema: Mapping[str, Any]) -> str:
        space, item = self._space, self.value(schema["items"])
        least, most = int(schema.get("minItems") or 0), schema.get("maxItems")
        if most == 0:
            return self._lark.rule(f'"[" {space} "]"')
        times = f"{{{max(0, least - 1)},{'' if most is None else int(most) - 1}}}"
        some = f'{item} {space} ("," {space} {item} {space}){times}'
        return self._lark.rule(f'"[" {space} {f"({some})?" if least == 0 else some} "]"')


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refs(schema: Any) -> set[str]:
    refs, waiting = set[str](), [schema]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            if isinstance(item.get("$ref"), str):
                refs.add(item["$ref"])
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item
    return refs
