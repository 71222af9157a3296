"""Where the end of a text was written before: in the text itself, or in a reference that it may copy from.

Two implementations of one thing: `PythonSearch` through the tokens' bytes, once for each length, and the native one
(native/search.cpp), which goes through the tokens once.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from typing import Protocol

from paceline.ops.extension import extension

LENGTHS = (2, 3, 4, 6, 8, 12, 16, 24, 32)  # of a match that are told apart; a longer one says nothing more
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

    def finds(self, tokens: list[int], reference: bool) -> bool:
        """Whether there would be a match, in the reference or in the text."""
        ...


class Watch(Protocol):
    """Several texts, until some of them come to something that was written before and is worth copying."""

    def add(self, search: Search, tokens: list[int], worth: Seq[float]) -> None:
        """A text: its search and its tokens, which grow. `worth`: of a copy, by the steps of LENGTHS that its match
        reaches: 0 first, as far as it is not worth anything.
        """
        ...

    def finds(self) -> bool:
        """Whether what can be copied now is worth more than is needed, all texts together. It is asked once in a step,
        looks in some steps only, and says nothing for a while after a find, longer each time.
        """
        ...


def search(reference: Seq[int] = ()) -> Search:
    """The fastest there is."""
    native = extension("Search")
    if native is None:
        return PythonSearch(reference)
    return native.Search(list(reference), list(LENGTHS))  # type: ignore[no-any-return]


def watch(need: float, wait: int, longest: int, every: int = 1) -> Watch:
    """The fastest there is. `need`: what all copies must be worth. Nothing is said for `wait` steps after the first find,
    then for twice as many, up to `longest`, nor in other steps than each `every`th.
    """
    native = extension("Watch")
    if native is None:
        return PythonWatch(need, wait, longest, every)
    return native.Watch(need, wait, longest, every)  # type: ignore[no-any-return]


class PythonWatch:
    def __init__(self, need: float, wait: int, longest: int, every: int = 1) -> None:
        self._need, self._wait, self._longest, self._every = need, wait, longest, every
        self._quiet = every - 1
        self._texts: list[tuple[Search, list[int], Seq[float]]] = []

    def add(self, search: Search, tokens: list[int], worth: Seq[float]) -> None:
        self._texts.append((search, tokens, worth))

    def finds(self) -> bool:
        if self._quiet > 0:
            self._quiet -= 1
            return False
        total = 0.0
        for search, tokens, worth in self._texts:
            length = max(search.in_text(tokens)[1], search.in_reference(tokens)[1])
            total += worth[LENGTHS.index(length)] if length else 0.0
        if total <= self._need:
            self._quiet = self._every - 1
            return False
        self._quiet, self._wait = max(self._wait, self._every - 1), min(2 * self._wait, self._longest)
        return True


class PythonSearch:
    def __init__(self, reference: Seq[int] = ()) -> None:
        self._text, self._reference = bytearray(), array("i", reference).tobytes()

    def in_text(self, tokens: list[int]) -> tuple[int, int]:
        self._grow(tokens)
        return self._longest(self._text, len(tokens) - 1)

    def in_reference(self, tokens: list[int]) -> tuple[int, int]:
        self._grow(tokens)
        return self._longest(self._reference, len(self._reference) // BYTES)

    def finds(self, tokens: list[int], reference: bool) -> bool:
        self._grow(tokens)
        source = self._reference if reference else self._text
        stop = len(source) // BYTES - (not reference)
        ending = bytes(self._text[-LENGTHS[0] * BYTES :])
        return len(tokens) >= LENGTHS[0] and _latest(source, ending, stop) > 0

    def _grow(self, tokens: list[int]) -> None:
        if len(self._text) < BYTES * len(tokens):
            self._text += array("i", tokens[len(self._text) // BYTES :]).tobytes()

    def _longest(self, source: bytes | bytearray, stop: int) -> tuple[int, int]:
        end, length = 0, 0
        for tokens in LENGTHS:
            if tokens * BYTES > len(self._text):
                break
            found = _latest(source, bytes(self._text[-tokens * BYTES :]), stop)
            if not found:
                break
            end, length = found, tokens
        return end, length


def _latest(source: bytes | bytearray, pattern: bytes, stop: int) -> int:
    """The token after the latest occurrence of `pattern` that ends at token `stop` or before; 0 without one."""
    at = source.rfind(pattern, 0, stop * BYTES)
    while at > 0 and at % BYTES:  # it began in the middle of a token
        at = source.rfind(pattern, 0, at + len(pattern) - 1)
    return (at + len(pattern)) // BYTES if at >= 0 else 0
