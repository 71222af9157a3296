"""Anthropic's Messages API: the wire by itself, and what its own client library makes of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from families import tokenizer_of
from paceline.chat.road import make_render
from paceline.text.chat import ChatTemplate
from paceline.text.formats.choose import format_of
from paceline.text.grammar import Grammars
from paceline.text.vocabulary import Vocabulary
from server.fake_engine import FakeEngine
from server.serving import Served, served

PATH = "/v1/messages"
U: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
TOOL = {
    "name": "get_weather", "description": "Get the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 5}},
                     "required": ["city"], "additionalProperties": False},
}  # fmt: skip
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
KEY = "a key of the tests"


@pytest.fixture(scope="module")
def s() -> Iterator[Served]:
    tokenizer = tokenizer_of("families/qwen3")
    chat = format_of(tokenizer)
    vocabulary = Vocabulary(tokenizer.to_json(), tokenizer.vocab_size, (1,))
    grammars = Grammars.of(tokenizer, vocabulary, chat, 20.0)
    engine = FakeEngine(tokenizer)
    engine.max_len = 16384
    try:
        with served(engine, (KEY,), grammars, chat=(make_render(tokenizer)[0], chat)) as made:
            yield made
    finally:
        grammars.close()
        ChatTemplate.of(tokenizer).close()


def prompt(s: Served) -> str:
    return s.engine.tokenizer.decode(s.engine.last_prompt, skip_special=False)


def ask(s: Served, messages: Any = U, **more: Any) -> dict[str, Any]:
    answer = s.post(PATH, messages=messages, max_tokens=400, **more)
    assert answer.status_code == 200, answer.text
    out: dict[str, Any] = answer.json()
    return out


def test_a_message_has_blocks_of_what_is_thought_said_and_called(s: Served) -> None:
    s.engine.script = "<think>\nhm\n</think>\n\nI look.\n" + CALL
    made = ask(
        s, tools=[TOOL], system=[{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]
    )
    kinds = [block["type"] for block in made["content"]]
    assert kinds == ["thinking", "text", "tool_use"]
    thought, said, call = made["content"]
    assert (thought["thinking"], said["text"].strip()) == ("hm", "I look.")
    assert (call["name"], call["input"]) == ("get_weather", {"city": "Paris"})
    assert (made["type"], made["role"], made["stop_reason"], made["stop_sequence"]) == (
        "message",
        "assistant",
        "tool_use",
        None,
    )
    used = made["usage"]
    assert used["input_tokens"] == len(s.engine.last_prompt)
    assert used["output_tokens"] > 10
    assert "be brief" in prompt(s)
    assert "get_weather" in prompt(s)
    result = {
        "type": "tool_result",
        "tool_use_id": call["id"],
        "content": [{"type": "text", "text": "12 degrees"}],
    }
    ask(
        s,
        [*U, {"role": "assistant", "content": made["content"]}, {"role": "user", "content": [result]}],
        tools=[TOOL],
    )
    text = prompt(s)
    assert text.index('"city": "Paris"') < text.index("12 degrees")
    assert text.rstrip().endswith("<|im_start|>assistant")


def test_why_an_answer_ended(s: Served) -> None:
    s.engine.script = "one two three"
    assert (ask(s)["stop_reason"], ask(s)["content"][0]["text"]) == ("end_turn", "one two three")
    cut = s.post(PATH, messages=U, max_tokens=3, thinking={"type": "disabled"}).json()
    assert (cut["stop_reason"], cut["usage"]["output_tokens"]) == ("max_tokens", 3)
    stopped = ask(s, stop_sequences=["zzz", " two"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", " two")
    assert stopped["content"] == [{"type": "text", "text": "one"}]


def test_a_stream_has_the_events_of_a_message(s: Served) -> None:
    s.engine.script = "<think>\nhm\n</think>\n\nI look.\n" + CALL
    whole = ask(s, tools=[TOOL], seed=1)
    text = s.post(PATH, messages=U, max_tokens=400, tools=[TOOL], seed=1, stream=True).text
    events = [
        json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")
    ]
    assert [e["type"] for e in events if e["type"] != "content_block_delta"] == [
        "message_start", *["content_block_start", "content_block_stop"] * 3, "message_delta", "message_stop",
    ]  # fmt: skip
    blocks: dict[int, str] = {}
    for e in events:
        if e["type"] == "content_block_delta":
            kind = e["delta"]["type"]
            value = e["delta"]["partial_json" if kind == "input_json_delta" else kind.removesuffix("_delta")]
            blocks[e["index"]] = blocks.get(e["index"], "") + value
    thought, said, call = whole["content"]
    assert list(blocks.values())[:2] == [thought["thinking"], said["text"]]
    assert json.loads(blocks[2]) == call["input"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_tokens_are_counted_as_they_would_be_read(s: Served) -> None:
    s.engine.script = "x"
    for more in ({}, {"tools": [TOOL]}, {"system": "be brief"}, {"thinking": {"type": "disabled"}}):
        counted = s.post(f"{PATH}/count_tokens", messages=U, **more).json()
        ask(s, **more)
        assert counted == {"input_tokens": len(s.engine.last_prompt)}, more


@pytest.mark.parametrize(
    ("choice", "held"), [({"type": "any"}, True), ({"type": "tool", "name": "get_weather"}, True),
                         ({"type": "auto"}, False), ({"type": "none"}, False)],
    ids=str,
)  # fmt: skip
def test_a_call_can_be_forced(s: Served, choice: dict[str, Any], held: bool) -> None:
    s.engine.script = "no call"
    made = ask(s, tools=[TOOL], tool_choice=choice, thinking={"type": "disabled"})
    assert (made["stop_reason"] == "tool_use") == held
    if held:
        assert len(made["content"][-1]["input"]["city"]) <= 5


def test_a_form_is_held(s: Served) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [7]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    made = ask(
        s, thinking={"type": "disabled"}, output_config={"format": {"type": "json_schema", "schema": schema}}
    )
    assert json.loads(made["content"][0]["text"]) == {"a": 7}


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "search_result"}]}]}, 400, "messages.0.content.0"),
        ({"messages": U, "max_tokens": 0}, 400, "max_tokens"),
        ({"messages": U, "tool_choice": {"type": "any"}}, 400, "needs tools"),
        ({"messages": [{"role": "user", "content": [PICTURE]}]}, 400, "reads text only"),
        ({"messages": [{"role": "user", "content": "x " * 9000}]}, 400, "context"),
    ],
    ids=lambda one: str(one)[:40],
)  # fmt: skip
def test_errors_have_anthropics_form(s: Served, body: dict[str, Any], status: int, said: str) -> None:
    answer = s.post(PATH, **({"max_tokens": 5} | body))
    assert answer.status_code == status
    told = answer.json()
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert said in told["error"]["message"]


def test_the_key_may_stand_where_anthropics_clients_put_it(s: Served) -> None:
    s.engine.script = "x"
    body = {"messages": U, "max_tokens": 5}
    for key, status in ((KEY, 200), ("wrong", 401)):
        assert (
            s.client.post(PATH, json=body, headers={"Authorization": "", "x-api-key": key}).status_code
            == status
        )


def test_tools_that_are_not_run_here_are_left_out(s: Served) -> None:
    s.engine.script = "x"
    made = ask(s, tools=[{"type": "web_search_20250305", "name": "web_search"}, TOOL])
    assert any("web_search_20250305" in one for one in made["warnings"])
    assert "web_search" not in prompt(s)


def test_anthropics_own_client(s: Served) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=s.url, api_key=KEY, max_retries=0)
    s.engine.script = "<think>\nhm\n</think>\n\nI look.\n" + CALL
    asked: dict[str, Any] = {"model": "fake", "max_tokens": 400, "messages": U, "tools": [TOOL]}
    made = client.messages.create(**asked, thinking={"type": "enabled", "budget_tokens": 1024})
    assert [block.type for block in made.content] == ["thinking", "text", "tool_use"]
    assert made.content[2].input == {"city": "Paris"}
    with client.messages.stream(**asked) as stream:
        said = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert said == made.content[1].text
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert (final.content[2].input, final.stop_reason) == ({"city": "Paris"}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": final.content[2].id, "content": "12"}
    s.engine.script = "It is 12."
    last = client.messages.create(
        **asked
        | {
            "messages": [
                *U,
                {"role": "assistant", "content": final.content},
                {"role": "user", "content": [result]},
            ]
        }
    )
    assert last.content[0].text == "It is 12."
    counted = client.messages.count_tokens(model="fake", messages=U)
    client.messages.create(model="fake", max_tokens=5, messages=U)
    assert counted.input_tokens == len(s.engine.last_prompt)
    with pytest.raises(anthropic.BadRequestError, match="needs tools"):
        client.messages.create(model="fake", max_tokens=5, messages=U, tool_choice={"type": "any"})
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=s.url, api_key="wrong", max_retries=0).messages.create(
            model="fake", max_tokens=5, messages=U
        )
