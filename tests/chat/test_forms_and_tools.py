"""What an answer has to look like and which tools it may call, as clients and the library say it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from families import TOOLS, tokenizer_of
from paceline.chat.constraint import compiled
from paceline.chat.forms import FormError, form_of
from paceline.chat.options import asked_of
from paceline.chat.road import Chats, make_render
from paceline.errors import UsageError
from paceline.text.chat import ChatTemplate
from paceline.text.formats.choose import format_of
from paceline.text.grammar import Grammars
from paceline.text.vocabulary import Vocabulary
from server.fake_engine import FakeEngine
from server.serving import Served, served

U = [{"role": "user", "content": "hi"}]
AGE = {
    "type": "object",
    "properties": {"age": {"enum": [7]}},
    "required": ["age"],
    "additionalProperties": False,
}
DECLARED = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in TOOLS.items()]


def only(*names: str, mode: str = "auto") -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.fixture(scope="module")
def s() -> Iterator[Served]:
    tokenizer = tokenizer_of("families/qwen2_5")
    chat = format_of(tokenizer)
    grammars = Grammars.of(tokenizer, Vocabulary(tokenizer.to_json(), tokenizer.vocab_size, (1,)), chat, 20.0)
    engine = FakeEngine(tokenizer)
    engine.max_len = 16384
    try:
        with served(engine, grammars=grammars, chat=(make_render(tokenizer)[0], chat)) as made:
            yield made
    finally:
        grammars.close()
        ChatTemplate.of(tokenizer).close()


def test_a_schema_beside_json_object_holds(s: Served) -> None:
    """REPORTS4, C3: any JSON came, without a warning."""
    for form in ({"type": "json_object", "json_schema": {"schema": AGE}}, {"type": "json_object", "schema": AGE},
                 {"type": "json_schema", "json_schema": {"name": "a", "schema": AGE}}):  # fmt: skip
        made = s.post("/v1/chat/completions", messages=U, response_format=form, max_tokens=60).json()
        assert json.loads(made["choices"][0]["message"]["content"]) == {"age": 7}, form
        text = s.post("/v1/completions", prompt="x", response_format=form, max_tokens=60).json()
        assert json.loads(text["choices"][0]["text"]) == {"age": 7}, form


@pytest.mark.parametrize(
    ("form", "field"),
    [
        ({"type": "json_schema"}, "json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "a"}}, "json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": None}}, "json_schema.schema"),
        ({"type": "json_object", "json_schema": {"name": "a"}}, "json_schema.schema"),
        ({"type": "regex"}, "regex"), ({"type": "grammar"}, "grammar"),
    ],
    ids=str,
)  # fmt: skip
def test_a_form_without_its_schema_is_refused(s: Served, form: dict[str, Any], field: str) -> None:
    with pytest.raises(FormError) as refused:
        form_of(form)
    assert refused.value.field == field
    for path, more in (("/v1/chat/completions", {"messages": U}), ("/v1/completions", {"prompt": "x"})):
        answer = s.post(path, **more, response_format=form)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"response_format.{field}")


def test_only_allowed_tools_are_called(s: Served) -> None:
    """REPORTS4, D12. All tools are shown, so that the prompt stays as it is."""
    for names, mode in ((("g",), "required"), (("f",), "required"), (("f", "g"), "required")):
        choice = only(*names, mode=mode)
        made = s.post(
            "/v1/chat/completions", messages=U, tools=DECLARED, tool_choice=choice, max_tokens=300
        ).json()
        calls = made["choices"][0]["message"]["tool_calls"]
        assert {call["function"]["name"] for call in calls} <= set(names)
        prompt = s.engine.tokenizer.decode(s.engine.last_prompt, skip_special=False)
        assert all(f'"name": "{tool}"' in prompt for tool in TOOLS)
        inner = [{"type": "function", "name": name} for name in names]
        wanted = {"type": "allowed_tools", "mode": mode, "tools": inner}
        tools = [{"type": "function", **tool["function"]} for tool in DECLARED]
        response = s.post(
            "/v1/responses", input="hi", tools=tools, tool_choice=wanted, max_output_tokens=300
        ).json()
        assert {item["name"] for item in response["output"]} <= set(names)
        assert response["tool_choice"]["mode"] == mode
    tokenizer = s.engine.tokenizer
    chats = Chats.of(tokenizer)
    asked = asked_of(chats, U, {"tools": DECLARED, "tool_choice": only("g")})
    assert s.service.loaded is not None
    make = compiled(s.service.loaded.grammars, asked, "none")
    assert make is not None
    constraint = make()
    opening = tokenizer.encode('<tool_call>\n{"name": "', add_bos=False)
    constraint.commit(opening)
    (mask,) = constraint.masks([])
    assert mask is not None
    assert [tokenizer.token_text(int(i)) for i in mask.nonzero()[0]] == ["g"]


def test_tools_that_are_not_there_are_refused(s: Served) -> None:
    for choice in (only("x"), only("f", "x", mode="required")):
        answer = s.post("/v1/chat/completions", messages=U, tools=DECLARED, tool_choice=choice)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")
        with pytest.raises(UsageError, match="no tool is called 'x'"):
            asked_of(Chats.of(s.engine.tokenizer), U, {"tools": DECLARED, "tool_choice": choice})
