"""Which format a chat template writes: a conversation with thoughts, calls and results goes through it.

What it writes is looked at. Names of models say nothing: many templates are a community's own.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from paceline.errors import UsageError
from paceline.text.formats import (
    atem,
    cohere,
    deepseek,
    gemma,
    harmony,
    hermes,
    kimi,
    lfm2,
    llama,
    mistral,
    tagged,
)
from paceline.text.formats.base import SWITCHES, Calls, ChatFormat, Needs, Thoughts, plain_thoughts

Render = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None, dict[str, Any]], str]

TOOL, KEY, VALUE, SECOND = "probe_tool_x7f", "probe_key", "probe-value-x7f", "probe_next_x7f"
THOUGHT, SAID = "probe-thought-x7f", "probe-said-x7f"
IDS = ("probe0x7f", "probe1x7f")  # nine letters and digits: Mistral's templates refuse others
PLAIN = ChatFormat(name="plain")
_THOUGHTS = {
    "gemma": gemma.THOUGHTS, "harmony": harmony.THOUGHTS, "think": plain_thoughts("<think>", "</think>"),
    "mistral": mistral.THOUGHTS, "seed": plain_thoughts("<seed:think>", "</seed:think>"),
    "thinking": plain_thoughts("<thinking>", "</thinking>"),
    "reasoning": plain_thoughts("<reasoning>", "</reasoning>"),
    "atem": atem.THOUGHTS, "cohere": cohere.RESPONSE, "cohere-text": cohere.TEXT,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sign:
    """How a notation is recognised: by a call that the template has written, or by words of the template."""

    calls: Calls
    written: re.Pattern[str]
    source: re.Pattern[str] | None = None


def _sign(calls: Calls, written: str, source: str | None = None) -> Sign:
    return Sign(calls, re.compile(written), None if source is None else re.compile(source))


_T = re.escape(TOOL)
SIGNS = (
    _sign(gemma.CALLS, rf"<\|tool_call>\s*call:{_T}", r"<\|tool_call>"),
    _sign(harmony.CALLS, rf"to=functions\.{_T}", r"to=functions"),
    _sign(atem.CALLS, rf'<atem:invoke name="{_T}"', r"<atem:function_calls>"),
    _sign(tagged.SEED, rf"<seed:tool_call>\s*<function={_T}>", r"<seed:tool_call>"),
    _sign(tagged.DEEPSEEK_V32, rf'<｜DSML｜function_calls>\s*<｜DSML｜invoke name="{_T}"'),
    _sign(tagged.DEEPSEEK_V4, rf'<｜DSML｜tool_calls>\s*<｜DSML｜invoke name="{_T}"'),
    _sign(cohere.CALLS, rf'<\|START_ACTION\|>\s*\[[^\]]*"tool_name":\s*"{_T}"', r"<\|START_ACTION\|>"),
    _sign(tagged.QWEN, rf"<function={_T}>\s*<parameter=", r"<function=\w"),
    _sign(tagged.MINIMAX, rf'<minimax:tool_call>\s*<invoke name="{_T}"', r"<minimax:tool_call>"),
    _sign(tagged.GLM_COMPACT, rf"<tool_call>{_T}<arg_key>"),
    _sign(tagged.GLM, rf"<tool_call>\s*{_T}", r"<arg_key>"),
    _sign(deepseek.V3, rf"function<｜tool▁sep｜>{_T}\n```json"),
    _sign(deepseek.V31, rf"<｜tool▁call▁begin｜>\s*{_T}\s*<｜tool▁sep｜>"),
    _sign(kimi.KIMI, r"<\|tool_call_begin\|>[^<]*<\|tool_call_argument_begin\|>", r"<\|tool_call_argument_begin\|>"),
    _sign(lfm2.CALLS, rf"<\|tool_call_start\|>\s*\[\s*{_T}\(", r"<\|tool_(?:call|list)_start\|>"),
    _sign(mistral.NEW, rf"\[TOOL_CALLS\]\s*{_T}", None),
    _sign(mistral.OLD, rf'\[TOOL_CALLS\]\s*\[\s*\{{[^\n]*"name":\s*"{_T}"', r"\[TOOL_CALLS\]"),
    _sign(hermes.GRANITE, rf'<\|tool_call\|>\s*\[\s*\{{[^\n]*"name":\s*"{_T}"', r"<\|tool_call\|>"),
    _sign(hermes.HERMES, rf'<tool_call>\s*\{{[^\n]*"name":\s*"{_T}"', r"<tool_call>"),
    _sign(llama.LLAMA, rf'\{{"name":\s*"{_T}",\s*"parameters":'),
)  # fmt: skip
NAMES = ("plain", *(sign.calls.name for sign in SIGNS))  # of formats that can be asked for


def probe(render: Render, source: str) -> ChatFormat:
    """The format of a template. One that cannot be rendered at all is plain, and says so in `note`."""
    try:
        render([_user()], None, {})
    except UsageError as error:
        if not _tried(render, [_user()], (TOOL,)):
            return replace(PLAIN, note=f"the chat template cannot be tried out ({error})")
    thoughts, needs_thoughts = _thoughts(render, source)
    sign, needs = _calls(render, source)
    calls = sign.calls if sign is not None else None
    if (
        calls is harmony.CALLS or calls is atem.CALLS
    ):  # whole formats, whose thoughts the template may leave out
        whole = named(calls.name)
        needs = replace(needs, thoughts_as=whole.needs.thoughts_as)
        return replace(whole, needs=needs, tools_shown=True, switches=False)
    made = ChatFormat(
        name=_name(calls, thoughts), thoughts=thoughts, calls=calls,
        needs=replace(needs, thoughts_as=needs_thoughts), ends=llama.ENDS if calls is llama.LLAMA else (),
        tools_shown=_shows_tools(render),
    )  # fmt: skip
    return replace(made, **_switch(render, source, made))


def named(name: str) -> ChatFormat:
    """A format by its name, for templates that say too little. Raises UsageError."""
    if name == "plain":
        return PLAIN
    if name == "gemma":
        return gemma.GEMMA
    if name == "harmony":
        return ChatFormat(
            name="harmony", thoughts=harmony.THOUGHTS, calls=harmony.CALLS, whole=harmony.HarmonyParser,
            needs=harmony.NEEDS, ends=harmony.ENDS, tools_shown=True, thinks_unasked=True,
        )  # fmt: skip
    if name == "atem":
        return ChatFormat(
            name="atem", thoughts=atem.THOUGHTS, calls=atem.CALLS, whole=atem.AtemParser, ends=(atem.LAST,),
            tools_shown=True, thinks_unasked=True,
        )  # fmt: skip
    calls = next((sign.calls for sign in SIGNS if sign.calls.name == name), None)
    if calls is None:
        raise UsageError(f"chat_format={name!r} is unknown: use auto or one of {', '.join(NAMES)}")
    thoughts = mistral.THOUGHTS if calls in (mistral.NEW, mistral.OLD) else _THOUGHTS["think"]
    ends = llama.ENDS if calls is llama.LLAMA else ()
    return ChatFormat(name=name, thoughts=thoughts, calls=calls, ends=ends, tools_shown=True)


def _name(calls: Calls | None, thoughts: Thoughts | None) -> str:
    if calls is not None:
        return calls.name
    return "plain" if thoughts is None else "think"


def _user(text: str = "hi") -> dict[str, Any]:
    return {"role": "user", "content": text}


def _tool(name: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {KEY: {"type": "string"}}, "required": [KEY]}
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": schema}}


def _asked(names: tuple[str, ...], text_arguments: bool, null_content: bool) -> list[dict[str, Any]]:
    arguments: Any = {KEY: VALUE}
    arguments = json.dumps(arguments) if text_arguments else arguments
    calls = [
        {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, id_ in zip(names, IDS, strict=False)
    ]
    message = {"role": "assistant", "content": None if null_content else "", "tool_calls": calls}
    results = [
        {"role": "tool", "tool_call_id": id_, "name": name, "content": "fine"}
        for name, id_ in zip(names, IDS, strict=False)
    ]
    return [_user(), message, *results]


def _tried(render: Render, messages: list[dict[str, Any]], names: tuple[str, ...], **options: Any) -> str:
    """What the template writes, "" if it refuses."""
    try:
        return render(messages, [_tool(name) for name in names], options)
    except UsageError:
        return ""


def _calls(render: Render, source: str) -> tuple[Sign | None, Needs]:
    """The notation of calls, and how earlier ones have to be given to be written in it."""
    strange = False
    for null_content, text_arguments in itertools.product((False, True), (False, True)):
        shown = _tried(render, _asked((TOOL,), text_arguments, null_content), (TOOL,))
        sign = next((sign_of for sign_of in SIGNS if sign_of.written.search(shown)), None) or _derived(shown)
        strange = strange or VALUE in shown
        if sign is None or VALUE not in shown or f"'{KEY}'" in shown or f'{{\\"{KEY}' in shown:
            continue
        needs = Needs(
            text_arguments=text_arguments, null_content=null_content,
            single_calls=SECOND not in _without_tools(render, text_arguments, null_content),
            short_ids=_refuses_ids(render, text_arguments, null_content), whole_tools=_refuses_bare_tools(render),
        )  # fmt: skip
        return sign, needs
    if strange:  # a notation that is not known here
        return None, Needs()
    shown = _tried(render, [_user()], (TOOL,)) if TOOL not in _tried(render, [_user()], ()) else ""
    texts = [shown, source] if TOOL in shown else [source]
    signs = ((text, sign_of) for text in texts for sign_of in SIGNS if sign_of.source is not None)
    sign = next(
        (sign_of for text, sign_of in signs if sign_of.source is not None and sign_of.source.search(text)),
        None,
    )
    calls = hermes.HERMES if sign is None else sign.calls  # what a model without a notation is held to
    told = calls.told if isinstance(calls, hermes.JsonCalls | lfm2.PythonCalls) else None
    return sign, Needs(calls_as_text=told)


_OBJECT = re.compile(
    rf'(?P<open><[^<>\s]+>|\[[A-Z_]+\])(?P<before>\s*)(?P<list>\[)?\{{"name":\s*"{_T}",\s*"(?P<key>arguments|parameters)":\s*'
    rf"\{{[^{{}}]*\}}\}}\]?(?P<after>\s*)(?P<close><[^<>\s]+>)?"
)


def _derived(shown: str) -> Sign | None:
    """JSON objects between marks that are no other notation's."""
    match = _OBJECT.search(shown)
    if match is None:
        return None
    closing = match["close"] or ""
    closing = closing if "/" in closing or "end" in closing else ""
    joint = None if match["list"] else "\n"
    around = (match["before"], match["after"] if closing else "")
    calls = hermes.JsonCalls("json", match["open"], closing, joint, around, match["key"])
    return Sign(calls, _OBJECT)


