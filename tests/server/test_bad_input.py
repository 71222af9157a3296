"""What a hostile newcomer sent by hand: 4xx with the field named, no traceback in the log, the server goes on."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.server.settings import ServerConfig
from paceline.text.grammar import Grammars
from server.fake_engine import FakeEngine, make_tokenizer
from server.grammars import grammars_of
from server.serving import Served, served

USER = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = grammars_of(make_tokenizer())
    yield made
    made.close()


@pytest.fixture(scope="module")
def s(grammars: Grammars) -> Iterator[Served]:
    with served(FakeEngine(make_tokenizer()), grammars=grammars) as server:
        yield server


@pytest.fixture(autouse=True)
def no_traceback(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.WARNING):
        yield
    assert not [record for record in caplog.records if record.exc_info]


def tool(**function: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "strict": True, **function}}]


MANY = {f"p{i}": {"type": "string"} for i in range(450)}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"prediction": {"type": "content", "content": "\ud800"}}, "prediction"),
    ({"tools": tool(parameters={"properties": {"\ud800": {}}})}, "tools.0.function.parameters"),
    ({"tools": tool(parameters={"properties": {"a": {"enum": ["\ud800"]}}})}, "tools.0.function.parameters"),
    ({"tools": tool(description="x" * 70_000)}, "tools.0.function.description"),
    ({"tools": tool(parameters={"properties": MANY})}, "tools"),
    ({"tools": tool(parameters={"properties": {"a": {"enum": list(range(1600))}}})}, "tools"),
    ({"tools": tool(parameters={"properties": {"a": {"type": "string", "maxLength": -1}}})}, "tools"),
    ({"response_format": {"type": "grammar", "grammar": "start[max_tokens=3]: /.*/"}}, "response_format.grammar"),
    ({"response_format": {"type": "grammar", "grammar": 'start: "\ud800"'}}, "response_format.grammar"),
    ({"response_format": {"type": "regex", "regex": "[^\\s\\S]"}}, "response_format.regex"),
    ({"response_format": {"type": "regex", "regex": "(?<=a)b"}}, "response_format.regex"),
    ({"response_format": {"type": "grammar", "grammar": 'start: "\x7f"'}}, "response_format.grammar"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}},
     "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "file:///etc/passwd"}}}},
     "response_format.json_schema.schema"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([-1], "prompt.0: Input should be greater than or equal to 0"),
        ([2**40], "prompt.0: Input should be less than 2147483648"),
        ([[1], [-1]], "prompt.1.0: Input should be greater than or equal to 0"),
        ([[]], "prompt: the prompt is empty: give at least one token"),
        ([], "prompt: give 1 to 64 prompts"),
    ],
)
def test_of_the_forms_of_a_prompt_the_closest_is_blamed(s: Served, prompt: Any, said: str) -> None:
    answer = s.post("/v1/completions", prompt=prompt)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, said)


@pytest.mark.parametrize(("more", "param"), BAD, ids=[param for _, param in BAD])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_the_field_is_named(s: Served, more: dict[str, Any], param: str, choice: str) -> None:
    body = {"model": "fake", "messages": USER, "max_tokens": 4, **more}
    if "tools" in more:
        body["tool_choice"] = choice
    headers = {"Content-Type": "application/json"}
    answer = s.client.post("/v1/chat/completions", content=json.dumps(body), headers=headers)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert len(error["message"]) < 500
    assert "<state>" not in error["message"]
    assert "\n" not in error["message"]


@pytest.mark.parametrize("required", [5, "ab", {"a": 1}, None, [["a"], 5]])
def test_a_schema_with_nonsense_for_required_is_taken_as_without(s: Served, required: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": required}
    for choice in ("auto", "required"):
        answer = s.post(
            "/v1/chat/completions",
            messages=USER,
            max_tokens=8,
            tools=tool(parameters=schema),
            tool_choice=choice,
        )
        assert answer.status_code == 200, answer.text


def test_a_grammar_that_becomes_too_complex_is_the_requests_fault(s: Served) -> None:
    """A thousand ways to go on behind the first character: more than the parser follows."""
    ways = " | ".join(f"r{i}" for i in range(2500))
    rules = "\n".join(f'r{i}: "x" "{i}"' for i in range(2500))
    wanted = {"type": "grammar", "grammar": f'start: "a" b\nb: {ways}\n{rules}'}
    answer = s.post("/v1/completions", prompt="x", max_tokens=9, response_format=wanted)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == "bad_grammar"
    assert s.post("/v1/completions", prompt="x", max_tokens=2).status_code == 200


@pytest.mark.parametrize(
    "text",
    [
        '{"model":"fake","seed":' + "9" * 5000 + "}",
        '{"a":' * 30_000,
        '{"prompt":"\xff"}',
        '{"a":1} b',
        "\xff\xfe",
    ],
)
def test_what_is_no_json_is_called_so(s: Served, text: str) -> None:
    kind = {"Content-Type": "application/json"}
    answer = s.client.post("/v1/completions", content=text.encode("latin-1"), headers=kind)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "bad_json"


def test_headers_that_look_like_addresses_and_are_none(s: Served) -> None:
    for host in ("[1.2]", "[:::::]", "[127.0.0.1]"):
        assert s.client.get("/health", headers={"Host": host}).status_code == 421
    for origin in ("http://[::1", "http://[", "//", "://" + s.url):
        answer = s.client.post("/v1/completions", json={}, headers={"Origin": origin})
        assert answer.json()["error"]["code"] == "foreign_origin"


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def talk(s: Served, first: bytes, then: bytes) -> bytes:
    """What the server says until it closes; `then` is sent when there was time to work on `first`."""
    with socket.create_connection(("127.0.0.1", s.port), timeout=10) as connection:
        connection.sendall(first)
        time.sleep(0.1)
        try:
            connection.sendall(then)
            out = b""
            while piece := connection.recv(65536):
                out += piece
        except (ConnectionResetError, BrokenPipeError):
            return out
        return out


@pytest.mark.parametrize(
    ("first", "then", "status"),
    [
        (b"", b"GARBAGE\r\n\r\n", b"400"),
        (CHUNKED, b"zz\r\n", b"400"),
        (CHUNKED + b"5\r\nabcde\r\n", b"zz\r\n", b"400"),
        (CHUNKED.replace(b"application/json", b"text/plain"), b"zz\r\n", b"415"),
        (CHUNKED.replace(b"localhost", b"evil.example"), b"zz\r\n", b"421"),
        (b"PRI * HTTP/2.0\r\n\r\n", b"SM\r\n\r\n", b"421"),
    ],
)
def test_what_is_no_http_is_answered_once_in_the_envelope(
    s: Served, first: bytes, then: bytes, status: bytes
) -> None:
    answer = talk(s, first, then)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split(b" ")[1] == status
    assert b"x-content-type-options: nosniff" in head
    error = json.JSONDecoder().raw_decode(body.decode())[0]["error"]
    assert error["type"] == "invalid_request_error"
    assert s.client.get("/health").status_code == 200


def test_garbage_behind_a_body_that_is_still_coming_frees_the_request(s: Served) -> None:
    before = s.worker.counters.submitted
    for _ in range(5):
        talk(s, CHUNKED + b'1d\r\n{"model":"fake","prompt":"x"}\r\n', b"-1\r\n")
    assert s.worker.counters.submitted == before
    assert s.settled(lambda: s.worker.load().texts == 0)


@pytest.mark.parametrize(
    "name", ["max_texts", "max_connections", "request_timeout", "max_body", "grammar_timeout", "max_n"]
)
def test_limits_that_would_let_nothing_through_are_refused(name: str) -> None:
    for value in (0, -1, float("inf"), float("nan")):
        with pytest.raises(UsageError, match=name):
            ServerConfig(**{name: value})
    ServerConfig(max_output=0, max_stop=0, drain_timeout=0, max_logit_bias=0, max_tools=0, max_logprobs=0)
