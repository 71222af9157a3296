"""Thoughts between two marks at the beginning of an answer, parted from what is said on arrival.

The line breaks that templates write around the marks belong to neither part. Llama-like models of DeepSeek and Qwen
write `<think>`, Mistral's `[THINK]`. A second opening mark is text, as answers may be about such marks.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.text.markers import held


@dataclass(slots=True)
class Parted:
    """The new text of one piece, parted."""

    reasoning: str = ""
    content: str = ""


class ThoughtParser:
    """Feed pieces of any size; the joined results are the same for every way of cutting the text."""

    def __init__(self, opening: str, closing: str, inside: bool) -> None:
        """`inside`: the prompt itself has opened a thought."""
        self._open, self._close = opening, closing
        self._state = "begun" if inside else "before"  # before | begun | inside | closed | behind
        self._rest = ""

    @property
    def thinking(self) -> bool:
        return self._state in ("begun", "inside")

    def feed(self, text: str) -> Parted:
        self._rest += text
        out = Parted()
        steps = {
            "before": self._before, "begun": self._begun, "inside": self._inside, "closed": self._closed,
            "behind": self._behind,
        }  # fmt: skip
        while steps[self._state](out):
            pass
        return out

    def finish(self) -> Parted:
        """The text has ended: what was kept back is what it looks like."""
        rest, self._rest = self._rest, ""
        return Parted(reasoning=rest) if self.thinking else Parted(content=rest)

    def _before(self, out: Parted) -> bool:
        """Nothing but white space has come: an opening mark may follow."""
        text = self._rest.lstrip()
        if text.startswith(self._open):
            self._rest, self._state = text[len(self._open) :], "begun"
            return True
        if self._open.startswith(text):
            return False
        self._state = "behind"
        return True

    def _begun(self, out: Parted) -> bool:
        if inside := self._rest.lstrip("\n"):
            self._rest, self._state = inside, "inside"
        return bool(inside)

    def _inside(self, out: Parted) -> bool:
        at = self._rest.find(self._close)
        end = at if at >= 0 else len(self._rest) - held(self._rest, [self._close])
        thought = self._rest[:end].rstrip("\n")
        out.reasoning += thought
        if at >= 0:
            self._rest, self._state = self._rest[at + len(self._close) :], "closed"
            return True
        self._rest = self._rest[len(thought) :]  # line breaks wait: they may be the last ones
        return False

    def _closed(self, out: Parted) -> bool:
        if text := self._rest.lstrip("\n"):
            self._rest, self._state = text, "behind"
        else:
            self._rest = ""
        return bool(text)

    def _behind(self, out: Parted) -> bool:
        out.content += self._rest
        self._rest = ""
        return False
