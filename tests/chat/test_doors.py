"""The same talks with every public template through every door: the same prompt, the same answer of the same tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from chat.doors import NAMES, Doors, Seen, Talk, doors_of
from families import FAMILIES, TOOLS

DECLARED = [
    {"type": "function", "function": {"name": name, "description": "Does it.", "parameters": schema}}
    for name, schema in TOOLS.items()
]


def say(words: str) -> list[dict[str, Any]]:
    """`s:be_brief u:hi`: a message a word, by the first letter of its role; t answers the call that is next, c calls."""
    roles = {"s": "system", "u": "user", "a": "assistant", "d": "developer"}
    out: list[dict[str, Any]] = []
    waiting: list[tuple[str, str]] = []
    for word in words.split():
        kind, _, text = word.partition(":")
        content = text.replace("_", " ")
        if kind[0] == "c":  # c:f,g calls both; c+:f beside a text; c?:f behind a thought
            calls = [
                {"id": f"call_{len(out)}_{k}", "type": "function",
                 "function": {"name": name, "arguments": json.dumps({"s": "x"} if name == "f" else {})}}
                for k, name in enumerate(text.split(","))
            ]  # fmt: skip
            waiting += [(call["id"], call["function"]["name"]) for call in calls]
            made: dict[str, Any] = {
                "role": "assistant",
                "content": "I look." if "+" in kind else None,
                "tool_calls": calls,
            }
            out.append(made | ({"reasoning_content": "hm"} if "?" in kind else {}))
        elif kind[0] == "t":
            id_, name = waiting.pop(0)
            out.append({"role": "tool", "content": content, "tool_call_id": id_, "name": name})
        else:
            message = {"role": roles[kind[0]], "content": content}
            out.append(message | ({"reasoning_content": "hm"} if "?" in kind else {}))
    return out


PLAIN = [
    "u:hi", "u:", "s:be_brief u:hi", "d:be_brief u:hi", "s: u:hi", "u:hi a:fine u:and_you?",
    "s:be_brief u:hi a:fine u:so?",
    "u:a a:b u:c a:d u:e", "u:one u:two", "s:S u:one u:two", "u:one u:two a:b u:c u:d", "u:a s:late u:b",
    "u:a a:b s:late u:c", "s:one s:two u:hi", "s:one u:a d:two u:b", "u:a a:b s:late", "s:alone", "a:first u:hi",
    "s:S a:first u:hi", "u:hi a:b a:c u:d", "u:hi a: u:so?", "u:hi a?:yes u:so?", "u:日本_😀 a:é u:<|im_start|>system",
    "u:<b>\"a\"_&_'b'</b>", "u:hi a:so_far", "s:S u:hi a:So",
]  # fmt: skip
WITH_TOOLS = [
    "u:hi", "s:be_brief u:hi", "u:w c:f", "u:w c:f t:12", "u:w c:f t:12 a:grey u:so?", "u:w c:f,g t:12 t:grey",
    "u:w c+:f t:12", "u:w c?:f t:12", "u:w c:f t:12 c:g t:grey", "s:S u:w c:f t:12 s:late u:so?",
    "u:w c:f t:12 u:one u:two",
]  # fmt: skip
TALKS: dict[str, Talk] = {words: {"messages": say(words)} for words in PLAIN}
TALKS |= {f"tools {words}": {"messages": say(words), "tools": DECLARED} for words in WITH_TOOLS}
TALKS |= {
    f"effort {effort}": {"messages": say("s:S u:hi"), "reasoning_effort": effort}
    for effort in ("medium", "none")
}
PARTS = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
TALKS["parts"] = {"messages": [{"role": "user", "content": PARTS}]}


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest) -> Iterator[Doors]:
    with pytest.MonkeyPatch.context() as patch, doors_of(request.param, patch) as made:
        yield made


def test_there_are_forty_talks() -> None:
    assert len(TALKS) == 40


def test_every_door_makes_the_same_prompt(model: Doors) -> None:
    wrong: dict[str, dict[str, Seen]] = {}
    said = 0
    for name, talk in TALKS.items():
        seen = {door: made for door in model.doors if (made := model.prompt(door, talk)) is not None}
        said += len(seen)
        if len({json.dumps(one) for one in seen.values()}) > 1:
            wrong[name] = {door: _readable(model, one) for door, one in seen.items()}
    assert not wrong
    assert said > 250, "doors have no words for too many talks"


def test_every_door_tells_the_same_of_the_same_tokens(model: Doors) -> None:
    family, tools = FAMILIES[model.name], TALKS["tools u:hi"]
    thought = (
        "".join((family.thought[0] * (not family.opened), "why so", family.thought[1]))
        if family.thought
        else ""
    )
    off = family.opened and family.switches
    effort = {"reasoning_effort": "none"} if off else {}
    plain = {"messages": say("u:hi")}
    answers = [(family.said + "Hello é🎉", plain | effort, "Hello é🎉", "", 0)]
    if family.thought and family.format != "deepseek-v3.1":
        on = {"reasoning_effort": "medium"} if family.switches else {}
        answers.append((thought + family.said + "yes", plain | on, "yes", "why so", 0))
    if family.calls:
        answers.append((family.calls[0], tools | effort, "", "", 1))
        answers.append(
            (
                family.calls[family.format != "harmony"],
                tools | effort,
                "",
                "",
                1 + (family.format != "harmony"),
            )
        )
    for script, talk, text, thoughts, calls in answers:
        if model.prompt("LLM.chat", talk) == ("refused", ""):  # hermes_3 is for requests with tools
            continue
        told = model.answers(script, talk)
        first, *_ = told.values()
        assert len(told) >= 8
        assert all(one == first for one in told.values()), (script, told)
        if not (family.opened and not off and not thoughts):  # else all of it is a thought
            assert (first.text, first.thoughts, len(first.calls)) == (text, thoughts, calls), script


def _readable(model: Doors, seen: Seen) -> Seen:
    kind, ids = seen
    return kind, model.llm.tokenizer.decode(ids, skip_special=False) if kind == "ids" else ""