def _without_tools(render: Render, text_arguments: bool, null_content: bool) -> str:
    """Two calls in one message, with tools that are called otherwise."""
    return _tried(render, _asked((TOOL, SECOND), text_arguments, null_content), (TOOL,))


def _refuses_ids(render: Render, text_arguments: bool, null_content: bool) -> bool:
    messages = json.loads(
        json.dumps(_asked((TOOL,), text_arguments, null_content)).replace(IDS[0], "call_0123456789")
    )
    return not _tried(render, messages, (TOOL,))


def _refuses_bare_tools(render: Render) -> bool:
    """Whether the template fails on a tool without a description, as clients may send it."""
    bare = {"type": "function", "function": {"name": TOOL}}
    try:
        render([_user()], [bare], {})
    except UsageError:
        return bool(_tried(render, [_user()], (TOOL,)))
    return False


def _shows_tools(render: Render) -> bool:
    return TOOL in _tried(render, [_user()], (TOOL,))


def _thoughts(render: Render, source: str) -> tuple[Thoughts | None, str]:
    """The marks of thoughts, and the field of a message that the template reads earlier thoughts from."""
    known = [notation for notation in _THOUGHTS.values() if not notation.said or notation.said in source]
    answer = {"role": "assistant", "content": SAID}
    ways: dict[str, dict[str, Any]] = {
        "reasoning_content": answer | {"reasoning_content": THOUGHT},
        "thinking": answer | {"thinking": THOUGHT},
        "parts": answer
        | {"content": [{"type": "thinking", "thinking": THOUGHT}, {"type": "text", "text": SAID}]},
    }
    for way, message in ways.items():
        for call in (False, True):
            asked = _asked((TOOL,), False, False)
            talk = [asked[0], asked[1] | {k: v for k, v in message.items() if k != "role"}, *asked[2:]]
            shown = _tried(render, talk if call else [_user(), message], (TOOL,) if call else ())
            before, thought, behind = shown.partition(THOUGHT)
            for thoughts in known if thought and SAID in behind else ():
                opening = thoughts.opening
                if before.rstrip().removesuffix("thought").rstrip().endswith(opening):
                    return thoughts, way
    prompts = [_tried(render, [_user()], (), **options) for options in ({}, {"enable_thinking": True})]
    for thoughts in known:
        if any(prompt.rstrip().endswith(thoughts.opening) for prompt in prompts):
            return thoughts, "reasoning_content"
    for thoughts in known:
        if thoughts.opening in source and thoughts.closing in source:
            return thoughts, "reasoning_content"
    closed = [notation for notation in known if "/" in notation.closing and notation.closing in source]
    return (closed[0] if closed else None), "reasoning_content"


def _switch(render: Render, source: str, made: ChatFormat) -> dict[str, Any]:
    """Whether the template can switch thinking on and off, and what holds if nobody says so."""
    if made.thoughts is None:
        return {}
    on, off, unsaid = (
        _tried(render, [_user()], (), **options)
        for options in (
            dict.fromkeys(SWITCHES, True),
            dict.fromkeys(SWITCHES, False),
            {},
        )
    )
    return {"switches": on != off, "thinks_unasked": unsaid == on and not made.closed_by(unsaid)}
