"""Whether texts with a drafter are, token by token, the texts without: the promise of the rule `match`.

Chapter by chapter: a few texts are written without a drafter, alone. Then every drafter writes each of them again,
with another draft length, in batches of different texts, among comings and goings, and so short of memory that
texts are preempted and resumed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch

from paceline.check.cases import KINDS, Case, make_case
from paceline.check.certificate import Divergence, Finding
from paceline.check.crash import Where, over
from paceline.check.scenes import CHURN, SQUEEZE, TOGETHER, UNSHARED, Output, Scene, play
from paceline.check.subject import Subject
from paceline.core import SamplingParams
from paceline.sampling import noise
from paceline.sampling.shape import Counts, LogitRow, shape

NAME = "token identity"
LENGTHS: tuple[int | Literal["auto"], ...] = (4, 2, "auto", 7, 1, 5, 3, 8, 6, 16)
PLAYS = (
    (TOGETHER, 5), (SQUEEZE, 6), (CHURN, 4), (UNSHARED, 6), (TOGETHER, 16), (TOGETHER, 1), (CHURN, 8), (TOGETHER, 12),
    (TOGETHER, 2), (TOGETHER, 16),
)  # fmt: skip


@dataclass(slots=True)
class Score:
    """What was compared so far."""

    chapters: int = 0  # that were gone through to their ends
    tokens: int = 0
    texts: int = 0
    drafted: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    prompts: set[tuple[int, ...]] = field(default_factory=set)
    temperatures: set[float] = field(default_factory=set)
    batches: set[int] = field(default_factory=set)
    lengths: set[str] = field(default_factory=set)
    scenes: set[str] = field(default_factory=set)
    preemptions: int = 0
    reused: int = 0  # prompt tokens found in the cache
    stopped: int = 0  # texts that a stop string or token ended
    outgrown: int = 0  # texts longer than the sliding window
    failures: set[str] = field(default_factory=set)  # of drafters: why they were parked
    divergence: Divergence | None = None

    def add(self, subject: Subject, case: Case, params: SamplingParams, output: Output) -> None:
        name = params.drafter or ""
        self.tokens += len(case.answer)
        self.texts += 1
        self.drafted[name] = self.drafted.get(name, 0) + output.stats.drafted
        self.accepted[name] = self.accepted.get(name, 0) + output.stats.accepted
        self.prompts.add(case.prompt)
        self.temperatures.add(params.temperature)
        self.lengths.add(str(params.draft_tokens))
        self.reused += output.stats.cached_prompt_tokens
        self.stopped += output.finish == "stop"
        self.outgrown += subject.window is not None and len(case.prompt) + len(case.answer) > subject.window
        failed = [reason for reason in output.stats.reasons if reason.startswith("drafter failed")]
        self.failures |= {f"{name}: {reason}" for reason in failed}


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to compare: whole chapters until `tokens` are compared, or no new batch after `seconds`."""

    tokens: int = 100_000
    seconds: float = float("inf")
    length: int = 96  # tokens of an answer
    cases: int = KINDS  # texts of a chapter


def compare(
    subject: Subject,
    effort: Effort,
    noise_floor: float,
    report: Callable[[int], None] = lambda n: None,
    score: Score | None = None,
    save: Callable[[Score], None] = lambda score: None,
) -> Score:
    """Compare until the effort is spent or the first difference is found. Raises Broken.

    Adds to `score`, from its chapter on. `save` is given it after each chapter.
    """
    score = score if score is not None else Score()
    end = time.perf_counter() + effort.seconds
    before = subject.engine.state.preemptions - score.preemptions
    while (score.tokens < effort.tokens or not score.chapters) and time.perf_counter() < end:
        chapter = score.chapters
        first = chapter * effort.cases
        cases = [make_case(subject, first + i, effort.length) for i in range(effort.cases)]
        for scene, batch in _batches(subject, cases, chapter):
            if time.perf_counter() > end:
                return score
            done = _play(subject, scene, batch)
            for (case, params), output in zip(batch, done, strict=True):
                again = Again(params, scene, len(batch))
                score.divergence = compare_one(subject, case, again, output, noise_floor)
                if score.divergence is not None:
                    return score
                score.add(subject, case, params, output)
            score.batches.add(len(batch))
            score.scenes.add(scene.name)
            score.preemptions = subject.engine.state.preemptions - before
            report(score.tokens)
        score.chapters += 1
        save(score)
    return score


