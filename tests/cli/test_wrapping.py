"""Words on lines of a terminal: whatever pieces they come in, none is broken that fits a line."""

from __future__ import annotations

import pytest

from paceline.cli.wrapping import Wrapping

TEXT = "The quick brown fox jumps over the lazy dog, again and again.\n\nA second paragraph."


def wrapped(text: str, width: int, size: int = 1) -> str:
    words = Wrapping(lambda: width, lambda said, kind: said)
    return "".join(words.push(text[i : i + size], "said") for i in range(0, len(text), size)) + words.end()


@pytest.mark.parametrize("width", [10, 14, 20, 40])
def test_words_stay_whole_in_pieces_of_any_size(width: int) -> None:
    shown = [wrapped(TEXT, width, size) for size in (1, 3, 7, len(TEXT))]
    assert len(set(shown)) == 1
    assert shown[0].split() == TEXT.split()
    # a blank at the end of a full line is not seen
    assert max(len(line.rstrip()) for line in shown[0].split("\n")) <= width
    assert "\n\nA second" in shown[0]


def test_a_text_that_fits_is_shown_as_it_is() -> None:
    assert wrapped(TEXT, 80) == TEXT


def test_code_and_words_longer_than_a_line_are_left_to_the_terminal() -> None:
    code = "```python\nresult = function_with_a_name(argument, other)\n```\n"
    assert wrapped(code, 20) == code
    assert wrapped("x" * 50 + " end", 20).replace("\n", "") == "x" * 50 + " end"
    assert wrapped("    indented = code that is long\n", 12) == "    indented = code that is long\n"


def test_wide_letters_count_twice_and_each_kind_keeps_its_colour() -> None:
    assert wrapped("ab \u4f60\u597d", 6) == "ab \n\u4f60\u597d"
    words = Wrapping(lambda: 80, lambda said, kind: f"<{kind[0]}{said}>")
    assert words.push("ab", "said") == ""
    assert words.push("cd ", "draft") == "<sab><dcd><d >"
    assert words.end() == ""
