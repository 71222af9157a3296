"""Tokens to text while they come: whole characters only, and never a stop string or the beginning of one.

Everything works token by token, so the result does not depend on how many tokens a step delivers.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from paceline.core import SamplingParams
from paceline.text.tokenizer import Tokenizer


class Detokenizer:
    """Incremental decode: what it returns, joined, equals `Tokenizer.decode` of all tokens.

    `begins` False: they go on a text, as those of an answer go on its prompt.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, begins: bool = True) -> None:
        self._stream = tokenizer.stream(skip_special, begins)

    def push(self, *tokens: int) -> str:
        """Text that these tokens complete; bytes of an unfinished character wait."""
        return self._stream(tokens)

    def finish(self) -> str:
        """What is left: U+FFFD for a character that was never finished."""
        return self._stream(None)


class StopStrings:
    """Looks for the earliest stop string, holding back text that could be the beginning of one."""

    def __init__(self, stops: Seq[str], shown: bool = False) -> None:
        """`shown`: the stop string itself is safe to show, once it is whole."""
        self._stops, self._shown = tuple(stops), shown
        self._first = {stop[0] for stop in stops}
        self._held = ""

    def push(self, text: str, may_stop: bool = True) -> tuple[str, bool]:
        """(text safe to show, whether a stop string was completed); with may_stop False none counts."""
        if not self._stops:
            return text, False
        held = self._held + text
        if may_stop:
            hits = [(at, len(stop)) for stop in self._stops if (at := held.find(stop)) >= 0]
            if hits:
                self._held = ""
                at, length = min(hits)
                return held[: at + length if self._shown else at], True
        keep = self._could_begin(held)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False

    def finish(self) -> str:
        """The text held back, once no more can come."""
        held, self._held = self._held, ""
        return held

    def _could_begin(self, text: str) -> int:
        """Length of the longest end of `text` that is a beginning, but not the whole, of a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if text[-size] in self._first and any(
                len(stop) > size and stop.startswith(text[-size:]) for stop in self._stops
            ):
                return size
        return 0


def signs_of(tokenizer: Tokenizer, stops: Seq[str]) -> dict[int, str]:
    """Special tokens that stop strings spell beside other text -> a sign for each, which no text holds."""
    spelled: dict[int, str] = {}
    for stop in stops:
        ids = tokenizer.encode(stop, add_bos=False)
        for token in ids if len(ids) > 1 else ():
            if token in tokenizer.special_ids:
                spelled.setdefault(token, chr(0xD800 + len(spelled) % 0x800))
    return spelled


def stop_ids_of(tokenizer: Tokenizer, stops: Seq[str]) -> frozenset[int]:
    """Special tokens that stop strings spell. Their text is never shown, so only the ids can be looked for."""
    ids = [tokenizer.token_id(stop) for stop in stops]
    return frozenset(i for i in ids if i is not None and i in tokenizer.special_ids)


@dataclass(slots=True)
class Pushed:
    """What some tokens added. On a stop, the token that completed the stop string is the last one kept."""

    text: str
    kept_tokens: int
    stopped: bool


class TextStream:
    """One text in the making: decoding and stop strings together.

    Stop strings completed within the first `min_tokens` tokens do not count and stay in the text. `signs`: what stands
    for special tokens while stop strings are looked for; no text that is shown has them, but with
    `include_stop_str_in_output` what they stand for.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, skip_special: bool = True) -> None:
        self._characters = Detokenizer(tokenizer, skip_special, begins=False)
        self.signs = signs_of(tokenizer, params.stop)
        self._tells = params.include_stop_str_in_output
        self._spelled = {
            ord(sign): tokenizer.token_text(token) if self._tells else None
            for token, sign in self.signs.items()
        }
        stops = [self._signed(tokenizer, stop) for stop in params.stop]
        self._stops = StopStrings(stops, self._tells)
        self._ends = {token: tokenizer.token_text(token) for token in stop_ids_of(tokenizer, params.stop)}
        self._unstopped = not params.stop
        self._min_tokens = params.min_tokens
        self._count = 0

    def _signed(self, tokenizer: Tokenizer, stop: str) -> str:
        for token, sign in self.signs.items():
            stop = stop.replace(tokenizer.token_text(token), sign)
        return stop

    def push(self, tokens: Seq[int]) -> Pushed:
        """Add tokens; after a stop the rest of them is refused, and nothing may follow."""
        if self._unstopped:
            return Pushed(self._characters.push(*tokens), len(tokens), False)
        out = []
        for i, token in enumerate(tokens):
            self._count += 1
            added = self._characters.push(token) + self.signs.get(token, "")
            text, stopped = self._stops.push(added, self._count > self._min_tokens)
            out.append(text.translate(self._spelled))
            if stopped:
                return Pushed("".join(out), i + 1, True)
        return Pushed("".join(out), len(tokens), False)

    def told(self, token: int) -> str:
        """What is shown of the special token that ended the text: something only if a stop string spells it."""
        return self._ends.get(token, "") if self._tells else ""

    def finish(self) -> str:
        """The last text, when the sequence ended for another reason than a stop string."""
        text, stopped = self._stops.push(self._characters.finish(), self._count > self._min_tokens)
        return (text if stopped else text + self._stops.finish()).translate(self._spelled)