Batch = list[tuple[Case, SamplingParams]]


def _play(subject: Subject, scene: Scene, batch: Batch) -> list[Output]:
    with over(lambda: _blamed(subject, scene, batch)):
        return play(subject, [(case.prompt, params) for case, params in batch], scene)


def _blamed(subject: Subject, scene: Scene, batch: Batch) -> Where:
    """Over what a batch broke: its first text that breaks alone, too, or else all of them together."""
    asked = {"batch": f"{len(batch)} texts {scene.name}"}
    for case, params in batch:
        try:
            play(subject, [(case.prompt, params)])
        except KeyboardInterrupt:
            break
        except Exception:  # noqa: BLE001  the very crash that is being looked for
            return {**asked, "breaks alone, too": "yes", **_asked(subject, [(case, params)])}
    return {**asked, "breaks alone, too": "no text of it", **_asked(subject, batch)}


def _asked(subject: Subject, batch: Batch) -> Where:
    def each(values: Iterable[object]) -> str:
        return ", ".join(dict.fromkeys(map(str, values)))

    return {
        "drafter": each(f"{params.drafter} drafting {params.draft_tokens}" for _, params in batch),
        "temperature": each(f"{params.temperature:g}" for _, params in batch),
        "seed": each(params.seed for _, params in batch),
        "prompt": each(subject.excerpt(case.prompt) for case, _ in batch),
    }


def _batches(subject: Subject, cases: Seq[Case], chapter: int) -> Iterator[tuple[Scene, Batch]]:
    """Every case with every drafter, mixed, in batches of all sizes, scene after scene."""
    each = [
        (case, replace(case.params, drafter=name, draft_tokens=LENGTHS[(3 * i + j + chapter) % len(LENGTHS)]))
        for i, name in enumerate(subject.drafters)
        for j, case in enumerate(cases)
    ]
    random.Random(chapter).shuffle(each)
    turn = 3 * chapter
    while each:
        scene, size = PLAYS[turn % len(PLAYS)]
        yield scene, each[:size]
        each, turn = each[size:], turn + 1


class Again(NamedTuple):
    """How a text was asked for again."""

    params: SamplingParams
    scene: Scene
    batch: int  # texts at once


def compare_one(
    subject: Subject, case: Case, where: Again, output: Output, noise_floor: float
) -> Divergence | None:
    """The first difference of a text from the one without a drafter, if there is one."""
    if output.tokens != case.output.tokens or output.error:
        return _explain(subject, case, where, output, noise_floor)
    for what, mine, other in (
        ("text", case.output.text, output.text),
        ("end", case.output.finish, output.finish),
    ):
        if mine != other:
            return _other(subject, case, where, output, f"{what}: {mine!r} without, {other!r} with")
    allowed = 1e-5 + 8 * noise_floor
    for i, (a, b) in enumerate(zip(case.output.logprobs, output.logprobs, strict=True)):
        if a.token != b.token or abs(a.raw - b.raw) > allowed or abs(a.shaped - b.shaped) > allowed:
            words = f"log probability of token {i}: {a.raw:.5f}, shaped {a.shaped:.5f}"
            return _other(subject, case, where, output, f"{words} without, {b.raw:.5f}, {b.shaped:.5f} with")
    return None


def _name(where: Again) -> str:
    params, scene, batch = where
    return (
        f"{params.drafter} drafting {params.draft_tokens}, temperature {params.temperature:g}, seed {params.seed}, "
        f"{batch} texts {scene.name}"
    )


def _explain(subject: Subject, case: Case, where: Again, output: Output, noise_floor: float) -> Divergence:
    """Where and how the texts part, and whether rounding can be the cause."""
    mine, other = case.output.tokens, output.tokens
    at = next(
        (i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), min(len(mine), len(other))
    )
    gap = top_two_gap(subject, case, at) if at < min(len(mine), len(other)) else None
    start = max(at - 20, 0)
    return Divergence(
        case=_name(where), position=at, plain_token=_token(mine, at), other_token=_token(other, at),
        plain_text=subject.decode(mine[start : at + 8]), other_text=subject.decode(other[start : at + 8]),
        gap=gap, noise_floor=noise_floor,
        kind="near-tie" if gap is not None and gap < 4 * noise_floor else "bug",
        what=output.error or ("" if gap is not None else _ends(case, output)),
    )  # fmt: skip


