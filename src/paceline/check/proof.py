"""Runs all proofs on one subject and writes down what they showed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.check import distribution, drafts, forward, identity, pictures, processes
from paceline.check.again import Order
from paceline.check.certificate import INTERRUPTED, Certificate, Finding
from paceline.check.crash import describe
from paceline.check.distribution import Rule, Sampled, Trial
from paceline.check.identity import Effort
from paceline.check.state_file import StateFile
from paceline.check.subject import Subject
from paceline.core import SamplingParams
from paceline.errors import UsageError

RULES: tuple[Rule, ...] = ("reject", "block")


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to do. `samples` texts are drawn for each of the rules `reject` and `block`, with each drafter."""

    effort: Effort
    samples: int = 3000
    law_seconds: float = float("inf")
    length: int = 96  # tokens of the texts that are computed by rows and chunks
    texts: int = 6  # of each drafter and scene, whose drafts are held against those of a clean start
    lossy: SamplingParams | None = None  # its rule is measured, and nothing else
    processes: int = 0  # that are started anew and compared with each other
    state: StateFile | None = None  # where token identity goes on from


QUICK = Plan(Effort(tokens=6_000, seconds=20.0, length=48), samples=1500, law_seconds=2.5, length=64, texts=3)
FULL = Plan(Effort(tokens=100_000))

Report = Callable[[str, float], None]  # what is running, and how far it is (0..1)


@dataclass(frozen=True, slots=True)
class Stage:
    """One promise: `run` compares until it is done, `found` says what that has shown so far."""

    name: str
    run: Callable[[], object]
    found: Callable[[], Finding]


def prove(
    subject: Subject, plan: Plan, provenance: Mapping[str, Any], report: Report, order: Order | None = None
) -> Certificate:
    """Test every promise; an interrupt or a crash keeps what was shown. `order`: how the subject is loaded anew.

    Raises UsageError for what cannot be asked.
    """
    findings: list[Finding] = []
    ended = ""
    for stage in (*_stages(subject, plan, report), *_starts(order, plan, report)):
        try:
            report(stage.name, 0.0)
            stage.run()
            findings.append(stage.found())
        except KeyboardInterrupt:
            ended = INTERRUPTED
            findings.append(stage.found().unfinished())
            break
        except UsageError:
            raise
        except Exception as error:  # noqa: BLE001  whatever a model, kernel or step raises refutes
            crash = describe(error)
            ended = "out of memory" if crash.kind == "memory" else "the engine raised"
            findings.append(stage.found().crashed(crash))
            break
    info, state = subject.engine.info, subject.engine.state
    facts = {
        "target": _named(info.get("target", "in memory")),
        "drafters": ", ".join(subject.drafters),
        "pictures": pictures.described(subject),
        "arithmetic": info.get("arithmetic", "plain torch"),
        "precision": f"{info.get('dtype', state.target.dtype)}, K/V {state.cache.holds}, on {state.target.device}",
    }
    return Certificate(facts, tuple(findings), dict(provenance), ended)


def _named(target: str) -> str:
    """A model without the path to it, which is of no use to whom a certificate is shown."""
    path = Path(target)
    if path.parent.name == "snapshots":
        return path.parents[1].name.removeprefix("models--").replace("--", "/")
    return f"{path.parent.name}/{path.name}" if path.name == "target" else path.name


def _stages(subject: Subject, plan: Plan, report: Report) -> list[Stage]:
    if plan.lossy is not None:
        return _distributions(subject, plan, report)
    rows, clean, effort, state = forward.Deviation(), dict[str, drafts.Compared](), plan.effort, plan.state
    score = state.read(subject, effort) if state else identity.Score()
    total = effort.tokens

    def compare() -> None:
        identity.compare(
            subject,
            effort,
            rows.logits,
            lambda n: report(identity.NAME, min(1.0, n / total)),
            score,
            lambda now: state.write(subject, effort, now) if state else None,
        )

    def draft() -> None:
        drafts.measure(subject, plan.texts, noise_floor=rows.logits, out=clean)

    out = [
        Stage(
            forward.NAME,
            lambda: forward.measure(subject, length=plan.length, out=rows),
            lambda: forward.finding(rows),
        ),
        Stage(identity.NAME, compare, lambda: identity.finding(subject, score)),
    ]
    if not isinstance(pictures.reader_of(subject), str):
        seen = pictures.Seen()
        out.append(
            Stage(
                pictures.NAME,
                lambda: pictures.compare(subject, plan.effort.seconds, rows.logits, seen, total // 50),
                lambda: pictures.finding(subject, seen),
            )
        )
    if drafts.of(subject):
        out.append(Stage(drafts.NAME, draft, lambda: drafts.finding(clean, exact=rows.logits == 0)))
    return out + (_distributions(subject, plan, report) if plan.samples else [])


def _starts(order: Order | None, plan: Plan, report: Report) -> list[Stage]:
    if order is None or not plan.processes or plan.lossy is not None:
        return []
    seen, count = processes.Starts(), plan.processes
    return [
        Stage(
            processes.NAME,
            lambda: processes.compare(order, count, seen, lambda n: report(processes.NAME, n / count)),
            lambda: processes.finding(seen),
        )
    ]


def _distributions(subject: Subject, plan: Plan, report: Report) -> list[Stage]:
    """The distribution of each rule, for drafters that sample: one that copies has nothing to copy in four tokens."""
    asked = [name for name in subject.drafters if name != "ngram" and "+" not in name]
    trials: dict[str, Trial] = {}

    def stage(rule: Rule) -> Stage:
        results: dict[str, Sampled] = {}

        def run() -> None:
            for i, name in enumerate(asked):
                report(f"distribution of {rule}", i / len(asked))
                trials[name] = trials.get(name) or distribution.prepare(subject, name)
                params = replace(plan.lossy or SamplingParams(verify=rule), drafter=name)
                results[name] = distribution.try_rule(
                    subject, params, trials[name], plan.samples, plan.law_seconds
                )

        return Stage(f"distribution of {rule}", run, lambda: distribution.finding(rule, results))

    if plan.lossy is not None and not asked:
        raise UsageError(
            "typical is measured with a network that drafts, and none is loaded: name one with --drafter"
        )
    return [stage(rule) for rule in (("typical",) if plan.lossy else RULES)] if asked else []
