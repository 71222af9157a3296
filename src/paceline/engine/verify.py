"""Let the target look at what was proposed: shape, verify, and say what to keep of every row."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from paceline.core import OWN_NOISE, Draft, TokenLogprob, Verdict
from paceline.drafters.base import Seen
from paceline.engine.picker import ConstraintFailed, logit_rows, tree_rows
from paceline.engine.request import RequestState
from paceline.engine.scheduler import ScheduledChunk
from paceline.engine.state import EngineState
from paceline.models.base import rows_of
from paceline.sampling.choose import Choice, choose, distribution, logprobs
from paceline.sampling.shape import LogitRow, is_greedy
from paceline.sampling.verify import (
    uniforms,
    verify_block,
    verify_match,
    verify_reject,
    verify_reject_tree,
    verify_tree,
    verify_typical,
    verify_typical_tree,
)
from paceline.tree import trunk


@dataclass(slots=True)
class Verified:
    keep: list[int]  # [B] tokens of each row's tail that become committed
    verdicts: list[Verdict | None]  # [B] None: nothing was sampled (prefill) or the text failed
    logprobs: list[list[TokenLogprob]]  # [B][accepted + 1], empty if not asked for
    hidden_slots: list[tuple[int, int]] = field(default_factory=list)  # (cache slot, text position)
    hidden_rows: list[int] = field(default_factory=list)  # row of the hidden state that belongs there
    seen: list[Seen] = field(default_factory=list)  # of drafts that are no trees, where some drafter watches

    @property
    def paths(self) -> list[list[int] | None]:
        """[B] of a tree, the places of its kept tokens."""
        return [None if verdict is None else verdict.path for verdict in self.verdicts]


def verify(
    state: EngineState, work: list[ScheduledChunk], draft: Draft, hidden: torch.Tensor, starts: list[int]
) -> Verified:
    """hidden [N, H] are the rows of the step, starts [B + 1] their offsets."""
    out = Verified([w.count for w in work], [None] * len(work), [[] for _ in work])
    wanted: list[int] = []  # rows of `hidden` whose logits are needed
    shaping: list[LogitRow] = []
    spans: list[tuple[int, int]] = []  # (index into work, first index into `wanted`)
    for i, w in enumerate(work):
        if w.last:
            first = starts[i] + w.count - 1
            rows = _shaping(state, state.requests[w.sequence.id], i, draft)
            if not rows:
                out.keep[i] = 0
                continue
            spans.append((i, len(wanted)))
            wanted += range(first, first + len(rows))
            shaping += rows
    if not wanted:
        return out
    logits = state.target.logits(hidden if len(wanted) == hidden.shape[0] else rows_of(hidden, wanted))
    choice = choose(logits, shaping)
    for i, first in spans:
        request = state.requests[work[i].sequence.id]
        end = first + len(draft.tokens[i]) + 1
        found = _verdict(state, request, i, draft, (choice, shaping, first, end))
        verdict = _sound(found, choice.ok[first:end], draft.tokens[i])
        if verdict is None:
            out.keep[i] = 0
            mask = shaping[first].mask
            state.fail(request, _NAN if mask is None or mask.any() else _SHUT, scrub=True)
            continue
        if state.watches and draft.tokens[i] and draft.tree(i) is None:
            _see(request, draft.tokens[i], (choice, first, end), out)
        _keep(state, request, work[i], verdict, out, (i, starts[i], wanted[first]))
        if request.sequence.params.logprobs is not None:
            tokens = [*(draft.tokens[i][j] for j in verdict.places), verdict.next_token]
            at = [first + row for row in _rows(verdict)]
            out.logprobs[i] = _logprobs(request, logits, choice, at, tokens)
    return out


_NAN = (
    "the model's scores for this text are not numbers (NaN): check the weights with `paceline check`, "
    "or load them with dtype=float32"
)
_SHUT = "the constraint failed: it allows no token here"
_UNJUDGED = "the constraint failed on the draft"


def _shaping(state: EngineState, request: RequestState, i: int, draft: Draft) -> list[LogitRow]:
    """What shapes the logits of row i; nothing if its constraint failed, which ends this text only.

    With OWN_NOISE a draft on which the constraint fails is given up: no drafter may decide whether a text fails.
    """
    parents = draft.tree(i)
    try:
        if parents is not None:
            return tree_rows(request, draft.tokens[i], parents)
        return logit_rows(request, draft.tokens[i])
    except ConstraintFailed as error:
        if request.rule in OWN_NOISE and draft.tokens[i]:
            draft.select(i, [])
            draft.reasons[i] = _UNJUDGED
            return _shaping(state, request, i, draft)
        state.fail(request, f"the constraint failed: {error}")
        return []


def _rows(verdict: Verdict) -> list[int]:
    """The row of the text's last token, 0, and those of what is kept."""
    return [0, *(place + 1 for place in verdict.places)]


