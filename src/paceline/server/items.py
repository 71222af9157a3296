"""The items of a Responses request: what its conversation is made of, and its tools.

Kinds that other clients send beside messages and function calls (Codex: custom tools, shell calls, web searches) are read
as calls where they are some, passed over where they hold nothing for the model, else carried as text.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from paceline.server.params import text_of
from paceline.server.schema import Content, Function, FunctionName, Many, Part

_EMPTY = ("item_reference", "web_search_call", "image_generation_call", "compaction")


class Said(Part):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: Any = Field(None, description="accepted and ignored")
    status: Any = Field(None, description="accepted and ignored")
    phase: Any = Field(None, description="accepted and ignored")


class Called(Part):
    type: Literal["function_call"]
    name: str = Field(max_length=128)
    arguments: str | None = None
    call_id: str = Field(max_length=256)
    id: Any = Field(None, description="accepted and ignored")
    status: Any = Field(None, description="accepted and ignored")


class CustomCalled(Part):
    """A call whose input is free text."""

    type: Literal["custom_tool_call"]
    name: str = Field(max_length=128)
    input: str
    call_id: str = Field(max_length=256)
    id: Any = Field(None, description="accepted and ignored")
    status: Any = Field(None, description="accepted and ignored")


class ShellCalled(Part):
    """`action`: what was run."""

    type: Literal["local_shell_call"]
    action: dict[str, Any]
    call_id: str | None = Field(None, max_length=256)
    id: str | None = Field(None, max_length=256)
    status: Any = Field(None, description="accepted and ignored")


class CallOutput(Part):
    type: Literal["function_call_output", "custom_tool_call_output", "local_shell_call_output"]
    call_id: str | None = Field(None, max_length=256)
    output: Content
    id: str | None = Field(None, max_length=256)
    status: Any = Field(None, description="accepted and ignored")


class Thought(Part):
    type: Literal["reasoning_text"]
    text: str


class Thoughts(Part):
    type: Literal["reasoning"]
    content: Many[Thought] | None = None
    summary: Any = Field(None, description="accepted and ignored")
    encrypted_content: Any = Field(None, description="accepted and ignored")
    id: Any = Field(None, description="accepted and ignored")
    status: Any = Field(None, description="accepted and ignored")


class OtherItem(Part):
    """Any other kind: `whole` is the item itself."""

    model_config = ConfigDict(extra="ignore", strict=True)
    type: str = Field(max_length=128)
    whole: Any = Field(None, description="the item; not for clients to set")

    @model_validator(mode="before")
    @classmethod
    def _keep(cls, data: Any) -> Any:
        return {"type": data.get("type"), "whole": data} if isinstance(data, dict) else data

    @field_validator("type")
    @classmethod
    def _is_other(cls, value: str) -> str:
        if value in _KINDS:
            raise ValueError("does not fit its type")
        return value


_KINDS = {
    "message": "Said", "function_call": "Called", "function_call_output": "CallOutput", "reasoning": "Thoughts",
    "custom_tool_call": "CustomCalled", "custom_tool_call_output": "CallOutput", "local_shell_call": "ShellCalled",
    "local_shell_call_output": "CallOutput",
}  # fmt: skip


def _kind(data: Any) -> str:
    """The class of an item, by its type; one without a type is a message."""
    kind = data.get("type", "message") if isinstance(data, dict) else "message"
    return _KINDS.get(kind, "OtherItem") if isinstance(kind, str) else "OtherItem"


Kind = Said | Called | CallOutput | Thoughts | CustomCalled | ShellCalled | OtherItem
Item = Annotated[
    Annotated[Said, Tag("Said")] | Annotated[Called, Tag("Called")] | Annotated[CallOutput, Tag("CallOutput")]
    | Annotated[Thoughts, Tag("Thoughts")] | Annotated[CustomCalled, Tag("CustomCalled")]
    | Annotated[ShellCalled, Tag("ShellCalled")] | Annotated[OtherItem, Tag("OtherItem")],
    Discriminator(_kind),
]  # fmt: skip


class Typed(Part):
    type: Literal["function"]


class FunctionTool(Function, Typed):
    """Fields of `Typed` come first, and so do their errors."""


class ToolFormat(Part):
    """What the text that a custom tool gets looks like. `syntax` is lark or regex."""

    type: Literal["text", "grammar"] = "text"
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = Field(None, max_length=2**16)


class CustomTool(Part):
    """A tool that gets free text, which the model writes as the argument `input` of a function."""

    type: Literal["custom"]
    name: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.\-]{0,127}$")
    description: str | None = Field(None, max_length=2**16)
    format: ToolFormat | None = None

    @property
    def holds(self) -> bool:
        """Whether the text is held to its format, not only told of it."""
        return self.format is None or self.format.type == "text" or self.format.syntax == "regex"

    def function(self) -> dict[str, Any]:
        """The function that stands for it."""
        text: dict[str, Any] = {"type": "string"}
        description, made = self.description or "", self.format
        if made is not None and made.type == "grammar" and made.definition:
            if made.syntax == "regex":
                text["pattern"] = f"^(?:{made.definition})$"
            else:
                description = (
                    f"{description}\n\nThe input has to fit this grammar:\n{made.definition}".strip()
                )
        schema = {"type": "object", "properties": {"input": text}, "required": ["input"]}
        return {"name": self.name, "description": description, "parameters": schema}


class OtherTool(Part):
    """A tool that the service itself would run, or one without a schema: it is left out."""

    model_config = ConfigDict(extra="ignore", strict=True)
    type: str = Field(max_length=128)

    @field_validator("type")
    @classmethod
    def _is_other(cls, value: str) -> str:
        if value in ("function", "allowed_tools", "custom"):
            raise ValueError("does not fit its type")
        return value


class NamedFunction(FunctionName, Typed):
    pass


class NamedCustom(FunctionName):
    type: Literal["custom"]


class AllowedFunctions(Part):
    """Which of the tools may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: Many[NamedFunction | NamedCustom] = Field(min_length=1, max_length=1024)


