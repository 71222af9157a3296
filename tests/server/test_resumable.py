"""Answers that outlive their connection: read again whole, bounded in time, size and number, each key's its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx2 as httpx
import pytest

from paceline.server import resumable
from paceline.server.resumable import HEADER, PATH, Bounds
from server.fake_engine import FakeEngine, make_tokenizer
from server.serving import Served, served

ID, OTHER = "0123456789abcdef" * 2, "f" * 32
ASK = {"model": "fake", "prompt": "x", "stream": True, "max_tokens": 300}
SCRIPT = "abcdefgh" * 30


def engine() -> FakeEngine:
    return FakeEngine(make_tokenizer(), script=SCRIPT, delay=0.01)


@pytest.fixture
def s() -> Iterator[Served]:
    with served(engine()) as server:
        yield server


def bounded(monkeypatch: pytest.MonkeyPatch, **bounds: Any) -> None:
    monkeypatch.setattr(resumable, "Bounds", partial(Bounds, **bounds))


def begin(s: Served, name: str = ID, **headers: str) -> str:
    """Ask, read one event, and leave."""
    with s.client.stream("POST", "/v1/completions", json=ASK, headers={HEADER: name, **headers}) as answer:
        assert answer.status_code == 200
        return next(line for line in answer.iter_lines() if line)


def again(s: Served, name: str = ID, method: str = "GET", **headers: str) -> httpx.Response:
    return s.client.request(method, PATH, headers={HEADER: name, **headers})


def text(body: str) -> str:
    import json

    events = [line[6:] for line in body.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])


def test_an_answer_goes_on_without_its_reader_and_is_read_from_its_beginning(s: Served) -> None:
    first = begin(s)
    assert s.engine.has_work
    answer = again(s)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert next(line for line in answer.text.splitlines() if line) == first
    assert text(answer.text) == SCRIPT
    assert answer.text.rstrip().endswith("data: [DONE]")
    assert len(s.engine.salts) == 1  # it was asked once
    gone = again(s)
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "no_stream")


def test_who_reads_to_the_end_leaves_nothing_behind(s: Served) -> None:
    whole = s.client.post("/v1/completions", json=ASK, headers={HEADER: ID})
    plain = s.client.post("/v1/completions", json={**ASK, "stream": False}, headers={HEADER: OTHER})
    assert text(whole.text) == plain.json()["choices"][0]["text"] == SCRIPT
    assert again(s).status_code == again(s, OTHER).status_code == 404
    assert s.client.post("/v1/completions", json=ASK, headers={HEADER: ID}).status_code == 200  # it is free


def test_without_a_reader_it_ends_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    bounded(monkeypatch, seconds=0.05)
    slow = FakeEngine(make_tokenizer(), script=SCRIPT, delay=0.2)
    lines: list[str] = []
    with served(slow, write=lines.append) as s:
        begin(s)
        assert s.settled(lambda: not slow.has_work)
        assert again(s).status_code == 404
        assert s.settled(lambda: bool(lines))
        assert "finish=disconnected" in lines[0]


def test_it_can_be_ended(s: Served) -> None:
    s.engine.delay = 0.2
    begin(s)
    assert again(s, method="DELETE").json() == {"stopped": True}
    assert s.settled(lambda: not s.engine.has_work)
    assert again(s, method="DELETE").status_code == 404


def test_a_later_reader_takes_the_place(s: Served) -> None:
    s.engine.delay = 0.05
    with s.client.stream("POST", "/v1/completions", json=ASK, headers={HEADER: ID}) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert text(again(s).text) == SCRIPT
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)


def test_other_keys_have_no_part_in_it() -> None:
    with served(engine(), keys=("one", "two")) as s:
        begin(s)
        two = {"Authorization": "Bearer two"}
        assert again(s, **two).status_code == again(s, method="DELETE", **two).status_code == 404
        assert s.client.get(PATH, headers={HEADER: ID, "Authorization": "Bearer three"}).status_code == 401
        assert text(again(s).text) == SCRIPT


def test_a_long_answer_lives_as_long_as_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    bounded(monkeypatch, size=2000)
    with served(engine()) as s:
        whole = s.client.post("/v1/completions", json=ASK, headers={HEADER: ID})
        assert text(whole.text) == SCRIPT
        assert len(whole.content) > 3 * 2000
        with s.client.stream("POST", "/v1/completions", json=ASK, headers={HEADER: ID}) as answer:
            pieces = answer.iter_bytes()
            read = 0
            while read < 4000:
                read += len(next(pieces))
            assert again(s).status_code == 404
        assert s.settled(lambda: not s.engine.has_work)


def test_one_too_many_is_an_answer_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    bounded(monkeypatch, count=1)
    with served(engine()) as s:
        begin(s)
        assert s.client.post("/v1/completions", json=ASK, headers={HEADER: OTHER}).status_code == 200
        begin(s, OTHER)
        assert again(s, OTHER).status_code == 404
        assert text(again(s).text) == SCRIPT


def test_an_id_that_is_none_or_is_taken_is_refused(s: Served) -> None:
    for name in ("", "x", ID.upper(), ID + "0"):
        answer = s.client.post("/v1/completions", json=ASK, headers={HEADER: name})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, HEADER)
    s.engine.delay = 0.05
    begin(s)
    taken = s.client.post("/v1/completions", json=ASK, headers={HEADER: ID})
    assert taken.status_code == 400
    assert "draw one for each" in taken.json()["error"]["message"]


def test_an_error_is_read_again_too(s: Served) -> None:
    answer = s.client.post("/v1/completions", json={**ASK, "prompt": []}, headers={HEADER: ID})
    assert answer.status_code == 400
    assert again(s).status_code == 404
    assert s.client.get(PATH).status_code == 404  # without an id it is a path that is not there


def test_start_and_end_of_the_application_reach_it() -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    async def never(*message: Any) -> Any:
        raise AssertionError("nothing is read or sent")

    asyncio.run(resumable.Resumable(app)({"type": "lifespan"}, never, never))
    assert seen == ["lifespan"]
