"""The text of an answer with Gemma 4's structural marks, and what of it is for the reader.

The engine's own text leaves special tokens out, so where the vocabulary has marks the text is decoded anew.
"""

from __future__ import annotations

from paceline.core import Delta, SamplingParams
from paceline.text import arguments, reasoning, tools
from paceline.text.reasoning import Parted, ReasoningParser
from paceline.text.stream import Detokenizer, StopStrings
from paceline.text.tokenizer import Tokenizer

MARKS = (tools.OPEN, arguments.CLOSE, arguments.QUOTE, tools.RESPONSE, reasoning.OPEN, reasoning.CLOSE)


class MarkedText:
    """The text of one answer, its marks included. Also counts the tokens inside thinking parts."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, thinking: bool) -> None:
        ids = {tokenizer.token_id(mark): mark for mark in MARKS}
        self._marks = {i: mark for i, mark in ids.items() if i is not None and i in tokenizer.special_ids}
        self._characters, self._stops = Detokenizer(tokenizer, begins=False), StopStrings(params.stop)
        self._min_tokens, self._count = params.min_tokens, 0
        self._thinking, self._stopped = thinking, False
        self.reasoning_tokens = 0

    def push(self, delta: Delta) -> str:
        if not self._marks:
            return delta.text
        out = "".join(self.one(token) for token in delta.token_ids)
        return out + self.end() if delta.finish_reason is not None else out

    def one(self, token: int) -> str:
        """What one token adds. All tokens of a text are given this way, or all by `push`."""
        self._count += 1
        mark = self._marks.get(token)
        self._thinking = (
            mark == reasoning.OPEN if mark in (reasoning.OPEN, reasoning.CLOSE) else self._thinking
        )
        self.reasoning_tokens += self._thinking or mark == reasoning.CLOSE
        if self._stopped:
            return ""
        text = self._characters.push(token) + (mark or "")
        shown, self._stopped = self._stops.push(text, self._count > self._min_tokens)
        return shown

    def end(self) -> str:
        """What was held back, once the text has ended."""
        if self._stopped:
            return ""
        return self._stops.push(self._characters.finish())[0] + self._stops.finish()


class Answer:
    """A chat answer as it comes, parted into what was thought and what is said."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, thinking: bool) -> None:
        """`thinking`: the prompt has opened a thinking part (`reasoning.opened_by`)."""
        self._marked, self._parser = MarkedText(tokenizer, params, thinking), ReasoningParser(thinking)

    def push(self, delta: Delta) -> Parted:
        parted = self._parser.feed(self._marked.push(delta))
        return self._with_rest(parted) if delta.finish_reason is not None else parted

    def one(self, token: int) -> Parted:
        """What one token adds; then `end` says what is left. All of a text this way, or all by `push`."""
        return self._parser.feed(self._marked.one(token))

    def end(self) -> Parted:
        return self._with_rest(self._parser.feed(self._marked.end()))

    def _with_rest(self, parted: Parted) -> Parted:
        last = self._parser.finish()
        return Parted(parted.reasoning + last.reasoning, parted.content + last.content)
