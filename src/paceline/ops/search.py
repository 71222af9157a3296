"""Where the end of a text was written before: in the text itself, or in a reference that it may copy from.

Two implementations of one thing: `PythonSearch` through the tokens' bytes, once for each length, and the native one
(native/search.cpp), which goes through the tokens once.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from typing import Protocol

from paceline.ops.extension import extension

LENGTHS = (2, 3, 4, 6, 8, 12, 16, 24, 32)  # of a match that are distinguished; a longer one says nothing more
BYTES = array("i").itemsize  # of a token


class Search(Protocol):
    """Of one text, which is always given whole: tokens are added to it, none is ever changed."""

    def in_text(self, tokens: list[int]) -> tuple[int, int]:
        """(end, length): where in the text, before its last token, the longest match of its end ends.

        The latest among equals, lengths compared as steps of LENGTHS. (0, 0) without a match.
        """
        ...

    def in_reference(self, tokens: list[int]) -> tuple[int, int]:
        """The same, of the reference."""
        ...


def search(reference: Seq[int] = ()) -> Search:
    """The fastest there is."""
    native = extension("Search")
    if native is None:
        return PythonSearch(reference)
    return native.Search(list(reference), list(LENGTHS))  # type: ignore[no-any-return]


class PythonSearch:
    def __init__(self, reference: Seq[int] = ()) -> None:
        self._text, self._reference = bytearray(), array("i", reference).tobytes()

    def in_text(self, tokens: list[int]) -> tuple[int, int]:
        self._grow(tokens)
        return self._longest(self._text, len(tokens) - 1)

    def in_reference(self, tokens: list[int]) -> tuple[int, int]:
        self._grow(tokens)
        return self._longest(self._reference, len(self._reference) // BYTES)

    def _grow(self, tokens: list[int]) -> None:
        if len(self._text) < BYTES * len(tokens):
            self._text += array("i", tokens[len(self._text) // BYTES :]).tobytes()

    def _longest(self, source: bytes | bytearray, stop: int) -> tuple[int, int]:
        end, length = 0, 0
        for tokens in LENGTHS:
            if tokens * BYTES > len(self._text):
                break
            place = _latest(source, bytes(self._text[-tokens * BYTES :]), stop)
            if not place:
                break
            end, length = place, tokens
        return end, length


def _latest(source: bytes | bytearray, pattern: bytes, stop: int) -> int:
    """The token after the latest occurrence of `pattern` that ends at token `stop` or before; 0 without one."""
    at = source.rfind(pattern, 0, stop * BYTES)
    while at > 0 and at % BYTES:  # it began in the middle of a token
        at = source.rfind(pattern, 0, at + len(pattern) - 1)
    return (at + len(pattern)) // BYTES if at >= 0 else 0
