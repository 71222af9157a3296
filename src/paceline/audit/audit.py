"""The audit itself: greedy texts, short sampled texts, sampling parameters and logprobs of two endpoints."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field
from statistics import NormalDist, mean, variance
from typing import Any, Literal

from paceline.audit.client import TOP, Answer, Endpoint
from paceline.audit.compare import Divergence, certain, divergence, logprob_gap
from paceline.check.chi2 import Fit, compare_samples

Verdict = Literal["lossless", "lossless up to near-ties", "not lossless", "features differ", "cannot tell"]
EXIT = {
    "lossless": 0,
    "lossless up to near-ties": 0,
    "not lossless": 1,
    "features differ": 1,
    "cannot tell": 3,
}
ALPHA = 1e-4  # chance that equal distributions are called different
WORDS = 4  # of a sampled text that are looked at
LOGPROB_TOLERANCE = 0.25  # nats; half-precision servers differ by less in what they say of one token
# What is asked once more with speculation on: engines have dropped these in silence, or refused them.
FEATURES: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": TOP},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 1.5},
    "logit_bias": {"logit_bias": {"13": -50, "198": -50}},
    "min_p": {"min_p": 0.2, "temperature": 0.7, "seed": 3},
    "stop": {"stop": ["."]},
}


PROMPTS = (
    "The capital of Australia is",
    "Q: Why is the sky blue?\nA:",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea,",
    "List the planets of the solar system:\n1. Mercury\n2.",
    "Translate to French: The cat sleeps on the chair.\nFrench:",
    "import json\n\ndef read_config(path):\n",
    "The three distributions of thermodynamics are",
    "Dear Sir or Madam,\n\nI am writing to",
    '{"name": "Ada", "born": 1815, "known_for": [',
    "Zutaten für einen Apfelkuchen:\n-",
    "SELECT name, COUNT(*) FROM orders",
    "A haiku about autumn:\n",
    "日本の首都は",
    "Step by step: 17 * 24 =",
    "for i in range(10):\n    print(i)\nfor i in range(10):\n",
    "In 1969, humans first",
    "The difference between a list and a tuple in Python is",
    "<ul>\n  <li>One</li>\n  <li>Two</li>\n",
    "To be, or not to be,",
)

QUESTIONS = (
    "What is in this picture?",
    "Which colours does it have, from the top to the bottom?",
)  # of a picture

# Sampled texts: every second token is one of three or four, and both networks and n-gram lookup draft here.
SAMPLED = "red, green, blue, red, blue, green, red, green, blue, green, red, blue, red, green,"


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is asked. Requests in all: 4 * prompts + 2 * samples + 4 * features (each side is asked twice).

    Of each picture there are 4 for a question, and one of each side without it.
    """

    prompts: int = len(PROMPTS)
    tokens: int = 64
    samples: int = 200  # sampled texts of each side
    sample_tokens: int = 24  # the first one is never drafted
    temperature: float = 1.0
    near_tie: float = 0.3  # nats; logits of 16 to 32 in bfloat16 lie 0.125 apart
    images: tuple[str, ...] = ()  # data URLs

    @property
    def requests(self) -> int:
        pictures = len(self.images) * (4 * len(QUESTIONS) + 2)
        return 4 * self.prompts + 2 * self.samples + 4 * len(FEATURES) + pictures


@dataclass(frozen=True, slots=True)
class Surprise:
    """Mean log probability of a sampled token on each side, in nats: a rule that keeps likely drafts raises it.

    Tokens of one text belong together, so the texts' means are compared (Welch's test at their large numbers).
    """

    mine: float
    theirs: float
    p_value: float
    detectable: float  # nats between the sides that are found with chance 90%

    @classmethod
    def of(cls, one: Seq[float], other: Seq[float]) -> Surprise:
        error = math.sqrt(variance(one) / len(one) + variance(other) / len(other)) or 1e-9
        p = math.erfc(abs(mean(one) - mean(other)) / error / math.sqrt(2))
        reach = NormalDist().inv_cdf(1 - ALPHA / 4) + NormalDist().inv_cdf(0.9)
        return cls(mean(one), mean(other), p, reach * error)

    @property
    def refuted(self) -> bool:
        return self.p_value < ALPHA / 2


@dataclass(slots=True)
class Report:
    verdict: Verdict = "cannot tell"
    reason: str = ""
    compared: int = 0
    divergences: list[Divergence] = field(default_factory=list)  # url against the other
    own: list[Divergence] = field(default_factory=list)  # each side against itself
    fit: Fit | None = None
    surprise: Surprise | None = None
    features: dict[str, str] = field(default_factory=dict)  # what differs, by parameter

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"exit_code": EXIT[self.verdict]}


Notify = Callable[[str, float], None]
Asked = str | tuple[str, str | None]  # a text to go on with, or a question and the picture that it is about


