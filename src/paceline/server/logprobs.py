"""Log probabilities in the two formats that clients know."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from paceline.core import TokenLogprob
from paceline.text.tokenizer import Tokenizer

Entry = TokenLogprob | int


def chat_logprobs(tokenizer: Tokenizer, entries: list[TokenLogprob]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat answer."""
    return {"content": [chat_entry(tokenizer, entry) for entry in entries], "refusal": None}


def chat_entry(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, Any]:
    top = [_token(tokenizer, token, value) for token, value in entry.top]
    return {**_token(tokenizer, entry.token, entry.raw), "top_logprobs": top}


def _token(tokenizer: Tokenizer, token: int, value: float) -> dict[str, Any]:
    piece = tokenizer.piece(token, skip_special=False)
    return {"token": piece.decode("utf-8", "replace"), "logprob": _finite(value), "bytes": list(piece)}


def token_entry(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, Any]:
    """An item of llama.cpp's `completion_probabilities`: as OpenAI's, with ids."""
    top = [{"id": token, **_token(tokenizer, token, value)} for token, value in entry.top]
    return {"id": entry.token, **_token(tokenizer, entry.token, entry.raw), "top_logprobs": top}


class Entries:
    """The entries of one choice of a completion, with where in its text each token's text begins.

    The parts of a character all begin where it does. Entries wait until the text they begin in is shown, and those of
    a stop string, which is not shown, are left out.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = tokenizer.stream(True, False)
        self._begun = 0  # characters of whole tokens so far
        self._shown = 0  # characters of the text so far
        self._waiting: list[tuple[Entry, int]] = []

    def echo(self, entries: list[Entry], text: str) -> list[tuple[Entry, int]]:
        """Those of a prompt that is shown as `text`."""
        ids = [entry if isinstance(entry, int) else entry.token for entry in entries]
        ways = [_offsets(self._tokenizer, ids, *way) for way in product((False, True), repeat=2)]
        offsets = next((offsets_so for offsets_so, whole in ways if whole == text), ways[-1][0])
        self._begun = self._shown = len(text)
        return list(zip(entries, offsets, strict=True))

    def push(self, entries: Sequence[Entry], text: str, reason: str | None) -> list[tuple[Entry, int]]:
        """What can be shown after `text` was added; `reason`: that the choice has ended."""
        self._shown += len(text)
        for entry in entries:
            self._waiting.append((entry, self._begun))
            token = entry if isinstance(entry, int) else entry.token
            self._begun += len(self._stream((token,)))
        if reason is None:
            ready = sum(begin < self._shown for _, begin in self._waiting)
        elif reason == "stop":
            ready = len(self._waiting)
            while ready and self._is_unseen(*self._waiting[ready - 1]):
                ready -= 1
        else:
            ready = len(self._waiting)
        out, self._waiting = self._waiting[:ready], self._waiting[ready:]
        return out

    def _is_unseen(self, entry: Entry, begin: int) -> bool:
        """Whether a token stands behind the text that is shown; one that ends the text has none of its own."""
        token = entry if isinstance(entry, int) else entry.token
        return begin >= self._shown and bool(self._tokenizer.piece(token))


def _offsets(tokenizer: Tokenizer, ids: list[int], skip_special: bool, begun: bool) -> tuple[list[int], str]:
    """Where each token's text begins, and the text. `begun`: begin-of-text was put first, which has none."""
    stream, text, offsets = tokenizer.stream(skip_special, True), "", list[int]()
    for at, token in enumerate(ids):
        offsets.append(len(text))
        if at or not begun or token != tokenizer.bos_id:
            text += stream((token,))
    return offsets, text + stream(None)


def completion_logprobs(tokenizer: Tokenizer, entries: list[tuple[Entry, int]]) -> dict[str, Any]:
    """`choices[].logprobs` of a completion; a bare id is a prompt's first token, which has no probability."""
    out: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for entry, offset in entries:
        token = entry if isinstance(entry, int) else entry.token
        out["tokens"].append(name_of(tokenizer, token))
        out["text_offset"].append(offset)
        out["token_logprobs"].append(None if isinstance(entry, int) else _finite(entry.raw))
        out["top_logprobs"].append(None if isinstance(entry, int) else _top(tokenizer, entry))
    return out


def _top(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, float]:
    """The most likely tokens and the chosen one; the likelier of two with the same text wins."""
    out = {name_of(tokenizer, entry.token): _finite(entry.raw)}
    for token, value in reversed(entry.top):
        out[name_of(tokenizer, token)] = _finite(value)
    return out


def name_of(tokenizer: Tokenizer, token: int) -> str:
    """The token's text, or its bytes where it is a part of a character."""
    piece = tokenizer.piece(token, skip_special=False)
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _finite(value: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for what is as good as impossible."""
    return max(value, -9999.0)
