"""Whether drafts are those of a clean start. A wrong one changes no text, it only costs speed: nothing else shows it.

What a drafter that reads the target's cache and hidden state, or keeps a cache of its own, proposed in the midst of
a batch is held against what it says of the same text computed alone, from its beginning, step by step: Gemma 4's
assistant at one constant position, with the hidden state of the last token whose K/V are committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple
from uuid import uuid4

import torch

from paceline.check.certificate import Divergence, Finding
from paceline.check.crash import Where, over
from paceline.check.scenes import CHURN, TOGETHER, UNSHARED, play
from paceline.check.subject import Subject
from paceline.core import SamplingParams, Sequence
from paceline.drafters.assistant import MTPDrafter
from paceline.drafters.base import DraftContext, Drafter, Kept
from paceline.drafters.contract import GreedyPicker
from paceline.drafters.draft_model import ModelDrafter
from paceline.drafters.translated import TranslatedDrafter
from paceline.kv.cache import KVCache
from paceline.models.drafters.base import FINAL
from paceline.sampling.draw import greedy

NAME = "drafts of a clean start"
_ID = -107  # sequence ids of ours
LOOSE = 0.2  # share of drafts that may differ where the forward is not bit-exact

Clean = tuple[list[int], float]  # a draft, and the smallest gap of the two best scores on its way


@dataclass(slots=True)
class Compared:
    drafts: int = 0
    tokens: int = 0
    different: int = 0
    first: Divergence | None = None


Results = dict[str, Compared]  # by drafter


def of(subject: Subject) -> dict[str, Drafter]:
    """The drafters that have a state, by name."""
    all_of_them = subject.engine.state.drafters.items()
    kinds = (MTPDrafter, ModelDrafter, TranslatedDrafter)
    return {n: d for n, d in all_of_them if isinstance(d, kinds) or d.taps}


def measure(
    subject: Subject, texts: int = 6, length: int = 40, noise_floor: float = 0.0, out: Results | None = None
) -> Results:
    """Compare greedy drafts of each drafter that has a state, in every scene; adds to `out`. Raises Broken."""
    out = out if out is not None else {}
    state = subject.engine.state
    tree, state.tree = state.tree, None  # a clean start drafts chains
    try:
        _measure(subject, texts, length, noise_floor, out)
    finally:
        state.tree = tree
    return out


def _measure(subject: Subject, texts: int, length: int, noise_floor: float, out: Results) -> None:
    """Of so many texts at once, of so many tokens each."""
    for name, drafter in of(subject).items():
        out[name] = Compared()
        params = SamplingParams(max_tokens=length, ignore_eos=True, drafter=name, draft_tokens=4)
        for turn, scene in enumerate((UNSHARED, CHURN, TOGETHER)):
            prompts = [subject.prompts[(turn * texts + i) % len(subject.prompts)] for i in range(texts)]
            with over(partial(_where, subject, params, f"{texts} texts {scene.name}", prompts[0])):
                outputs = play(subject, [(p, params) for p in prompts], scene)
            for prompt, output in zip(prompts, outputs, strict=True):
                with over(partial(_where, subject, params, "1 text from a clean start", prompt)):
                    _compare(
                        subject, drafter, Story(prompt, output.tokens, output.drafts), out[name], noise_floor
                    )


def _where(subject: Subject, params: SamplingParams, batch: str, prompt: Seq[int]) -> Where:
    asked = f"{params.drafter} drafting {params.draft_tokens}"
    return {"drafter": asked, "batch": batch, "temperature": "0", "prompt": subject.excerpt(prompt)}


class Story(NamedTuple):
    """A text that was written with drafts."""

    prompt: Seq[int]
    answer: list[int]
    drafts: list[tuple[int, list[int]]]  # (tokens of the answer before it, a draft)


def _compare(subject: Subject, drafter: Drafter, story: Story, out: Compared, noise_floor: float) -> None:
    prompt, answer, drafts = story
    texts = [[*prompt, *answer[:at]] for at, _ in drafts]
    clean = (
        _clean_mtp(subject, drafter, texts)
        if isinstance(drafter, MTPDrafter)
        else _clean_model(drafter, texts)
        if isinstance(drafter, ModelDrafter)
        else _clean_text(drafter, texts)
        if isinstance(drafter, TranslatedDrafter)
        else _clean_told(subject, drafter, texts)
    )
    for (at, draft), again in zip(drafts, clean, strict=True):
        right, gap = again(len(draft))
        out.drafts, out.tokens = out.drafts + 1, out.tokens + len(draft)
        if draft != right:
            out.different += 1
            if out.first is None:
                j = next(i for i, (a, b) in enumerate(zip(right, draft, strict=True)) if a != b)
                out.first = Divergence(
                    case=f"draft of {drafter.name} after {at} tokens", position=at + j, plain_token=right[j],
                    other_token=draft[j], plain_text=subject.decode(right), other_text=subject.decode(draft),
                    gap=gap, noise_floor=noise_floor, kind="near-tie" if gap < 4 * noise_floor else "bug",
                    what="the draft is not the one that the drafter makes of this text from a clean start",
                )  # fmt: skip


def _clean_mtp(
    subject: Subject, drafter: MTPDrafter, texts: Seq[list[int]]
) -> Iterator[Callable[[int], Clean]]:
    """For each text, a longer one each time, a function of the draft length."""
    target, cache = subject.engine.state.target, subject.engine.state.cache
    hidden: torch.Tensor | None = None

    def draft(text: list[int], count: int) -> Clean:
        nonlocal hidden
        done = cache.committed(_ID)
        if done < len(text) - 1:
            with cache.tail([(_ID, text[done:-1])]) as tail:
                hidden = target.forward(tail.rows(target.device), cache)[-1:].clone()
                tail.commit([len(text) - 1 - done])
        assert hidden is not None, "a text has a beginning"
        token, state, gap = text[-1], hidden, float("inf")
        out: list[int] = []
        for _ in range(count):
            with cache.tail([(_ID, [token])]) as tail:  # never committed: the position stays
                step = drafter.net.step(tail.rows(target.device), state, cache)
            state, gap = step.hidden.clone(), min(gap, _gap(step.logits))
            token = int(greedy(step.logits, step.ids)[0])
            out.append(token)
        return out, gap

    yield from _each(cache, texts, draft)


def _clean_model(drafter: ModelDrafter, texts: Seq[list[int]]) -> Iterator[Callable[[int], Clean]]:
    model, cache = drafter.model, drafter.cache

    def draft(text: list[int], count: int) -> Clean:
        done = cache.committed(_ID)
        with cache.tail([(_ID, text[done:-1])]) as tail:
            if done < len(text) - 1:
                model.forward(tail.rows(model.device), cache)
            tail.commit([len(text) - 1 - done])
        out, gap = [text[-1]], float("inf")
        for _ in range(count):
            with cache.tail([(_ID, out)]) as tail:
                hidden = model.forward(tail.rows(model.device), cache)[-1:]
                logits = model.logits(hidden)[:, : drafter.vocab_size]
            out.append(int(greedy(logits, None)[0]))
            gap = min(gap, _gap(logits))
        return out[1:], gap

    yield from _each(cache, texts, draft)


class _Gaps(GreedyPicker):
    """Keeps the smallest gap of the two best scores."""

    gap = float("inf")

    def pick(
        self,
        rows: Seq[int],
        step: int,
        logits: torch.Tensor,
        ids: torch.Tensor | None = None,
        sure: Seq[float] | None = None,
    ) -> list[int]:
        self.gap = min(self.gap, _gap(logits))
        return super().pick(rows, step, logits, ids, sure)


def _clean_text(drafter: TranslatedDrafter, texts: Seq[list[int]]) -> Iterator[Callable[[int], Clean]]:
    """Each text read anew, from its beginning."""

    def draft(text: list[int], count: int) -> Clean:
        sequence = Sequence(_ID, list(text), 0, SamplingParams(), 0, salt=uuid4().hex)
        context = DraftContext([sequence], [count], [0], None, [False], drafter.cache, GreedyPicker(1))
        try:
            return drafter.draft(context).tokens[0], float("inf")
        finally:
            drafter.forget(_ID)

    for text in texts:
        yield lambda count, text=text: draft(text, count)  # type: ignore[misc]


def _clean_told(
    subject: Subject, drafter: Drafter, texts: Seq[list[int]]
) -> Iterator[Callable[[int], Clean]]:
    """As a text of its own, which shares nothing that is remembered."""
    target, cache = subject.engine.state.target, subject.engine.state.cache
    sequence = Sequence(_ID, list(texts[0]) if texts else [], 0, SamplingParams(), 0, salt=uuid4().hex)

    def draft(text: list[int], count: int) -> Clean:
        done = cache.committed(_ID)
        sequence.tokens[:], sequence.committed = text, len(text) - 1
        if done < len(text) - 1:
            with cache.tail([(_ID, text[done:-1])]) as tail:
                states = target.states(tail.rows(target.device), cache)
                taps = [states[0 if tap == FINAL else 1 + target.tapped.index(tap)] for tap in drafter.taps]
                tail.commit([len(text) - 1 - done])
            drafter.on_commit([Kept(sequence, done, taps)])
        picker = _Gaps(1)
        context = DraftContext([sequence], [count], [cache.slot(_ID)], None, [False], cache, picker)
        return drafter.draft(context).tokens[0], picker.gap

    if texts:
        drafter.begin(sequence)
        try:
            yield from _each(cache, texts, draft)
        finally:
            drafter.forget(_ID)


def _each(
    cache: KVCache, texts: Seq[list[int]], draft: Callable[[list[int], int], Clean]
) -> Iterator[Callable[[int], Clean]]:
    """Keep a sequence open while its texts are gone through."""
    if not texts:
        return
    cache.open(_ID, texts[0], share=False)
    try:
        for text in texts:
            yield lambda count, text=text: draft(text, count)  # type: ignore[misc]
    finally:
        cache.close(_ID)


def _gap(logits: torch.Tensor) -> float:
    best = logits[0].float().topk(2).values
    return float(best[0] - best[1])


def finding(results: dict[str, Compared], *, exact: bool) -> Finding:
    """Any difference refutes where the forward is bit-exact; elsewhere rounding may change a few drafts."""
    counts: dict[str, float] = {}
    for name, r in results.items():
        counts |= {
            f"{name}: drafts": r.drafts,
            f"{name}: tokens": r.tokens,
            f"{name}: different": r.different,
        }
    bad = [n for n, r in results.items() if r.different > (0 if exact else LOOSE * r.drafts)]
    if bad:
        return Finding(NAME, "refuted", f"{', '.join(bad)} drafts from a state that is not its own",
                       counts, results[bad[0]].first)  # fmt: skip
    idle = [n for n, r in results.items() if not r.drafts]
    if idle:
        return Finding(NAME, "not shown", f"{', '.join(idle)} never drafted", counts)
    words = (
        "every draft was the one of a clean start"
        if exact
        else "drafts differ from a clean start by rounding only"
    )
    return Finding(NAME, "holds", words, counts)