@dataclass(slots=True)
class Audit:
    """Ask `url` and `against` what `plan` says. `notify` hears what is asked and the share that is done."""

    url: Endpoint
    against: Endpoint
    plan: Plan = field(default_factory=Plan)
    notify: Notify = lambda what, share: None
    report: Report = field(default_factory=Report)

    def run(self) -> Report:
        """The report with its verdict. Raises UsageError for an endpoint that cannot be asked."""
        self.url.find_model()
        self.against.find_model()
        self._greedy()
        self._pictures()
        self._sampled()
        self._features()
        self.report.verdict, self.report.reason = judge(self.report)
        return self.report

    def _ask(self, side: Endpoint, what: str, prompt: Asked, params: dict[str, Any]) -> Answer:
        done = self.url.asked + self.against.asked
        self.notify(what, done / self.plan.requests)
        return side.complete(prompt, params) if isinstance(prompt, str) else side.see(*prompt, params)

    def _greedy(self) -> None:
        for i, prompt in enumerate(PROMPTS[: self.plan.prompts]):
            self._compare(i, prompt, "greedy completion")

    def _pictures(self) -> None:
        """Greedy answers about each picture; and whether a side answers alike without it, which looks at none."""
        for i, url in enumerate(self.plan.images):
            first = len(PROMPTS) + i * len(QUESTIONS)
            seen = [self._compare(first + j, (text, url), "a picture") for j, text in enumerate(QUESTIONS)]
            sides = (("the audited side", self.url), ("the reference", self.against))
            for number, (name, side) in enumerate(sides):
                without = self._ask(side, "no picture", (QUESTIONS[0], None), self._params)
                if seen[0] is not None and without.ok and without.text == seen[0][number].text:
                    self.report.features["pictures"] = f"{name} answers the same without the picture"

    @property
    def _params(self) -> dict[str, Any]:
        return {"temperature": 0, "max_tokens": self.plan.tokens, "logprobs": TOP, "seed": 1}

    def _compare(self, number: int, prompt: Asked, what: str) -> tuple[Answer, Answer] | None:
        """Ask each side twice and note what differs. One answer of each; None if one refused."""
        mine, theirs = (
            [self._ask(side, "greedy texts", prompt, self._params) for _ in range(2)]
            for side in (self.url, self.against)
        )
        if not all(answer.ok for answer in (*mine, *theirs)):
            bad = next(answer for answer in (*mine, *theirs) if not answer.ok)
            self.report.features[what] = f"refused with {bad.status}: {bad.error}"
            return None
        self.report.compared += 1
        for pair in (mine, theirs):
            own = divergence(number, pair[0], pair[1], self.plan.near_tie)
            if own is not None:
                self.report.own.append(own)
        difference = divergence(number, mine[0], theirs[0], self.plan.near_tie)
        if difference is not None:
            self.report.divergences.append(difference)
        return mine[0], theirs[0]

    def _sampled(self) -> None:
        texts: list[list[str]] = []
        means: list[list[float]] = []
        for number, side in enumerate((self.url, self.against)):
            texts.append([])
            means.append([])
            for i in range(self.plan.samples):
                seed = (
                    1 + number * self.plan.samples + i
                )  # equal seeds may give equal texts: they would prove nothing
                params = {
                    "temperature": self.plan.temperature, "max_tokens": self.plan.sample_tokens, "seed": seed,
                    "logprobs": 1,
                }  # fmt: skip
                answer = self._ask(side, "sampled texts", SAMPLED, params)
                if answer.ok:
                    texts[-1].append(answer.text)
                    logprobs = [token.logprob for token in answer.tokens if math.isfinite(token.logprob)]
                    means[-1] += [sum(logprobs) / len(logprobs)] if logprobs else []
        if all(len(seen) >= 20 for seen in texts):
            self.report.fit = fit_words(*texts)
        if all(len(side) >= 20 for side in means):
            self.report.surprise = Surprise.of(*means)

    def _features(self) -> None:
        for name, extra in FEATURES.items():
            params = {"temperature": 0, "max_tokens": self.plan.tokens, "seed": 1, **extra}
            mine, again, theirs, theirs_again = (
                self._ask(side, f"parameter {name}", PROMPTS[1], params)
                for side in (self.url, self.url, self.against, self.against)
            )
            stable = mine.text == again.text and theirs.text == theirs_again.text
            difference = _feature(name, mine, theirs, stable, self.plan.near_tie)
            if difference:
                self.report.features[name] = difference


def fit_words(one: Seq[str], other: Seq[str]) -> Fit:
    """The words of two samples of texts, place by place: the place where they differ most, at a level for all places."""
    sides = [[re.findall(r"\w+", text) for text in texts] for texts in (one, other)]
    fits = []
    for place in range(WORDS):
        counts = [Counter("".join(words[place : place + 1]) for words in side) for side in sides]
        cells = sorted(set(counts[0]) | set(counts[1]))
        mine, theirs = ([count[cell] for cell in cells] for count in counts)
        fits.append(compare_samples(mine, theirs, ALPHA / WORDS / 2))
    return min(fits, key=lambda fit: (fit.p_value, fit.detectable))


