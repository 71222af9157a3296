"""Grammars of tool calls in a model's own notation, in Lark as llguidance reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.text.exact import Exact, constants_exact
from paceline.text.formats.events import Tools

SPACES = {"whitespace_flexible": True, "whitespace_pattern": r"[ \n\t\r]{0,16}"}  # bounded: no endless blanks


class Lark:
    """Rules under way. `marks`: the id of each mark that is one token of the vocabulary."""

    def __init__(self, marks: Mapping[str, int]) -> None:
        self.marks = marks
        self.rules: list[str] = []

    def mark(self, mark: str) -> str:
        """A mark as its token where it has one; "" for no mark."""
        if not mark:
            return '""'
        if mark in self.marks:
            return f"<[{self.marks[mark]}]>"
        return literal(mark)

    def spelled(self, text: str) -> str:
        """A text with marks in it, each of them as its token."""
        marks = sorted((m for m in self.marks if m), key=len, reverse=True)
        parts = re.split("(" + "|".join(map(re.escape, marks)) + ")", text) if marks else [text]
        return " ".join(self.mark(p) if p in self.marks else literal(p) for p in parts if p) or '""'

    def rule(self, body: str, kind: str = "rule") -> str:
        """The name of a new rule; upper-case kinds are terminals, `[...]` behind them is llguidance's."""
        name, bracket, options = kind.partition("[")
        name = f"{name}_{len(self.rules)}"
        self.rules.append(f"{name}{bracket}{options}: {body}")
        return name

    def json(self, schema: Mapping[str, Any]) -> str:
        """Any value that fits a schema, written as JSON. Raises UsageError for large integers where none can stand."""
        if not constants_exact(schema):
            return Exact(self, schema).value(schema)
        return self.rule("%json " + json.dumps({**schema, "x-guidance": SPACES}))

    def arguments(self, schema: Mapping[str, Any]) -> str:
        """An object that fits a schema."""
        return self.json({**schema, "type": "object"} if "$ref" not in schema else schema)

    def until(self, mark: str) -> str:
        """Any text up to a mark, and the mark."""
        if mark in self.marks:
            return f"({self.rule('/(?s:.+)/', 'FREE')})? <[{self.marks[mark]}]>"
        return self.rule(f"/(?s:.*){escaped(mark)}/", "until[lazy]")

    def text(self, start: str) -> str:
        return "\n".join([start, *self.rules]) + "\n"


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """A text inside of a regular expression between slashes."""
    return re.sub(r"([\\.+*?()|\[\]{}^$/#&~\-])", r"\\\1", text).replace("\n", r"\n")


def either(options: Sequence[str]) -> str:
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"


def choices(tools: Tools) -> list[tuple[str, Mapping[str, Any]]]:
    return list(tools.items())
