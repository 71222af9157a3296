"""What agents and libraries send, as their own code writes it, on Qwen3's template: served as by their own servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from families import tokenizer_of
from paceline.chat.road import make_render
from paceline.text.chat import ChatTemplate
from paceline.text.formats.choose import format_of
from paceline.text.grammar import Grammars, Vocabulary
from server.fake_engine import FakeEngine
from server.serving import Served, served

CITY = {
    "type": "object", "title": "get_weather_args", "additionalProperties": False, "required": ["city"],
    "properties": {"city": {"description": "A town.", "title": "City", "type": "string", "maxLength": 5}},
}  # fmt: skip
FUNCTION = {"name": "get_weather", "description": "Get the weather.", "parameters": CITY, "strict": True}
TOOL = {"type": "function", "function": FUNCTION}
FREE = {"type": "function", "function": FUNCTION | {"strict": False}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
WROTE = "<think>\nThey ask.\n</think>\n\n" + CALL
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"


@pytest.fixture(scope="module")
def s() -> Iterator[Served]:
    tokenizer = tokenizer_of("families/qwen3")
    chat = format_of(tokenizer)
    vocabulary = Vocabulary(tokenizer.to_json(), tokenizer.vocab_size, (1,))
    grammars = Grammars.of(tokenizer, vocabulary, chat, 20.0)
    engine = FakeEngine(tokenizer, script=WROTE)
    engine.max_len = 16384
    try:
        with served(engine, grammars=grammars, chat=(make_render(tokenizer)[0], chat)) as made:
            yield made
    finally:
        grammars.close()
        ChatTemplate.of(tokenizer).close()


def prompt(s: Served) -> str:
    return s.engine.tokenizer.decode(s.engine.last_prompt, skip_special=False)


def test_langchain_binds_tools_and_sends_results(s: Served) -> None:
    s.engine.script = WROTE
    first = {"content": "Weather in Paris?", "role": "user"}
    asked = {
        "messages": [first],
        "tools": [FREE],
        "parallel_tool_calls": True,
        "temperature": 0.0,
        "stream": False,
    }
    message = s.post(CHAT, **asked).json()["choices"][0]["message"]
    [call] = message["tool_calls"]
    assert (call["type"], json.loads(call["function"]["arguments"])) == ("function", {"city": "Paris"})
    s.engine.script = "Sunny."
    history = [first, {"role": "assistant", "content": None, "tool_calls": message["tool_calls"]},
               {"role": "tool", "content": "sunny", "tool_call_id": call["id"]}]  # fmt: skip
    done = s.post(CHAT, **asked | {"messages": history}).json()["choices"][0]
    assert (done["message"]["content"], done["finish_reason"]) == ("Sunny.", "stop")
    assert CALL in prompt(s)
    assert "<tool_response>\nsunny\n</tool_response>" in prompt(s)


@pytest.mark.parametrize("mode", ["tools", "required", "json_object", "json_schema"])
def test_instructor_forces_a_call_or_a_format(s: Served, mode: str) -> None:
    """The fake engine picks any token that the grammar allows, and ends where it may."""
    more: dict[str, Any] = {
        "tools": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        "required": {"tools": [TOOL], "tool_choice": "required"},
        "json_object": {"response_format": {"type": "json_object"}},
        "json_schema": {
            "response_format": {"type": "json_schema", "json_schema": {"name": "W", "schema": CITY}}
        },
    }[mode]
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 600, **more, **off}
    answers = [s.post(CHAT, **asked, seed=seed).json()["choices"][0] for seed in range(4)]
    done = [one for one in answers if one["finish_reason"] != "length"]
    for one in done:
        message = one["message"]
        called = message.get("tool_calls")
        assert bool(called) == (mode in ("tools", "required"))
        value = json.loads(called[0]["function"]["arguments"] if called else message["content"])
        assert isinstance(value, dict)
        assert mode == "json_object" or len(value["city"]) <= 5
    assert done or mode == "json_object"


def test_aider_streams_an_edit(s: Served) -> None:
    s.engine.script = (
        "<think>\nhm\n</think>\n\na.py\n```\n<<<<<<< SEARCH\nx\n=======\ny\n>>>>>>> REPLACE\n```\n"
    )
    talk = [{"role": "system", "content": "Act as an expert developer."}, {"role": "user", "content": "Change it"},
            {"role": "assistant", "content": "Ok."}, {"role": "user", "content": "a.py: x"}]  # fmt: skip
    content = thought = ""
    asked = {"messages": talk, "stream": True, "temperature": 0, "stream_options": {"include_usage": True}}
    with s.client.stream("POST", CHAT, json=asked) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    content += choice["delta"].get("content") or ""
                    thought += choice["delta"].get("reasoning_content") or ""
    assert (thought, content) == ("hm", s.engine.script.partition("</think>\n\n")[2])


def test_openai_agents_and_codex_over_responses(s: Served) -> None:
    """Both send whole conversations, a developer's instructions, tools of other kinds, and ask for a stream."""
    s.engine.script = WROTE
    function = {"type": "function", **FUNCTION, "strict": False}
    others = [
        {"type": "web_search"},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
    ]
    asked = {
        "model": "fake", "instructions": "You are a coding agent.", "store": False,
        "include": ["reasoning.encrypted_content"],
        "input": [{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
                  {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}],
        "tools": [function, *others], "tool_choice": "auto", "parallel_tool_calls": False, "stream": True,
        "reasoning": {"effort": "medium", "summary": "auto"}, "prompt_cache_key": "abc",
    }  # fmt: skip
    events = []
    with s.client.stream("POST", RESPONSES, json=asked) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line[6:]))
    kinds = [event["type"] for event in events]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert "response.reasoning_text.delta" in kinds
    arguments = "".join(e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta")
    assert json.loads(arguments) == {"city": "Paris"}
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "function_call"]
    s.engine.script = "<think>\n\n</think>\n\nSunny."
    result = {"type": "function_call_output", "call_id": output[1]["call_id"], "output": "sunny"}
    more = asked | {"input": [*asked["input"], *output, result], "stream": False}
    [*_, said] = s.post(RESPONSES, **{k: v for k, v in more.items() if k != "model"}).json()["output"]
    assert said["content"][0]["text"] == "Sunny."
    for part in (
        "You are a coding agent.",
        "Be brief.",
        "<think>\nThey ask.\n</think>",
        '{"city": "Paris"}',
        "sunny",
    ):
        assert part in prompt(s)


