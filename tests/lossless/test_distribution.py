"""`reject` and `block` keep the target's distribution: counts of texts against enumeration; a liar must fail."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from paceline.core import Draft, SamplingParams
from paceline.drafters.base import DraftContext
from testing import VOCAB, RandomDrafter, Setup, TinyTarget, make_cache, make_engine

ALLOWED = (2, 5, 9)
PROMPT = [4, 6, 8, 10]
LENGTH, TEXTS = 3, 600
TEMPERATURE = 2.0


class Liar(RandomDrafter):
    """Always proposes the same token, and says that it was drawn from a uniform distribution."""

    name = "liar"

    def draft(self, context: DraftContext) -> Draft:
        distribution = torch.zeros(VOCAB, dtype=torch.float64)
        distribution[list(ALLOWED)] = 1 / len(ALLOWED)
        tokens = [[ALLOWED[1]] * k for k in context.limits]
        return Draft(tokens, [[0.3] * len(t) for t in tokens], [[distribution] * len(t) for t in tokens])


class TreeLiar(Liar):
    """As two siblings."""

    branches = True

    def draft(self, context: DraftContext) -> Draft:
        draft = super().draft(context)
        for row, tokens in enumerate(draft.tokens):
            draft.tokens[row] = [ALLOWED[1], ALLOWED[0]][: len(tokens)]
            draft.confidence[row] = [0.3] * len(draft.tokens[row])
            draft.q[row] = draft.q[row][: len(draft.tokens[row])]  # type: ignore[index]
        draft.parents = [[-1] * len(tokens) for tokens in draft.tokens]
        return draft


def exact_law() -> dict[tuple[int, ...], float]:
    target, distribution = TinyTarget(), {}
    for text in itertools.product(ALLOWED, repeat=LENGTH):
        cache = make_cache()
        cache.open(0, PROMPT)
        with cache.tail([(0, [*PROMPT, *text])]) as tail:
            logits = target.logits(target.forward(tail.rows(), cache))
        chance = 1.0
        for i, token in enumerate(text):
            row = logits[len(PROMPT) - 1 + i][list(ALLOWED)] / TEMPERATURE
            chance *= float(torch.softmax(row, 0)[ALLOWED.index(token)])
        distribution[text] = chance
    assert math.isclose(sum(distribution.values()), 1.0)
    return distribution


def p_value(counts: dict[tuple[int, ...], int], distribution: dict[tuple[int, ...], float]) -> float:
    """Chi-squared with cells of less than five expected texts pooled."""
    rare = [t for t, p in distribution.items() if p * TEXTS < 5]
    cells = [(counts.get(t, 0), p * TEXTS) for t, p in distribution.items() if t not in rare]
    if rare:
        cells.append(
            (sum(counts.get(t, 0) for t in rare), max(5.0, sum(distribution[t] for t in rare) * TEXTS))
        )
    x = sum((seen - want) ** 2 / want for seen, want in cells)
    return float(torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2.0), torch.tensor(x / 2)))


def sample(
    drafter: str, rule: str, lossy: bool = False, tree: tuple[int, int] | None = None
) -> tuple[dict[tuple[int, ...], int], int, int]:
    """(counts of texts, drafted, accepted)"""
    params = SamplingParams(
        max_tokens=LENGTH, temperature=TEMPERATURE, allowed_token_ids=ALLOWED, seed=12, n=TEXTS, verify=rule,  # type: ignore[arg-type]
    )  # fmt: skip
    setup = Setup(drafter=drafter, k=2 if tree is None else 6, tree=tree)
    engine = make_engine(setup, {"liar": Liar(), "tree liar": TreeLiar()}.get(drafter))
    counts: dict[tuple[int, ...], int] = {}
    drafted = accepted = 0
    for c in engine.run({"a": (PROMPT, params)})["a"]:
        counts[tuple(c.token_ids)] = counts.get(tuple(c.token_ids), 0) + 1
        drafted += c.stats.drafted
        accepted += c.stats.accepted
        assert c.stats.lossy == lossy
    return counts, drafted, accepted


CASES = [
    *itertools.product(("mtp", "model", "random"), ("match", "reject", "block")),
    ("lookahead", "reject"),
]


@pytest.mark.parametrize(("drafter", "rule"), CASES)
def test_texts_follow_the_exact_distribution(drafter: str, rule: str) -> None:
    counts, drafted, accepted = sample(drafter, rule)
    assert sum(counts.values()) == TEXTS
    assert drafted > accepted > 0
    assert p_value(counts, exact_law()) > 1e-5


def test_texts_of_trees_follow_it_too() -> None:
    counts, drafted, accepted = sample("mtp", "reject", tree=(2, 2))
    assert drafted > accepted > 0
    assert p_value(counts, exact_law()) > 1e-5


def test_a_tree_that_lies_about_its_distribution_is_noticed() -> None:
    counts, _, accepted = sample("tree liar", "reject", tree=(1, 2))
    assert accepted > 0
    assert p_value(counts, exact_law()) < 1e-9


@pytest.mark.parametrize("rule", ["reject", "block"])
def test_a_draft_that_lies_about_its_distribution_is_noticed(rule: str) -> None:
    counts, _, accepted = sample("liar", rule)
    assert accepted > 0
    assert p_value(counts, exact_law()) < 1e-9


def test_typical_is_lossy_and_says_so() -> None:
    counts, _, accepted = sample("liar", "typical", lossy=True)
    assert accepted > 0
    assert p_value(counts, exact_law()) < 1e-9


def test_a_greedy_text_is_the_targets_own_under_typical_too() -> None:
    texts = []
    for rule in ("match", "typical"):
        engine = make_engine(Setup(drafter="random", k=2))
        (done,) = engine.run({"a": (PROMPT, SamplingParams(max_tokens=24, verify=rule))})["a"]  # type: ignore[arg-type]
        assert done.stats.drafted > 0
        assert not done.stats.lossy
        texts.append(done.token_ids)
    assert texts[0] == texts[1]


def test_match_does_not_care_about_lies() -> None:
    counts, _, _ = sample("liar", "match")
    assert p_value(counts, exact_law()) > 1e-5
