"""The official Python client against the server over the fake engine."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from server.fake_engine import FakeEngine, make_tokenizer
from server.grammars import grammars_of
from server.serving import Served, served

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")
TALK = [{"role": "user", "content": "hello"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
            "required": ["a", "b"],
        },
    },
}


class Person(pydantic.BaseModel):  # type: ignore[misc, name-defined]
    name: str = pydantic.Field(max_length=5)
    adult: bool


@pytest.fixture(scope="module")
def s() -> Iterator[Served]:
    engine = FakeEngine(make_tokenizer())
    grammars = grammars_of(engine.tokenizer, 20.0)
    with served(engine, keys=("key",), grammars=grammars) as server:
        yield server
    grammars.close()


@pytest.fixture
def client(s: Served) -> Iterator[object]:
    with openai.OpenAI(base_url=f"{s.url}/v1", api_key="key", max_retries=0, timeout=60) as made:
        yield made


def test_conversation_and_stream(client: openai.OpenAI) -> None:  # type: ignore[name-defined]
    whole = client.chat.completions.create(model="fake", messages=TALK, seed=1, max_tokens=30, n=2)
    assert len(whole.choices) == 2
    chunks = list(
        client.chat.completions.create(
            model="fake",
            messages=TALK,
            seed=1,
            max_tokens=30,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 30
    assert whole.usage.completion_tokens_details.accepted_prediction_tokens == 0


@pytest.mark.parametrize("seed", range(4))
def test_json_schema_parses(client: openai.OpenAI, seed: int) -> None:  # type: ignore[name-defined]
    answer = client.chat.completions.parse(
        model="fake", messages=TALK, response_format=Person, seed=seed, max_tokens=400
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_a_call_or_the_format_parses(client: openai.OpenAI) -> None:  # type: ignore[name-defined]
    parameters = {"type": "object", "required": ["a"], "additionalProperties": False,
                  "properties": {"a": {"type": "integer"}}}  # fmt: skip
    tool = {"type": "function", "function": {"name": "add", "parameters": parameters, "strict": True}}
    seen = set()
    for seed in range(12):
        choice = client.chat.completions.parse(
            model="fake", messages=TALK, response_format=Person, tools=[tool], seed=seed, max_tokens=400
        ).choices[0]
        seen.add(choice.finish_reason)
        if choice.finish_reason == "tool_calls":
            assert choice.message.content is None
            assert all(isinstance(c.function.parsed_arguments["a"], int) for c in choice.message.tool_calls)
        else:
            assert isinstance(choice.message.parsed, Person)
    assert seen == {"stop", "tool_calls"}


def test_forced_tool_call_streams(client: openai.OpenAI) -> None:  # type: ignore[name-defined]
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        with client.chat.completions.stream(
            model="fake",
            messages=TALK,
            tools=[TOOL],
            tool_choice=choice,
            parallel_tool_calls=False,
            seed=2,
            max_tokens=300,
        ) as stream:
            for _ in stream:
                continue
            message = stream.get_final_completion().choices[0].message
        arguments = json.loads(message.tool_calls[0].function.arguments)
        assert isinstance(arguments["a"], int)
        assert arguments["b"] in ("x", "y")
        assert message.content is None


def test_errors_are_the_clients_own(client: openai.OpenAI, s: Served) -> None:  # type: ignore[name-defined]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nope")
    with pytest.raises(openai.BadRequestError, match="n: at most"):
        client.chat.completions.create(model="fake", messages=TALK, n=99)
    with pytest.raises(openai.BadRequestError, match="cannot be compiled"):
        client.chat.completions.create(
            model="fake", messages=TALK,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}},
        )  # fmt: skip
    with (
        pytest.raises(openai.AuthenticationError),
        openai.OpenAI(base_url=f"{s.url}/v1", api_key="no") as wrong,
    ):
        wrong.models.list()
