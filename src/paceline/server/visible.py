"""What a chat answer shows of its tokens: the text with Gemma 4's structural marks, parted by the parsers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paceline.core import Delta
from paceline.text.marked import MarkedText
from paceline.text.reasoning import ReasoningParser
from paceline.text.tools import CallArguments, CallStart, Event, Text, ToolParser


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
