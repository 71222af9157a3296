"""JSON schemas that people write -> ones that a grammar holds: what fits the result fits the original.

Formats become patterns; unknown ones are annotations, as JSON Schema has it. `oneOf` becomes `anyOf` where no two options
fit at the same time, or are made so: their discriminator is required, or properties that they do not name are left out.
Numbers get a bound on their digits: a small model may write them without end. What cannot be held is refused by its name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from itertools import permutations
from typing import Any

from paceline.errors import UsageError
from paceline.text.schema_formats import formatted

Schema = Any  # a dict, or true or false
_LARGEST = 10**15  # of a number without a bound of its own
_LEAST_WHOLE, _MOST_WHOLE = -(2**63) + 1024, 2**63 - 1  # of an integer with bounds of its own
_STEP = 1e-9  # digits behind the point
_MOST_COMPARED = 64  # options of `oneOf` that are compared each with each
_MOST_UNIQUE = 5  # values of which every order is listed
_VALUE = "paceline-any"  # the definition of any value with bounded numbers
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_ONES = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames",
         "unevaluatedItems", "unevaluatedProperties", "additionalItems")  # fmt: skip
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_NOTES = {"title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly", "$schema",
          "$defs", "definitions"}  # fmt: skip
_TYPES = ("null", "boolean", "number", "string", "array", "object")


def held(schema: Schema) -> Schema:
    """A schema whose every value fits `schema`, in words that llguidance knows. Raises UsageError, with the keyword."""
    if not isinstance(schema, dict):
        return schema
    maker = _Maker(schema)
    made = maker.of(schema, "")
    if not isinstance(made, dict) or set(made) == {"$ref"}:
        notes = {k: v for k, v in schema.items() if k in ("$defs", "definitions", "$id")}
        made = notes | made if isinstance(made, dict) else schema
    for place, name, needed in maker.needed:  # a reference that goes round takes no words beside it
        made[place][name] = made[place][name] | {"required": [*_required(made[place][name]), needed]}
    if maker.uses_value:
        made = made | {"$defs": {**made.get("$defs", {}), _VALUE: maker.value()}}
    return made


def held_arguments(schema: dict[str, Any]) -> dict[str, Any]:
    """`held` for the arguments of a tool, which are an object; without properties it is empty. Raises UsageError."""
    if not schema:
        return schema  # any arguments
    if "$ref" in schema and _types(_Maker(schema).target(schema)) != {"object"}:
        raise _refuse("", "$ref", "has to be of type object, which the arguments of a tool are")
    if "object" not in _types(schema):
        raise _refuse("", "type", "is object for the arguments of a tool")
    whole = schema if "$ref" in schema else {**schema, "type": "object"}
    if whole.get("properties") == {}:
        whole = {"additionalProperties": False} | whole
    made: dict[str, Any] = held(whole)
    return made


def _refuse(where: str, keyword: str, why: str) -> UsageError:
    return UsageError(f"{where + ': ' if where else ''}{keyword} {why}")


class _Maker:
    def __init__(self, root: dict[str, Any]) -> None:
        self.root = root
        self.uses_value = False
        self.needed: dict[tuple[str, str, str], None] = {}  # definitions, and what they shall require
        text = json.dumps(root)
        self._has_ids, self._joins = '"$id"' in text, '"allOf"' in text

    def of(self, schema: Schema, where: str) -> Schema:
        if not isinstance(schema, dict):
            return schema
        out = dict(schema)
        for name in _MAPS:
            if isinstance(out.get(name), dict):
                out[name] = {k: self.of(v, f"{where}.{k}".strip(".")) for k, v in out[name].items()}
        for name in _LISTS:
            if isinstance(out.get(name), list):
                out[name] = [self.of(v, f"{where}.{name}".strip(".")) for v in out[name]]
        for name in _ONES:
            if name in out:
                out[name] = self._inner(out[name], f"{where}.{name}".strip("."))
        self._references(out, where)
        out = _simpler(out)
        for name in _COUNTS:
            if isinstance(out.get(name), float) and out[name].is_integer():
                out[name] = int(out[name])
        if "oneOf" in out:
            out = self._one_of(out, where)
        if out.get("uniqueItems") is True:
            out = _unique(out, self._resolved(out.get("items")), where)
        out.pop("uniqueItems", None)
        return self._open(_bounded(formatted(out), where))

    def _inner(self, value: Any, where: str) -> Any:
        return [self.of(v, where) for v in value] if isinstance(value, list) else self.of(value, where)

    def _references(self, schema: dict[str, Any], where: str) -> None:
        if where and isinstance(schema.get("$id"), str):
            raise _refuse(where, "$id", "within a schema cannot be held: leave it out")
        target = schema.get("$ref")
        if isinstance(target, str) and not target.startswith("#") and not self._has_ids:
            raise _refuse(where, "$ref", f"{target[:80]!r} is not within the schema: put it under $defs")

    def _open(self, schema: dict[str, Any]) -> Schema:
        """Values that the schema says nothing of, with bounded numbers."""
        if not set(schema) - _NOTES:
            return self._any()
        if {"$ref", *_LISTS[:3]} & set(schema):  # llguidance cannot join two definitions that go round
            return schema
        more: dict[str, Any] = {}
        kind = schema.get("type")
        names = {"patternProperties", "propertyNames"}
        if kind == "object" and not names & set(schema) and schema.get("additionalProperties", True) is True:
            more["additionalProperties"] = self._any()
        if kind == "array" and not {"items", "prefixItems", "contains"} & set(schema):
            more["items"] = self._any()
        return schema | more

    def _any(self) -> Schema:
        if self._has_ids or self._joins:  # a reference could mean another document, or be joined with itself
            return True
        self.uses_value = True
        return {"$ref": f"#/$defs/{_VALUE}"}

    def value(self) -> dict[str, Any]:
        again = self._any()
        return _bounded({"type": [*_TYPES], "items": again, "additionalProperties": again})

    # oneOf

    def _one_of(self, schema: dict[str, Any], where: str) -> dict[str, Any]:
        options = schema["oneOf"]
        rest = {k: v for k, v in schema.items() if k not in ("oneOf", "discriminator")}
        if not isinstance(options, list) or "anyOf" in rest:
            raise _refuse(where, "oneOf", "beside anyOf cannot be held: write one of them")
        views = [self._resolved(option) for option in options]
        if not all(isinstance(view, dict) for view in views):
            raise _refuse(where, "oneOf", "with an option that fits anything cannot be held: use anyOf")
        named = self._discriminator(schema, views)
        if named is not None:
            return rest | {
                "anyOf": [self._requiring(o, v, named) for o, v in zip(options, views, strict=True)]
            }
        if _all_differ(views):
            return rest | {"anyOf": options}
        if _all_differ([view | _closing(view) for view in views]):
            return rest | {
                "anyOf": [_closed(option, view) for option, view in zip(options, views, strict=True)]
            }
        raise _refuse(
            where, "oneOf", "has options that can fit at the same time, which cannot be held: use anyOf, or give each "
            "option a property with another constant"
        )  # fmt: skip

    def _requiring(self, option: dict[str, Any], view: dict[str, Any], name: str) -> dict[str, Any]:
        if name in _required(view):
            return option
        steps = str(option.get("$ref", "")).split("/")
        if len(steps) == 3 and steps[0] == "#" and steps[1] in ("$defs", "definitions"):
            self.needed[steps[1], steps[2], name] = None
            return option
        return option | {"required": [*_required(view), name]}

    def target(self, schema: dict[str, Any]) -> dict[str, Any]:
        """What a schema's reference means; an empty one where that is not found."""
        target = self._resolved({"$ref": schema["$ref"]})
        return target if isinstance(target, dict) else {}

    def _resolved(self, option: Schema) -> Schema:
        """An option that is a reference alone, as what it refers to."""
        for _ in range(8):
            if not isinstance(option, dict) or set(option) - {"title", "description"} != {"$ref"}:
                return option
            node: Any = self.root
            for step in str(option["$ref"]).removeprefix("#/").split("/"):
                name = step.replace("~1", "/").replace("~0", "~")
                node = node.get(name) if isinstance(node, dict) else None
            if not isinstance(node, dict):
                return option
            option = node
        return option

    def _discriminator(self, schema: dict[str, Any], options: list[dict[str, Any]]) -> str | None:
        """A property that has other constants in each option."""
        discriminator = schema.get("discriminator")
        first = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
        names = [first] if isinstance(first, str) else list(_properties(options[0])) if options else []
        for name in names:
            sets = [_values(_properties(option).get(name)) for option in options]
            if all(_is_object(o) for o in options) and _all_apart(sets):
                return name
        return None