def _feature(name: str, mine: Answer, theirs: Answer, stable: bool, near_tie: float) -> str:
    """What differs under one parameter; empty if nothing does, or nothing that the sides' own noise does not explain."""
    if mine.ok != theirs.ok:
        who, bad = ("the audited side", mine) if theirs.ok else ("the reference", theirs)
        return f"refused by {who} only ({bad.status}: {bad.error})"
    if not mine.ok:
        return ""
    if name == "logprobs":
        if bool(mine.tokens) != bool(theirs.tokens):
            return "given by one side only"
        if certain(mine) > 3 + certain(theirs):
            return (
                f"{certain(mine)} of {len(mine.tokens)} tokens are said to be certain, as if kept drafts had no "
                "alternatives"
            )
        gap = logprob_gap(mine, theirs)
        return f"differ by up to {gap:.2f} nats" if gap is not None and gap > LOGPROB_TOLERANCE else ""
    difference = divergence(0, mine, theirs, near_tie)
    if difference is not None and stable and name != "min_p":  # sampled texts need not agree between engines
        return f"other text from {difference.at} on ({difference.first!r}, {difference.second!r})"
    return ""


def judge(report: Report) -> tuple[Verdict, str]:
    """One verdict in plain words."""
    if not report.compared:
        return "cannot tell", "no prompt was answered by both sides"
    noisy = {difference.prompt for difference in report.own}
    clear = [d for d in report.divergences if d.prompt not in noisy]
    faults = [d for d in clear if d.kind == "fault"]
    if report.fit is not None and report.fit.refuted:
        return (
            "not lossless",
            f"the words of sampled texts follow another distribution (p = {report.fit.p_value:.1e})",
        )
    odd = report.surprise
    if odd is not None and odd.refuted and "logprobs" not in report.features:  # else they cannot be believed
        return "not lossless", (
            f"the tokens of sampled texts are {'more' if odd.mine > odd.theirs else 'less'} likely than the reference's: "
            f"{odd.mine:.2f} and {odd.theirs:.2f} nats (p = {odd.p_value:.1e})"
        )
    if faults:
        worst = max(faults, key=lambda d: d.gap or 0.0)
        return "not lossless", (
            f"{len(faults)} of {report.compared} greedy texts part where the choice is clear "
            f"(prompt {worst.prompt}, token {worst.at}: {worst.first!r} or {worst.second!r}, {worst.gap:.2f} nats apart)"
        )
    if report.features:
        what = "; ".join(f"{name}: {what}" for name, what in report.features.items())
        return "features differ", f"the texts give no reason for doubt, but {what}" if not clear else what
    unknown = [d for d in clear if d.kind == "unknown"]
    if unknown:
        return "cannot tell", (
            f"{len(unknown)} of {report.compared} greedy texts part, and the servers give no logprobs to say whether "
            "it was a near-tie: switch them on"
        )
    if noisy:
        return "cannot tell", (
            f"a side differs from itself in {len(noisy)} of {report.compared} greedy texts: its own noise hides what "
            "speculation does; ask an idle server, one request at a time"
        )
    if report.divergences:
        gap = max(d.gap or 0.0 for d in report.divergences)
        count = f"{len(report.divergences)} of {report.compared}"
        words = f"{count} greedy texts part, all at near-ties (at most {gap:.3f} nats)"
        return "lossless up to near-ties", words
    return "lossless", f"all {report.compared} greedy texts are equal, and nothing else differs"


def to_text(report: Report) -> str:
    """The report as people read it."""
    lines = [f"verdict: {report.verdict.upper()}", f"  {report.reason}", ""]
    lines.append(
        f"greedy texts compared  {report.compared}, {len(report.divergences)} part, "
        f"{len(report.own)} part from their own repeat"
    )
    lines += [
        f"  prompt {d.prompt}, token {d.at}: {d.first!r} or {d.second!r}, {d.kind}"
        + ("" if d.gap is None or math.isnan(d.gap) else f" ({d.gap:.3f} nats)")
        for d in report.divergences[:8]
    ]
    if report.fit is not None:
        fit = report.fit
        lines.append(
            f"sampled texts          {fit.samples} of each side, chi-squared of their words {fit.statistic:.1f} at "
            f"{fit.freedom} degrees, p = {fit.p_value:.3g}; words {fit.detectable:.2f} away in total variation would "
            f"be found with chance {fit.power:.0%}"
        )
    if report.surprise is not None:
        odd = report.surprise
        lines.append(
            f"their tokens           {odd.mine:.2f} and {odd.theirs:.2f} nats likely on average, p = {odd.p_value:.3g}; "
            f"{odd.detectable:.2f} nats between them would be found with chance 90%"
            + (" (not believed: see logprobs)" if "logprobs" in report.features else "")
        )
    lines.append(
        "parameters             " + ("all alike" if not report.features else f"{len(report.features)} differ")
    )
    lines += [f"  {name}: {what}" for name, what in report.features.items()]
    return "\n".join(lines)
