"""The server over the bundled pair: speculation on, off and per request give the same answer, also side by side."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

import paceline
from paceline.config import EngineConfig
from paceline.server.loading import load
from server.serving import Served, served

DEMO = Path(paceline.__file__).parent / "demo"
pytestmark = pytest.mark.skipif(
    not (DEMO / "target" / "config.json").is_file(), reason="the demo pair is not here"
)
PROMPTS = ["def parse(self, text):\n    ", "class Queue:\n", "import os\nimport ", "for item in items:\n"]
SPECULATION: list[dict[str, Any]] = [
    {"drafter": "none"}, {}, {"drafter": "mtp"}, {"drafter": "ngram"}, {"draft_tokens": 1}, {"draft_tokens": 7},
    {"draft_tokens": 0}, {"draft_tokens": "auto"},
]  # fmt: skip


@pytest.fixture(scope="module")
def s() -> Iterator[Served]:
    config = EngineConfig(target="demo", threads=1, max_model_len=512)
    with served(load=lambda service: load(config, service, lambda line: None)) as server:
        yield server
        assert server.service.loaded is not None
        server.service.loaded.grammars.close()


def ask(s: Served, i: int, speculation: dict[str, Any]) -> dict[str, Any]:
    """One streamed answer as (text, token ids, logprobs, finish reason)."""
    body = {
        "model": "fake", "prompt": PROMPTS[i % 4], "max_tokens": 24, "seed": i, "temperature": (0, 0.8)[i % 2],
        "logprobs": 2, "stream": True, "speculation": {**speculation, "trace": True},
    }  # fmt: skip
    if i % 3 == 0:
        body |= {"min_p": 0.02, "repetition_penalty": 1.1, "logit_bias": {"300": 2}, "stop": ["\n\n\n"]}
    lines = httpx.post(f"{s.url}/v1/completions", json=body, timeout=120).text.split("\n\n")
    lines = [line for line in lines if not line.startswith(":")]  # what a busy machine sends to keep it open
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line[6:]) for line in lines[:-2]]
    return {
        "text": "".join(c["choices"][0]["text"] for c in chunks),
        "ids": [token for c in chunks for token in c["paceline"]["tokens"]],
        "logprobs": [value for c in chunks for value in c["choices"][0]["logprobs"]["token_logprobs"]],
        "reason": chunks[-1]["choices"][0]["finish_reason"],
        "drafted": chunks[-1]["speculation"]["drafted"],
    }


def test_the_same_answer_for_every_speculation_alone_and_among_sixteen(s: Served) -> None:
    plain = [ask(s, i, {"drafter": "none"}) for i in range(16)]
    drafted = 0
    for round_ in range(2):
        with ThreadPoolExecutor(16) as pool:
            kinds = [SPECULATION[(i // 2 + 4 * round_) % 8] for i in range(16)]
            answers = list(pool.map(ask, [s] * 16, range(16), kinds))
        for expected, got in zip(plain, answers, strict=True):
            assert got["text"] == expected["text"]
            assert got["ids"] == expected["ids"]
            assert got["reason"] == expected["reason"]
            assert got["logprobs"] == pytest.approx(expected["logprobs"], abs=1e-4)
            drafted += got["drafted"]
    assert drafted > 0
    assert plain[0]["drafted"] == 0


def test_prompt_scores_equal_those_of_writing(s: Served) -> None:
    body = {"prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0, "logprobs": 1}
    written = s.post("/v1/completions", **body).json()["choices"][0]
    body |= {"prompt": PROMPTS[0] + written["text"], "max_tokens": 0, "echo": True}
    scored = s.post("/v1/completions", **body).json()["choices"][0]
    if scored["logprobs"]["tokens"][-12:] != written["logprobs"]["tokens"]:
        pytest.skip("the text tokenises otherwise when it is read as one piece")
    assert scored["logprobs"]["token_logprobs"][-12:] == pytest.approx(
        written["logprobs"]["token_logprobs"], abs=1e-4
    )


def test_schema_and_forced_call_on_the_real_tokenizer(s: Served) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}, "ok": {"type": "boolean"}},
              "required": ["age", "ok"], "additionalProperties": False}  # fmt: skip
    for speculation in ({"drafter": "none"}, {"drafter": "mtp"}):
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": PROMPTS[1]}],
            "seed": 5,
            "max_tokens": 200,
        }
        body["speculation"] = speculation
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        answer = s.post("/v1/chat/completions", **body, response_format=wanted).json()["choices"][0]
        assert answer["finish_reason"] == "stop"
        value = json.loads(answer["message"]["content"])
        assert isinstance(value["ok"], bool)
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        called = s.post(
            "/v1/chat/completions", **body, tools=tools, tool_choice="required", parallel_tool_calls=False
        ).json()["choices"][0]
        assert called["finish_reason"] == "tool_calls"
        assert isinstance(json.loads(called["message"]["tool_calls"][0]["function"]["arguments"])["age"], int)


def test_the_lossy_rule_is_said_in_the_answer_and_nothing_else_is_lossy(s: Served) -> None:
    for body, lossy in (
        ({"temperature": 1.0, "speculation": {"verify": "typical"}}, True),
        (
            {"temperature": 0, "speculation": {"verify": "typical"}},
            False,
        ),  # greedy texts are the target's own
        ({"temperature": 1.0}, False),
    ):
        for path, prompt in (
            ("/v1/completions", {"prompt": PROMPTS[0]}),
            ("/v1/responses", {"input": PROMPTS[0]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPTS[0]}]}),
        ):
            answer = s.post(path, **prompt, **body, seed=1).json()
            assert answer["speculation"]["lossy"] is lossy, path
    bad = s.post("/v1/completions", prompt="x", speculation={"verify": "typical", "typical_delta": 2})
    assert bad.status_code == 400
    assert "typical_delta" in bad.json()["error"]["message"]


def test_a_call_or_the_answer_is_the_same_for_every_speculation(s: Served) -> None:
    """The first token decides, also where it and the end of the text stand in a drafted block."""
    schema = {"type": "object", "properties": {"age": {"type": "integer"}, "ok": {"type": "boolean"}},
              "required": ["age", "ok"], "additionalProperties": False}  # fmt: skip
    assert s.service.loaded is not None
    opening = {
        s.service.loaded.tokenizer.encode(text, add_bos=False)[0] for text in ("<", "<|", "<|tool_call>")
    }
    drafted, reasons = 0, set()
    for seed in range(6):
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": PROMPTS[seed % 4]}],
            "seed": seed, "max_tokens": 160, "temperature": 0.8 if seed > 1 else 0,
            "logit_bias": {str(token): 100 if seed % 2 else -100 for token in opening},
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
            "tools": [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}],
            "parallel_tool_calls": False,
        }  # fmt: skip
        plain: tuple[Any, ...] | None = None
        for speculation in (SPECULATION[0], *SPECULATION[2:4], SPECULATION[5]):
            answer = s.post("/v1/chat/completions", **body, speculation=speculation).json()
            choice, drafted = answer["choices"][0], drafted + answer["speculation"]["drafted"]
            calls = [call["function"] for call in choice["message"].get("tool_calls", [])]
            got = (
                choice["message"]["content"],
                calls,
                choice["finish_reason"],
                answer["usage"]["completion_tokens"],
            )
            plain = plain or got
            assert got == plain
        assert plain is not None
        content, calls, reason, _ = plain
        reasons.add(reason)
        if reason != "length":
            assert reason == ("tool_calls" if seed % 2 else "stop")
            value = json.loads(calls[0]["arguments"] if calls else content)
            assert isinstance(value["age"], int)
            assert isinstance(value["ok"], bool)
    assert drafted > 0
    assert {"tool_calls", "stop"} <= reasons


def test_a_time_limit_ends_the_answer_where_it_is(s: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what was held back of it: the text is that of its tokens, and the cache is free again."""
    body = {
        "prompt": PROMPTS[0],
        "max_tokens": 400,
        "temperature": 0,
        "n": 2,
        "ignore_eos": True,
        "logprobs": 0,
    }
    whole = s.post("/v1/completions", **body).json()["choices"][0]["text"]
    monkeypatch.setattr(s.service, "config", replace(s.service.config, request_timeout=0.4))
    found = s.post("/v1/completions", **body)
    assert found.status_code == 200
    answer = found.json()
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "length"
        assert whole.startswith(choice["text"])
    tokens = answer["usage"]["completion_tokens"]
    assert tokens == sum(len(choice["logprobs"]["tokens"]) for choice in answer["choices"])
    assert tokens == 800 or any("time limit" in said for said in answer["warnings"])
    assert s.settled(lambda: s.worker.load().texts == 0)