def _ends(case: Case, output: Output) -> str:
    return f"ended by {output.finish!r}, without by {case.output.finish!r}"


def _other(subject: Subject, case: Case, where: Again, output: Output, what: str) -> Divergence:
    """The tokens are equal, but not what was said of them."""
    last = len(output.tokens) - 1
    return Divergence(
        case=_name(where), position=last, plain_token=_token(case.answer, last), other_token=_token(output.tokens, last),
        plain_text=case.output.text[-80:], other_text=output.text[-80:],
        gap=None, noise_floor=0.0, kind="bug", what=what,
    )  # fmt: skip


def _token(tokens: Seq[int], at: int) -> int:
    return tokens[at] if at < len(tokens) else -1


def top_two_gap(subject: Subject, case: Case, at: int) -> float:
    """Difference of the two best scores that the plain run had at answer token `at`, noise included."""
    text, params = [*case.prompt, *case.answer[:at]], case.params
    hidden = subject.hidden([text], (1,))[0][-1:]
    history = Counts(list(case.prompt))
    history.add(list(case.answer[:at]))
    constraint = params.constraint() if params.constraint else None
    if constraint:
        constraint.commit(case.answer[:at])
    mask = constraint.masks([])[0] if constraint else None
    seed = _seed(case)
    row = LogitRow(
        params, seed, len(text), history, mask, params.stop_token_ids if at < params.min_tokens else ()
    )
    scores = shape(subject.logits(hidden), [row])[0].double().cpu()
    if params.temperature > 0:
        cells = torch.arange(scores.shape[-1])
        scores = scores + noise.gumbel(noise.uniform([seed], [len(text)], cells, noise.TARGET))[0]
    best = scores.topk(2).values
    return float(best[0] - best[1])


def _seed(case: Case) -> int:
    assert case.params.seed is not None, "every case has its own seed"
    return noise.sibling_seed(case.params.seed, 0)


def finding(subject: Subject, score: Score) -> Finding:
    """One difference refutes. Inconclusive if no draft was both accepted and refused."""
    counts = {
        "tokens compared": score.tokens, "texts": score.texts, "prompts": len(score.prompts),
        "tokens drafted": sum(score.drafted.values()), "tokens kept": sum(score.accepted.values()),
        "texts ended by a stop": score.stopped, "texts longer than the window": score.outgrown,
        "preemptions": score.preemptions, "prompt tokens found in the cache": score.reused,
    }  # fmt: skip
    covered = {
        "drafters": ", ".join(sorted(score.drafted)),
        "draft lengths": ", ".join(sorted(score.lengths, key=lambda k: (k == "auto", k.zfill(2)))),
        "temperatures": ", ".join(f"{t:g}" for t in sorted(score.temperatures)),
        "batch shapes": ", ".join(map(str, sorted(score.batches))),
        "scenes": ", ".join(sorted(score.scenes)),
    }
    if (tree := subject.engine.state.tree) is not None:
        covered["trees"] = f"up to {tree.depth}x{tree.width}"

    def said(outcome: Literal["holds", "refuted", "not shown"], words: str) -> Finding:
        return Finding(NAME, outcome, words, counts, score.divergence, covered)

    if score.divergence is not None:
        return said("refuted", "a text changed with a drafter")
    if score.failures:
        return said("not shown", "; ".join(sorted(score.failures)))
    idle = [n for n in subject.drafters if not 0 < score.accepted.get(n, 0) < score.drafted.get(n, 0)]
    if idle:
        return said(
            "not shown", f"drafts of {', '.join(idle)} were never both kept and refused: give it more time"
        )
    several = subject.engine.state.cache.max_sequences > 1  # one text alone has nobody to give way to
    needed = {"was preempted": score.preemptions} if several else {}
    needed |= {"found its prompt in the cache": score.reused} if subject.engine.state.share_prefixes else {}
    needed |= {"outgrew the window": score.outgrown} if subject.window else {}
    missing = [what for what, count in needed.items() if not count]
    if missing:
        return said("not shown", f"no difference, but no text {' or '.join(missing)}: give it more time")
    return said("holds", f"with {', '.join(subject.drafters)} every token equals the one without a drafter")
