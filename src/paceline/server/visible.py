"""What a chat answer shows of its tokens: the text with Gemma 4's structural marks, parted by the parsers.

The engine's own text leaves special tokens out, so where the vocabulary has marks the text is decoded anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paceline.core import Delta, SamplingParams
from paceline.text import arguments, reasoning, tools
from paceline.text.reasoning import ReasoningParser
from paceline.text.stream import Detokenizer, StopStrings
from paceline.text.tokenizer import Tokenizer
from paceline.text.tools import CallArguments, CallStart, Event, Text, ToolParser

MARKS = (tools.OPEN, arguments.CLOSE, arguments.QUOTE, tools.RESPONSE, reasoning.OPEN, reasoning.CLOSE)


class MarkedText:
    """The text of one answer, its marks included. Also counts the tokens inside thinking parts."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, thinking: bool) -> None:
        ids = {tokenizer.token_id(mark): mark for mark in MARKS}
        self._marks = {i: mark for i, mark in ids.items() if i is not None and i in tokenizer.special_ids}
        self._characters, self._stops = Detokenizer(tokenizer), StopStrings(params.stop)
        self._min_tokens, self._count = params.min_tokens, 0
        self._thinking, self._stopped = thinking, False
        self.reasoning_tokens = 0

    def push(self, delta: Delta) -> str:
        if not self._marks:
            return delta.text
        out = "".join(self._one(token) for token in delta.token_ids)
        if delta.finish_reason is not None and not self._stopped:
            out += self._stops.push(self._characters.finish())[0] + self._stops.finish()
        return out

    def _one(self, token: int) -> str:
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


@dataclass(slots=True)
class ChatText:
    """One choice of a chat answer: deltas in, OpenAI's delta objects out, the final message at the end."""

    marked: MarkedText
    reasoning: ReasoningParser
    tools: ToolParser | None
    id: str
    older: bool = False  # calls are told as function_call
    content: str = ""
    thoughts: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def push(self, delta: Delta) -> dict[str, Any]:
        """What this delta adds: any of content, reasoning_content and tool_calls."""
        text = self.marked.push(delta)
        parted = self.reasoning.feed(text)
        if delta.finish_reason is not None:
            last = self.reasoning.finish()
            parted.content += last.content
            parted.reasoning += last.reasoning
        events: list[Event] = [Text(parted.content)] if parted.content else []
        if self.tools is not None:
            events = self.tools.feed(parted.content)
            if delta.finish_reason is not None:
                events += self.tools.finish()
        return self._collect(parted.reasoning, events)

    def _collect(self, thoughts: str, events: list[Event]) -> dict[str, Any]:
        content = ""
        calls: dict[int, dict[str, Any]] = {}
        for item in events:
            match item:
                case Text(text):
                    content += text
                case CallStart(index, name):
                    calls[index] = {"index": index, "id": f"call_{self.id}_{index}", "type": "function"}
                    calls[index]["function"] = {"name": name, "arguments": ""}
                    self.calls.append({**calls[index], "function": dict(calls[index]["function"])})
                case CallArguments(index, piece):
                    call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                    call["function"]["arguments"] += piece
                    self.calls[index]["function"]["arguments"] += piece
        self.content += content
        self.thoughts += thoughts
        out: dict[str, Any] = {"reasoning_content": thoughts} if thoughts else {}
        if content:
            out["content"] = content
        if self.older and 0 in calls:
            out["function_call"] = calls[0]["function"]
        elif calls and not self.older:
            out["tool_calls"] = list(calls.values())
        return out

    def message(self) -> dict[str, Any]:
        out: dict[str, Any] = {"role": "assistant", "content": self.content, "refusal": None}
        if self.thoughts:
            out["reasoning_content"] = self.thoughts
        if self.calls:
            out["content"] = self.content or None
        if self.calls and self.older:
            out["function_call"] = self.calls[0]["function"]
        elif self.calls:
            out["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in self.calls]
        return out

    def finish_reason(self, reason: str) -> str:
        called = "function_call" if self.older else "tool_calls"
        return called if self.calls and reason == "stop" else reason
