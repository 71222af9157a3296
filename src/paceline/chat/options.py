"""What the library and files of prompts may say of a chat, in the words of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, Literal, TypedDict

from paceline.chat.asked import Asked, ToolChoice
from paceline.chat.forms import checked_schema, form_of
from paceline.chat.messages import can_continue
from paceline.chat.road import Chats
from paceline.config import SamplingOptions
from paceline.errors import UsageError, shown

_A_TOOL = "{'type': 'function', 'function': {'name': ..., 'parameters': {...}}}"


class Wanted(TypedDict, total=False):
    """Of one chat."""

    tools: Seq[Mapping[str, Any]] | None
    tool_choice: Literal["none", "auto", "required"] | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    response_format: Mapping[str, Any] | None
    reasoning_effort: str | None
    thinking_budget: int | None  # tokens of a thought, at most
    chat_template_kwargs: Mapping[str, Any] | None


class ChatOptions(SamplingOptions, Wanted, total=False):
    """The keywords of a chat: those of sampling, and what OpenAI's API says of tools and forms."""


NAMES = frozenset(Wanted.__annotations__)


def parted(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what is said of the chat, what is said of sampling)."""
    wanted = {name: value for name, value in given.items() if name in NAMES}
    return wanted, {name: value for name, value in given.items() if name not in NAMES}


def asked_of(chats: Chats, messages: Seq[Mapping[str, Any]], wanted: Mapping[str, Any]) -> Asked:
    """What is asked for. Raises UsageError for what cannot be."""
    tools = [_tool(i, tool) for i, tool in enumerate(wanted.get("tools") or ())]
    effort, given = wanted.get("reasoning_effort"), dict(wanted.get("chat_template_kwargs") or {})
    thinking = given.pop("enable_thinking", None)
    if thinking is None and effort is not None:
        thinking = effort != "none"
    plain = chats.plain(messages)
    return Asked(
        messages=plain,
        tools=tools,
        choice=choice_of(wanted.get("tool_choice"), [tool["function"]["name"] for tool in tools]),
        one_call=wanted.get("parallel_tool_calls") is False,
        form=form_of(wanted.get("response_format")),
        thinking=thinking,
        effort=effort,
        variables=given,
        most_thought=_budget(wanted.get("thinking_budget")),
        continues=bool(plain) and can_continue(plain[-1]),
    )


def _budget(given: object) -> int | None:
    if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 0):
        raise UsageError(
            f"thinking_budget={shown(given)} is not possible: give tokens, 0 or more, or leave it out"
        )
    return given


def choice_of(given: object, names: Seq[str]) -> ToolChoice:
    """`names`: of the tools there are. Raises UsageError."""
    if given is None or given in ("none", "auto", "required"):
        if given == "required" and not names:
            raise UsageError("tool_choice: needs tools")
        return ToolChoice(given or "auto")
    if isinstance(given, Mapping) and given.get("type") == "allowed_tools":
        inner = given.get("allowed_tools") or {}
        wanted = tuple(choice_of(tool, names).names or () for tool in inner.get("tools") or ())
        return ToolChoice(
            "required" if inner.get("mode") == "required" else "auto",
            tuple(name for some in wanted for name in some),
        )
    function = given.get("function") if isinstance(given, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise UsageError(
            f"tool_choice={shown(given)} is not possible: give none, auto, required or a function"
        )
    if name not in names:
        raise UsageError(f"tool_choice: no tool is called {name[:80]!r}")
    return ToolChoice("required", (name,))


def _tool(index: int, tool: object) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UsageError(f"tools[{index}]={shown(tool)} is no tool: give {_A_TOOL}")
    checked_schema(function.get("parameters") or {}, f"tools.{index}.function.parameters")
    return {
        "type": "function",
        "function": {name: value for name, value in function.items() if value is not None},
    }
