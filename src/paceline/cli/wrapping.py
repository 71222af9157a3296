"""Words of a text that comes in pieces, put on lines of a terminal's width: none is broken where it need not be."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from operator import itemgetter

from rich.cells import cell_len

FENCE = "```"


class Wrapping:
    """Takes styled pieces and gives what can be shown. A word waits until it is whole; code between fences stays."""

    def __init__(self, width: Callable[[], int], paint: Callable[[str, str], str]) -> None:
        """`width`: columns of the terminal now, which may change. `paint`: (text, kind) as it is shown."""
        self._width, self._paint = width, paint
        self._word: list[tuple[str, str]] = []  # (letter, kind)
        self._column = 0
        self._line = ""  # what stands on this line, to know fences
        self._code = False

    def push(self, text: str, kind: str) -> str:
        out = ""
        for letter in text:
            if letter.isspace():
                out += self._flush() + self._paint(letter, kind)
                self._space(letter)
            else:
                self._word.append((letter, kind))
                if len(self._word) >= self._width():  # longer than a line: broken as the terminal does
                    out += self._flush()
        return out

    def end(self) -> str:
        """What still waits, at the end of an answer; the next begins a line of its own."""
        out = self._flush()
        self._column, self._line, self._code = 0, "", False
        return out

    def _space(self, letter: str) -> None:
        if letter != "\n":
            self._column += 1
            self._line += letter
            return
        if self._line.lstrip().startswith(FENCE):
            self._code = not self._code
        self._column, self._line = 0, ""

    def _flush(self) -> str:
        """The word, on a new line if it does not fit this one."""
        plain = "".join(letter for letter, _ in self._word)
        columns = cell_len(plain)
        code = self._code or self._line.lstrip().startswith(FENCE) or self._line.startswith("    ")
        breaks = not code and self._column > 0 and self._column + columns > self._width() >= columns
        out = "\n" if breaks else ""
        for kind, letters in groupby(self._word, itemgetter(1)):
            out += self._paint("".join(letter for letter, _ in letters), kind)
        self._column = (0 if breaks else self._column) + columns
        self._line += plain
        self._word = []
        return out
