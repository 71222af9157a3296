"""The text of a chat answer with the structural marks of its format, and what its parser makes of it.

The engine's own text leaves special tokens out, so where marks are such tokens the text is decoded anew.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.core import Delta, SamplingParams
from paceline.text.formats.base import ChatFormat
from paceline.text.formats.events import Event, Text, Thought, Tools
from paceline.text.formats.thoughts import Parted
from paceline.text.stream import Detokenizer, StopStrings
from paceline.text.tokenizer import Tokenizer


class MarkedText:
    """The text of one answer, its marks included."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, marks: Iterable[str]) -> None:
        ids = {tokenizer.token_id(mark): mark for mark in marks}
        self.marks = {i: mark for i, mark in ids.items() if i is not None and i in tokenizer.special_ids}
        self._characters = Detokenizer(tokenizer, begins=False)
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output)
        self._min_tokens, self._count = params.min_tokens, 0
        self._stopped = False

    def one(self, token: int) -> str:
        """What one token adds."""
        self._count += 1
        if self._stopped:
            return ""
        text = self._characters.push(token) + self.marks.get(token, "")
        shown, self._stopped = self._stops.push(text, self._count > self._min_tokens)
        return shown

    def end(self) -> str:
        """What was held back, once the text has ended."""
        if self._stopped:
            return ""
        return self._stops.push(self._characters.finish())[0] + self._stops.finish()


class Answer:
    """A chat answer as it comes: what is thought, said and called. All of a text by `push`, or all by `one` and `end`."""

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, chat: ChatFormat, inside: bool, tools: Tools | None = None
    ) -> None:  # fmt: skip
        """`inside`: the prompt has opened a thought. Without `tools` calls are text."""
        self._text = MarkedText(tokenizer, params, chat.marks)
        self._parser = chat.parser(inside, tools)
        self._by_token = bool(self._text.marks) or chat.thoughts is not None
        self.reasoning_tokens = 0

    def push(self, delta: Delta) -> list[Event]:
        if not self._by_token:
            events = self._parser.feed(delta.text)
            return events + self._parser.finish() if delta.finish_reason is not None else events
        events = [event for token in delta.token_ids for event in self.one(token)]
        return events + self.end() if delta.finish_reason is not None else events

    def one(self, token: int) -> list[Event]:
        """What one token adds. Tokens of a thought count, those of its marks, too."""
        before = self._parser.thinking
        events = self._parser.feed(self._text.one(token))
        self.reasoning_tokens += before or self._parser.thinking
        return events

    def end(self) -> list[Event]:
        """What was held back, once the text has ended."""
        return self._parser.feed(self._text.end()) + self._parser.finish()


def parted(events: Iterable[Event]) -> Parted:
    """What is thought and what is said."""
    out = Parted()
    for event in events:
        if isinstance(event, Thought):
            out.reasoning += event.text
        elif isinstance(event, Text):
            out.content += event.text
    return out
