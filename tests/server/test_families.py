"""Every family through the server: chat completions, Responses and Ollama's API, streamed or not, with drafts or none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from families import ARGUMENTS, FAMILIES, TOOLS, tokenizer_of
from paceline.chat.road import make_render
from paceline.text.chat import ChatTemplate
from paceline.text.formats.base import ChatFormat
from paceline.text.formats.choose import format_of
from paceline.text.grammar import Grammars
from paceline.text.vocabulary import Vocabulary
from server.fake_engine import FakeEngine
from server.serving import Served, served

DECLARED = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in TOOLS.items()]
CHAT = "/v1/chat/completions"
U = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module", params=FAMILIES)
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, Served, ChatFormat]]:
    tokenizer = tokenizer_of(request.param)
    chat = format_of(tokenizer)
    vocabulary = Vocabulary(tokenizer.to_json(), tokenizer.vocab_size, (1,))
    grammars = Grammars.of(tokenizer, vocabulary, chat, 20.0)
    engine = FakeEngine(tokenizer, script="")
    engine.max_len = 16384
    render, _ = make_render(tokenizer)
    try:
        with served(engine, grammars=grammars, chat=(render, chat)) as s:
            yield request.param, s, chat
    finally:
        grammars.close()
        ChatTemplate.of(tokenizer).close()


def answers(name: str) -> list[tuple[str, bool | None, str, str, list[tuple[str, Any]]]]:
    """(what the model writes, whether to think, its thought, text, calls)."""
    one = FAMILIES[name]
    off = False if one.opened and one.switches else None
    out: list[tuple[str, bool | None, str, str, list[tuple[str, Any]]]] = []
    if not one.opened or one.switches:
        out.append((one.said + "Hello é🎉", off, "", "Hello é🎉", []))
    if one.calls and (not one.opened or one.switches):
        both = [("f", ARGUMENTS), ("g", {})]
        alone = one.format == "harmony"  # its call ends the answer
        out.append((one.calls[not alone], off, "", "", both[:1] if alone else both))
    if one.thought:
        opening, closing = one.thought
        lead = "" if one.opened or one.format == "deepseek-v3.1" else opening
        on = True if one.switches else None
        out.append((lead + "why so" + closing + one.said + "yes", on, "why so", "yes", []))
        if one.calls:
            out.append((lead + "why" + closing + one.calls[0], on, "why", "", [("f", ARGUMENTS)]))
    return out


def body(think: bool | None, **more: Any) -> dict[str, Any]:
    switch = {} if think is None else {"chat_template_kwargs": {"enable_thinking": think}}
    return {"messages": U, "tools": DECLARED, "max_tokens": 400, "seed": 1, **switch, **more}


def joined(s: Served, asked: dict[str, Any]) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """The message that a client puts together from a stream, its end, and the usage."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    reason, used = "", {}
    with s.client.stream(
        "POST", CHAT, json={"stream": True, "stream_options": {"include_usage": True}, **asked}
    ) as r:
        for line in r.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            used = chunk.get("usage") or used
            for choice in chunk["choices"]:
                delta, reason = choice["delta"], choice["finish_reason"] or reason
                message["content"] += delta.get("content") or ""
                message["reasoning_content"] += delta.get("reasoning_content") or ""
                for call in delta.get("tool_calls", ()):
                    if "id" in call:
                        assert call["index"] == len(message["tool_calls"])
                        message["tool_calls"].append(
                            {"id": call["id"], "type": "function", "function": call["function"]}
                        )
                    else:
                        message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"][
                            "arguments"
                        ]
    return message, reason, used


def test_answers_come_parted_through_every_api(server: tuple[str, Served, ChatFormat]) -> None:
    name, s, _ = server
    for script, think, thought, text, calls in answers(name):
        s.engine.script = script
        plain = s.post(CHAT, **body(think, speculation={"draft_tokens": 0})).json()
        choice = plain["choices"][0]
        message = choice["message"]
        assert message.get("reasoning_content", "") == thought, script
        assert (message["content"] or "") == text, script
        told = [
            (c["function"]["name"], json.loads(c["function"]["arguments"]))
            for c in message.get("tool_calls", [])
        ]
        assert told == calls, script
        assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
        details = plain["usage"]["completion_tokens_details"]
        assert bool(details["reasoning_tokens"]) == bool(thought)
        assert details["reasoning_tokens"] < plain["usage"]["completion_tokens"]
        drafted = s.post(CHAT, **body(think, speculation={"draft_tokens": 7})).json()
        ids = [
            c.pop("id") for m in (message, drafted["choices"][0]["message"]) for c in m.get("tool_calls", [])
        ]
        assert drafted["choices"] == plain["choices"]
        if FAMILIES[name].needs.get("short_ids"):
            assert all(len(one) == 9 and one.isalnum() for one in ids)
        streamed, reason, used = joined(s, body(think))
        for call in streamed["tool_calls"]:
            call.pop("id")
        assert streamed == {
            "content": text,
            "reasoning_content": thought,
            "tool_calls": message.get("tool_calls", []),
        }
        assert reason == choice["finish_reason"]
        assert used["completion_tokens_details"]["reasoning_tokens"] == details["reasoning_tokens"]
        responses(s, think, (thought, text, calls))
        ollama(s, think, (thought, text, calls))