def _sound(verdict: Verdict, ok: Seq[bool], tokens: list[int]) -> Verdict | None:
    """`verdict` as far as there were tokens to choose; what came before stands, as without a draft. None: no token."""
    end = next((n for n, row in enumerate(_rows(verdict)) if not ok[row]), None)
    if end is None:
        return verdict
    path = None if verdict.path is None else verdict.path[: end - 1]
    return Verdict(end - 1, tokens[verdict.places[end - 1]], path) if end else None


def _verdict(
    state: EngineState,
    request: RequestState,
    i: int,
    draft: Draft,
    span: tuple[Choice, list[LogitRow], int, int],
) -> Verdict:
    choice, shaping, first, end = span
    tokens = draft.tokens[i]
    parents = draft.tree(i)
    if state.forced is not None:
        end = end if parents is None else first + 1 + trunk(parents)
        found = state.forced.verdict(choice.tokens[first:end], request.sequence.seed, shaping[first].position)
        found.path = None if parents is None else list(range(found.accepted))
        return found
    if request.rule == "match" or not tokens or is_greedy(shaping[first]) or choice.shaped is None:
        own = choice.tokens[first:end]
        return verify_match(own, tokens) if parents is None else verify_tree(own, tokens, parents)
    p = distribution(choice.shaped[first:end], shaping[first:end])  # [k + 1, V]
    if request.rule == "typical":
        own, params = choice.tokens[first:end], shaping[first].params
        if parents is not None:
            return verify_typical_tree(p, own, tokens, parents, params)
        return verify_typical(p, own, tokens, params)
    distributions = draft.q[i] if draft.q is not None else None
    q = list(distributions) if distributions is not None else [None] * len(tokens)
    noise = uniforms(request.sequence.seed, shaping[first].position, len(tokens))
    if parents is not None:
        return verify_reject_tree(p, q, tokens, parents, noise)
    verify = verify_reject if request.rule == "reject" else verify_block
    return verify(p, q, tokens, noise)


def _see(request: RequestState, drafted: list[int], span: tuple[Choice, int, int], out: Verified) -> None:
    """Note the target's tokens at the rows of a draft, unless their noise may be used once more."""
    choice, first, end = span
    sequence = request.sequence
    if request.rule in OWN_NOISE or is_greedy(sequence):
        sound = (*choice.ok[first:end], False).index(False)
        chosen = tuple(choice.tokens[first : first + sound])
        out.seen.append(Seen(sequence, len(sequence.tokens), tuple(drafted), chosen))


def _keep(
    state: EngineState,
    request: RequestState,
    w: ScheduledChunk,
    verdict: Verdict,
    out: Verified,
    where: tuple[int, int, int],
) -> None:
    """Record a verdict; the hidden state of the last kept row feeds the next draft."""
    i, _, row = where
    out.verdicts[i] = verdict
    out.keep[i] = w.count + verdict.accepted
    if request.network not in state.drafters:
        return
    position = w.sequence.committed + w.count + verdict.accepted - 1
    out.hidden_slots.append((state.cache.slot(w.sequence.id), position))
    out.hidden_rows.append(row + _rows(verdict)[-1])


def _logprobs(
    request: RequestState, logits: torch.Tensor, choice: Choice, rows: list[int], tokens: list[int]
) -> list[TokenLogprob]:
    top = request.sequence.params.logprobs or 0
    return [
        logprobs(logits[row], None if choice.shaped is None else choice.shaped[row], token, top)
        for row, token in zip(rows, tokens, strict=True)
    ]
