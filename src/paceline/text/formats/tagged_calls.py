"""Calls written as tags with one argument each, whose values are text unless their schema says otherwise.

Qwen3-Coder and Qwen3.5: `<tool_call>`, `<function=f>`, `<parameter=key>`, a line of value, `</parameter>`, `</function>`.
GLM-4.5 to 4.7: `<tool_call>f`, `<arg_key>key</arg_key>`, `<arg_value>value</arg_value>`, `</tool_call>`.
DeepSeek V3.2: `<｜DSML｜invoke name="f">`, `<｜DSML｜parameter name="key" string="true">value</｜DSML｜parameter>`.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass

from paceline.text.formats.calls import HEAD, CallParser, begins, quoted
from paceline.text.formats.events import Tools
from paceline.text.formats.kinds import EVERY, kind_of, kinds_of
from paceline.text.markers import first, held

_NAME = re.compile(r"[\w.\-/: ]+")
_WORDS = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True, slots=True)
class Tags:
    """The marks around a call, its name, a key and a value.

    A value ends only where a key or the end of the call follows: its text may hold the closing mark itself.
    """

    opening: str
    lead: str  # stands before the name
    name_ends: tuple[str, ...]  # the first of them ends the name; only the first is not looked at again
    key: tuple[str, str]
    value: tuple[str, str]
    end: str  # of a call
    closing: str  # of what `opening` has begun
    trim: bool  # a line break on each side of a value is not the value's
    kinds: tuple[str, ...] = ()  # behind a key: that its value is a string, that it is JSON


class TaggedCallParser(CallParser):
    def __init__(self, tools: Tools, tags: Tags) -> None:
        openers = [mark for mark in (tags.opening, tags.lead) if mark]
        super().__init__(tools, openers, list(dict.fromkeys([tags.end, tags.closing])))
        self._tags, self._taken, self._name = tags, "", ""
        self._ends = re.compile("|".join(map(re.escape, dict.fromkeys([tags.value[1], tags.end]))))
        self._keys = 0
        self._kinds: frozenset[str] = frozenset()
        self._begun = self._text = False  # whether a value has begun, and is text that is shown as it comes

    def begin(self, marker: str) -> None:
        self._taken, self._keys = marker, 0
        self.state = self._head if marker == self._tags.lead or not self._tags.lead else self._lead

    def _lead(self) -> bool:
        rest, lead = self.rest.lstrip(), self._tags.lead
        if rest.startswith(lead):
            size = len(self.rest) - len(rest) + len(lead)
            self._taken, self.rest = self._taken + self.rest[:size], self.rest[size:]
            self.state = self._head
            return True
        return False if begins(rest, lead) and not self.ended else self.no_call(self._taken)

    def _head(self) -> bool:
        """The name. A call that only its lead begins has to be one of the tools."""
        ends = self._tags.name_ends
        mark = first(self.rest, ends)
        name = self.rest[: len(self.rest) - held(self.rest, ends) if mark is None else mark[0]].strip()
        if name and not _NAME.fullmatch(name):
            return self.no_call(self._taken)
        if mark is None:
            return self.no_call(self._taken) if self.ended or len(self.rest) > HEAD else False
        if not name or (self._taken == self._tags.lead and not self.calls and name not in self.tools):
            return self.no_call(self._taken)
        at, end = mark
        self.call(name)
        self._name, self.state = name, self._next
        self.rest = self.rest[at + (len(end) if end == ends[0] else 0) :]
        return True

    def _next(self) -> bool:
        """A key, or the end of the call."""
        rest, (opening, closing) = self.rest.lstrip(), self._tags.key
        if rest.startswith(opening):
            at = rest.find(closing, len(opening))
            behind = rest[at + len(closing) :].lstrip() if self._tags.value[0] else rest[at + len(closing) :]
            if (
                at < 0
                or begins(behind, self._tags.value[0])
                or any(begins(behind, k) for k in self._tags.kinds)
            ):
                return False
            key = rest[len(opening) : at].strip()
            self._kinds = kinds_of(self.tools.get(self._name, {}), key)
            self._text = self._kinds == {"string"}
            self.rest = self._said(behind.removeprefix(self._tags.value[0]))
            self.argue(("{" if self._keys == 0 else ", ") + f'"{quoted(key)}": ')
            self._keys, self._begun, self.state = self._keys + 1, False, self._value
            return True
        if any(begins(rest, mark) for mark in (opening, self._tags.end)):
            return False
        self.argue("}" if self._keys else "{}")
        self.state = self.between
        return True

    def _said(self, behind: str) -> str:
        """Takes from before a value what says whether it is a string or JSON, where the notation has that."""
        for text, mark in zip((True, False), self._tags.kinds, strict=False):
            if behind.startswith(mark):
                self._kinds = self._kinds if self._text else frozenset({"string"}) if text else EVERY
                self._text = text
                return behind.removeprefix(mark)
        return behind.removeprefix(">") if self._tags.kinds else behind

    def _value(self) -> bool:
        end, behind = self._value_end()
        if not self._text and behind is None and not self.ended:
            return False
        text = self.rest[:end]
        if not self._begun and (text or behind is not None):
            self.argue('"' if self._text else "")
            text = text.removeprefix("\n") if self._tags.trim else text
            self._begun = True
        if behind is None:
            return self._more(text, end)
        text = text.removesuffix("\n") if self._tags.trim else text
        self.argue(quoted(text) + '"' if self._text else typed(text, self._kinds))
        self.rest, self.state = self.rest[behind:], self._next
        return True

    def _more(self, text: str, end: int) -> bool:
        """A piece of a value that goes on; at the end of the text, what is left of it."""
        if self._text:
            open_end = 0 if self.ended or not self._tags.trim else len(text) - len(text.removesuffix("\n"))
            self.argue(quoted(text[: len(text) - open_end]))
            self.rest = self.rest[end - open_end :]
        elif self.ended:
            self.argue(text)
            self.rest = ""
        return False

    def _value_end(self) -> tuple[int, int | None]:
        """(characters that are the value's, where the text goes on behind it; None if the end has not come)."""
        tags = self._tags
        for match in self._ends.finditer(self.rest):
            closes = match[0] == tags.value[1]
            follows = (tags.key[0], tags.end) if closes else (tags.closing,)
            behind = self.rest[match.end() :].lstrip()
            if behind.startswith(follows) or (self.ended and not behind and closes):
                return match.start(), match.end() if closes else match.start()
            if not self.ended and any(begins(behind, follower) for follower in follows):
                return match.start(), None
        open_end = 0 if self.ended else held(self.rest, [tags.value[1], tags.end])
        return len(self.rest) - open_end, None


def typed(text: str, kinds: frozenset[str]) -> str:
    """A value as JSON: of one of `kinds` if it reads as such (Python's words included), else the text as a string."""
    text = text if "string" in kinds else text.strip()
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text.strip())
            made = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        if kind_of(value) & kinds:
            return text.strip() if read is json.loads else made
    return _WORDS[text] if text in _WORDS and "string" not in kinds else f'"{quoted(text)}"'
