"""The rules that say how much of a draft is kept. Pure functions: noise is an argument.

`match`   keeps the draft tokens that equal the target's own choice; needs no q, works with any drafter.
`reject`  accepts with min(1, p/q) and resamples from max(p - q, 0) (arXiv 2211.17192, 2302.01318).
`block`   decides the block jointly and never accepts less (arXiv 2403.10444, algorithm 2).
`typical` is lossy: keeps also what the target finds likely enough (arXiv 2401.10774, section 2.3.1).

For `reject` and `block`, p[i] is the target's distribution at draft position i (p[k] at the bonus position) and q[i]
must be the one that draft[i] was really drawn from, given the tokens before it. Where a draft stops may depend on its
tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from paceline.core import SamplingParams, Verdict
from paceline.sampling import noise


@dataclass(frozen=True, slots=True)
class Uniforms:
    """Independent uniforms in (0, 1) for one verification of k draft tokens."""

    accept: list[float]  # [k]
    pick: list[float]  # [k + 1], by the position that the next token takes


def uniforms(seed: int, position: int, k: int) -> Uniforms:
    """The noise of one verification whose first draft token is at absolute `position`.

    Addressed by (first position, index in the block): `block` looks at all of its uniforms, so one that a later round
    used again at the same absolute position would already be known to have failed.
    """
    accept = [noise.scalar(seed, position, noise.ACCEPT, i) for i in range(k)]
    return Uniforms(accept, [noise.scalar(seed, position, noise.RESIDUAL, i) for i in range(k + 1)])


def verify_match(target_tokens: Seq[int], draft: Seq[int], parents: Seq[int] | None = None) -> Verdict:
    """Keep the draft as far as it equals the target's tokens at the same k + 1 places.

    With `parents` the draft is a tree (see tree.py), and a chain without: target_tokens[0] follows the text, [j + 1]
    follows token j of the draft.
    """

    def follow(row: int, children: Seq[int]) -> int | None:
        return next((j for j in children if draft[j] == target_tokens[row]), None)

    if parents is not None:
        return _verdict(target_tokens, _walk(parents, follow))
    for accepted, (drafted, own) in enumerate(zip(draft, target_tokens)):
        if drafted != own:
            return Verdict(accepted, own)
    return Verdict(len(draft), target_tokens[len(draft)])


def verify_typical(
    p: torch.Tensor,
    own: Seq[int],
    draft: Seq[int],
    params: SamplingParams,
    parents: Seq[int] | None = None,
) -> Verdict:
    """Lossy. Keep a draft token that is the target's own, or whose p exceeds min(epsilon, delta * exp(-entropy of p)).

    p [k + 1, V] float64; own [k + 1] the target's tokens there, which go before others of a tree.
    """
    least = _least(p, params)

    def follow(row: int, children: Seq[int]) -> int | None:
        likely = (j for j in children if float(p[row, draft[j]]) > least[row])
        return next((j for j in children if draft[j] == own[row]), next(likely, None))

    return _verdict(own, _walk(parents, follow, len(draft)), parents is None)


def _least(p: torch.Tensor, params: SamplingParams) -> list[float]:
    """The chance above which a token is typical, by row of p."""
    entropy = torch.special.entr(p).sum(-1)
    least: list[float] = (
        (params.typical_delta * torch.exp(-entropy)).clamp(max=params.typical_epsilon).tolist()
    )
    return least


def verify_reject(
    p: torch.Tensor,
    q: Seq[torch.Tensor | None],
    draft: Seq[int],
    draws: Uniforms,
    parents: Seq[int] | None = None,
) -> Verdict:
    """Speculative sampling. p [k + 1, V] float64; q [k] distributions [V], None = one-hot on the draft token.

    Of a tree (arXiv 2305.09781, without replacement 2402.14992) a token's children are tried in turn, each against what
    those before it have left of p: q[j] is what token j was drawn from, given its path and the siblings before it.
    """

    def follow(row: int, children: Seq[int]) -> int | None:
        ratios, _ = siblings(p[row], q, draft, children)
        return next((j for j, ratio in zip(children, ratios, strict=True) if draws.accept[j] < ratio), None)

    path = _walk(parents, follow, len(draft))
    row = path[-1] + 1 if path else 0
    _, rest = siblings(p[row], q, draft, _children(parents, row - 1, len(draft)))
    return Verdict(len(path), _pick(rest, draws.pick[row]), None if parents is None else path)


def siblings(
    p: torch.Tensor, q: Seq[torch.Tensor | None], draft: Seq[int], children: Seq[int]
) -> tuple[list[float], torch.Tensor]:
    """How likely each of a token's children is kept if those before it are not (above 1: surely), and what the next token
    is drawn from if none is, [V].
    """
    ratios = []
    for j in children:
        ratios += _ratios(p[None], [q[j]], [draft[j]])
        p = residual(p, q[j], draft[j], 1.0)
    return ratios, p


def _children(parents: Seq[int] | None, after: int, count: int) -> list[int]:
    """The places of the tokens that come right after the one at place `after`, -1 for the text."""
    if parents is None:
        return [after + 1] if after + 1 < count else []
    return [j for j, parent in enumerate(parents) if parent == after]


def _walk(
    parents: Seq[int] | None, follow: Callable[[int, Seq[int]], int | None], count: int = 0
) -> list[int]:
    """The path through a draft of `count` tokens of which `follow` says each step: of the row that says what comes next,
    and the places of the tokens that may, to one of them or None.
    """
    path: list[int] = []
    after: int | None = -1
    while after is not None:
        after = follow(after + 1, _children(parents, after, count))
        path += [] if after is None else [after]
    return path


def _verdict(own: Seq[int], path: list[int], chain: bool = False) -> Verdict:
    """Keep a path, and write the target's own token after it."""
    return Verdict(len(path), own[path[-1] + 1 if path else 0], None if chain else path)


