"""`paceline check` on a tiny exact target: it holds when nothing is wrong, and finds every bug that is planted."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.check import distribution, drafts, forward, identity
from paceline.check.certificate import Certificate, Finding
from paceline.check.identity import Effort
from paceline.check.subject import Subject
from paceline.core import ForwardBatch, SamplingParams, Verdict
from paceline.drafters.assistant import MTPDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.states import StateDrafter
from paceline.engine import step as stepping
from paceline.kv.cache import KVCache
from planted import LAW
from testing import RandomDrafter, Setup, TinyAssistant, TinyNet, TinyTarget, make_cache, make_engine, prompts

EFFORT = Effort(tokens=400, length=14, cases=9)


class Blurred(TinyTarget):
    """Its numbers depend a little on how many rows are computed together, as plain kernels' do."""

    def __init__(self, blur: float) -> None:
        super().__init__()
        self.blur = blur

    def forward(self, rows: ForwardBatch, cache: KVCache) -> torch.Tensor:
        hidden = super().forward(rows, cache)
        return hidden * (1 + self.blur * (rows.count - 1))


def subject(**changes: Any) -> Subject:
    target = changes.pop("target", None) or TinyTarget()
    drafters = {"mtp": MTPDrafter(TinyAssistant(target)), "ngram": NgramDrafter(), "random": RandomDrafter()}
    parts = {"target": target, "drafters": drafters, "default_drafter": "mtp", "prefix_cache": True} | changes
    engine = make_engine(Setup(pages=300), **parts)
    return Subject(engine, tuple(tuple(p) for p in prompts(6, longest=20)))


def test_forward_is_bit_exact_or_says_by_how_much_not() -> None:
    exact = forward.measure(subject(), length=40)
    assert exact.logits == 0
    assert forward.finding(exact).outcome == "holds"
    blurred = forward.measure(subject(target=Blurred(1e-9)), length=40)
    assert 0 < blurred.logits < 1e-5
    assert forward.finding(blurred).outcome == "not shown"


def test_identity_holds_and_is_not_vacuous() -> None:
    it = subject()
    score = identity.compare(it, EFFORT, 0.0)
    found = identity.finding(it, score)
    assert found.outcome == "holds", found.words
    assert score.tokens >= 400
    assert set(score.accepted) == {"mtp", "ngram", "random"}
    assert len(score.lengths) >= 5
    assert len(score.temperatures) >= 3


