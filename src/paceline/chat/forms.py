"""`response_format` -> what a grammar holds, within limits."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.chat.asked import Form
from paceline.errors import UsageError, shown

_GBNF = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)  # a rule of llama.cpp's grammars
_TYPES = "text, json_object, json_schema, grammar or regex"


@dataclass(frozen=True, slots=True)
class Limits:
    """Of a schema: levels, and characters of it as text."""

    depth: int = 32
    size: int = 64 * 2**10


class FormError(UsageError):
    """`field`: what of the response_format is wrong, e.g. `json_schema.schema`; empty for the whole."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{'.'.join(filter(None, ('response_format', field)))}: {message}")
        self.field, self.message = field, message


def form_of(given: Mapping[str, Any] | None, limits: Limits = Limits()) -> Form | None:
    """What OpenAI's response_format asks for, `grammar` and `regex` among it; None for any text. Raises FormError."""
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == "text":
        return None
    if kind in ("json_object", "json_schema"):
        return Form("json", checked_schema(*_schema(kind, given), limits))
    if kind not in ("grammar", "regex"):
        raise FormError("", f"{shown(given)} is not possible: give a type, which is {_TYPES}")
    source = given.get(kind)
    if not source or not isinstance(source, str):
        raise FormError(kind, "is missing")
    if len(source) > limits.size:
        raise FormError(kind, f"over {limits.size} characters")
    if kind == "regex":
        return Form("regex", source)
    return Form("gbnf" if _GBNF.search(source) else "lark", source)


def _schema(kind: str, given: Mapping[str, Any]) -> tuple[Any, str]:
    """(schema, its field). A json_object may have one, in OpenAI's place; a json_schema must."""
    inner = given.get("json_schema")
    if kind == "json_object" and inner is None:
        return {"type": "object"}, ""
    if not isinstance(inner, Mapping):
        raise FormError("json_schema", "is missing")
    schema = inner.get("schema")
    if not isinstance(schema, Mapping):
        raise FormError("json_schema.schema", "is missing: give the JSON schema that the answer has to fit")
    return schema, "json_schema.schema"


def checked_schema(schema: Any, field: str, limits: Limits = Limits()) -> str:
    """A client's JSON schema as text. Raises FormError for one that is too deep or too large."""
    _check_depth(schema, field, limits.depth)
    try:
        text = json.dumps(schema)
        json.dumps(schema, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise FormError(field, "has a lone surrogate, which is no character: remove it") from error
    except (TypeError, ValueError) as error:
        raise FormError(field, f"is no JSON ({error}): give texts, numbers, lists and dicts") from error
    if len(text) > limits.size:
        raise FormError(field, f"over {limits.size} characters")
    return text


def _check_depth(schema: Any, field: str, limit: int) -> None:
    """Raise FormError for JSON nested deeper than `limit`; itself without recursion."""
    level, depth = [schema], 0
    while level:
        depth += 1
        if depth > limit:
            raise FormError(field, f"nested deeper than {limit} levels: make it flatter")
        inner: list[Any] = []
        for item in level:
            inner += item.values() if isinstance(item, dict) else item if isinstance(item, list) else []
        level = [item for item in inner if isinstance(item, (dict, list))]
