"""Gemma 4's notation of a call's arguments, rewritten as JSON while it arrives.

Whatever comes in, what goes out up to the closing brace is valid JSON: missing values become null, missing commas
and colons are written, unknown bare words become strings. Types are those of the text: `5` is a number and
`<|"|>5<|"|>` is a string.
"""

from __future__ import annotations

import json
import re

from paceline.text.markers import held

CLOSE, QUOTE = "<tool_call|>", '<|"|>'
MAX_DEPTH = 64
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_KEY_END = re.compile(r'[:,{}\[\]]|<tool_call\|>|<\|"\|>')
_VALUE_END = re.compile(r'[,{}\[\]]|<tool_call\|>|<\|"\|>')
_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})')


class ArgumentReader:
    """Feed text that begins at the opening brace, until `done`."""

    def __init__(self) -> None:
        self.done = False
        self._json = _JsonWriter()
        self._rest = ""
        self._string = ""  # the mark that ends the string being read

    def feed(self, text: str) -> tuple[str, str]:
        """The JSON of what can be decided, and the text after the end of the arguments."""
        self._rest += text
        out: list[str] = []
        while self._rest and not self.done:
            piece = self._read_string() if self._string else self._read()
            if piece is None:
                return "".join(out), ""
            out.append(piece)
        after, self._rest = self._rest, ""
        return "".join(out), after

    def finish(self) -> str:
        """The text was cut off: what was kept back of a string, if one is open."""
        rest, self._rest = self._rest, ""
        return _escaped(rest) if self._string else ""

    def _read(self) -> str | None:
        """The next token outside strings; None: more text is needed."""
        self._rest = rest = self._rest.lstrip()
        if not rest or any(len(rest) < len(m) and m.startswith(rest) for m in (QUOTE, CLOSE)):
            return None
        for mark in (QUOTE, '"'):
            if rest.startswith(mark):
                self._string, self._rest = mark, rest[len(mark) :]
                return self._json.begin() + '"'
        if rest.startswith(CLOSE):
            self.done = True
            return self._json.close_all()
        if rest[0] in "{}[],:":
            self._rest = rest[1:]
            piece = self._json.mark(rest[0])
            self.done = self._json.complete
            return piece
        end = (_KEY_END if self._json.wants_key else _VALUE_END).search(rest)
        if end is None:
            return None
        self._rest = rest[end.start() :]
        return self._json.word(rest[: end.start()].strip())

    def _read_string(self) -> str | None:
        if self._string == '"':
            return self._read_json_string()
        at = self._rest.find(QUOTE)
        end = at if at >= 0 else len(self._rest) - held(self._rest, [QUOTE])
        piece, self._rest = _escaped(self._rest[:end]), self._rest[end:]
        if at < 0:
            return piece or None
        self._rest = self._rest[len(QUOTE) :]
        return piece + self._end_string()

    def _read_json_string(self) -> str | None:
        """Some models quote as in JSON: its escapes are kept, what it may not hold is escaped."""
        rest = self._rest
        if rest[0] == '"':
            self._rest = rest[1:]
            return self._end_string()
        if rest[0] == "\\":
            if len(rest) < (6 if rest[1:2] == "u" else 2):
                return None
            escape = _ESCAPE.match(rest)
            self._rest = rest[escape.end() if escape else 1 :]
            return escape[0] if escape else "\\\\"
        end = next((i for i, char in enumerate(rest) if char in '"\\'), len(rest))
        self._rest = rest[end:]
        return _escaped(rest[:end])

    def _end_string(self) -> str:
        self._string = ""
        self._json.end()
        return '"'


class _JsonWriter:
    """Keeps the structure valid. `_expect` says what the innermost container wants next."""

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._empty: list[bool] = []
        self._expect = "value"  # key | colon | value | comma
        self.complete = False

    @property
    def wants_key(self) -> bool:
        return bool(self._stack) and self._stack[-1] == "{" and self._expect in ("key", "comma")

    def begin(self) -> str:
        """What has to stand before the next key or value."""
        if self._expect == "colon":
            self._expect = "value"
            return ":"
        if self._expect == "comma":
            self._expect = "key" if self._stack[-1] == "{" else "value"
        if not self._stack or (self._stack[-1] == "{" and self._expect == "value"):
            return ""
        lead = "" if self._empty[-1] else ","
        self._empty[-1] = False
        return lead

    def end(self) -> None:
        """A key or a value is complete."""
        self._expect = "colon" if self._expect == "key" else "comma"
        self.complete = not self._stack

    def word(self, text: str) -> str:
        lead = self.begin()
        is_key = self._expect == "key"
        self.end()
        if not is_key and (text in _WORDS or _NUMBER.fullmatch(text)):
            return lead + _WORDS.get(text, text)
        return lead + json.dumps(text, ensure_ascii=False)

    def mark(self, char: str) -> str:
        if char in "{[":
            return self._open(char)
        if char in "}]":
            return self._close()
        if char == ":":
            if self._expect != "colon":
                return ""
            self._expect = "value"
            return ":"
        missing = self._missing()
        self._expect = "key" if self._stack[-1] == "{" else "value"
        return missing

    def close_all(self) -> str:
        return "".join(self._close() for _ in range(len(self._stack)))

    def _open(self, char: str) -> str:
        lead = self.begin()
        if self._expect == "key":
            lead += '"":'
        if len(self._stack) == MAX_DEPTH:
            self._expect = "value"
            self.end()
            return lead + "null"
        self._stack.append(char)
        self._empty.append(True)
        self._expect = "key" if char == "{" else "value"
        return lead + char

    def _close(self) -> str:
        closer = self._missing() + ("}" if self._stack.pop() == "{" else "]")
        self._empty.pop()
        self._expect = "value"
        self.end()
        return closer

    def _missing(self) -> str:
        """A value that an object's key still lacks."""
        if self._stack[-1] != "{":
            return ""
        return {"colon": ":null", "value": "null"}.get(self._expect, "")


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
