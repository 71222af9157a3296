"""From the body of a chat request to what is asked of the model. Every refusal names its field."""

from __future__ import annotations

from typing import Any, Literal

from paceline.chat.asked import Asked, ToolChoice
from paceline.chat.messages import can_continue
from paceline.server.params import refuse
from paceline.server.schema import ChatRequest, Function, Message, NamedTool, Tool
from paceline.server.service import Room, check_schema, form_of
from paceline.server.settings import ServerConfig

_FIELDS = ("name", "tool_call_id", "refusal", "reasoning_content", "reasoning")  # of a message, as they are


def asked_of(room: Room, body: ChatRequest, config: ServerConfig) -> Asked:
    """What a request asks for. Raises ApiError 400, and UsageError for messages that are none."""
    tools, goes_on = body.tools or [], continues(body)
    choice = _choice(body)
    if choice.mode != "none":
        for i, tool in enumerate(tools):
            check_schema(tool.function.parameters or {}, f"tools.{i}.function.parameters", config)
    given = body.chat_template_kwargs
    return Asked(
        messages=room.chats.plain([given_of(message) for message in body.messages]),
        tools=[_declared(tool) for tool in tools],
        choice=choice,
        one_call=body.parallel_tool_calls is False,
        form=form_of(body, config),
        thinking=_thinking(body),
        effort=body.reasoning_effort,
        variables=dict(given.model_extra or {}) if given is not None else {},
        continues=goes_on,
        opens_turn=body.add_generation_prompt is not False,
        budget=_budget(body),
        most_thought=None if body.thinking_budget == -1 else body.thinking_budget,
        strict=config.strict,
    )


def given_of(message: Message) -> dict[str, Any]:
    """A message as `chat.messages` reads it, without what clients have put beside the known fields."""
    out: dict[str, Any] = {"role": message.role, "content": message.content}
    if isinstance(message.content, list):
        out["content"] = [part.media or {"type": "text", "text": part.text or ""} for part in message.content]
    out |= {name: value for name in _FIELDS if (value := getattr(message, name)) is not None}
    if message.tool_calls:
        calls = [(call.id, call.function) for call in message.tool_calls]
        out["tool_calls"] = [
            {"id": id_, "function": {"name": made.name, "arguments": made.arguments}} for id_, made in calls
        ]
    elif message.function_call is not None:
        made = message.function_call
        out["function_call"] = {"name": made.name, "arguments": made.arguments}
    return out


def continues(body: ChatRequest) -> bool:
    """Whether the answer goes on with the last message, not with a turn of its own. Raises ApiError 400."""
    field = "continue_final_message"
    if body.continue_final_message and body.add_generation_prompt:
        raise refuse(field, "and add_generation_prompt exclude each other: give one of them")
    if body.continue_final_message is False or body.add_generation_prompt:
        return False
    possible = can_continue(given_of(body.messages[-1]))
    if body.continue_final_message and not possible:
        raise refuse(field, "the last message has to be the assistant's, without tool calls")
    return possible


def _choice(body: ChatRequest) -> ToolChoice:
    wanted = body.tool_choice
    if wanted is None or isinstance(wanted, str):
        if wanted == "required" and not body.tools:
            raise refuse("tool_choice", "needs tools")
        return ToolChoice(wanted or "auto")
    if not body.tools:
        raise refuse("tool_choice", "needs tools")
    mode: Literal["auto", "required"] = "required"
    if isinstance(wanted, NamedTool):
        names = [wanted]
    else:
        names, mode = wanted.allowed_tools.tools, wanted.allowed_tools.mode
    known = {tool.function.name for tool in body.tools}
    for named in names:
        if named.function.name not in known:
            raise refuse("tool_choice", f"no tool is called {named.function.name[:80]!r}")
    return ToolChoice(mode, tuple(dict.fromkeys(named.function.name for named in names)))


def _declared(tool: Tool) -> dict[str, Any]:
    """A tool as templates print it, without what clients have put beside the known fields."""
    known = tool.function.model_dump(exclude_none=True, include=set(Function.model_fields))
    return {"type": tool.type, "function": known}


def _budget(body: ChatRequest) -> int | None:
    """Soft tokens of a picture that names none itself. Raises ApiError 400."""
    if body.image_tokens is not None:
        return body.image_tokens
    most = (body.mm_processor_kwargs or {}).get("max_soft_tokens")
    if most is not None and (isinstance(most, bool) or not isinstance(most, int)):
        raise refuse("mm_processor_kwargs.max_soft_tokens", "give 70, 140, 280, 560 or 1120")
    return most


def _thinking(body: ChatRequest) -> bool | None:
    if body.chat_template_kwargs is not None and body.chat_template_kwargs.enable_thinking is not None:
        return body.chat_template_kwargs.enable_thinking
    return None if body.reasoning_effort is None else body.reasoning_effort != "none"