def _simpler(schema: dict[str, Any]) -> dict[str, Any]:
    """The same in words that can be held, for words that zod and others write where simpler ones do."""
    out = dict(schema)
    if "if" not in out or not {"then", "else"} & set(out):
        out = {k: v for k, v in out.items() if k not in ("if", "then", "else")}
    if "contains" not in out:
        out = {k: v for k, v in out.items() if k not in ("minContains", "maxContains")}
    alone = not {"$ref", "$dynamicRef", "if", "dependentSchemas", "not", "contains", *_LISTS[:3]} & set(out)
    for name, plain in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        if name in out and (alone or out[name] is True):
            unevaluated = out.pop(name)
            out = {plain: unevaluated} | out
    return _named_keys(out)


def _named_keys(schema: dict[str, Any]) -> dict[str, Any]:
    """`propertyNames` as properties or patterns, as far as it is one of few names, or a pattern."""
    names = schema.get("propertyNames")
    rest = {k: v for k, v in schema.items() if k != "propertyNames"}
    if names is True or (isinstance(names, dict) and not set(names) - _NOTES - {"type"}):
        return rest if names is True or names.get("type", "string") == "string" else schema
    if not isinstance(names, dict) or {"properties", "patternProperties"} & set(rest):
        return schema
    inner, words = rest.get("additionalProperties", True), set(names) - _NOTES - {"type"}
    listed = [names["const"]] if words == {"const"} else names.get("enum") if words == {"enum"} else None
    if isinstance(listed, list):
        own = {name: inner for name in listed if isinstance(name, str)}
        return rest | {"properties": own, "additionalProperties": False}
    if words == {"pattern"} and isinstance(names["pattern"], str):
        return rest | {"patternProperties": {names["pattern"]: inner}, "additionalProperties": False}
    return schema


