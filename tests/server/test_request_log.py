"""One line for each request: what it says, and what cannot get into it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.server import start as module
from paceline.server.start import start
from server.fake_engine import FakeEngine, make_tokenizer
from server.serving import Served, served

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "secret words"}]
LINE = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d POST (\S+) (\d{3}) \d+\.\d{3} s"
    r"(?: id=(\S+) model=(\S+) prompt=(\d+) output=(\d+) finish=(\S+) acceptance=(\S+))?"
)


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def s(lines: list[str]) -> Iterator[Served]:
    with served(FakeEngine(make_tokenizer(), delay=0.001), write=lines.append, keys=("key-words",)) as server:
        yield server


def last(s: Served, lines: list[str], count: int = 1) -> tuple[Any, ...]:
    assert s.settled(lambda: len(lines) == count), lines
    found = LINE.fullmatch(lines[-1])
    assert found, lines[-1]
    return found.groups()


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_line_says(s: Served, lines: list[str], stream: bool) -> None:
    answer = s.post(CHAT, messages=USER, max_tokens=20, seed=1, ignore_eos=True, stream=stream)
    path, status, id_, model, prompt, output, finish, acceptance = last(s, lines)
    assert (path, status, model, output, finish) == (CHAT, "200", "fake", "20", "length")
    assert id_ in answer.text
    assert 0 < float(acceptance) <= 1
    if not stream:
        told = answer.json()
        assert int(prompt) == told["usage"]["prompt_tokens"]
        report = told["speculation"]
        assert acceptance == f"{report['accepted'] / report['drafted']:.2f}"
    s.post(TEXT, prompt=["a", "b"], n=2, max_tokens=3, ignore_eos=True, speculation={"drafter": "none"})
    assert last(s, lines, 2)[4:] == ("4", "12", "length", "-")
    assert not any("words" in line for line in lines), "nothing of a text or a key"


def test_refusals_have_a_line_and_looking_has_none(s: Served, lines: list[str]) -> None:
    s.client.get("/v1/models")
    s.client.get("/metrics")
    s.post(CHAT, messages=[])
    assert last(s, lines)[:3] == (CHAT, "400", None)
    s.client.post(TEXT, json={}, headers={"Authorization": "Bearer no"})
    assert last(s, lines, 2)[:3] == (TEXT, "401", None)
    s.client.post("/%0A2026%20forged%1b[31m", json={})
    assert len(lines) == 3
    assert lines[-1].isprintable()


def test_a_client_that_leaves_has_a_line(s: Served, lines: list[str]) -> None:
    body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": True}
    with s.client.stream("POST", TEXT, json=body) as answer:
        next(answer.iter_bytes())
    path, status, *_, finish, _ = last(s, lines)
    assert (path, status, finish) == (TEXT, "200", "disconnected")


def test_a_text_that_fails_says_so(s: Served, lines: list[str]) -> None:
    s.engine.nan_in = "poison"
    assert s.post(TEXT, prompt="poison", max_tokens=5).status_code == 500
    assert last(s, lines)[1] == "500"
    assert "error" in last(s, lines)[6]


@pytest.mark.parametrize(("given", "kept"), [({}, True), ({"request_log": False}, False)], ids=["on", "off"])
def test_it_is_on_and_can_be_switched_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: dict[str, Any], kept: bool
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(module, "build_app", lambda service, keys, write: seen.append(write))
    monkeypatch.setattr(module, "run", lambda *args: None)
    start(None, {"port": 0} | given, {}, print)
    assert (seen[0] is not None) == kept
    if kept:
        seen[0]("a line")
        assert capsys.readouterr().err == "a line\n"
