"""Draws the tokens of a draft for the drafters that score tokens, as each row's request samples.

Under `match` a draft token is drawn with the very noise that the target will use at its position: equal distributions
give equal tokens (arXiv 2408.07978). Under `reject` and `block` it must be drawn with noise of its own, and comes with
the distribution that it was drawn from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from paceline.control.acceptance import SIBLINGS
from paceline.control.allocation import should_continue
from paceline.control.confidence import worth_of
from paceline.core import MAX_DRAFT_TOKENS, OWN_NOISE, Constraint, Draft
from paceline.drafters.base import Leaf
from paceline.engine.request import RequestState
from paceline.ops.base import Rule, Stop
from paceline.sampling import noise
from paceline.sampling.choose import Proposal, choose_candidates, rule_of
from paceline.sampling.shape import LogitRow, is_edited, is_greedy
from paceline.tree import Shape, branches, path_to


class ConstraintFailed(Exception):
    """A request's constraint raised, or its answer is none. It ends its own text only: see verify.py."""


def logit_rows(request: RequestState, draft: list[int]) -> list[LogitRow]:
    """What shapes the logits after the text, after its first draft token, ..., after all of `draft`.

    Raises ConstraintFailed.
    """
    s = request.sequence
    if not draft and s.constraint is None and not s.params.min_tokens:
        return [LogitRow(s.params, s.seed, len(s.tokens), request.counts)]
    masks = _masks(s.constraint, draft) if s.constraint is not None else [None] * (len(draft) + 1)
    params, seed, first, counts = s.params, s.seed, len(s.tokens), request.counts
    stop = tuple(request.stop_ids) if s.output_len < params.min_tokens else ()
    if not (params.edits or stop):  # nobody asks what stands before a token
        return [LogitRow(params, seed, first + j, counts, mask) for j, mask in enumerate(masks)]
    return [
        LogitRow(
            params,
            seed,
            first + j,
            counts.with_draft(draft[:j]) if j else counts,
            mask,
            stop if s.output_len + j < params.min_tokens else (),
        )
        for j, mask in enumerate(masks)
    ]


def tree_rows(request: RequestState, draft: list[int], parents: list[int]) -> list[LogitRow]:
    """As `logit_rows` of a tree: what shapes the logits after the text, then after each token of `draft`."""
    rows: list[LogitRow | None] = [None] * (len(draft) + 1)
    for path in branches(parents):
        for place, row in zip([-1, *path], logit_rows(request, [draft[j] for j in path]), strict=True):
            rows[place + 1] = rows[place + 1] or row
    return [row for row in rows if row is not None]


def _masks(constraint: Constraint, draft: list[int]) -> list[np.ndarray | None]:
    try:
        known = constraint.masks(draft)
        right = len(known) == len(draft) + 1 and all(mask is None or _is_mask(mask) for mask in known)
    except Exception as error:  # a constraint is a stranger, as a drafter is
        raise ConstraintFailed(str(error) or type(error).__name__) from error
    if not right:
        raise ConstraintFailed(
            f"its masks after {len(draft)} draft tokens are not {len(draft) + 1} bool arrays [V]"
        )
    return known


