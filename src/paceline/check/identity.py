"""Whether texts with a drafter are, token by token, the texts without: the promise of the rule `match`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from paceline.check.certificate import Divergence, Finding
from paceline.check.subject import Subject
from paceline.core import Completion, SamplingParams
from paceline.sampling import noise
from paceline.sampling.shape import Counts, LogitRow, shape

LENGTHS: tuple[int | Literal["auto"], ...] = (1, 2, 4, "auto", 7, 16, 3, 5)
BATCHES = (1, 3, 5, 8, 2, 16)
SHAPES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.1},
    {"temperature": 0.0, "repetition_penalty": 1.15, "frequency_penalty": 0.1},
    {"temperature": 0.7, "top_k": 40, "min_p": 0.02, "presence_penalty": 0.3},
)


@dataclass(frozen=True, slots=True)
class Case:
    """One text without a drafter. Others must equal it, however they were drafted."""

    prompt: tuple[int, ...]
    params: SamplingParams
    answer: tuple[int, ...] = ()


@dataclass(slots=True)
class Score:
    """What was compared so far."""

    tokens: int = 0
    texts: int = 0
    drafted: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    prompts: set[tuple[int, ...]] = field(default_factory=set)
    temperatures: set[float] = field(default_factory=set)
    batches: set[int] = field(default_factory=set)
    lengths: set[str] = field(default_factory=set)
    failures: set[str] = field(default_factory=set)  # of drafters: why they were parked
    divergence: Divergence | None = None

    def add(self, case: Case, params: SamplingParams, done: Completion, batch: int) -> None:
        name = params.drafter or ""
        self.tokens += len(case.answer)
        self.texts += 1
        self.drafted[name] = self.drafted.get(name, 0) + done.stats.drafted
        self.accepted[name] = self.accepted.get(name, 0) + done.stats.accepted
        self.prompts.add(case.prompt)
        self.temperatures.add(params.temperature)
        self.batches.add(batch)
        self.lengths.add(str(params.draft_tokens))
        self.failures |= {reason for reason in done.stats.reasons if reason.startswith("drafter failed")}


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to compare: until both `tokens` are compared and every combination was run, or `seconds` are
    over.
    """

    tokens: int = 100_000
    seconds: float = float("inf")
    length: int = 96  # tokens of an answer
    cases: int = len(SHAPES) * len(LENGTHS)  # at least so many texts without a drafter


def compare(
    subject: Subject, effort: Effort, noise_floor: float, report: Callable[[int], None] = lambda n: None
) -> Score:
    """Compare until the effort is spent or the first difference is found."""
    score, end = Score(), time.perf_counter() + effort.seconds
    for number, case in enumerate(_cases(subject, effort.length)):
        if score.tokens >= effort.tokens and number >= effort.cases:
            break
        if time.perf_counter() > end:
            break
        (texts,) = subject.run([(case.prompt, replace(case.params, drafter="none"))])
        whole = replace(case, answer=tuple(texts[0].token_ids))
        for batch in _batches(subject, whole, number):
            if time.perf_counter() > end:
                break
            done = subject.run([(whole.prompt, params) for params in batch])
            for params, (text, *_) in zip(batch, done, strict=True):
                if tuple(text.token_ids) != whole.answer:
                    score.divergence = explain(subject, whole, params, text, noise_floor)
                    return score
                score.add(whole, params, text, len(batch))
            report(score.tokens)
    return score


def _cases(subject: Subject, length: int) -> Iterator[Case]:
    """Prompts, parameters and seeds in an endless, fixed order."""
    number = 0
    while True:
        prompt = subject.prompts[number % len(subject.prompts)]
        room = subject.engine.max_len - len(prompt)
        shaping = SHAPES[(number + number // len(subject.prompts)) % len(SHAPES)]
        params = SamplingParams(max_tokens=min(length, room), seed=number, ignore_eos=True, **shaping)
        yield Case(prompt, params)
        number += 1


def _batches(subject: Subject, case: Case, number: int) -> Iterator[list[SamplingParams]]:
    """Every drafter, each with another draft length, in batches of changing size; lengths move on from case
    to case.
    """
    each = [
        replace(case.params, drafter=name, draft_tokens=LENGTHS[(number + 3 * i + j) % len(LENGTHS)])
        for j in range(2)
        for i, name in enumerate(subject.drafters)
    ]
    size = BATCHES[number % len(BATCHES)]
    for start in range(0, len(each), size):
        yield each[start : start + size]


def explain(
    subject: Subject, case: Case, params: SamplingParams, other: Completion, noise_floor: float
) -> Divergence:
    """Where and how the texts part, and whether rounding can be the cause."""
    pairs = zip(case.answer, other.token_ids, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(case.answer), len(other.token_ids)))
    gap = top_two_gap(subject, case, at)
    start = max(at - 20, 0)
    name = f"{params.drafter} drafting {params.draft_tokens}, temperature {params.temperature:g}, seed {params.seed}"
    return Divergence(
        name, at, _token(case.answer, at), _token(other.token_ids, at),
        subject.decode(case.answer[start : at + 8]), subject.decode(other.token_ids[start : at + 8]),
        gap, noise_floor, "near-tie" if gap <= 4 * noise_floor else "bug",
    )  # fmt: skip


def _token(tokens: Seq[int], at: int) -> int:
    return tokens[at] if at < len(tokens) else -1


def top_two_gap(subject: Subject, case: Case, at: int) -> float:
    """Difference of the two best scores that the plain run had at answer token `at`, noise included."""
    text = [*case.prompt, *case.answer[:at]]
    hidden = subject.hidden([text], (1,))[0][-1:]
    history = Counts(list(case.prompt))
    history.add(list(case.answer[:at]))
    row = LogitRow(
        params=case.params, seed=_seed(case), position=len(text), history=history, mask=None, stop_ids=()
    )
    scores = shape(subject.logits(hidden), [row])[0].double().cpu()
    if case.params.temperature > 0:
        cells = torch.arange(scores.shape[-1])
        scores = scores + noise.gumbel(noise.uniform([_seed(case)], [len(text)], cells, noise.TARGET))[0]
    best = scores.topk(2).values
    return float(best[0] - best[1])


def _seed(case: Case) -> int:
    assert case.params.seed is not None, "every case has its own seed"
    return noise.sibling_seed(case.params.seed, 0)


def finding(subject: Subject, score: Score) -> Finding:
    """Refuted by one difference; not shown if a drafter's tokens were never kept and refused."""
    counts = {
        "tokens compared": score.tokens, "texts": score.texts, "prompts": len(score.prompts),
        "temperatures": len(score.temperatures), "batch shapes": len(score.batches),
        "draft lengths": len(score.lengths), "drafters": len(score.drafted),
        "tokens drafted": sum(score.drafted.values()), "tokens kept": sum(score.accepted.values()),
    }  # fmt: skip
    if score.divergence is not None:
        return Finding("token identity", "refuted", "a text changed with a drafter", counts, score.divergence)
    if score.failures:
        return Finding("token identity", "not shown", "; ".join(sorted(score.failures)), counts)
    idle = [n for n in subject.drafters if not 0 < score.accepted.get(n, 0) < score.drafted.get(n, 0)]
    if idle:
        words = f"no difference, but drafts of {', '.join(idle)} were never both kept and refused: more prompts needed"
        return Finding("token identity", "not shown", words, counts)
    words = f"with {', '.join(subject.drafters)} every token equals the one without a drafter"
    return Finding("token identity", "holds", words, counts)
