"""An answer as it comes: what is thought, said and called, in the objects of OpenAI's API, which others are made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from paceline.core import Delta
from paceline.text.formats.events import CallArguments, CallStart, Event, Text, Thought
from paceline.text.marked import Answer


@dataclass(slots=True)
class ChatAnswer:
    """One text: deltas in, what each adds out, the final message at the end."""

    events: Answer
    id: str  # what ids of calls are made of
    most: int = 128  # calls that are told
    short_ids: bool = False  # the template wants ids of nine letters and digits
    content: str = ""
    thoughts: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def push(self, delta: Delta) -> dict[str, Any]:
        """What this delta adds: any of content, reasoning_content and tool_calls."""
        return self.collect(self.events.push(delta))

    def _id(self, index: int) -> str:
        return f"{self.id[:7]}{index:02d}"[-9:] if self.short_ids else f"call_{self.id}_{index}"

    def collect(self, events: Iterable[Event]) -> dict[str, Any]:
        """What these events add, in the same objects."""
        content = thoughts = ""
        calls: dict[int, dict[str, Any]] = {}
        for item in events:
            match item:
                case Text(text):
                    content += text
                case Thought(text):
                    thoughts += text
                case CallStart(index, name) if index < self.most:
                    calls[index] = {"index": index, "id": self._id(index), "type": "function"}
                    calls[index]["function"] = {"name": name, "arguments": ""}
                    self.calls.append({**calls[index], "function": dict(calls[index]["function"])})
                case CallArguments(index, piece) if index < self.most:
                    call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                    call["function"]["arguments"] += piece
                    self.calls[index]["function"]["arguments"] += piece
        self.content += content
        self.thoughts += thoughts
        out: dict[str, Any] = {"reasoning_content": thoughts} if thoughts else {}
        if content:
            out["content"] = content
        if calls:
            out["tool_calls"] = list(calls.values())
        return out

    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls of the whole text."""
        return [{name: value for name, value in call.items() if name != "index"} for call in self.calls]

    def message(self) -> dict[str, Any]:
        """The whole text as a message."""
        out: dict[str, Any] = {"role": "assistant", "content": self.content, "refusal": None}
        if self.thoughts:
            out["reasoning_content"] = self.thoughts
        if self.calls:
            out["content"] = self.content or None
            out["tool_calls"] = self.tool_calls()
        return out

    def finish_reason(self, reason: str) -> str:
        return "tool_calls" if self.calls and reason == "stop" else reason
