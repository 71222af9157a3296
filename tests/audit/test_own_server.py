"""`paceline audit` on our own server over the bundled pair: lossless, lossy by its rule, and with a planted fault."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from paceline.audit.audit import Audit, Plan, Report
from paceline.audit.client import Endpoint
from paceline.config import EngineConfig
from paceline.server.loading import load
from planted import keep_a_rejected_token
from server.serving import Served, served


@pytest.fixture(scope="module")
def own() -> Iterator[Served]:
    config = EngineConfig(target="demo", threads=1, max_model_len=256)
    with served(load=lambda service: load(config, service, lambda line: None)) as server:
        yield server
        assert server.service.loaded is not None
        server.service.loaded.grammars.close()


def audited(server: Served, plan: Plan, **speculation: Any) -> Report:
    sides = [
        Endpoint(server.url, body={"speculation": wanted})
        for wanted in ({"draft_tokens": 4, **speculation}, {"drafter": "none"})
    ]
    try:
        return Audit(*sides, plan).run()
    finally:
        for side in sides:
            side.close()


def test_match_is_found_lossless(own: Served) -> None:
    report = audited(own, Plan(prompts=4, tokens=24, samples=30))
    assert report.verdict == "lossless", report
    assert report.surprise is not None
    assert report.surprise.p_value > 1e-4


def test_typical_is_found_lossy_by_its_samples(own: Served) -> None:
    report = audited(own, Plan(prompts=1, tokens=8, samples=60, sample_tokens=48), verify="typical")
    assert report.verdict == "not lossless"
    assert "the tokens of sampled texts are more likely than the reference's" in report.reason
    assert not report.divergences  # greedy texts are the target's own under every rule


def test_a_planted_fault_is_found_in_greedy_texts(own: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_a_rejected_token(monkeypatch)
    report = audited(own, Plan(prompts=4, tokens=24, samples=0))
    assert report.verdict == "not lossless", report
    assert "greedy texts part where the choice is clear" in report.reason
