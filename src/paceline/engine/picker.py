"""What is drafted in one round: tokens that drafters draw (sampler.py) until it is not worth going on (ops/rounds.py).

A tree grows level by level: of the tokens that may follow its branches the likeliest are taken, as its shape allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch

from paceline.control.acceptance import SIBLINGS
from paceline.core import MAX_DRAFT_TOKENS, OWN_NOISE, Draft
from paceline.drafters.base import Leaf
from paceline.engine.request import RequestState
from paceline.engine.sampler import DraftSampler
from paceline.ops.base import Rule, Stop, shared_chance, sigmoid
from paceline.ops.rounds import Ends
from paceline.sampling import noise
from paceline.sampling.candidates import best_tokens
from paceline.sampling.shape import LogitRow, is_greedy
from paceline.tree import Shape, path_to

GREEDY_POWER = 1.5  # of its probabilities, a drafter is surer than they say that the best token is


class _Child(NamedTuple):
    chance: float  # of its path
    sure: float  # that it is kept if the one before it is
    q: torch.Tensor | None
    leaf: Leaf


class StepPicker:
    """Picks for one draft round. Rows count from 0 in the order of `requests`."""

    def __init__(
        self, requests: list[RequestState], stops: list[Stop], vocab_size: int, trees: Seq[Shape | None] = ()
    ) -> None:
        """`trees`: how the draft of each row may branch; empty: none may."""
        self._sampler, self._ends = DraftSampler(requests, vocab_size), Ends(stops)
        self._requests, self._stops = requests, stops
        shapes = trees or [None] * len(requests)
        self._shapes = [shape or Shape(stop.limit, 1) for shape, stop in zip(shapes, stops, strict=True)]
        self._tokens: list[list[int]] = [[] for _ in requests]
        self._confidence: list[list[float]] = [[] for _ in requests]
        self._parents: list[list[int]] = [[] for _ in requests]  # of rows that `grow`,
        self._chances: list[list[float]] = [[] for _ in requests]  # products of confidences on the way there
        self._q: list[list[torch.Tensor | None] | None] = [
            None if request.rule in OWN_NOISE else [] for request in requests
        ]

    def pick(
        self,
        rows: Seq[int],
        step: int,
        logits: torch.Tensor,
        ids: torch.Tensor | None = None,
        sure: Seq[float] | None = None,
    ) -> list[int]:
        """Tokens for `rows` at draft position `step`; logits [b, V], or [b, C] of the candidates `ids` [b, C]."""
        shaping = [self._sampler.row_after(row, self._tokens[row]) for row in rows]
        drawn = self._sampler.draw(rows, shaping, step, logits, ids)
        for i, row in enumerate(rows):
            if row in self._sampler.ended:
                continue
            self._tokens[row].append(drawn.tokens[i])
            confidence = drawn.confidence[i]
            if sure is not None:
                shared = self._requests[row].rule in OWN_NOISE
                confidence = shared_chance(sure[i]) if shared else sigmoid(sure[i])
            self._confidence[row].append(confidence)
            distribution = self._q[row]
            if distribution is not None:
                distribution.append(drawn.q[i])
        return drawn.tokens

    def best(self, row: int, scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        rules = self.rules([row])
        return best_tokens(scores, count, None if rules is None else rules[0])

    def rules(self, rows: Seq[int]) -> list[Rule] | None:
        return self._sampler.rules(rows, [self._tokens[row] for row in rows])

    def stop(self, row: int) -> Stop:
        return self._ends.after(row, len(self._tokens[row]))

    def go_on(self, rows: Seq[int], step: int) -> list[int]:
        on = [row for row in rows if row not in self._sampler.ended]
        return self._ends.go_on(on, step, [self._confidence[row][step] for row in on])

    def width(self, row: int) -> int:
        return self._shapes[row].width if self._stops[row].limit > 1 else 1

    def grow(self, leaves: Seq[Leaf], logits: torch.Tensor, ids: torch.Tensor | None = None) -> list[Leaf]:
        rows = [leaf.row for leaf in leaves]
        paths = [path_to(self._parents[leaf.row], leaf.node) for leaf in leaves]
        shaping = [
            self._sampler.row_after(row, [self._tokens[row][j] for j in path])
            for row, path in zip(rows, paths, strict=True)
        ]
        counts = self._children(leaves)
        left = [1.0] * len(leaves)  # of the probability
        by_leaf: list[list[_Child]] = [[] for _ in leaves]
        for rank in range(max(counts)):
            drawn = self._sampler.draw(rows, shaping, len(paths[0]) + rank * MAX_DRAFT_TOKENS, logits, ids)
            for i, (leaf, token) in enumerate(zip(leaves, drawn.tokens, strict=True)):
                share = drawn.confidence[i]
                if rank < counts[i] and leaf.row not in self._sampler.ended and (share > 0 or not rank):
                    child = leaf._replace(token=token, source=i)
                    by_leaf[i].append(_Child(0.0, share * left[i], drawn.q[i], child))
                left[i] *= 1.0 - share
            tokens = torch.tensor(drawn.tokens, device=logits.device)[:, None]
            if ids is None:  # the next are drawn without them
                logits.scatter_(1, tokens, -math.inf)
            else:
                logits.masked_fill_(ids == tokens, -math.inf)
        levels: dict[int, list[_Child]] = {}
        for leaf, children, row in zip(leaves, by_leaf, shaping, strict=True):
            before, sure = self._chance(leaf), [child.sure for child in children]
            if self.prunes(leaf.row):
                sure = self._odds(row, children)
            level = levels.setdefault(leaf.row, [])
            level += [
                child._replace(chance=before * s, sure=s) for child, s in zip(children, sure, strict=True)
            ]
        deep = len(paths[0]) + 1
        return [leaf for row, level in levels.items() for leaf in self._take_level(row, level, deep)]

    def _odds(self, row: LogitRow, children: list[_Child]) -> list[float]:
        """How likely each child is the target's choice, which uses the same noise and nearly the same scores."""
        if is_greedy(row):
            weights = [child.sure**GREEDY_POWER for child in children]
        else:
            draws = [noise.scalar(row.seed, row.position, noise.TARGET, c.leaf.token) for c in children]
            weights = [child.sure / -math.log1p(-u) for child, u in zip(children, draws, strict=True)]
        whole = sum(weights)
        return [weight / whole if whole > 0 else 0.0 for weight in weights]

    def _chance(self, leaf: Leaf) -> float:
        """That all tokens on the way to it are kept, about."""
        return self._chances[leaf.row][leaf.node] if leaf.node >= 0 else 1.0

    def prunes(self, row: int) -> bool:
        """Whether tokens of the draft may be left out by value. Not under rules that judge them by their distribution."""
        request = self._requests[row]
        return request.rule in OWN_NOISE or is_greedy(request.sequence)

    def _deepest(self, row: int) -> int:
        return min(self._shapes[row].depth, self._stops[row].limit)

    def _children(self, leaves: Seq[Leaf]) -> list[int]:
        """How many tokens to draw after each leaf."""
        counts = [self.width(leaf.row) if self.prunes(leaf.row) else 0 for leaf in leaves]
        shares = (1.0, *SIBLINGS)
        for row in {leaf.row for leaf in leaves if not self.prunes(leaf.row)}:
            own = [i for i, leaf in enumerate(leaves) if leaf.row == row]
            level = len(path_to(self._parents[row], leaves[own[0]].node)) + 1
            left = self._stops[row].limit - len(self._tokens[row]) - (self._deepest(row) - level)
            tries = [
                (-self._chance(leaves[i]) * share, i) for i in own for share in shares[: self.width(row)]
            ]
            for _, i in sorted(tries)[: max(1, min(self.width(row), left))]:
                counts[i] += 1
        return counts

    def _take_level(self, row: int, children: list[_Child], deep: int) -> list[Leaf]:
        """Take the best of a level into the draft; those of them that may go on, which must not be in vain: a token is
        never likelier than the one before it.
        """
        stop, chances = self._stops[row], self._chances[row]
        limit, least = stop.limit, stop.price if stop.chance else 0.0
        if self.prunes(row):
            children = sorted(children, key=lambda child: -child.chance)[: self.width(row)]
            children = [c for i, c in enumerate(children) if c.chance > least or not (i or chances)]
        out = []
        for child in children:
            out.append(child.leaf._replace(node=len(self._tokens[row])))
            self._tokens[row].append(child.leaf.token)
            self._parents[row].append(child.leaf.node)
            self._confidence[row].append(child.sure)
            chances.append(child.chance)
            if (q := self._q[row]) is not None:
                q.append(child.q)
        if deep >= self._deepest(row):
            return []
        if not self.prunes(row):
            return out if len(chances) < limit else []
        if len(chances) >= limit:
            least = max(least, sorted(chances)[-limit])
        return [leaf for leaf in out if chances[leaf.node] > least]

    def take(self, row: int, tokens: list[int], confidence: list[float]) -> None:
        self._tokens[row] += tokens
        self._confidence[row] += confidence

    def draft(self, drafter: str) -> Draft:
        reasons = [None if tokens else "no proposal" for tokens in self._tokens]
        draft = Draft(self._tokens, self._confidence, self._q, list(reasons), [drafter] * len(self._requests))
        if any(self._parents):
            draft.parents = [parents or None for parents in self._parents]
            for row, (chances, stop) in enumerate(zip(self._chances, self._stops, strict=True)):
                if len(chances) > stop.limit:  # a token's chance is never above that of the one before it
                    best = sorted(range(len(chances)), key=lambda node: (-chances[node], node))[: stop.limit]
                    draft.select(row, sorted(best))
        return draft