def verify_block(p: torch.Tensor, q: Seq[torch.Tensor | None], draft: Seq[int], draws: Uniforms) -> Verdict:
    """Block verification: keeps the longest prefix whose own test passes. Arguments as in `verify_reject`."""
    weight, keep = _block(p, q, draft)
    passed = [i + 1 for i in range(len(draft)) if draws.accept[i] < keep[i]]
    accepted = max(passed, default=0)
    return Verdict(
        accepted, _pick(_next_distribution(p, q, draft, accepted, weight[accepted]), draws.pick[accepted])
    )


def residual(p: torch.Tensor, q: torch.Tensor | None, token: int, weight: float) -> torch.Tensor:
    """max(weight * p - q, 0) normalised, [V]; p itself where nothing is left (then p and q are equal)."""
    rest = _excess(p, q, token, weight)
    total = rest.sum()
    return torch.where(total > 0, rest / total, p)


def _next_distribution(
    p: torch.Tensor, q: Seq[torch.Tensor | None], draft: Seq[int], accepted: int, weight: float
) -> torch.Tensor:
    """What the token after `kept` draft tokens is drawn from, [V]."""
    return (
        p[accepted] if accepted == len(draft) else residual(p[accepted], q[accepted], draft[accepted], weight)
    )


def _pick(p: torch.Tensor, u: float) -> int:
    """The token whose share of the cumulated mass holds u: always one with mass, whatever the rounding."""
    ladder = p.cumsum(-1)
    index = torch.searchsorted(ladder, (u * ladder[-1:]).clamp(max=ladder[-1]), right=True)
    last = (p > 0).nonzero()[-1:, 0]
    return int(torch.minimum(index, last)) if len(last) else 0


def _ratios(p: torch.Tensor, q: Seq[torch.Tensor | None], draft: Seq[int]) -> list[float]:
    """p/q of each draft token; 0 for one that the target's vocabulary lacks or that q says cannot be."""
    out = []
    for i, token in enumerate(draft):
        inside = 0 <= token < p.shape[-1]
        distribution = q[i]
        mine = float(p[i, token]) if inside else 0.0
        theirs = (
            1.0
            if distribution is None
            else float(distribution[token])
            if 0 <= token < len(distribution)
            else 0.0
        )
        out.append(mine / theirs if theirs > 0 else 0.0)
    return out


def _block(p: torch.Tensor, q: Seq[torch.Tensor | None], draft: Seq[int]) -> tuple[list[float], list[float]]:
    """(running weights [k + 1], pass probability of each prefix [k]) of algorithm 2."""
    weight = [1.0]
    for ratio in _ratios(p, q, draft):
        weight.append(min(weight[-1] * ratio, 1.0))
    keep = []
    for i in range(1, len(draft) + 1):
        if i == len(draft):
            keep.append(weight[i])
            continue
        rest = float(_excess(p[i], q[i], draft[i], weight[i]).sum())
        total = rest + 1 - weight[i]
        keep.append(rest / total if total > 0 else 0.0)  # 0/0: p equals q there, the next test passes surely
    return weight, keep


def _excess(p: torch.Tensor, q: torch.Tensor | None, token: int, weight: float) -> torch.Tensor:
    """max(weight * p - q, 0), [V]; q may be of another vocabulary size, or None for one-hot on `token`."""
    rest = weight * p
    if q is None:
        if 0 <= token < len(rest):
            rest[token] -= 1
    else:
        width = min(len(rest), len(q))
        rest[:width] -= q[:width].to(rest)
    return rest.clamp_(min=0)
