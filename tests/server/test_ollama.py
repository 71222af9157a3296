"""Ollama's API over the fake engine, as its clients use it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.text.grammar import Grammars
from paceline.text.vocabulary import Vocabulary
from server.fake_engine import MARKS, FakeEngine, make_tokenizer
from server.serving import Served, served

TALK = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}}  # fmt: skip


@pytest.fixture(scope="module")
def s() -> Iterator[Served]:
    engine = FakeEngine(make_tokenizer())
    ids = {mark: engine.tokenizer.token_id(mark) for mark in MARKS}
    vocabulary = Vocabulary(engine.tokenizer._backend.to_str(), engine.tokenizer.vocab_size, (1, 4))
    grammars = Grammars(vocabulary, {mark: i for mark, i in ids.items() if i is not None}, 20.0)
    with served(engine, grammars=grammars) as server:
        yield server
    grammars.close()


def lines(answer: Any) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in answer.text.splitlines()]


def test_a_chat_streams_lines_and_says_what_it_took(s: Served) -> None:
    options = {"seed": 1, "num_predict": 30}
    got = lines(s.post("/api/chat", messages=TALK, options=options))
    assert [line["done"] for line in got] == [False] * (len(got) - 1) + [True]
    whole = s.post("/api/chat", messages=TALK, options=options, stream=False).json()
    text = "".join(line["message"]["content"] for line in got)
    assert text == whole["message"]["content"]
    chat = s.post("/v1/chat/completions", messages=TALK, seed=1, max_tokens=30).json()
    assert text == chat["choices"][0]["message"]["content"]
    for end in (got[-1], whole):
        assert (end["done_reason"], end["eval_count"]) == ("length", 30)
        assert end["prompt_eval_count"] == chat["usage"]["prompt_tokens"]
        assert end["total_duration"] > 0
        assert end["created_at"].endswith("Z")
        assert end["speculation"]["drafted"] > 0


def test_generate_is_a_chat_or_raw(s: Served) -> None:
    options = {"seed": 1, "num_predict": 20}
    got = lines(s.post("/api/generate", prompt="hello", system="Be brief.", options=options))
    system = {"role": "system", "content": "Be brief."}
    chat = s.post("/api/chat", messages=[system, *TALK], options=options, stream=False).json()
    assert "".join(line["response"] for line in got) == chat["message"]["content"]
    raw = s.post("/api/generate", prompt="hello", raw=True, options=options, stream=False).json()
    plain = s.post("/v1/completions", prompt="hello", seed=1, max_tokens=20).json()
    assert raw["response"] == plain["choices"][0]["text"]
    for path, empty in (
        ("/api/generate", {"prompt": ""}),
        ("/api/chat", {"messages": []}),
        ("/api/generate", {}),
    ):
        assert s.post(path, **empty).json()["done_reason"] == "load"


def test_log_probabilities(s: Served) -> None:
    options = {"seed": 1, "num_predict": 12}
    for path, body in (
        ("/api/chat", {"messages": TALK}),
        ("/api/generate", {"prompt": "hello", "raw": True}),
    ):
        whole = s.post(path, **body, options=options, stream=False, logprobs=True, top_logprobs=2).json()
        assert len(whole["logprobs"]) == 12
        assert all(len(entry["top_logprobs"]) == 2 for entry in whole["logprobs"])
        got = lines(s.post(path, **body, options=options, logprobs=True, top_logprobs=2))
        assert [entry for line in got for entry in line.get("logprobs", ())] == whole["logprobs"]
        bare = s.post(path, **body, options=options, stream=False, logprobs=True).json()["logprobs"]
        assert [set(entry) for entry in bare] == [{"token", "logprob", "bytes"}] * 12
        without = s.post(path, **body, options=options, stream=False, top_logprobs=2).json()
        assert "logprobs" not in without
        for most in (-1, 10**6):
            assert s.post(path, **body, logprobs=True, top_logprobs=most).status_code == 400


def test_options_reach_the_engine(s: Served) -> None:
    options = {
        "temperature": 0.5, "top_k": 7, "top_p": 0.5, "min_p": 0.1, "seed": 4, "stop": ["zz"], "repeat_penalty": 1.5,
        "presence_penalty": 0.5, "frequency_penalty": 0.25, "num_predict": -2, "num_ctx": 4096,
    }  # fmt: skip
    told = s.post("/api/chat", messages=TALK, options=options, stream=False, keep_alive="5m", n=3).json()
    assert told["warnings"] == [
        "n: is unknown here and ignored", "options.num_ctx: is unknown here and ignored",
        "keep_alive: has no effect here and ignored",
    ]  # fmt: skip
    used = s.engine.last_params
    assert used is not None
    assert (used.temperature, used.top_k, used.top_p, used.min_p, used.seed) == (0.5, 7, 0.5, 0.1, 4)
    assert (used.repetition_penalty, used.presence_penalty, used.frequency_penalty) == (1.5, 0.5, 0.25)
    assert (used.stop, used.max_tokens > 100, used.n) == (("zz",), True, 1)


def test_formats_hold(s: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    for form in (schema, "json"):
        told = s.post(
            "/api/chat", messages=TALK, format=form, options={"seed": 3, "num_predict": 300}, stream=False
        ).json()
        if told["done_reason"] == "stop":
            assert isinstance(json.loads(told["message"]["content"]), dict)


@pytest.mark.parametrize("stream", [True, False])
def test_thoughts_and_calls(stream: bool) -> None:
    script = "<|channel>thought\nhm<channel|>I add.<|tool_call>call:add{a:5}<tool_call|>"
    with served(FakeEngine(make_tokenizer(), script=script)) as server:
        answer = server.post("/api/chat", messages=TALK, tools=[TOOL], stream=stream)
        got = lines(answer) if stream else [answer.json()]
        assert "".join(line["message"].get("thinking", "") for line in got) == "hm"
        assert "".join(line["message"]["content"] for line in got) == "I add."
        calls = [call for line in got for call in line["message"].get("tool_calls", [])]
        assert calls == [{"function": {"name": "add", "arguments": {"a": 5}}}]
        assert got[-1]["done_reason"] == "stop"
        history = [
            *TALK, {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "tool_name": "add", "content": "7"},
        ]  # fmt: skip
        assert server.post("/api/chat", messages=history, tools=[TOOL], stream=False).status_code == 200


def test_tags_and_names(s: Served) -> None:
    assert [one["model"] for one in s.client.get("/api/tags").json()["models"]] == ["fake"]
    assert "version" in s.client.get("/api/version").json()
    body = {"messages": TALK, "options": {"num_predict": 2}, "stream": False}
    assert "warnings" not in s.client.post("/api/chat", json={"model": "fake:latest", **body}).json()
    assert (
        "is not served" in s.client.post("/api/chat", json={"model": "llama3", **body}).json()["warnings"][0]
    )


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["AA"]}]}, "reads text only"),
    ("/api/chat", {"messages": TALK, "options": {"temperature": "hot"}}, "options.temperature"),
    ("/api/chat", {"messages": TALK, "options": {"num_predict": 0}}, "max_tokens"),
    ("/api/chat", {"messages": [{"role": "root", "content": "x"}]}, "messages.0.role"),
    ("/api/generate", {"prompt": "x", "suffix": "y"}, "suffix"),
    ("/api/generate", {"prompt": "x", "images": ["AA"]}, "reads text only"),
    ("/api/generate", {"prompt": "x", "raw": True, "system": "y"}, "system"),
    ("/api/generate", {"prompt": "x" * 600, "raw": True}, "prompt"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "word"), BAD)
def test_errors_are_plain_text(s: Served, path: str, body: dict[str, Any], word: str) -> None:
    answer = s.post(path, **body)
    assert answer.status_code == 400
    assert word in answer.json()["error"]


def test_an_error_while_it_streams_is_a_line() -> None:
    with served(FakeEngine(make_tokenizer(), delay=0.02)) as server:
        with server.client.stream("POST", "/api/chat", json={"messages": TALK}) as answer:
            text = ""
            for piece in answer.iter_text():
                text += piece
                if not server.engine.fail and "error" not in text:
                    server.engine.fail = [ValueError("x"), ValueError("x")]
        assert "error" in json.loads(text.splitlines()[-1])
        assert server.settled(lambda: not server.engine.running)


def test_curl_as_in_its_documentation(s: Served) -> None:
    """`curl -d` says that it sends a form. A browser that does so is refused: the page may be another site's."""
    body = json.dumps({"model": "fake", "messages": TALK, "stream": False, "options": {"num_predict": 3}})
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = s.client.post("/api/chat", content=body, headers=form)
    assert answer.status_code == 200, answer.text
    assert answer.json()["eval_count"] == 3
    for more in (
        {"Sec-Fetch-Site": "same-origin"},
        {"Cookie": "a=b"},
        {"Referer": f"{s.url}/"},
        {"Origin": s.url},
    ):
        assert s.client.post("/api/chat", content=body, headers=form | more).status_code == 415
