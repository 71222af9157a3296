"""What strangers do to the engine: drafters with false laws, constraints that end early or break."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest
import torch

from paceline.core import Draft, SamplingParams
from paceline.drafters.base import DraftContext
from paceline.errors import RequestFailed
from testing import EOS, VOCAB, RandomDrafter, Setup, make_engine, prompts, run


def laws(context: DraftContext, make: Any) -> Draft:
    tokens = [[2 + i % 3] * k for i, k in enumerate(context.limits)]
    return Draft(
        tokens, [[0.5] * len(t) for t in tokens], [make(t) for t in tokens], [], ["liar"] * len(tokens)
    )


NONSENSE = {
    "too few": lambda tokens: [torch.full((VOCAB,), 1 / VOCAB)] * (len(tokens) - 1),
    "not a number": lambda tokens: [torch.full((VOCAB,), torch.nan)] * len(tokens),
    "no law": lambda tokens: [torch.zeros(VOCAB)] * len(tokens),
    "negative": lambda tokens: [torch.linspace(-1, 1, VOCAB)] * len(tokens),
    "two-dimensional": lambda tokens: [torch.full((1, VOCAB), 1 / VOCAB)] * len(tokens),
}


@pytest.mark.parametrize("rule", ["reject", "block"])
@pytest.mark.parametrize("name", NONSENSE)
def test_a_law_that_is_none_parks_the_drafter_and_nothing_else(name: str, rule: Any) -> None:
    class Liar(RandomDrafter):
        name = "liar"

        def draft(self, context: DraftContext) -> Draft:
            return laws(context, NONSENSE[name])

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
