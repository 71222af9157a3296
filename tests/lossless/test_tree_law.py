"""`reject` on trees keeps the target's distribution: by enumeration (test_distribution.py counts texts)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paceline.core import SamplingParams
from paceline.sampling.verify import Uniforms, siblings, verify_reject, verify_typical

SIZE = 3  # tokens
Group = list[tuple[int, torch.Tensor]]  # siblings in the order drawn, each with what it was drawn from


def laws(seed: int) -> dict[tuple[int, ...], torch.Tensor]:
    """A distribution after each text of up to two tokens."""
    g = torch.Generator().manual_seed(seed)
    texts = [t for n in range(3) for t in itertools.product(range(SIZE), repeat=n)]
    return {t: torch.softmax(2 * torch.randn(SIZE, generator=g, dtype=torch.float64), 0) for t in texts}


def groups(q: torch.Tensor, count: int, *, again: bool = False) -> Iterator[tuple[float, Group]]:
    """All draws of so many siblings with their chances, each without those before it; `again`: as if with them."""
    if not count:
        yield 1.0, []
        return
    for token in range(SIZE):
        rest = q.clone()
        rest[token] = 0
        for chance, group in groups(rest / rest.sum(), count - 1, again=again):
            got = [(t, q if again else own) for t, own in group]
            yield float(q[token]) * chance, [(token, q), *got]


def after(group: Group, token: int) -> int:
    """Children of a token: it depends on all that was drawn before them."""
    return 2 if (token + group[0][0]) % 2 else 1


def written(seed: int, *, again: bool = False, drops: bool = False) -> dict[tuple[int, ...], float]:
    """The distribution of the first two tokens that a round writes, completed by p where it writes fewer."""
    p, q = laws(seed), laws(seed + 1000)
    out = dict.fromkeys(itertools.product(range(SIZE), repeat=2), 0.0)
    for chance, first in groups(q[()], 2, again=again):
        if drops and first[1][0] == 2:  # a sibling that is left out for what it is
            first = first[:1]
        below = [list(groups(q[(token,)], after(first, token), again=again)) for token, _ in first]
        for choice in itertools.product(*below):
            parents, tokens, own = [], [], []
            for (token, law), (_, group) in zip(first, choice, strict=True):
                place = len(tokens)
                tokens += [token, *(t for t, _ in group)]
                parents += [-1] + [place] * len(group)
                own += [law, *(d for _, d in group)]
            weight = chance * float(torch.tensor([c for c, _ in choice], dtype=torch.float64).prod())
            for path, share, end in outcomes(p, own, tokens, parents):
                text = tuple(tokens[j] for j in path)
                for last in range(SIZE):
                    for more in range(SIZE):
                        whole = (*text, last, more)[:2]
                        rest = float(p[(last,)][more]) if not text else 1 / SIZE
                        out[whole] += weight * share * float(end[last]) * rest
    return out


def outcomes(
    p: dict[tuple[int, ...], torch.Tensor], q: list[torch.Tensor], tokens: list[int], parents: list[int]
) -> Iterator[tuple[list[int], float, torch.Tensor]]:
    """What may become of a tree: (path, chance, law of the next token). Also asks `verify_reject` each time."""
    rows = [()] + [tuple(tokens[j] for j in path_of(parents, node)) for node in range(len(tokens))]
    stacked = torch.stack([p[row] for row in rows])

    def go(node: int, path: list[int], chance: float, accept: list[float]) -> Any:
        children = [j for j, parent in enumerate(parents) if parent == node]
        ratios, end = siblings(stacked[node + 1], q, tokens, children)
        for j, ratio in zip(children, ratios, strict=True):
            kept = min(ratio, 1.0)
            if kept > 0:
                yield from go(j, [*path, j], chance * kept, swapped(accept, j, 0.5 * kept))
            chance, accept = chance * (1 - kept), swapped(accept, j, 0.5 + 0.5 * kept)
        if chance > 0:
            found = verify_reject(stacked, q, tokens, Uniforms(accept, [0.5] * (len(tokens) + 1)), parents)
            assert found.path == path
            assert end[found.next_token] > 0
            yield path, chance, end

    return go(-1, [], 1.0, [0.5] * len(tokens))


def swapped(values: list[float], at: int, value: float) -> list[float]:
    return [value if i == at else v for i, v in enumerate(values)]


def path_of(parents: list[int], node: int) -> list[int]:
    return [] if node < 0 else [*path_of(parents, parents[node]), node]


def away(seed: int, **how: bool) -> float:
    p = laws(seed)
    found = written(seed, **how)
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-12)
    return max(abs(found[a, b] - float(p[()][a] * p[(a,)][b])) for a, b in found)


def test_every_tree_enumerated() -> None:
    for seed in range(2):
        assert away(seed) < 1e-12


def test_enumeration_notices_what_is_wrong() -> None:
    assert max(away(seed, again=True) for seed in range(2)) > 1e-3  # reported as if siblings were put back
    assert max(away(seed, drops=True) for seed in range(2)) > 1e-3


def test_typical_follows_its_own_token_first_then_a_likely_one() -> None:
    p = torch.tensor(
        [[0.5, 0.4, 0.1], [0.2, 0.7, 0.1], [0.1, 0.1, 0.8], [0.3, 0.3, 0.4]], dtype=torch.float64
    )
    draft, parents, params = [1, 2, 0], [-1, 0, -1], SamplingParams(typical_epsilon=0.3, typical_delta=1.0)
    assert verify_typical(p, [0, 1, 1, 2], draft, params, parents).path == [2]
    found = verify_typical(p, [2, 2, 1, 2], draft, params, parents)
    assert (found.path, found.next_token) == ([0, 1], 1)