def _all_apart(sets: list[frozenset[str] | None]) -> bool:
    known = [values for values in sets if values is not None]
    return len(known) == len(sets) and sum(map(len, known)) == len(frozenset[str]().union(*known))


def _is_object(schema: dict[str, Any]) -> bool:
    return schema.get("type") == "object"


def _properties(schema: dict[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def _required(schema: dict[str, Any]) -> list[str]:
    required = schema.get("required")
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []


def _all_differ(views: list[dict[str, Any]]) -> bool:
    """Whether no two of them can fit at the same time; linear where constants or types tell them apart."""
    values = [_values(view) for view in views]
    for kind in sorted(set[str]().union(*map(_types, views))):
        alike = [i for i, view in enumerate(views) if kind in _types(view)]
        if len(alike) < 2 or _all_apart([values[i] for i in alike]):
            continue
        if kind != "object" or not all(_is_object(views[i]) for i in alike):
            return False
        if not _objects_differ([views[i] for i in alike]):
            return False
    return True


def _objects_differ(views: list[dict[str, Any]]) -> bool:
    shared = set.intersection(*(set(_required(view)) for view in views))
    if any(_all_apart([_values(_properties(view).get(name)) for view in views]) for name in shared):
        return True
    if len(views) > _MOST_COMPARED:
        raise _refuse(
            "", "oneOf", f"has more than {_MOST_COMPARED} options that no property tells apart by its constant: use "
            "anyOf, or give each option such a property"
        )  # fmt: skip
    return all(_apart(a, b) for i, a in enumerate(views) for b in views[:i])


def _closing(schema: dict[str, Any]) -> dict[str, Any]:
    """Words that keep an object from having properties that it does not name."""
    if not _is_object(schema) or "patternProperties" in schema or not _properties(schema):
        return {}
    if schema.get("additionalProperties") is False:
        return {}
    own = _properties(schema)
    return {"properties": own, "additionalProperties": False}


def _closed(option: dict[str, Any], view: dict[str, Any]) -> dict[str, Any]:
    """`option` without further properties; a reference keeps its own words for those it names."""
    more = _closing(view)
    if "$ref" in option and more:
        more["properties"] = dict.fromkeys(more["properties"], True)
    elif more:
        more["properties"] = _properties(option)
    return option | more


def _values(schema: Any) -> frozenset[str] | None:
    """The values that a schema allows, as JSON, where it lists them."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return frozenset([json.dumps(schema["const"], sort_keys=True)])
    if isinstance(schema.get("enum"), list):
        return frozenset(json.dumps(value, sort_keys=True) for value in schema["enum"])
    return None


def _types(schema: dict[str, Any]) -> frozenset[str]:
    kind = schema.get("type", [*_TYPES])
    each = kind if isinstance(kind, list) else [kind]  # what is no name is no type
    kinds = frozenset(k for k in each if isinstance(k, str))
    return kinds | {"number"} if "integer" in kinds else kinds


def _apart(first: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether nothing can fit both."""
    if not _types(first) & _types(other):
        return True
    a, b = _values(first), _values(other)
    if a is not None and b is not None:
        return not a & b
    if not (_is_object(first) and _is_object(other)):
        return False
    for here, there in ((first, other), (other, first)):
        if there.get("additionalProperties") is False and set(_required(here)) - set(_properties(there)):
            return True
    for name in set(_required(first)) & set(_required(other)):
        a, b = _values(_properties(first).get(name)), _values(_properties(other).get(name))
        if a is not None and b is not None and not a & b:
            return True
    return False


def _unique(schema: dict[str, Any], inner: Schema, where: str) -> dict[str, Any]:
    """Arrays of few listed values as every array of them in any order."""
    most = schema.get("maxItems")
    if isinstance(most, int) and most <= 1:
        return schema
    inner = {"enum": [False, True]} if isinstance(inner, dict) and inner.get("type") == "boolean" else inner
    values = _values(inner)
    if values is None or len(values) > _MOST_UNIQUE or "prefixItems" in schema:
        raise _refuse(
            where, "uniqueItems", f"is held for arrays of up to {_MOST_UNIQUE} listed values (enum) only: leave it out"
        )  # fmt: skip
    least = schema.get("minItems", 0)
    top = len(values) if most is None else min(most, len(values))
    listed = [json.loads(value) for value in sorted(values)]
    arrays = [list(array) for size in range(least, top + 1) for array in permutations(listed, size)]
    if not arrays:
        raise _refuse(where, "minItems", "asks for more different items than there are")
    return {k: v for k, v in schema.items() if k not in ("items", "minItems", "maxItems", "type")} | {
        "enum": arrays
    }


def _bounded(schema: dict[str, Any], where: str = "") -> dict[str, Any]:
    """Numbers of at most 16 digits, and 9 behind the point, where the schema's own bounds are no others."""
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
    if not {"number", "integer"} & set(map(str, kinds)) or {"enum", "const"} & set(schema):
        return schema
    names = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "multipleOf")
    if any(abs(limit) > _LARGEST for limit in _limits(schema, names)):
        schema = _nearer(schema, "number" not in kinds, where)
    limits = _limits(schema, names)
    if "number" not in kinds and any(abs(limit) > _LARGEST for limit in limits):
        return schema
    if any(abs(limit) > _LARGEST or 0 < abs(limit) < _STEP * 100 for limit in limits):
        return schema
    out = dict(schema)
    if not _limits(schema, ("minimum", "exclusiveMinimum")):
        out["minimum"] = -_LARGEST
    if not _limits(schema, ("maximum", "exclusiveMaximum")):
        out["maximum"] = _LARGEST
    if "number" in kinds and "multipleOf" not in out:
        out["multipleOf"] = _STEP
    return out


def _nearer(schema: dict[str, Any], whole: bool, where: str) -> dict[str, Any]:
    """Bounds that llguidance holds, which computes with 64 bits, within those of the schema; `whole`: of integers.

    Code generators write those of int64 and uint64. A bound is moved inwards to the next number that is exact as a float.
    """
    least, most = (_LEAST_WHOLE, _MOST_WHOLE) if whole else (-_LARGEST, _LARGEST)
    step = 1 if whole else 0
    low = [*_limits(schema, ["minimum"]), *(limit + step for limit in _limits(schema, ["exclusiveMinimum"]))]
    high = [*_limits(schema, ["maximum"]), *(limit - step for limit in _limits(schema, ["exclusiveMaximum"]))]
    bottom, top = max([*low, least]), min([*high, most])
    if bottom > top or any(abs(limit) > _LARGEST for limit in _limits(schema, ["multipleOf"])):
        raise _refuse(
            where, "minimum and maximum", f"are held from {least} to {most} only: leave larger ones out"
        )
    far = [k for k in ("exclusiveMinimum", "exclusiveMaximum") if whole or abs(schema.get(k) or 0) > _LARGEST]
    out = {k: v for k, v in schema.items() if k not in far}
    if low:
        out["minimum"] = _exact(math.ceil(bottom), math.inf) if whole else bottom
    if high:
        out["maximum"] = top if top == most or not whole else _exact(math.floor(top), -math.inf)
    if low and high and out["minimum"] > out["maximum"]:
        raise _refuse(where, "minimum and maximum", "leave no number that can be held: use enum")
    return out


def _exact(limit: int, towards: float) -> int:
    """The next whole number, in one direction, that a float holds."""
    nearest = float(limit)
    while (nearest < limit) if towards > 0 else (nearest > limit):
        nearest = math.nextafter(nearest, towards)
    return int(nearest)


def _limits(schema: dict[str, Any], names: Iterable[str]) -> list[float]:
    values = (schema.get(name) for name in names)
    return [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
