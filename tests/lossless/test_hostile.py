"""What third parties do to the engine: drafters with false distributions, constraints that end early or break."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.core import Completion, Draft, SamplingParams
from paceline.drafters.base import DraftContext
from paceline.errors import RequestFailed
from testing import EOS, VOCAB, RandomDrafter, Setup, make_engine, prompts, run


def distributions(context: DraftContext, make: Any) -> Draft:
    tokens = [[2 + i % 3] * k for i, k in enumerate(context.limits)]
    return Draft(
        tokens, [[0.5] * len(t) for t in tokens], [make(t) for t in tokens], [], ["liar"] * len(tokens)
    )


NONSENSE = {
    "too few": lambda tokens: [torch.full((VOCAB,), 1 / VOCAB)] * (len(tokens) - 1),
    "not a number": lambda tokens: [torch.full((VOCAB,), torch.nan)] * len(tokens),
    "no distribution": lambda tokens: [torch.zeros(VOCAB)] * len(tokens),
    "negative": lambda tokens: [torch.linspace(-1, 1, VOCAB)] * len(tokens),
    "two-dimensional": lambda tokens: [torch.full((1, VOCAB), 1 / VOCAB)] * len(tokens),
}


@pytest.mark.parametrize("rule", ["reject", "block"])
@pytest.mark.parametrize("name", NONSENSE)
def test_a_distribution_that_is_none_parks_the_drafter_and_nothing_else(name: str, rule: Any) -> None:
    class Liar(RandomDrafter):
        name = "liar"

        def draft(self, context: DraftContext) -> Draft:
            return distributions(context, NONSENSE[name])

    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, verify=rule)
    texts = prompts(2, seed=3)
    done = run(make_engine(Setup(), Liar()), texts, params)
    plain = run(make_engine(Setup()), texts, params)
    assert [c.token_ids for c in done] == [c.token_ids for c in plain]
    assert all(any(r.startswith("drafter failed") for r in c.stats.reasons) for c in done)


class Ends:
    """Allows `length` tokens, then only the end."""

    def __init__(self, length: int) -> None:
        self._length, self._done = length, 0

    def masks(self, draft: Seq[int]) -> list[np.ndarray | None]:
        return [self._mask(self._done + j) for j in range(len(draft) + 1)]

    def _mask(self, at: int) -> np.ndarray | None:
        mask = np.ones(VOCAB, dtype=bool)
        mask[EOS] = False
        return mask if at < self._length else ~mask

    def commit(self, tokens: Seq[int]) -> None:
        self._done += len(tokens)


@pytest.mark.parametrize("drafter", ["none", "oracle"])
def test_a_constraint_that_ends_before_min_tokens_ends_the_text(drafter: str) -> None:
    params = SamplingParams(max_tokens=30, min_tokens=20, constraint=lambda: Ends(7))
    (prompt,) = prompts(1, seed=3)
    free = run(make_engine(Setup(eos=(EOS,))), [prompt], params)[0].token_ids
    setup = Setup(eos=(EOS,), drafter=drafter, k=8, texts=[prompt + free + [EOS] * 9])
    (done,) = run(make_engine(setup), [prompt], params)
    assert done.token_ids.count(EOS) == 1
    assert (len(done.token_ids), done.finish_reason) == (8, "stop")


def test_a_constraint_that_breaks_ends_its_own_text_only() -> None:
    class Breaks(Ends):
        def commit(self, tokens: Seq[int]) -> None:
            super().commit(tokens)
            if self._done > 4:
                raise RequestFailed("it broke")

    texts = prompts(3, seed=5)
    plain = run(make_engine(Setup()), texts, SamplingParams(max_tokens=16))
    each = [
        SamplingParams(max_tokens=16, constraint=(lambda: Breaks(99)) if i == 1 else None) for i in range(3)
    ]
    done = run(make_engine(Setup(drafter="mtp")), texts, each)
    assert [c.finish_reason for c in done] == ["length", "error", "length"]
    assert "it broke" in (done[1].error or "")
    assert [done[i].token_ids for i in (0, 2)] == [plain[i].token_ids for i in (0, 2)]


class Looks(Ends):
    """Free, but `masks` fails once `fails(tokens written, tokens looked ahead)` says so."""

    def __init__(self, fails: Callable[[int, int], bool], answer: Any = None) -> None:
        super().__init__(99)
        self._fails, self._answer = fails, answer

    def masks(self, draft: Seq[int]) -> list[np.ndarray | None]:
        if not self._fails(self._done, len(draft)):
            return [None] * (len(draft) + 1)
        if self._answer is not None:
            return self._answer
        raise ValueError("it cannot look")


DRAFTERS = ["none", "mtp", "model", "ngram", "random", "oracle"]


def beside(
    setup: Setup, middle: Callable[[], Looks], **params: Any
) -> tuple[list[Completion], list[Completion]]:
    """Three texts of which the second has a constraint, and the same without."""
    texts = prompts(3, seed=5)
    each = [SamplingParams(max_tokens=16, seed=i, **params) for i in range(3)]
    plain = run(make_engine(Setup()), texts, each)
    setup.texts = [t + c.token_ids for t, c in zip(texts, plain, strict=True)]
    each[1] = replace(each[1], constraint=middle)
    return run(make_engine(setup), texts, each), plain


@pytest.mark.parametrize("rule", ["match", "reject", "block"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_masks_that_raise_end_their_own_text_only(drafter: str, rule: Any) -> None:
    setup = Setup(drafter=drafter, verify=rule)
    done, plain = beside(setup, lambda: Looks(lambda written, _: written > 4), temperature=0.0)
    assert [c.finish_reason for c in done] == ["length", "error", "length"]
    assert done[1].error == "the constraint failed: it cannot look"
    for i in (0, 2):
        assert done[i].token_ids == plain[i].token_ids
        assert not any(reason.startswith("drafter failed") for reason in done[i].stats.reasons)
    assert done[1].token_ids == plain[1].token_ids[: len(done[1].token_ids)]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_constraint_that_fails_only_on_drafts_fails_no_text(drafter: str, temperature: float) -> None:
    done, plain = beside(
        Setup(drafter=drafter),
        lambda: Looks(lambda written, ahead: written > 3 and ahead > 1),
        temperature=temperature,
    )
    assert [c.token_ids for c in done] == [c.token_ids for c in plain]
    assert [c.finish_reason for c in done] == ["length"] * 3


@pytest.mark.parametrize("drafter", ["none", "mtp", "model"])
def test_a_row_whose_constraint_fails_is_drafted_for_no_further(drafter: str) -> None:
    """Its neighbours' drafts are as long as without it, and its drafter is not parked."""
    setup = Setup(drafter=drafter)
    done, _ = beside(setup, lambda: Looks(lambda _, ahead: ahead > 1))
    calm, _ = beside(setup, lambda: Looks(lambda *_: False))
    for i in (0, 2):
        assert done[i].stats.drafted_by_position == calm[i].stats.drafted_by_position
    assert not any(reason.startswith("drafter failed") for c in done for reason in c.stats.reasons)


