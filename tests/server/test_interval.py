"""Tokens that are made faster than `stream_interval` are sent together, and nothing else changes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.core import Delta, TokenLogprob
from paceline.server.generation import joined
from server.fake_engine import FakeEngine, make_tokenizer
from server.serving import Served, served

NEVER = 3600.0  # seconds: whoever waits for this to pass runs into the client's timeout
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 60}
PLAIN: dict[str, Any] = {"prompt": "def f(x):", "max_tokens": 60}


def events(s: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = s.post(path, stream=True, seed=5, **body)
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices)


def slow_engine() -> FakeEngine:
    return FakeEngine(make_tokenizer(), delay=0.002)


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", PLAIN)])
def test_fewer_events_with_the_same_text(path: str, body: dict[str, Any]) -> None:
    with served(slow_engine(), stream_interval=0.0) as s:
        each = events(s, path, body | {"n": 2})
    with served(slow_engine(), stream_interval=NEVER) as s:
        few = events(s, path, body | {"n": 2})
    for index in (0, 1):
        assert text_of(few, index) == text_of(each, index) != ""
    assert len(few) < len(each) / 2
    assert each[-1]["choices"][0]["finish_reason"] == few[-1]["choices"][0]["finish_reason"]


def test_an_end_does_not_wait_and_a_whole_answer_neither() -> None:
    with served(slow_engine(), stream_interval=NEVER) as s:
        whole = s.post("/v1/completions", seed=5, n=3, **PLAIN).json()
        streamed = events(s, "/v1/completions", PLAIN | {"n": 3})
    assert [c["text"] for c in whole["choices"]] == [text_of(streamed, i) for i in range(3)]


def test_a_trace_still_has_every_step() -> None:
    body = PLAIN | {"speculation": {"draft_tokens": 3, "trace": True}}
    with served(slow_engine(), stream_interval=NEVER) as s:
        chunks = events(s, "/v1/completions", body)
    steps = chunks[-1]["speculation"]["steps"]
    assert sum("paceline" in chunk for chunk in chunks) == steps > 1


def test_what_gathers_in_an_interval_never_fills_the_buffer() -> None:
    with served(slow_engine(), stream_interval=NEVER, stream_buffer=8) as s:
        chunks = events(s, "/v1/completions", PLAIN)
    assert chunks[-1]["choices"][0]["finish_reason"] is not None


def test_tokens_count_as_often_as_they_are_made() -> None:
    with served(slow_engine(), stream_interval=NEVER) as s:
        asked = PLAIN | {"stream_options": {"include_usage": True}}
        usage = events(s, "/v1/completions", asked)[-1]["usage"]
        metrics = s.client.get("/metrics").text.splitlines()
    made = [float(line.rsplit(" ", 1)[1]) for line in metrics if line.startswith("paceline_tokens_total{")]
    assert sum(made) == usage["completion_tokens"] > 0


def test_deltas_of_a_text_are_joined_and_texts_kept_apart() -> None:
    entries = [TokenLogprob(i, -1.0, -1.0, []) for i in range(3)]
    batch = [
        (0, Delta("r", 0, "a", [1], ["draft"], [1, 9], entries[:1])),
        (0, Delta("r", 1, "b", [2], ["target"])),
        (1, Delta("q", 0, "c", [3], ["target"])),
        (0, Delta("r", 0, "de", [4, 5], ["draft", "target"], [4], entries[1:], "stop")),
    ]
    first, second, third = joined(batch)
    assert first == (
        0,
        Delta("r", 0, "ade", [1, 4, 5], ["draft", "draft", "target"], [], entries, "stop"),
    )
    assert (second, third) == (batch[1], batch[2])
