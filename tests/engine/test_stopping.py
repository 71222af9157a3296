"""Stopping a draft by what was drawn before is exact under `reject` and `block`; dropping a drawn token is not."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from odds import Odds, block_odds, reject_odds
from paceline.sampling.verify import residual

V, LENGTH = 3, 3
Stop = Callable[[tuple[int, ...]], bool]  # of the tokens drawn so far: draft no more


def distributions(seed: int) -> dict[tuple[int, ...], torch.Tensor]:
    """A distribution over V tokens for every text of up to LENGTH tokens."""
    g = torch.Generator().manual_seed(seed)
    texts = [t for n in range(LENGTH + 1) for t in itertools.product(range(V), repeat=n)]
    return {t: torch.softmax(1.5 * torch.randn(V, generator=g, dtype=torch.float64), 0) for t in texts}


def drafts(q: dict[tuple[int, ...], torch.Tensor], stop: Stop) -> dict[tuple[int, ...], float]:
    """Chance of every draft of a drafter that asks `stop` after each token."""
    done: dict[tuple[int, ...], float] = {}
    open_: dict[tuple[int, ...], float] = {(): 1.0}
    while open_:
        text, chance = open_.popitem()
        if len(text) == LENGTH - 1 or stop(text):
            done[text] = chance
        else:
            open_ |= {(*text, t): chance * float(q[text][t]) for t in range(V)}
    return done


def first_two(
    p: dict[tuple[int, ...], torch.Tensor],
    q: dict[tuple[int, ...], torch.Tensor],
    rule: Callable[..., Odds],
    drawn: dict[tuple[int, ...], float],
) -> dict[tuple[int, ...], float]:
    """Distribution of the first two tokens, by one step and, where it emits one only, the target alone after it."""
    out = dict.fromkeys(itertools.product(range(V), repeat=2), 0.0)
    for draft, chance in drawn.items():
        laws_p = torch.stack([p[draft[:i]] for i in range(len(draft) + 1)])
        laws_q = [q[draft[:i]] for i in range(len(draft))]
        odds = rule(laws_p, laws_q, list(draft))
        for kept, share in enumerate(odds.kept):
            if kept == len(draft):
                after = laws_p[kept]
            else:
                after = residual(laws_p[kept], laws_q[kept], draft[kept], odds.weight[kept])
            for token in range(V):
                text, mass = (*draft[:kept], token), chance * share * float(after[token])
                if len(text) >= 2:
                    out[text[:2]] += mass
                else:
                    for last in range(V):
                        out[text[0], last] += mass * float(p[text][last])
    return out


def distance(
    rule: Callable[..., Odds], drawn: Callable[..., dict[tuple[int, ...], float]], seed: int
) -> float:
    p, q = distributions(seed), distributions(seed + 100)
    got = first_two(p, q, rule, drawn(q))
    exact = {t: float(p[()][t[0]] * p[t[:1]][t[1]]) for t in got}
    return sum(abs(got[t] - exact[t]) for t in got) / 2


@pytest.mark.parametrize("rule", [reject_odds, block_odds])
@pytest.mark.parametrize("seed", range(4))
def test_stopping_by_earlier_tokens_is_exact(rule: Callable[..., Odds], seed: int) -> None:
    def unsure(q: dict[tuple[int, ...], torch.Tensor]) -> dict[tuple[int, ...], float]:
        return drafts(q, lambda text: bool(text) and float(q[text[:-1]][text[-1]]) < 0.4)

    assert distance(rule, unsure, seed) < 1e-12


@pytest.mark.parametrize("rule", [reject_odds, block_odds])
def test_dropping_a_token_after_seeing_it_is_biased(rule: Callable[..., Odds]) -> None:
    def dropped(q: dict[tuple[int, ...], torch.Tensor]) -> dict[tuple[int, ...], float]:
        out: dict[tuple[int, ...], float] = {}
        for text, chance in drafts(q, lambda t: False).items():
            keep = next((i for i, t in enumerate(text) if float(q[text[:i]][t]) < 0.4), len(text))
            out[text[:keep]] = out.get(text[:keep], 0.0) + chance
        return out

    assert max(distance(rule, dropped, seed) for seed in range(4)) > 0.01
