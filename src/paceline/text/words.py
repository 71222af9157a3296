"""Words in tokens: what a drafter that follows an edit has to know of a tokenizer (drafters/alignment.py)."""

from __future__ import annotations

import re

from paceline.text.tokenizer import Tokenizer

_WORD = re.compile(r" ?\w+")
_GOES_ON = re.compile(r"\w")


class Words:
    """Implements `Words` of drafters/alignment.py."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def respaced(self, tokens: tuple[int, ...]) -> tuple[int, ...] | None:
        """The same word without the space before it, or with one if it has none; None if it is no word."""
        text = self._tokenizer.decode(tokens, skip_special=False, begins=False)
        if _WORD.fullmatch(text) is None:
            return None
        return tuple(self._tokenizer.encode(text[1:] if text[0] == " " else f" {text}", add_bos=False))

    def goes_on(self, token: int) -> bool:
        """Whether `token` begins in the middle of a word."""
        return _GOES_ON.match(self._tokenizer.token_text(token)) is not None