@pytest.mark.parametrize("drafter", ["none", "mtp"])
@pytest.mark.parametrize(
    "answer",
    [[], [None] * 99, [np.zeros(VOCAB, bool)] * 99, [[True] * VOCAB], [np.ones((1, VOCAB), bool)], 7, [np.ones(0, bool)]],
    ids=["nothing", "too many", "far too many", "lists", "two-dimensional", "a number", "no vocabulary"],
)  # fmt: skip
def test_masks_that_are_none_end_their_own_text_only(answer: Any, drafter: str) -> None:
    done, plain = beside(Setup(drafter=drafter), lambda: Looks(lambda written, _: written > 2, answer))
    assert [c.finish_reason for c in done] == ["length", "error", "length"]
    assert (done[1].error or "").startswith("the constraint failed: ")
    assert [done[i].token_ids for i in (0, 2)] == [plain[i].token_ids for i in (0, 2)]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_constraint_that_allows_nothing_says_so(drafter: str) -> None:
    class Shuts(Ends):
        def _mask(self, at: int) -> np.ndarray:
            return np.full(VOCAB, at < 3)

    done, plain = beside(Setup(drafter=drafter), lambda: Shuts(0))  # type: ignore[arg-type,return-value]
    assert done[1].error == "the constraint failed: it allows no token here"
    assert done[1].token_ids == plain[1].token_ids[:3]
    assert [done[i].token_ids for i in (0, 2)] == [plain[i].token_ids for i in (0, 2)]


def test_an_engine_goes_on_after_a_constraint_that_failed() -> None:
    engine = make_engine(Setup(drafter="mtp"))
    (prompt,) = prompts(1, seed=5)
    bad = SamplingParams(max_tokens=8, constraint=lambda: Looks(lambda *_: True))
    assert run(engine, [prompt], bad)[0].finish_reason == "error"
    free = engine.state.cache.open_sequences
    good = run(engine, [prompt], SamplingParams(max_tokens=8))[0]
    assert (free, good.finish_reason, len(good.token_ids)) == (0, "length", 8)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_scores_that_are_no_numbers_end_a_text_where_they_do_without_a_drafter(drafter: str) -> None:
    (prompt,) = prompts(1, seed=5)
    params = SamplingParams(max_tokens=16, temperature=0.9, seed=2)
    plain = run(make_engine(Setup()), [prompt], params)[0].token_ids
    poison = next(t for t in plain[4:] if t not in prompt)
    setup = Setup(drafter=drafter, poison=poison, texts=[prompt + plain])
    (done,) = run(make_engine(setup), [prompt], params)
    assert done.finish_reason == "error"
    assert done.token_ids == plain[: plain.index(poison) + 1]
