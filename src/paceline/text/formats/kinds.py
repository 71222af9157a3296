"""Which types of JSON an argument may have, by its schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EVERY = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
_DEPTH = 16  # of references to references


def kinds_of(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """The types that the property `key` of `schema` may have; all of them where nothing is said."""
    properties = schema.get("properties")
    inner = properties.get(key) if isinstance(properties, Mapping) else None
    return _kinds(inner, schema, 0)


def _kinds(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or depth > _DEPTH:
        return EVERY
    if isinstance(schema.get("$ref"), str):
        return _kinds(resolved(schema["$ref"], root), root, depth + 1)
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named}) & EVERY or EVERY
    if isinstance(named, list):
        return frozenset(kind for kind in named if isinstance(kind, str)) & EVERY or EVERY
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return frozenset().union(*map(kind_of, values)) or EVERY
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list) and schema[word]:
            return frozenset().union(*(_kinds(kind, root, depth + 1) for kind in schema[word]))
    every = schema.get("allOf")
    if isinstance(every, list) and every:
        kinds = EVERY
        for kind in every:
            kinds &= _kinds(kind, root, depth + 1)
        return kinds or EVERY
    return EVERY


def resolved(reference: str, root: Mapping[str, Any]) -> Any:
    """What a local `$ref` means; None for any other."""
    node: Any = root
    for step in reference.removeprefix("#/").split("/") if reference.startswith("#/") else ["?"]:
        name = step.replace("~1", "/").replace("~0", "~")
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def kind_of(value: Any) -> frozenset[str]:
    """JSON schema's names for the type of a value."""
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, float):
        return frozenset({"number", "integer"} if value.is_integer() else {"number"})
    names = {int: ("integer", "number"), str: ("string",), list: ("array",), dict: ("object",)}
    return frozenset(names.get(type(value), ("null",) if value is None else ()))
