"""The Responses API over the fake engine: raw, and with the official Python client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.server.responses import ResponsesRequest, messages
from server.fake_engine import FakeEngine, make_tokenizer
from server.grammars import grammars_of
from server.serving import Served, served

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}


class Person(pydantic.BaseModel):  # type: ignore[misc, name-defined]
    name: str = pydantic.Field(max_length=5)
    adult: bool


def scripted(script: str | None = None) -> Any:
    return served(FakeEngine(make_tokenizer(), script=script))


@pytest.fixture(scope="module")
def s() -> Iterator[Served]:
    engine = FakeEngine(make_tokenizer())
    grammars = grammars_of(engine.tokenizer, 20.0)
    with served(engine, keys=("key",), grammars=grammars) as server:
        yield server
    grammars.close()


@pytest.fixture
def client(s: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{s.url}/v1", api_key="key", max_retries=0, timeout=60) as made:
        yield made


def test_text_whole_and_streamed_is_the_chats_text(client: Any) -> None:
    chat = client.chat.completions.create(
        model="fake", seed=1, max_tokens=30,
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}],
    )  # fmt: skip
    asked = {
        "model": "fake",
        "instructions": "Be brief.",
        "input": "hello",
        "max_output_tokens": 30,
        "extra_body": {"seed": 1},
    }
    whole = client.responses.create(**asked)
    assert whole.output_text == chat.choices[0].message.content != ""
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (whole.usage.output_tokens, whole.usage.total_tokens) == (30, 30 + whole.usage.input_tokens)
    assert whole.speculation["seed"] == 1
    with client.responses.stream(**asked) as stream:
        events = list(stream)
    final = events[-1].response
    assert final.output_text == whole.output_text
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = list(dict.fromkeys(e.type.removeprefix("response.") for e in events))
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip


def test_a_format_is_parsed_and_a_forced_call_streams(client: Any) -> None:
    parsed = client.responses.parse(model="fake", input="hello", text_format=Person, max_output_tokens=400)
    assert isinstance(parsed.output_parsed, Person)
    for choice in ("required", {"type": "function", "name": "add"}):
        asked = {
            "model": "fake", "input": "hello", "tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False,
            "max_output_tokens": 300, "extra_body": {"seed": 2},
        }  # fmt: skip
        whole = client.responses.create(**asked)
        (call,) = whole.output
        assert (call.type, call.name, call.status) == ("function_call", "add", "completed")
        assert isinstance(json.loads(call.arguments)["a"], int)
        with client.responses.stream(**asked) as stream:
            deltas = [e.delta for e in stream if e.type == "response.function_call_arguments.delta"]
            final = stream.get_final_response()
        assert "".join(deltas) == final.output[0].arguments == call.arguments
        answered = [{"type": "function_call_output", "call_id": call.call_id, "output": "7"}]
        again = client.responses.create(
            model="fake", input=[{"role": "user", "content": "hello"}, *whole.output, *answered], tools=[TOOL],
            max_output_tokens=5,
        )  # fmt: skip
        assert again.output[-1].type == "message"


def test_thoughts_text_and_calls_are_items_of_their_own() -> None:
    script = (
        "<|channel>thought\nhm<channel|>Let me see.<|tool_call>call:add{a:5}<tool_call|>"
        "<|tool_call>call:add{a:6}<tool_call|>"
    )
    with scripted(script) as server:
        asked = {"input": "hello", "tools": [TOOL], "reasoning": {"effort": "high"}}
        with_thinking = server.post("/v1/responses", **asked | {"reasoning": None}).json()
        kinds = [item["type"] for item in with_thinking["output"]]
        assert kinds == ["reasoning", "message", "function_call", "function_call"]
        assert with_thinking["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
        assert [json.loads(i["arguments"]) for i in with_thinking["output"][2:]] == [{"a": 5}, {"a": 6}]
        assert with_thinking["status"] == "completed"
        lines = server.post("/v1/responses", **asked | {"reasoning": None, "stream": True}).text.split("\n\n")
        events = [json.loads(line.partition("data: ")[2]) for line in lines if line]
        assert all(line.startswith(f"event: {e['type']}\n") for line, e in zip(lines, events, strict=False))
        last = events[-1]["response"]
        for changing in ("id", "created_at"):
            assert last.pop(changing)
        ids = ("id", "call_id")
        plain = [
            [{k: v for k, v in i.items() if k not in ids} for i in o]
            for o in (last["output"], with_thinking["output"])
        ]
        assert plain[0] == plain[1]


def test_the_conversation_reaches_the_template_as_a_chat() -> None:
    given = [
        {"role": "developer", "content": "Old."},
        {"role": "user", "content": [{"type": "input_text", "text": "What is 1+1?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant",
         "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
    ]  # fmt: skip
    made = messages(ResponsesRequest.model_validate({"input": given}).input, "New.")
    assert [m["role"] for m in made] == ["developer", "user", "assistant", "tool"]
    assert made[0]["content"] == "New.\n\nOld."
    assert made[2]["reasoning_content"] == "hm"
    assert [call["id"] for call in made[2]["tool_calls"]] == ["c1", "c2"]
    assert made[3]["tool_call_id"] == "c1"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"), ({"conversation": {"id": "x"}}, "conversation"),
    ({"background": True}, "background"), ({"prompt": {"id": "x"}}, "prompt"), ({"n": 2}, "n"), ({"input": []}, "input"),
    ({"input": "x" * 600}, "input"), ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"truncation": "auto"}, "truncation"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input.0.call_id"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
     "input.0.content.0.input_image"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nonsense"}}}}, "text.format.schema"),
    ({"temperature": -1}, "temperature"), ({"input": "explode"}, "input"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param"), BAD, ids=[param for _, param in BAD])
def test_what_is_refused_names_the_field_of_this_api(s: Served, body: dict[str, Any], param: str) -> None:
    answer = s.post("/v1/responses", **{"input": "hello", **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_kinds_of_other_clients_are_left_out_or_read(s: Served) -> None:
    """What Codex always sends beside its functions, and the items of its earlier turns."""
    call = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    others = [
        {"type": "web_search"},
        {"type": "custom", "name": "patch", "format": {"type": "grammar"}},
        {"type": "local_shell"},
    ]
    items = [
        {"role": "user", "content": "hi"},
        {
            "type": "custom_tool_call",
            "call_id": "c1",
            "name": "patch",
            "input": "*** Begin",
            "status": "completed",
        },
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        {
            "type": "web_search_call",
            "id": "ws_1",
            "status": "completed",
            "action": {"type": "search", "query": "x"},
        },
        {"type": "local_shell_call", "call_id": "c2", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "c2", "output": "a.txt"},
        {"type": "item_reference", "id": "msg_1"},
        {"type": "mcp_list_tools", "server_label": "docs", "tools": []},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]},
        {"type": "function_call", "call_id": "c3", "name": "add", "arguments": "{broken"},
        {"type": "function_call_output", "call_id": "c3", "output": "2"},
    ]
    answer = s.post("/v1/responses", input=items, tools=[call, *others], max_output_tokens=3)
    assert answer.status_code == 200, answer.text
    assert answer.json()["warnings"] == [
        "tools.1: tools of type 'web_search' are not run here",
        "tools.2.format: the grammar is told to the model, and not held",
        "tools.3: tools of type 'local_shell' are not run here",
        "input.3: items of type 'web_search_call' hold nothing for the model",
        "input.6: items of type 'item_reference' hold nothing for the model",
        "input.7: items of type 'mcp_list_tools' are unknown here and carried as text",
    ]
    assert [(tool["type"], tool["name"]) for tool in answer.json()["tools"]] == [
        ("function", "add"),
        ("custom", "patch"),
    ]
    made = messages(ResponsesRequest.model_validate({"input": items}).input, None)
    assert [m["role"] for m in made] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
        "assistant",
        "tool",
    ]
    calls = [call["function"] for m in made for call in m.get("tool_calls", ())]
    assert calls == [
        {"name": "patch", "arguments": {"input": "*** Begin"}},
        {"name": "local_shell", "arguments": {"type": "exec", "command": ["ls"]}},
        {"name": "add", "arguments": "{broken"},
    ]
    assert [m["tool_call_id"] for m in made if m["role"] == "tool"] == ["c1", "c2", "c3"]
    assert '"server_label": "docs"' in made[5]["content"]


def test_a_custom_tool_gets_free_text(s: Served) -> None:
    pattern = {"type": "grammar", "syntax": "regex", "definition": "[ab]{3}\\n"}
    tool = {"type": "custom", "name": "patch", "description": "Patches.", "format": pattern}
    asked: dict[str, Any] = {
        "input": "hi", "tools": [tool], "tool_choice": {"type": "custom", "name": "patch"},
        "parallel_tool_calls": False, "seed": 3, "max_output_tokens": 400,
    }  # fmt: skip
    made = s.post("/v1/responses", **asked).json()
    (call,) = made["output"]
    assert (call["type"], call["name"]) == ("custom_tool_call", "patch")
    assert len(call["input"]) == 4
    assert set(call["input"][:3]) <= {"a", "b"}, "the text is held to the tool's format"
    assert call["input"].endswith("\n")
    assert made["tools"] == [tool]
    lines = s.post("/v1/responses", **asked, stream=True).text.splitlines()
    told = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    (delta,) = [e for e in told if e["type"] == "response.custom_tool_call_input.delta"]
    (done,) = [e for e in told if e["type"] == "response.custom_tool_call_input.done"]
    assert delta["delta"] == done["input"] == call["input"]
    assert told[-1]["response"]["output"][0]["input"] == call["input"]
    lark = {**tool, "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}}
    free = s.post("/v1/responses", **{**asked, "tools": [lark]}).json()
    assert free["warnings"] == ["tools.0.format: the grammar is told to the model, and not held"]


def test_log_probabilities_of_what_is_said(client: Any) -> None:
    asked = {"model": "fake", "input": "hello", "max_output_tokens": 12, "extra_body": {"seed": 1}}
    plain = client.responses.create(**asked).output[0].content[0]
    assert plain.logprobs == []
    whole = client.responses.create(**asked, top_logprobs=2, include=["message.output_text.logprobs"])
    part = whole.output[0].content[0]
    assert len(part.logprobs) == 12
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
    assert bytes(b for entry in part.logprobs for b in entry.bytes).decode("utf-8", "replace") == part.text
    with client.responses.stream(**asked, top_logprobs=2) as stream:
        deltas = [e for e in stream if e.type == "response.output_text.delta"]
    assert sum(len(e.logprobs) for e in deltas) == 12
    only = client.responses.create(**asked, include=["message.output_text.logprobs"])
    assert all(entry.top_logprobs == [] for entry in only.output[0].content[0].logprobs)


def test_thoughts_have_no_log_probabilities() -> None:
    with scripted("<|channel>thought\nhm<channel|>yes") as s:
        asked = {"input": "hello", "reasoning": {"effort": "high"}, "top_logprobs": 0}
        made = s.post("/v1/responses", **asked).json()
        (message,) = [item for item in made["output"] if item["type"] == "message"]
        said = "".join(entry["token"] for entry in message["content"][0]["logprobs"])
        assert said.startswith("yes")


def test_what_is_ignored_is_told_and_nothing_is_stored(s: Served) -> None:
    body = {
        "input": [{"role": "user", "content": "x", "colour": "red"}],
        "max_tool_calls": 3,
        "include": ["x"],
        "store": True,
    }
    told = s.post("/v1/responses", max_output_tokens=3, **body).json()
    assert sorted(told["warnings"]) == [
        "input.colour: is unknown here and ignored",
        "max_tool_calls: is unknown here and ignored",
    ]
    assert told["store"] is False
    gone = s.client.get(f"/v1/responses/{told['id']}")
    assert (gone.status_code, "not stored" in gone.json()["error"]["message"]) == (404, True)


def test_an_error_before_and_after_the_first_token() -> None:
    with scripted() as server:
        server.engine.fail = [ValueError("x"), ValueError("x")]
        assert server.post("/v1/responses", input="hello", stream=True).status_code == 500
        server.engine.delay = 0.02
        with server.client.stream(
            "POST", "/v1/responses", json={"input": "hello", "stream": True, "max_output_tokens": 100}
        ) as answer:
            text = ""
            for piece in answer.iter_text():
                text += piece
                if not server.engine.fail and "delta" in text and '"error":{' not in text:
                    server.engine.fail = [ValueError("x"), ValueError("x")]
        assert '"error":{' in text
        assert "response.completed" not in text
        assert server.settled(lambda: not server.engine.running)
