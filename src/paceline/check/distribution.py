"""Whether `reject` and `block` draw from the target's exact distribution: chi-squared over whole short texts. How far
`typical`, which is lossy, is from it.

Texts of a few tokens from a few allowed ids are sampled through the engine with a drafter, and counted; the
distribution of every such text is computed from the target's logits alone, without the engine's sampling code.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from paceline.check.certificate import Finding
from paceline.check.chi2 import Fit, compare
from paceline.check.crash import Where, over
from paceline.check.subject import Subject
from paceline.core import Completion, SamplingParams

TOKENS, CHOICES, TEMPERATURE = 4, 4, 1.2
PROMPTS = 3  # of which the one where the drafter is kept most often is sampled
Rule = Literal["reject", "block", "typical"]


@dataclass(frozen=True, slots=True)
class Sampled:
    fit: Fit
    drafted: int
    accepted: int
    away: float  # total variation between the texts as counted and their exact distribution
    noise: float  # what that is on average for exact samples, as many


def allowed(subject: Subject, prompt: tuple[int, ...], drafter: str) -> tuple[tuple[int, ...], int]:
    """The tokens that the drafter gets right most often after this prompt, and how often it did in a short trial.

    A drafter that scores few candidates only can draft nothing from tokens that it never considers.
    """
    params = SamplingParams(
        max_tokens=6, temperature=TEMPERATURE, ignore_eos=True, n=16, seed=5, drafter=drafter, draft_tokens=4,
        bad_token_ids=subject.engine.state.target.eos_token_ids,
    )  # fmt: skip
    (texts,) = _run(subject, prompt, params)
    survivors: Counter[int] = Counter()
    seen: Counter[int] = Counter()
    for text in texts:
        seen.update(text.token_ids)
        survivors.update(t for t, o in zip(text.token_ids, text.origins, strict=True) if o == "draft")
    order = [t for t, _ in (survivors + Counter()).most_common()] + [t for t, _ in seen.most_common()]
    ids = list(dict.fromkeys(order))[:CHOICES]
    return tuple(sorted(ids)), sum(survivors[t] for t in ids)


def _run(subject: Subject, prompt: tuple[int, ...], params: SamplingParams) -> list[list[Completion]]:
    drafter = f"{params.drafter} drafting {params.draft_tokens}, rule {params.verify or 'match'}"
    with over(partial(_where, subject, prompt, drafter, f"{params.n} texts of one prompt")):
        return subject.run([(prompt, params)])


def _where(subject: Subject, prompt: tuple[int, ...], drafter: str, batch: str) -> Where:
    asked = {"drafter": drafter, "batch": batch, "temperature": f"{TEMPERATURE:g}"}
    return asked | {"prompt": subject.excerpt(prompt)}


def exact_law(
    subject: Subject, prompt: tuple[int, ...], ids: tuple[int, ...]
) -> dict[tuple[int, ...], float]:
    """Chance of every text of TOKENS tokens from `ids`."""
    where = torch.tensor(ids)
    together = subject.engine.state.cache.max_sequences
    distribution: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        longer: dict[tuple[int, ...], float] = {}
        texts = list(distribution)
        for first in range(0, len(texts), together):
            part = texts[first : first + together]
            with over(partial(_where, subject, prompt, "none", f"{len(part)} texts of one prompt")):
                hidden = subject.hidden([[*prompt, *text] for text in part], (len(prompt) + TOKENS,))
            logits = subject.logits(torch.stack([h[-1] for h in hidden])).double().cpu()[:, where]
            for text, row in zip(part, torch.softmax(logits / TEMPERATURE, -1).tolist(), strict=True):
                longer |= {(*text, token): distribution[text] * p for token, p in zip(ids, row, strict=True)}
        distribution = longer
    return distribution


def sample(
    subject: Subject, prompt: tuple[int, ...], params: SamplingParams
) -> tuple[dict[tuple[int, ...], int], int, int]:
    """(counts of texts, tokens drafted, tokens kept)."""
    (texts,) = _run(subject, prompt, params)
    counts: dict[tuple[int, ...], int] = {}
    for text in texts:
        counts[tuple(text.token_ids)] = counts.get(tuple(text.token_ids), 0) + 1
    return counts, sum(t.stats.drafted for t in texts), sum(t.stats.accepted for t in texts)


@dataclass(frozen=True, slots=True)
class Trial:
    """What is sampled for a drafter: texts from `ids` after `prompt`, and the chance of each."""

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    distribution: dict[tuple[int, ...], float]


def prepare(subject: Subject, drafter: str) -> Trial:
    """The prompt, of the shortest few, and the tokens with which this drafter is kept most often."""
    trials = {p: allowed(subject, p, drafter) for p in sorted(set(subject.prompts), key=len)[:PROMPTS]}
    prompt = max(trials, key=lambda p: trials[p][1])
    return Trial(prompt, trials[prompt][0], exact_law(subject, prompt, trials[prompt][0]))


def try_rule(
    subject: Subject, asked: SamplingParams, trial: Trial, samples: int, seconds: float = float("inf")
) -> Sampled:
    """Draw about `samples` texts by the rule and drafter of `asked` and hold them against the exact distribution."""
    prompt, ids, distribution = trial.prompt, trial.ids, trial.distribution
    params = replace(
        asked, max_tokens=TOKENS, temperature=TEMPERATURE, allowed_token_ids=ids, ignore_eos=True,
        draft_tokens=TOKENS - 2,
    )  # fmt: skip
    texts = list(itertools.product(ids, repeat=TOKENS))
    counts = dict.fromkeys(texts, 0)
    drafted = accepted = done = 0
    strange = 0
    end = time.perf_counter() + seconds
    while done < samples and (not done or time.perf_counter() < end):
        size = min(256, samples - done)
        new, more, verdicts = sample(subject, prompt, replace(params, n=size, seed=done))
        drafted, accepted, done = drafted + more, accepted + verdicts, done + size
        for text, n in new.items():
            counts[text] = counts.get(text, 0) + n
            strange += n if text not in distribution else 0
    cells, chances = [*(counts[t] for t in texts), strange], [*(distribution[t] for t in texts), 0.0]
    away = sum(abs(n / done - p) for n, p in zip(cells, chances, strict=True)) / 2
    noise = sum(math.sqrt(p * (1 - p) / (2 * math.pi * done)) for p in chances)
    return Sampled(compare(cells, chances), drafted, accepted, away, noise)


def finding(rule: Rule, results: dict[str, Sampled]) -> Finding:
    """One rule with every drafter that was tried."""
    counts: dict[str, float] = {}
    for name, r in results.items():
        fit = r.fit
        counts |= {
            f"{name}: texts": fit.samples, f"{name}: chi-squared": fit.statistic, f"{name}: degrees": fit.freedom,
            f"{name}: p-value": fit.p_value, f"{name}: drafted": r.drafted, f"{name}: kept": r.accepted,
        }  # fmt: skip
    if rule == "typical":
        away = "; ".join(
            f"with {name} texts of {TOKENS} tokens are {r.away:.3f} away from the target's distribution in total "
            f"variation (exact samples, as many: {r.noise:.3f})" for name, r in results.items()
        )  # fmt: skip
        return Finding(
            f"distribution of {rule}", "refuted", f"lossy by its definition, never certified: {away}", counts
        )
    bad = [name for name, r in results.items() if r.fit.refuted]
    if bad:
        words = f"committed tokens do not follow the target's distribution with {', '.join(bad)}"
        return Finding(f"distribution of {rule}", "refuted", words, counts)
    idle = [name for name, r in results.items() if not 0 < r.accepted < r.drafted]
    if idle or not results:
        words = f"drafts of {', '.join(idle) or 'no drafter'} were never both kept and refused"
        return Finding(f"distribution of {rule}", "not shown", words, counts)
    fit = max((r.fit for r in results.values()), key=lambda f: f.detectable)
    words = (
        f"committed tokens follow the target's exact distribution; if {fit.detectable:.1%} of them came out otherwise, "
        f"this test would see it {fit.power:.0%} of the time (false alarms: {fit.alpha:.2%})"
    )
    return Finding(f"distribution of {rule}", "holds", words, counts)