def test_drafts_of_a_drafter_with_a_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of a clean start, until `on_commit` brings of each row what belongs to the row before."""

    def outcome() -> str:
        target = TinyTarget()
        drafter = StateDrafter("states", TinyNet(target), make_cache(300))
        it = subject(target=target, drafters={"states": drafter}, default_drafter="states")
        results = drafts.measure(it, texts=4, length=16)
        assert results["states"].drafts > 20
        return drafts.finding(results, exact=True).outcome

    assert outcome() == "holds"
    notify = stepping.notify

    def late(state: Any, plan: Any, result: Any, states: Any, starts: Any) -> None:
        notify(state, plan, result, tuple(torch.roll(part, 1, 0) for part in states), starts)

    monkeypatch.setattr(stepping, "notify", late)
    assert outcome() == "refuted"


def test_a_drafter_that_never_hits_is_reported_as_not_shown() -> None:
    class Silent(RandomDrafter):
        name = "silent"

        def __init__(self) -> None:
            super().__init__(max_tokens=0)

    it = subject(drafters={"silent": Silent()}, default_drafter="silent")
    assert (
        identity.finding(it, identity.compare(it, replace(EFFORT, tokens=60, cases=1), 0.0)).outcome
        == "not shown"
    )


def keep_a_rejected_token(tokens: Any, draft: Any, *_: Any) -> Verdict:
    kept = next((i for i, t in enumerate(draft) if t != tokens[i]), len(draft))
    kept = min(kept + 1, len(draft))
    return Verdict(kept, tokens[kept])


def correction_one_row_late(tokens: Any, draft: Any, *_: Any) -> Verdict:
    kept = next((i for i, t in enumerate(draft) if t != tokens[i]), len(draft))
    return Verdict(kept, tokens[min(kept + 1, len(tokens) - 1)] if draft else tokens[kept])


@pytest.mark.parametrize("bug", [keep_a_rejected_token, correction_one_row_late])
def test_planted_verification_bugs_are_refuted(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.engine.verify.verify_match", bug)
    it = subject()
    score = identity.compare(it, EFFORT, 1e-12)
    found = identity.finding(it, score)
    assert found.outcome == "refuted"
    assert found.divergence is not None
    assert found.divergence.kind == "bug"
    text = Certificate({"target": "tiny"}, (found,), {}).to_text()
    assert "first divergence" in text
    assert "DOES NOT HOLD" in text


def test_a_cache_spoilt_by_refused_tokens_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a refused token leaves behind in the cache changes what comes after it."""
    from paceline.kv.tail import Tail

    honest = Tail.commit

    def spoiling(self: Tail, keep: list[int], paths: Any = None) -> None:
        honest(self, keep, paths)
        if any(count < len(tokens) for (_, tokens), count in zip(self._items, keep, strict=True)):
            for store in (*self._cache.k, *self._cache.v):
                store.mul_(0.7)

    monkeypatch.setattr(Tail, "commit", spoiling)
    it = subject()
    assert identity.finding(it, identity.compare(it, EFFORT, 0.0)).outcome == "refuted"


def test_a_near_tie_is_told_from_a_bug() -> None:
    it = subject(target=Blurred(0.02))
    floor = forward.measure(it, length=40).logits
    score = identity.compare(it, replace(EFFORT, tokens=4000), floor)
    assert score.divergence is not None
    assert score.divergence.kind == "near-tie"


def asked(rule: Any) -> SamplingParams:
    return SamplingParams(verify=rule, drafter="mtp")


@pytest.mark.parametrize("rule", ["reject", "block"])
def test_sampling_rules_follow_the_exact_distribution(rule: Any) -> None:
    it = subject()
    found = distribution.finding(
        rule, {"mtp": distribution.try_rule(it, asked(rule), distribution.prepare(it, "mtp"), 160)}
    )
    assert found.outcome == "holds", found
    assert "this test would see it 90% of the time" in found.words


@pytest.mark.parametrize("name", LAW)
def test_a_bug_that_bends_the_distribution_is_refuted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    LAW[name](monkeypatch)
    target = TinyTarget()
    it = subject(target=target, drafters={"mtp": MTPDrafter(TinyAssistant(target, error=20.0))})
    found = distribution.finding(
        "reject", {"mtp": distribution.try_rule(it, asked("reject"), distribution.prepare(it, "mtp"), 400)}
    )
    assert found.outcome == "refuted", found


def test_certificate_holds_only_when_everything_needed_holds() -> None:
    good = [
        Finding(n, "holds", "") for n in ("token identity", "distribution of reject", "distribution of block")
    ]
    exact, loose = Finding("bit-exact forward", "holds", ""), Finding("bit-exact forward", "not shown", "")
    assert Certificate({}, (exact, *good), {}).holds
    assert "bit-exact" in Certificate({}, (exact, *good), {}).contract
    assert Certificate({}, (loose, *good), {}).holds
    assert Certificate({}, (loose, *good), {}).contract.startswith("token-identical")
    assert not Certificate({}, (exact, *good), {}, ended="interrupted").holds
    assert not Certificate(
        {}, (exact, *good[:2], Finding("distribution of block", "not shown", "")), {}
    ).holds
    assert not Certificate({}, (), {}).holds
    assert json.loads(json.dumps(Certificate({}, tuple(good), {}).to_json()))["holds"] is True
