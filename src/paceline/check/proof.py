"""Runs all proofs on one subject and writes down what they showed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.check import drafts, forward, identity, law
from paceline.check.certificate import Certificate, Finding
from paceline.check.identity import Effort
from paceline.check.law import Rule, Sampled
from paceline.check.subject import Subject

RULES: tuple[Rule, ...] = ("reject", "block")


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to do. `samples` texts are drawn for each of the rules `reject` and `block`, with each drafter."""

    effort: Effort
    samples: int = 3000
    law_seconds: float = float("inf")
    length: int = 96  # tokens of the texts that are computed by rows and chunks
    texts: int = 6  # of each drafter and scene, whose drafts are held against those of a clean start


QUICK = Plan(Effort(tokens=6_000, seconds=20.0, length=48), samples=1500, law_seconds=2.5, length=64, texts=3)
FULL = Plan(Effort(tokens=100_000))

Report = Callable[[str, float], None]  # what is running, and how far it is (0..1)


def prove(subject: Subject, plan: Plan, provenance: Mapping[str, Any], report: Report) -> Certificate:
    """Test every promise; an interrupt keeps what was shown."""
    findings: list[Finding] = []
    ended = ""
    try:
        report("forward by rows and chunks", 0.0)
        deviation = forward.measure(subject, length=plan.length)
        findings.append(forward.finding(deviation))
        total = plan.effort.tokens
        score = identity.compare(
            subject, plan.effort, deviation.logits, lambda n: report("token identity", min(1.0, n / total))
        )
        findings.append(identity.finding(subject, score))
        report("drafts of a clean start", 0.0)
        clean = drafts.measure(subject, plan.texts, noise_floor=deviation.logits)
        if clean:
            findings.append(drafts.finding(clean, exact=deviation.logits == 0))
        findings += _laws(subject, plan, report) if plan.samples else []
    except KeyboardInterrupt:
        ended = "interrupted"
    info = subject.engine.info
    facts = {
        "target": info.get("target", "in memory"),
        "drafters": ", ".join(subject.drafters),
        "arithmetic": info.get("arithmetic", "plain torch"),
        "precision": f"{info.get('dtype', subject.engine.state.target.dtype)} on {subject.engine.state.target.device}",
    }
    return Certificate(facts, tuple(findings), dict(provenance), ended)


def _laws(subject: Subject, plan: Plan, report: Report) -> list[Finding]:
    """The law of each rule. Only drafters that sample are asked: one that copies has nothing to copy in four tokens."""
    asked = [name for name in subject.drafters if name != "ngram" and "+" not in name]
    results: dict[Rule, dict[str, Sampled]] = {rule: {} for rule in RULES}
    for i, name in enumerate(asked):
        trial = law.prepare(subject, name)
        for j, rule in enumerate(RULES):
            report(f"law of {rule}", (i + j / len(RULES)) / len(asked))
            results[rule][name] = law.try_rule(subject, (rule, name), trial, plan.samples, plan.law_seconds)
    return [law.finding(rule, found) for rule, found in results.items()] if asked else []