def _is_mask(mask: np.ndarray) -> bool:
    return mask.ndim == 1 and mask.size > 0 and mask.dtype.kind in "biu"


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
        self._lives, self._stops, self._vocab_size = requests, stops, vocab_size
        shapes = trees or [None] * len(requests)
        self._shapes = [shape or Shape(stop.most, 1) for shape, stop in zip(shapes, stops, strict=True)]
        self._tokens: list[list[int]] = [[] for _ in requests]
        self._confidence: list[list[float]] = [[] for _ in requests]
        self._parents: list[list[int]] = [[] for _ in requests]  # of rows that `grow`,
        self._chances: list[list[float]] = [
            [] for _ in requests
        ]  # and the products of confidences on the way
        self._q: list[list[torch.Tensor | None] | None] = [
            None if request.rule in OWN_NOISE else [] for request in requests
        ]
        self._alive = [1.0] * len(
            requests
        )  # chance that all of a row's draft is kept, as far as its stop asks
        self._ended: set[int] = set()  # rows whose constraint failed: nothing is drafted for them any more

    def pick(
        self, rows: Seq[int], step: int, logits: torch.Tensor, ids: torch.Tensor | None = None
    ) -> list[int]:
        """Tokens for `rows` at draft position `step`; logits [b, V], or [b, C] of the candidates `ids` [b, C]."""
        drawn = self._draw(rows, [self._last_row(r) for r in rows], step, logits, ids)
        for i, row in enumerate(rows):
            if row in self._ended:
                continue
            self._tokens[row].append(drawn.tokens[i])
            self._confidence[row].append(drawn.confidence[i])
            distribution = self._q[row]
            if distribution is not None:
                distribution.append(drawn.q[i])
        return drawn.tokens

    def _draw(
        self,
        rows: Seq[int],
        shaping: list[LogitRow],
        step: int,
        logits: torch.Tensor,
        ids: torch.Tensor | None,
    ) -> Proposal:
        """A token from each row of logits, with the noise that the rule of its row of the context allows."""
        plain = [self._lives[r].rule in OWN_NOISE for r in rows]
        if all(plain):
            return choose_candidates(logits, ids, shaping, noise.TARGET)
        out = Proposal([0] * len(rows), [0.0] * len(rows), [None] * len(rows))
        for wanted in (True, False):
            part = [i for i, own_noise in enumerate(plain) if own_noise is wanted]
            if not part:
                continue
            if not wanted:  # the round's first position: see noise.draft_purpose
                for i in part:
                    shaping[i] = replace(shaping[i], position=len(self._lives[rows[i]].sequence.tokens))
            drawn = choose_candidates(
                logits[part],
                None if ids is None else ids[part],
                [shaping[i] for i in part],
                noise.TARGET if wanted else noise.draft_purpose(step),
                None if wanted else self._vocab_size,
            )
            for i, token, confidence, q in zip(part, drawn.tokens, drawn.confidence, drawn.q, strict=True):
                out.tokens[i], out.confidence[i], out.q[i] = token, confidence, q
        return out

    def _last_row(self, row: int) -> LogitRow:
        """What shapes the logits of the next draft token. A constraint that fails stops its own row, not the round."""
        return self._row_after(row, self._tokens[row])

    def _row_after(self, row: int, tokens: list[int]) -> LogitRow:
        request = self._lives[row]
        if row not in self._ended:
            try:
                return logit_rows(request, tokens)[-1]
            except ConstraintFailed:
                self._ended.add(row)
        s = request.sequence
        return LogitRow(s.params, s.seed, len(s.tokens) + len(tokens), request.counts)

    def rules(self, rows: Seq[int]) -> list[Rule] | None:
        shaping = [self._last_row(r) for r in rows]
        other = any(self._lives[r].rule not in OWN_NOISE for r in rows)
        if other or self._ended or any(map(is_edited, shaping)):
            return None
        return [rule_of(row) for row in shaping]

    def width(self, row: int) -> int:
        return self._shapes[row].width if self._stops[row].most > 1 else 1

    def grow(self, leaves: Seq[Leaf], logits: torch.Tensor, ids: torch.Tensor | None = None) -> list[Leaf]:
        rows = [leaf.row for leaf in leaves]
        paths = [path_to(self._parents[leaf.row], leaf.node) for leaf in leaves]
        shaping = [
            self._row_after(row, [self._tokens[row][j] for j in path])
            for row, path in zip(rows, paths, strict=True)
        ]
        counts = self._children(leaves)
        left = [1.0] * len(leaves)  # of the probability
        found: list[list[_Child]] = [[] for _ in leaves]
        for rank in range(max(counts)):
            drawn = self._draw(rows, shaping, len(paths[0]) + rank * MAX_DRAFT_TOKENS, logits, ids)
            for i, (leaf, token, share) in enumerate(
                zip(leaves, drawn.tokens, drawn.confidence, strict=True)
            ):
                if rank < counts[i] and leaf.row not in self._ended and (share > 0 or not rank):
                    child = leaf._replace(token=token, source=i)
                    found[i].append(_Child(0.0, share * left[i], drawn.q[i], child))
                left[i] *= 1.0 - share
            tokens = torch.tensor(drawn.tokens, device=logits.device)[
                :, None
            ]  # the next are drawn without them
            _ = (
                logits.scatter_(1, tokens, -math.inf)
                if ids is None
                else logits.masked_fill_(ids == tokens, -math.inf)
            )
        levels: dict[int, list[_Child]] = {}
        for leaf, children, row in zip(leaves, found, shaping, strict=True):
            before, sure = self._chance(leaf), [child.sure for child in children]
            if self.prunes(leaf.row):
                sure = self._odds(row, children)
            levels.setdefault(leaf.row, []).extend(
                child._replace(chance=before * odds, sure=odds)
                for child, odds in zip(children, sure, strict=True)
            )
        return [
            leaf for row, level in levels.items() for leaf in self._take_level(row, level, len(paths[0]) + 1)
        ]

    def _odds(self, row: LogitRow, children: list[_Child]) -> list[float]:
        """How likely each child is the target's own: that one's scores are nearly the drafter's, its noise the same."""
        if is_greedy(row):
            weights = [child.sure**GREEDY_POWER for child in children]
        else:
            draws = [
                noise.scalar(row.seed, row.position, noise.TARGET, child.leaf.token) for child in children
            ]
            weights = [child.sure / -math.log1p(-u) for child, u in zip(children, draws, strict=True)]
        whole = sum(weights)
        return [weight / whole if whole > 0 else 0.0 for weight in weights]

    def _chance(self, leaf: Leaf) -> float:
        """That all tokens on the way to it are kept, about."""
        return self._chances[leaf.row][leaf.node] if leaf.node >= 0 else 1.0

    def prunes(self, row: int) -> bool:
        """Whether tokens may be left out for what they are: where they are not judged by how likely they were drawn."""
        request = self._lives[row]
        return request.rule in OWN_NOISE or is_greedy(request.sequence)

    def _deepest(self, row: int) -> int:
        return min(self._shapes[row].depth, self._stops[row].most)

    def _children(self, leaves: Seq[Leaf]) -> list[int]:
        """How many tokens to draw after each leaf."""
        counts = [self.width(leaf.row) if self.prunes(leaf.row) else 0 for leaf in leaves]
        shares = (1.0, *SIBLINGS)
        for row in {leaf.row for leaf in leaves if not self.prunes(leaf.row)}:
            own = [i for i, leaf in enumerate(leaves) if leaf.row == row]
            level = len(path_to(self._parents[row], leaves[own[0]].node)) + 1
            left = self._stops[row].most - len(self._tokens[row]) - (self._deepest(row) - level)
            tries = [
                (-self._chance(leaves[i]) * shares[rank], i) for i in own for rank in range(self.width(row))
            ]
            for _, i in sorted(tries)[: max(1, min(self.width(row), left))]:
                counts[i] += 1
        return counts

    def _take_level(self, row: int, children: list[_Child], deep: int) -> list[Leaf]:
        """Take the best of a level into the draft; those of them that may go on, which must not be in vain: a token is
        never likelier than the one before it.
        """
        stop, chances = self._stops[row], self._chances[row]
        most, least = stop.most, stop.price if stop.chance else 0.0
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
            return out if len(chances) < most else []
        if len(chances) >= most:
            least = max(least, sorted(chances)[-most])
        return [leaf for leaf in out if chances[leaf.node] > least]

    def take(self, row: int, tokens: list[int], confidence: list[float]) -> None:
        self._tokens[row] += tokens
        self._confidence[row] += confidence

    def stop(self, row: int) -> Stop:
        stop, picked = self._stops[row], len(self._tokens[row])
        if not picked:
            return stop
        chance = tuple([self._alive[row] * chance for chance in stop.chance[picked:]])
        most = stop.most - picked if chance or not stop.chance else min(stop.most - picked, 1)
        return stop._replace(most=most, chance=chance)

    def go_on(self, rows: Seq[int], step: int) -> list[int]:
        call = max([self._stops[row].step for row in rows], default=0.0)
        on = should_continue([self._gain(row, step) for row in rows], call)
        return [row for row, more in zip(rows, on, strict=True) if more]

    def _gain(self, row: int, step: int) -> float:
        """Tokens that another one gains after that of `step`, net of its price."""
        most, chance, worth, price, _ = self._stops[row]
        if row in self._ended or step + 1 >= most:
            return -math.inf
        if not chance:
            return math.inf
        self._alive[row] *= worth_of(worth, self._confidence[row][step])
        return self._alive[row] * chance[step] - price if step < len(chance) else -math.inf

    def draft(self, drafter: str) -> Draft:
        reasons = [None if tokens else "no proposal" for tokens in self._tokens]
        draft = Draft(self._tokens, self._confidence, self._q, list(reasons), [drafter] * len(self._lives))
        if any(self._parents):
            draft.parents = [parents or None for parents in self._parents]
            for row, (chances, stop) in enumerate(zip(self._chances, self._stops, strict=True)):
                if len(chances) > stop.most:  # a token's chance is never above that of the one before it
                    best = sorted(range(len(chances)), key=lambda node: (-chances[node], node))[: stop.most]
                    draft.select(row, sorted(best))
        return draft
