"""What a chat answer shows of its tokens: what is thought, said and called, as OpenAI's objects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paceline.core import Delta
from paceline.text.formats.events import CallArguments, CallStart, Event, Text, Thought
from paceline.text.marked import Answer


@dataclass(slots=True)
class ChatText:
    """One choice of a chat answer: deltas in, OpenAI's delta objects out, the final message at the end."""

    answer: Answer
    id: str
    older: bool = False  # calls are told as function_call
    most: int = 128  # calls that are told
    short_ids: bool = False  # the template wants ids of nine letters and digits
    content: str = ""
    thoughts: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def push(self, delta: Delta) -> dict[str, Any]:
        """What this delta adds: any of content, reasoning_content and tool_calls."""
        return self._collect(self.answer.push(delta))

    def _id(self, index: int) -> str:
        return f"{self.id[:7]}{index:02d}"[-9:] if self.short_ids else f"call_{self.id}_{index}"

    def _collect(self, events: list[Event]) -> dict[str, Any]:
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
