"""Gemma 4's thinking parts: `<|channel>thought` newline ... `<channel|>`, parted from the answer on arrival."""

from __future__ import annotations

from paceline.text.formats.thoughts import Parted
from paceline.text.markers import held

OPEN, CLOSE = "<|channel>", "<channel|>"
_NAME = "thought"


class GemmaThoughtParser:
    """Feed pieces of any size; the joined results are the same for every way of cutting the text."""

    def __init__(self, inside: bool = False) -> None:
        """`inside`: the prompt itself has opened a thinking part ."""
        self._state = "think" if inside else "content"
        self._rest = ""

    @property
    def thinking(self) -> bool:
        return self._state in ("name", "think")

    def feed(self, text: str) -> Parted:
        self._rest += text
        out = Parted()
        while self._advance(out):
            pass
        return out

    def finish(self) -> Parted:
        """The text has ended: what was kept back is what it looks like."""
        rest, self._rest = self._rest, ""
        if self._state == "name":  # a name that was cut off says nothing; anything else is text
            return Parted() if _NAME.startswith(rest.strip()) else Parted(content=OPEN + rest)
        return Parted(reasoning=rest) if self._state == "think" else Parted(content=rest)

    def _advance(self, out: Parted) -> bool:
        """Take what can be decided; True if a part has ended and there may be more."""
        if self._state == "name":
            return self._take_name()
        marker = OPEN if self._state == "content" else CLOSE
        at = self._rest.find(marker)
        end = at if at >= 0 else len(self._rest) - held(self._rest, [marker])
        if self._state == "content":
            out.content += self._rest[:end]
        else:
            out.reasoning += self._rest[:end]
        if at < 0:
            self._rest = self._rest[end:]
            return False
        self._rest = self._rest[at + len(marker) :]
        self._state = "name" if self._state == "content" else "content"
        return True

    def _take_name(self) -> bool:
        """Drop the channel's name, which ends at the line's end; a channel may also close at once."""
        close, line = self._rest.find(CLOSE), self._rest.find("\n")
        if close >= 0 and (line < 0 or close < line):
            self._rest = self._rest[close + len(CLOSE) :]
            self._state = "content"
            return True
        if line < 0:
            return False
        self._rest = self._rest[line + 1 :]
        self._state = "think"
        return True
