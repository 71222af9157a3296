"""Log probabilities in the two formats that clients know."""

from __future__ import annotations

from typing import Any

from paceline.core import TokenLogprob
from paceline.text.tokenizer import Tokenizer


def chat_logprobs(tokenizer: Tokenizer, entries: list[TokenLogprob]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat answer."""
    return {"content": [_chat_entry(tokenizer, entry) for entry in entries], "refusal": None}


def _chat_entry(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, Any]:
    top = [_token(tokenizer, token, value) for token, value in entry.top]
    return {**_token(tokenizer, entry.token, entry.raw), "top_logprobs": top}


def _token(tokenizer: Tokenizer, token: int, value: float) -> dict[str, Any]:
    piece = tokenizer.piece(token, skip_special=False)
    return {"token": piece.decode("utf-8", "replace"), "logprob": _finite(value), "bytes": list(piece)}


def completion_logprobs(
    tokenizer: Tokenizer, entries: list[TokenLogprob | int], offset: int
) -> dict[str, Any]:
    """`choices[].logprobs` of a completion; a bare id is a prompt's first token, which has no probability.

    `offset`: characters of the choice's text before the first entry.
    """
    out: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for entry in entries:
        token = entry if isinstance(entry, int) else entry.token
        out["tokens"].append(name_of(tokenizer, token))
        out["text_offset"].append(offset)
        offset += len(tokenizer.piece(token).decode("utf-8", "replace"))
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