AnyTool = FunctionTool | CustomTool | OtherTool


def left_out(items: str | list[Kind], tools: list[AnyTool] | None) -> dict[str, str]:
    """What of a request does not reach the model as it is: field -> why."""
    out: dict[str, str] = {}
    for i, tool in enumerate(tools or []):
        if isinstance(tool, OtherTool):
            out[f"tools.{i}"] = f"tools of type {tool.type[:40]!r} are not run here"
        elif isinstance(tool, CustomTool) and not tool.holds:
            out[f"tools.{i}.format"] = "the grammar is told to the model, and not held"
    for i, item in enumerate(items if isinstance(items, list) else []):
        if isinstance(item, OtherItem):
            kind = repr(item.type[:40])
            out[f"input.{i}"] = (
                f"items of type {kind} hold nothing for the model"
                if item.type in _EMPTY
                else f"items of type {kind} are unknown here and carried as text"
            )
    return out


def messages(items: str | list[Kind], instructions: str | None) -> list[dict[str, Any]]:
    """The conversation as a chat has it: calls and thoughts belong to a turn of the assistant."""
    out: list[dict[str, Any]] = []
    if isinstance(items, str):
        out.append({"role": "user", "content": items})
    thoughts = ""
    for item in items if isinstance(items, list) else []:
        if isinstance(item, Thoughts):
            thoughts += "".join(part.text for part in item.content or [])
            continue
        if isinstance(item, CallOutput):
            out.append({"role": "tool", "tool_call_id": item.call_id or item.id, "content": item.output})
            continue
        _add(out, item)
        if thoughts and out and out[-1]["role"] == "assistant":
            out[-1]["reasoning_content"], thoughts = thoughts, ""
    if instructions:
        if out and out[0]["role"] in ("system", "developer"):
            out[0] = {**out[0], "content": f"{instructions}\n\n{text_of(out[0]['content'])}"}
        else:
            out.insert(0, {"role": "system", "content": instructions})
    return out


def _add(out: list[dict[str, Any]], item: Kind) -> None:
    if isinstance(item, Said):
        out.append({"role": item.role, "content": item.content})
        return
    if isinstance(item, OtherItem):
        if item.type not in _EMPTY:
            out.append({"role": "assistant", "content": json.dumps(item.whole, ensure_ascii=False)})
        return
    if not out or out[-1]["role"] != "assistant":
        out.append({"role": "assistant", "content": None})
    out[-1].setdefault("tool_calls", []).append(_call(item))


def _call(item: Kind) -> dict[str, Any]:
    if isinstance(item, CustomCalled):
        return {"id": item.call_id, "function": {"name": item.name, "arguments": {"input": item.input}}}
    if isinstance(item, ShellCalled):
        function = {"name": "local_shell", "arguments": item.action}
        return {"id": item.call_id or item.id, "function": function}
    assert isinstance(item, Called)
    return {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
