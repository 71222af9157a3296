"""What a tokenizer's decoder does: token by token as bytes where that is exact, else through the `tokenizers` library.

The decoder of a tokenizer.json is a chain of steps. Most chains map each token by itself (Replace, Metaspace, Strip,
ByteFallback, ByteLevel), and then join them (Fuse) and cut what was put before the text (Strip). Such a chain is a
`Chain`. Any other one is decoded by the library over a window of the last tokens (`Window`).
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass
from typing import Any, Protocol

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_UNDECODED = re.compile("[\udc80-\udcff]")
_CONTEXT = 8  # tokens before the last shown text that a window decodes again
_PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_REST = [byte for byte in range(256) if byte not in _PLAIN]
# the printable characters that byte-level BPE writes for bytes, as GPT-2 chose them
ALPHABET = {chr(b): bytes([b]) for b in _PLAIN} | {chr(256 + i): bytes([b]) for i, b in enumerate(_REST)}

Step = dict[str, Any]


class Backend(Protocol):
    """What of `tokenizers.Tokenizer` is used."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True, slots=True)
class Chain:
    """Steps for each token, and what is cut off a text: up to `lead` and `trail` times `cut` at its two ends.

    `last`: "bytes" for byte fallback, "byte_level", or None where tokens are text.
    """

    steps: tuple[Step, ...]
    last: str | None
    cut: str
    lead: int
    trail: int

    @property
    def drops_first(self) -> bool:
        """Whether the first token of a text is written in another way than later ones."""
        return any(step["type"] == "Metaspace" and step["prepend_scheme"] != "never" for step in self.steps)

    def piece(self, token: str, first: bool = False) -> bytes:
        """The bytes of one token's entry; `first`: at the beginning of a text."""
        for step in self.steps:
            token = _applied(step, token, first)
        if self.last == "byte_level":
            values = [ALPHABET.get(character) for character in token]
            return token.encode() if None in values else b"".join(part for part in values if part is not None)
        lone = _BYTE.fullmatch(token) if self.last == "bytes" else None
        return token.encode() if lone is None else bytes([int(lone[1], 16)])


def _applied(step: Step, token: str, first: bool) -> str:
    if step["type"] == "Replace":
        return token.replace(step["pattern"]["String"], step["content"])
    if step["type"] == "Metaspace":
        dropped = first and step["prepend_scheme"] != "never"
        return token.replace(step["replacement"], "" if dropped else " ")
    left, right = step["start"], step["stop"]
    begin = min(left, len(token) - len(token.lstrip(step["content"])))
    end = len(token) - min(right, len(token) - len(token.rstrip(step["content"])))
    return token[begin : max(begin, end)]


def chain_of(decoder: Step | None) -> Chain | None:
    """The chain that a decoder of tokenizer.json is; None for one that does not go token by token."""
    if decoder is None:
        return None
    steps: list[Step] = []
    last: str | None = None
    cut: tuple[str, int, int] | None = None
    joined = False
    for step in _flat(decoder):
        kind = step["type"]
        if kind == "Fuse":
            joined = True
        elif joined and kind == "Strip" and cut is None:
            cut = (step["content"], step["start"], step["stop"])
        elif kind == "ByteLevel" and last is None and not joined:
            last, joined = "byte_level", True
        elif kind == "ByteFallback" and last is None and not joined:
            last = "bytes"
        elif last is None and not joined and _is_simple(step):
            steps.append(step)
        else:
            return None
    return Chain(tuple(steps), last, *(cut or ("", 0, 0)))


def _flat(decoder: Step) -> list[Step]:
    return (
        [part for inner in decoder["decoders"] for part in _flat(inner)]
        if decoder["type"] == "Sequence"
        else [decoder]
    )


def _is_simple(step: Step) -> bool:
    if step["type"] == "Replace":
        return bool(step["pattern"].get("String"))
    return step["type"] in ("Metaspace", "Strip")


class Characters:
    """Bytes to text while they come: whole characters only.

    What is no UTF-8 becomes U+FFFD, with byte fallback one for each byte, else one for each broken character, as the
    library has it. A character that was shown stays, also where bytes after it are broken.
    """

    def __init__(self, chain: Chain, begins: bool) -> None:
        self._each_byte = chain.last == "bytes"
        errors = "surrogateescape" if self._each_byte else "replace"
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors=errors)
        self._cut, self._lead, self._trail = chain.cut, chain.lead if begins else 0, chain.trail
        self._held = ""  # what is cut off if the text ends here

    def push(self, data: bytes, final: bool = False) -> str:
        text = self._utf8.decode(data, final)
        if self._each_byte:
            text = _UNDECODED.sub("\ufffd", text)
        while self._lead and text:
            if text[0] != self._cut:
                self._lead = 0
            else:
                text, self._lead = text[1:], self._lead - 1
        return self._ending(text) if self._trail else text

    def _ending(self, text: str) -> str:
        text = self._held + text
        held = min(self._trail, len(text) - len(text.rstrip(self._cut)))
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


class Window:
    """Text by the library's own decoder, while tokens come: the last token waits until the next one shows its text.

    Decoding the last few tokens gives the end of the text, since decoders look at neighbours. What two decodings, without
    and with the newest token, have in common is settled. `anchor`: a token that stands before a text that goes on.
    """

    def __init__(self, backend: Backend, skip_special: bool, anchor: int | None) -> None:
        self._backend, self._skip = backend, skip_special
        self._ids = [] if anchor is None else [anchor]
        self._shown = "" if anchor is None else self._decode(self._ids)
        self._start = 0  # of the window
        self._text = self._shown  # of the window, without the newest token
        self._emitted = len(self._shown)  # characters of the window's text that were shown

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=self._skip)

    def push(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(self._ids[self._start :])
        same = next((i for i, (a, b) in enumerate(zip(self._text, text)) if a != b), len(self._text))
        settled = text[:same].rstrip("\ufffd")
        new = settled[self._emitted :]
        self._shown += new
        self._emitted += len(new)
        self._text = text
        if len(self._ids) - self._start > 4 * _CONTEXT:
            self._advance()
        return new

    def _advance(self) -> None:
        """Begin the window later, if what waits to be shown is the same from there."""
        start = len(self._ids) - _CONTEXT
        waiting, text = self._text[self._emitted :], self._decode(self._ids[start:])
        if text.endswith(waiting) and len(text) > len(waiting):
            self._start, self._text, self._emitted = start, text, len(text) - len(waiting)

    def finish(self) -> str:
        whole = self._decode(self._ids)
        return whole[len(self._shown) :] if whole.startswith(self._shown) else self._text[self._emitted :]