def responses(s: Served, think: bool | None, want: tuple[str, str, list[tuple[str, Any]]]) -> None:
    effort = {} if think is None else {"reasoning": {"effort": "medium" if think else "none"}}
    tools = [{"type": "function", **tool["function"]} for tool in DECLARED]
    made = s.post("/v1/responses", input="hi", tools=tools, max_output_tokens=400, seed=1, **effort).json()
    items = made["output"]
    shown = {
        kind: [item for item in items if item["type"] == kind]
        for kind in ("reasoning", "message", "function_call")
    }
    assert "".join(item["content"][0]["text"] for item in shown["reasoning"]) == want[0]
    assert "".join(item["content"][0]["text"] for item in shown["message"]) == want[1]
    assert [(item["name"], json.loads(item["arguments"])) for item in shown["function_call"]] == want[2]


def ollama(s: Served, think: bool | None, want: tuple[str, str, list[tuple[str, Any]]]) -> None:
    switch = {} if think is None else {"think": think}
    asked = {
        "messages": U,
        "tools": DECLARED,
        "options": {"num_predict": 400, "seed": 1},
        "stream": False,
        **switch,
    }
    message = s.post("/api/chat", **asked).json()["message"]
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])]
    assert (message.get("thinking", ""), message["content"], calls) == want


def test_forced_calls_and_formats_hold_behind_the_thought(server: tuple[str, Served, ChatFormat]) -> None:
    """The fake engine picks among the allowed tokens; where the thought is open, any token may come first."""
    name, s, _ = server
    one, tokenizer = FAMILIES[name], s.engine.tokenizer
    for think in (False, True) if one.switches else (None,):
        more: dict[str, Any] = {"tool_choice": "required"} if one.calls or not one.opened else {}
        s.post(CHAT, **body(think, **more, max_tokens=1))
        params = s.engine.last_params
        assert params is not None
        constraint = params.constraint() if params.constraint else None
        if one.calls is None or constraint is None:
            continue
        mask = constraint.masks([])[0]
        opened = one.opened and think is not False
        if one.format == "json":  # its marks are no tokens: a grammar reads the thought, too
            assert mask is not None
        elif opened or (one.format == "deepseek-v3.1" and think):
            assert mask is None
        else:
            assert mask is not None
            allowed = {tokenizer.token_text(int(i)) for i in mask.nonzero()[0]}
            first = tokenizer.token_text(tokenizer.encode(one.calls[0], add_bos=False)[0])
            may = (
                {tokenizer.token_text(tokenizer.encode(one.thought[0], add_bos=False)[0])}
                if one.thought
                else set()
            )
            thinks = think or (think is None and one.thinks)
            assert allowed == ({first} | (may if thinks else set()))


def test_results_of_calls_are_shown_to_the_model(server: tuple[str, Served, ChatFormat]) -> None:
    """Ids as OpenAI makes them, arguments as text, null content, two calls at once: as clients send them."""
    name, s, _ = server
    s.engine.script = FAMILIES[name].said + "ok"
    calls = [
        {
            "id": "call_abc123def456",
            "type": "function",
            "function": {"name": "f", "arguments": '{"s": "Paris"}'},
        },
        {"id": "call_other", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    results = [
        {"role": "tool", "tool_call_id": c["id"], "content": f"result {i}"} for i, c in enumerate(calls)
    ]
    talk = [*U, {"role": "assistant", "content": None, "tool_calls": calls}, *results]
    answer = s.post(CHAT, **body(None, messages=talk))
    assert answer.status_code == 200, answer.text
    prompt = s.engine.tokenizer.decode(s.engine.last_prompt, skip_special=False)
    for part in ("Paris", "result 0", "result 1"):
        assert part in prompt


def test_one_call_where_parallel_calls_are_off(server: tuple[str, Served, ChatFormat]) -> None:
    name, s, _ = server
    one = FAMILIES[name]
    if one.calls is None or (one.opened and not one.switches):
        return
    s.engine.script = one.calls[1]
    message = s.post(CHAT, **body(False if one.switches else None, parallel_tool_calls=False)).json()[
        "choices"
    ][0]
    [call] = message["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS
    if name == "families/hermes_3":  # a template for use with tools only
        return
    off = s.post(CHAT, **body(False if one.switches else None, tool_choice="none")).json()["choices"][0][
        "message"
    ]
    assert "tool_calls" not in off
