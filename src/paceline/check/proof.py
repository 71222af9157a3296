"""Runs all proofs on one subject and writes down what they showed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.check import forward, identity, law
from paceline.check.certificate import Certificate, Finding
from paceline.check.identity import Effort
from paceline.check.law import Rule, Sampled
from paceline.check.subject import Subject

RULES: tuple[Rule, ...] = ("reject", "block")


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to do. `samples` texts are drawn for each of the rules `reject` and `block`, with each drafter."""

    effort: Effort
    samples: int = 4000
    law_seconds: float = float("inf")
    length: int = 96  # tokens of the texts that are computed by rows and chunks


QUICK = Plan(Effort(tokens=6_000, seconds=10.0, length=64), samples=1500, law_seconds=2.5, length=64)
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
        for rule in RULES:
            findings += _law(subject, rule, plan, report)
    except KeyboardInterrupt:
        ended = "interrupted"
    facts = {
        "target": subject.engine.info.get("target", "in memory"),
        "drafters": ", ".join(subject.drafters),
        "arithmetic": subject.engine.info.get("arithmetic", "plain torch"),
    }
    return Certificate(facts, tuple(findings), dict(provenance), ended)


def _law(subject: Subject, rule: Rule, plan: Plan, report: Report) -> list[Finding]:
    """The law of one rule. Only drafters that sample are asked: one that copies has nothing to copy in four tokens."""
    asked = [name for name in subject.drafters if name != "ngram" and "+" not in name]
    results: dict[str, Sampled] = {}
    for i, name in enumerate(asked):
        report(f"law of {rule}", i / len(asked))
        results[name] = law.try_rule(subject, rule, name, plan.samples, plan.law_seconds)
    return [law.finding(rule, results)] if asked else []