def test_an_answer_that_is_begun_may_be_a_thought_or_text_about_one(s: Served) -> None:
    s.engine.script = " so\n</think>\n\nyes"
    begun = [
        {"role": "user", "content": "what is <think>?"},
        {"role": "assistant", "content": "<think>\nI think"},
    ]
    message = s.post(CHAT, messages=begun).json()["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) in (("so", "yes"), (" so", "yes"))
    s.engine.script = "a mark"
    message = s.post(CHAT, messages=begun[:1]).json()["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (None, "a mark")


def test_the_card_says_the_format_and_tools_that_no_one_sees_are_told(s: Served) -> None:
    card = s.client.get("/v1/models/fake").json()
    assert (card["thinking"], card["chat_format"]) == (True, "hermes")
    tokenizer = tokenizer_of("families/phi3")
    engine = FakeEngine(
        tokenizer, script='<tool_call>{"name": "get_weather", "arguments": {"city": "x"}}</tool_call>'
    )
    engine.max_len = 4096
    with served(engine, chat=(make_render(tokenizer)[0], format_of(tokenizer))) as plain:
        answer = plain.post(CHAT, messages=[{"role": "user", "content": "x"}], tools=[FREE]).json()
        assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
        assert "does not show them" in answer["warnings"][0]
    ChatTemplate.of(tokenizer).close()
