"""Histories as clients send them, over templates that are strict about roles and turns, and over one that is not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.chat.messages import plain
from paceline.chat.repairs import rendered
from paceline.errors import UsageError
from paceline.server.asking import given_of
from paceline.server.schema import Message
from paceline.text.chat import ChatTemplate, TemplateRefused
from paceline.text.formats.probe import PLAIN as PLAIN_FORMAT
from server.serving import Served, served

# As Mistral's, Llama 2's and Gemma 2's templates say it, without what does not matter here
STRICT = """{%- if messages[0].role == 'system' %}<<{{ messages[0].content }}>>{% set loop_messages = messages[1:] %}
{%- else %}{% set loop_messages = messages %}{% endif %}
{%- for message in loop_messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{%- if message.role in ('user', 'assistant') %}[{{ message.role }}:{{ message.content }}]{% endif %}{% endfor %}"""
NO_SYSTEM = """{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate') }}{% endif -%}
[{{ message.role }}:{{ message.content | trim }}]{% endfor %}"""
FIRST_ONLY = """{%- if messages[0].role == 'system' %}<<{{ messages[0].content }}>>{% endif %}
{%- for message in messages if message.role in ('user', 'assistant', 'tool') %}[{{ message.role }}:{{ message.content }}]
{%- for call in message.tool_calls or [] %}({{ call.function.name }}
{%- for key, value in call.function.arguments.items() %} {{ key }}={{ value }}{% endfor %}){% endfor %}{% endfor %}"""
PLAIN = """{%- for message in messages %}[{{ message.role }}:{{ message.content }}]
{%- for call in message.tool_calls or [] %}({{ call.function.name }} {{ call.function.arguments if
call.function.arguments is string else call.function.arguments | tojson }}){% endfor %}{% endfor %}"""
TEMPLATES = {"strict": STRICT, "no-system": NO_SYSTEM, "first-only": FIRST_ONLY, "plain": PLAIN}
FIRST = "messages: the chat template takes no system message there: all of them were put first, as one"
IN_USER = (
    "messages: the chat template takes no system message: it was put before the first message of the user"
)
JOINED = "messages: the chat template takes no two turns of one role in a row: they were joined"
BEGUN = "messages: the chat template takes no conversation that the user does not begin: an empty turn was put first"
TEXT = (
    "messages: the chat template takes no arguments of a call that are no object: they stand in one, as text"
)


def history(
    messages: list[Message], parts: bool = False, template: str | None = None
) -> list[dict[str, Any]]:
    """What a server's messages are to a template."""
    return plain([given_of(message) for message in messages], parts, template)


@pytest.fixture(scope="module")
def templates() -> Iterator[dict[str, ChatTemplate]]:
    made = {name: ChatTemplate(source, {}) for name, source in TEMPLATES.items()}
    yield made
    for template in made.values():
        template.close()


def said(text: str) -> list[dict[str, Any]]:
    """s:a u:b -> messages of these roles."""
    roles = {"s": "system", "u": "user", "a": "assistant", "d": "developer"}
    return [{"role": roles[word[0]], "content": word[2:]} for word in text.split()]


CASES = [
    ("strict", "s:S u:A a:B u:C", "<<S>>[user:A][assistant:B][user:C]", []),
    ("strict", "d:S u:A", "<<S>>[user:A]", []),
    ("strict", "u:A s:S", "<<S>>[user:A]", [FIRST]),
    ("strict", "s:S s:T u:A", "<<S\n\nT>>[user:A]", [FIRST]),
    ("strict", "s:S u:A d:T a:B u:C", "<<S\n\nT>>[user:A][assistant:B][user:C]", [FIRST]),
    ("strict", "s:S u:A u:B", "<<S>>[user:A\n\nB]", [JOINED]),
    ("strict", "u:A u:B a:C a:D u:E", "[user:A\n\nB][assistant:C\n\nD][user:E]", [JOINED]),
    ("strict", "u:A s:S u:B", "<<S>>[user:A\n\nB]", [FIRST, JOINED]),
    ("strict", "a:A u:B", "[user:][assistant:A][user:B]", [BEGUN]),
    ("strict", "s:S a:A u:B", "<<S>>[user:][assistant:A][user:B]", [BEGUN]),
    ("no-system", "s:S u:A a:B u:C", "[user:S\n\nA][assistant:B][user:C]", [IN_USER]),
    ("no-system", "d:S s:T u:A", "[user:S\n\nT\n\nA]", [IN_USER]),
    ("no-system", "s:S u:A u:B", "[user:S\n\nA\n\nB]", [IN_USER, JOINED]),
    ("no-system", "s:S", "[user:S]", [IN_USER]),
    ("first-only", "u:A s:S u:B", "<<S>>[user:A][user:B]", [FIRST]),  # it would be left out without a word
    ("plain", "u:A s:S d:T u:B u:C", "[user:A][system:S][system:T][user:B][user:C]", []),
]


@pytest.mark.parametrize(("name", "turns", "prompt", "warnings"), CASES)
def test_a_strict_template_gets_what_it_takes(templates, name, turns, prompt, warnings) -> None:  # type: ignore[no-untyped-def]
    messages = history([Message(**message) for message in said(turns)])
    assert rendered(templates[name].render, messages) == (prompt, warnings)
    if warnings:
        try:
            _, left = rendered(templates[name].render, messages, strict=True)
        except TemplateRefused:
            return
        assert left
        assert all("does not show this system message" in one for one in left)


def test_what_no_change_can_mend_is_refused_in_the_templates_words() -> None:
    template = ChatTemplate("{{ raise_exception('Only on Sundays') }}", {})
    with pytest.raises(UsageError, match="Only on Sundays"):
        rendered(template.render, said("s:S u:A u:B"))
    template.close()
    deaf = ChatTemplate("{{ messages[-1].content }}", {})
    assert rendered(deaf.render, said("s:S u:A a:B s:T u:C")) == (
        "C", [f"messages.{i}: the chat template does not show this system message" for i in (0, 3)]
    )  # fmt: skip
    deaf.close()


ARGUMENTS = [
    ('{"a": 1}', '(f {"a": 1})', "(f a=1)"),
    ({"a": 1}, '(f {"a": 1})', "(f a=1)"),
    (None, "(f {})", "(f)"),
    ("", "(f {})", "(f)"),
    ("null", "(f {})", "(f)"),
    ('{"a": 1', '(f {"a": 1)', '(f arguments={"a": 1)'),
    ("[1, 2]", "(f [1, 2])", "(f arguments=[1, 2])"),
    ("[" * 5000, f"(f {'[' * 5000})", f"(f arguments={'[' * 5000})"),
    ("1" * 5000, f"(f {'1' * 5000})", f"(f arguments={'1' * 5000})"),
]


@pytest.mark.parametrize(
    ("given", "plain", "itemised"), ARGUMENTS, ids=[str(given)[:9] for given, *_ in ARGUMENTS]
)
def test_arguments_of_old_calls_are_carried_whatever_they_are(templates, given, plain, itemised) -> None:  # type: ignore[no-untyped-def]
    """Each later turn would be refused otherwise."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": given}}
    messages = history(
        [Message(role="user", content="A"), Message(role="assistant", content=None, tool_calls=[call])]
    )
    assert rendered(templates["plain"].render, messages) == (f"[user:A][assistant:]{plain}", [])
    text, warnings = rendered(templates["first-only"].render, messages)
    assert (text, warnings) == (
        f"[user:A][assistant:]{itemised}",
        [TEXT] if "arguments=" in itemised else [],
    )


def test_results_of_calls_are_never_lost(templates: dict[str, ChatTemplate]) -> None:
    """A template that knows no such role shows them as the user's; one that writes them as JSON is left alone."""
    talk = [*said("u:A a:B"), {"role": "tool", "content": '{"sky": "very grey"}'}]
    for name in ("strict", "no-system"):
        text, warnings = rendered(templates[name].render, talk)
        assert text.endswith('[user:{"sky": "very grey"}]')
        assert warnings == [
            "messages: the chat template takes no results of calls: they were given as the user's"
        ]
    escaped = ChatTemplate("{% for m in messages %}{{ m.content | tojson }}{% endfor %}", {})
    assert rendered(escaped.render, talk)[1] == []
    escaped.close()


def test_a_call_without_arguments_and_what_was_refused() -> None:
    sent = [
        {"role": "user", "content": "A"},
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f"}}]},
        {"role": "assistant", "content": None, "refusal": "I will not."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "Nor that."}]},
        {"role": "assistant", "content": "yes", "refusal": None},
    ]
    made = history([Message.model_validate(message) for message in sent])
    assert made[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    assert [message["content"] for message in made[2:]] == ["I will not.", "Nor that.", "yes"]


def test_a_template_with_the_role_keeps_the_developer() -> None:
    one = [Message(role="developer", content="S")]
    assert history(one)[0]["role"] == history(one, template="{{ messages }}")[0]["role"] == "system"
    assert history(one, template="{% if m.role == 'developer' %}")[0]["role"] == "developer"


@pytest.fixture
def strict_turns(templates: dict[str, ChatTemplate]) -> Iterator[Served]:
    def render(messages: Any, tools: Any, options: Any) -> str:
        return templates["strict"].render(messages)

    with served(chat=(render, PLAIN_FORMAT)) as s:
        yield s


def test_over_http_the_change_is_a_warning(strict_turns: Served) -> None:
    body = {"messages": said("u:A s:S u:B"), "max_tokens": 2}
    assert strict_turns.post("/v1/chat/completions", **body).json()["warnings"] == [FIRST, JOINED]
    last = json.loads(strict_turns.post("/api/chat", **body).text.splitlines()[-1])
    assert last["warnings"][:2] == [FIRST, JOINED]
    call = {"function": {"name": "f", "arguments": {}}}
    history_ = [
        *said("u:A"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "user", "content": "B"},
    ]
    assert strict_turns.post("/api/chat", messages=history_, stream=False).status_code == 200
