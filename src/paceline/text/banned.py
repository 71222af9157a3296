"""Texts that may not be written: the tokens that would complete one, after what was written so far.

`bad_words` are vLLM's: each is the tokens that it is by itself and after a space, and their last one is refused where the
others stand before it. `banned_strings` are looked for in the bytes of the text, whatever tokens write them. Both are
functions of the answer alone: a text that has begun in the prompt is not looked at.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from paceline.text.tokenizer import Tokenizer


class History(Protocol):
    """What was written so far."""

    @property
    def output_len(self) -> int: ...

    def last(self, count: int) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Pieces:
    """The bytes of all tokens, sorted, and the tokens in that order. Special tokens have no bytes."""

    sorted: list[bytes]
    tokens: np.ndarray  # int64 [V]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Pieces:
        made = sorted((tokenizer.piece(token), token) for token in range(tokenizer.vocab_size))
        return cls([piece for piece, _ in made], np.array([token for _, token in made], dtype=np.int64))

    def begun_by(self, start: bytes) -> np.ndarray:
        """The tokens whose bytes begin with `start`."""
        end = start.rstrip(b"\xff")
        low = bisect_left(self.sorted, start)
        high = bisect_left(self.sorted, end[:-1] + bytes([end[-1] + 1])) if end else len(self.sorted)
        return self.tokens[low:high]

    def that_hold(self, text: bytes) -> np.ndarray:
        return self.tokens[[i for i, piece in enumerate(self.sorted) if text in piece]]


@dataclass(frozen=True, slots=True)
class Spelled:
    """A text, and what completes it: `rests[k]` after its first k bytes, `rests[0]` are tokens that hold all of it."""

    text: bytes
    rests: list[np.ndarray]

    @classmethod
    def of(cls, text: str, pieces: Pieces) -> Spelled:
        wanted = text.encode()
        later = [pieces.begun_by(wanted[cut:]) for cut in range(1, len(wanted))]
        return cls(wanted, [pieces.that_hold(wanted), *later])

    def after(self, tail: bytes) -> list[np.ndarray]:
        later = [rest for cut, rest in enumerate(self.rests) if cut and tail.endswith(self.text[:cut])]
        return [self.rests[0], *later]


class Banned:
    def __init__(self, tokenizer: Tokenizer, words: Seq[tuple[int, ...]], strings: Seq[Spelled]) -> None:
        self._tokenizer, self._words, self._strings = tokenizer, words, strings
        self._reach = max((len(string.text) for string in strings), default=0) - 1  # bytes
        self._most = max((len(word) for word in words), default=0) - 1  # tokens

    def after(self, text: History) -> np.ndarray:
        """The tokens that may not come next, int64 [n]."""
        out: list[np.ndarray] = []
        if self._words:
            last = tuple(text.last(min(self._most, text.output_len)))
            banned = [word[-1] for word in self._words if last[len(last) - len(word) + 1 :] == word[:-1]]
            out.append(np.array(banned, dtype=np.int64))
        if self._strings:
            tail = self._tail(text)
            for string in self._strings:
                out += string.after(tail)
        return np.concatenate(out)

    def _tail(self, text: History) -> bytes:
        """The last bytes of the output, as many as a text can have begun with."""
        count, tail = self._reach, b""
        while True:
            count = min(count, text.output_len)
            tail = b"".join(map(self._tokenizer.piece, text.last(count)))
            if len(tail) >= self._reach or count >= text.output_len:
                return tail
            count *= 2  # there are tokens without bytes among them


def banned_of(tokenizer: Tokenizer, words: Seq[str], strings: Seq[str]) -> Banned | None:
    """None where nothing is banned. The first call for strings looks at the whole vocabulary; that is kept with the
    tokenizer.
    """
    if not words and not strings:
        return None
    if strings and tokenizer.sorted_pieces is None:
        tokenizer.sorted_pieces = Pieces.of(tokenizer)
    spelled = []
    for text in strings:
        if text not in tokenizer.banned:
            if len(tokenizer.banned) >= 1024:
                tokenizer.banned.clear()
            tokenizer.banned[text] = Spelled.of(text, tokenizer.sorted_pieces)
        spelled.append(tokenizer.banned[text])
    return Banned(tokenizer, _written(tokenizer, words), spelled)


def _written(tokenizer: Tokenizer, words: Seq[str]) -> list[tuple[int, ...]]:
    out: dict[tuple[int, ...], None] = {}
    for word in words:
        own = tuple(tokenizer.encode(word, add_bos=False))
        spaced = tuple(tokenizer.encode(f" {word.lstrip()}", add_bos=False))
        out |= dict.fromkeys([own] if own else [])
        if len(spaced) == len(own) and spaced[:1] != own[:1]:  # as vLLM has it
            out[spaced] = None
    return list(out)
