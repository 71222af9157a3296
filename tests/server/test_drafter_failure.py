"""A drafter that fails while the server runs: the answer stays right, it is seen, and the next request works."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.config import EngineConfig
from paceline.core import Draft
from paceline.drafters.base import DraftContext, Drafter
from paceline.server import loading
from paceline.server.service import Service
from server.serving import Served, served

DEMO = Path(paceline.__file__).parent / "demo"
pytestmark = pytest.mark.skipif(
    not (DEMO / "target" / "config.json").is_file(), reason="the demo pair is not here"
)
BODY: dict[str, Any] = {
    "prompt": "def parse(self, text):\n    ", "max_tokens": 40, "ignore_eos": True, "temperature": 0.7, "logprobs": 1,
}  # fmt: skip
DRAFTED, PLAIN = {"drafter": "mtp", "draft_tokens": 4}, {"drafter": "none"}
BAD: dict[str, Callable[[], Exception | list[int]]] = {
    "raises": lambda: RuntimeError("secret: device lost"), "no memory": MemoryError,
    "no token": lambda: [10**9], "too many": lambda: [5] * 99,
}  # fmt: skip


class Moody(Drafter):
    """A real drafter that works for `good` more drafts; then it raises `bad`, or proposes it for every row."""

    def __init__(self, inner: Drafter) -> None:
        self.name, self.max_tokens, self.needs_hidden = inner.name, inner.max_tokens, inner.needs_hidden
        self._inner, self.good, self.failures = inner, 10**9, 0
        self.bad: Exception | list[int] = []

    def draft(self, context: DraftContext) -> Draft:
        self.good -= 1
        draft = self._inner.draft(context)
        if self.good >= 0:
            return draft
        self.failures += 1
        if isinstance(self.bad, Exception):
            raise self.bad
        draft.tokens = [self.bad for _ in draft.tokens]
        return draft

    def forget(self, sequence_id: int) -> None:
        self._inner.forget(sequence_id)


@pytest.fixture(scope="module")
def setup() -> Iterator[tuple[Served, Moody]]:
    found: list[Moody] = []
    config = EngineConfig(target="demo", drafter="mtp", threads=1, max_model_len=512)

    def load(service: Service) -> loading.ServedEngine:
        engine = loading.load(config, service, lambda line: None)
        drafters = engine._engine.state.drafters
        drafters["mtp"] = moody = Moody(drafters["mtp"])
        found.append(moody)
        return engine

    with served(load=load) as server:
        yield server, found[0]
        assert server.service.loaded is not None
        server.service.loaded.grammars.close()


def answer(s: Served, speculation: dict[str, Any], seed: int = 5) -> tuple[dict[str, Any], dict[str, Any]]:
    body = s.post("/v1/completions", **BODY, seed=seed, speculation=speculation)
    assert body.status_code == 200, body.text
    return body.json()["choices"][0], body.json()["speculation"]


def failed_steps(s: Served) -> float:
    head = 'paceline_steps_without_draft_total{reason="drafter failed"} '
    lines = s.client.get("/metrics").text.splitlines()
    return sum(float(line.removeprefix(head)) for line in lines if line.startswith(head))


@pytest.mark.parametrize("good", [0, 3])
@pytest.mark.parametrize("kind", ["raises", "no memory", "no token", "too many"])
def test_the_answer_is_that_of_no_drafter_and_the_next_one_drafts_again(
    setup: tuple[Served, Moody], caplog: pytest.LogCaptureFixture, good: int, kind: str
) -> None:
    s, moody = setup
    expected, none = answer(s, PLAIN)
    before, moody.failures = failed_steps(s), 0
    moody.good, moody.bad = good, BAD[kind]()
    with caplog.at_level(logging.WARNING):
        got, report = answer(s, DRAFTED)
    assert (
        pytest.approx(got["logprobs"].pop("token_logprobs"), abs=1e-4)
        == expected["logprobs"]["token_logprobs"]
    )
    assert (got["text"], got["finish_reason"]) == (expected["text"], "length")
    assert moody.failures == 1  # parked: not asked again for this text
    assert report["reason"] == "drafter failed"
    assert report["drafters"] == ({"mtp": good} if good else {})
    assert none["reason"] == "disabled by request"
    assert "finished without its drafter: drafter failed: " in caplog.text
    assert "Traceback" not in caplog.text
    assert failed_steps(s) == before + report["steps"] - good - 1  # the first step of a text never drafts
    assert "secret" not in s.client.get("/metrics").text + json.dumps(report)
    moody.good, moody.bad = 10**9, []
    again, report = answer(s, DRAFTED)
    assert again["text"] == expected["text"]
    assert report["reason"] != "drafter failed"
    assert report["drafted"] > 0
    assert s.worker.counters.step_errors == 0


def test_all_texts_that_are_being_written_stay_right(setup: tuple[Served, Moody]) -> None:
    s, moody = setup
    expected = [answer(s, PLAIN, seed)[0]["text"] for seed in range(6)]
    moody.good, moody.bad = 5, RuntimeError("gone")
    with ThreadPoolExecutor(6) as pool:
        got = list(pool.map(lambda seed: answer(s, DRAFTED, seed), range(6)))
    assert [choice["text"] for choice, _ in got] == expected
    assert any(report["reason"] == "drafter failed" for _, report in got)
    moody.good, moody.bad = 10**9, []
    assert s.client.get("/health").status_code == 200
