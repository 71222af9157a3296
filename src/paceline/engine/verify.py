"""Let the target look at what was proposed: shape, verify, and say what to keep of every row."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from paceline.core import OWN_NOISE, Draft, TokenLogprob, Verdict
from paceline.drafters.base import Seen
from paceline.engine.mirostat import follows, settle, threshold_after
from paceline.engine.plan import StepPlan, StepResult
from paceline.engine.request import RequestState
from paceline.engine.shaping import ConstraintFailed, logit_rows, tree_rows
from paceline.engine.state import EngineState
from paceline.models.base import rows_of
from paceline.sampling.choose import Choice, choose, distribution, logprobs
from paceline.sampling.shape import LogitRow, is_greedy
from paceline.sampling.verify import uniforms, verify_block, verify_match, verify_reject, verify_typical
from paceline.tree import trunk


def verify(state: EngineState, plan: StepPlan, hidden: torch.Tensor, starts: list[int]) -> StepResult:
    """hidden [N, H] are the rows of the step, starts [B + 1] their offsets."""
    size, draft = len(plan.requests), plan.draft
    out = StepResult(list(plan.counts), [None] * size, [[] for _ in range(size)])
    wanted: list[int] = []  # rows of `hidden` whose logits are needed
    shaping: list[LogitRow] = []
    spans: list[tuple[int, int]] = []  # (row of the plan, first index into `wanted`)
    for b, (request, last) in enumerate(zip(plan.requests, plan.last, strict=True)):
        if last and request.pool is None:
            rows = _shaping(state, request, b, draft)
            if not rows:
                out.keep[b] = 0
                continue
            first = starts[b] + plan.counts[b] - 1
            spans.append((b, len(wanted)))
            wanted += range(first, first + len(rows))
            shaping += rows
    if not wanted:
        return out
    logits = state.target.logits(hidden if len(wanted) == hidden.shape[0] else rows_of(hidden, wanted))
    for b, first in spans:
        tokens = draft.tokens[b]
        if tokens and follows(plan.requests[b].sequence):
            end = first + len(tokens) + 1
            settle(logits[first:end], shaping[first:end], tokens, draft.tree(b))
    choice = choose(logits, shaping)
    sound = all(choice.ok)
    for b, first in spans:
        request, tokens = plan.requests[b], draft.tokens[b]
        span = slice(first, first + len(tokens) + 1)
        result = _verdict(state, request, draft, b, _Span(choice, shaping, span))
        verdict = result if sound else _sound(result, choice.ok[span], tokens)
        if verdict is None:
            out.keep[b] = 0
            mask = shaping[first].mask
            state.fail(request, _NAN if mask is None or mask.any() else _SHUT, scrub=True)
            continue
        if state.observes and tokens and draft.tree(b) is None:
            _see(request, tokens, choice, span, out)
        _keep(state, plan, b, verdict, wanted[first], out)
        if follows(request.sequence):
            out.thresholds[b] = threshold_after(logits[span], shaping[span], verdict)
        if request.sequence.params.logprobs is not None:
            written = [*(tokens[j] for j in verdict.places), verdict.next_token]
            out.logprobs[b] = _logprobs(
                request, logits, choice, [first + row for row in _rows(verdict)], written
            )
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
    """`verdict`, cut before the first row without a valid token; None if that is the first row."""
    end = next((n for n, row in enumerate(_rows(verdict)) if not ok[row]), None)
    if end is None:
        return verdict
    path = None if verdict.path is None else verdict.path[: end - 1]
    return Verdict(end - 1, tokens[verdict.places[end - 1]], path) if end else None


@dataclass(frozen=True, slots=True)
class _Span:
    """The rows of logits of one row of a plan."""

    choice: Choice
    shaping: list[LogitRow]
    own: slice  # of both


def _verdict(state: EngineState, request: RequestState, draft: Draft, b: int, span: _Span) -> Verdict:
    """Of row b of a step."""
    choice, shaping, own = span.choice, span.shaping, span.own
    tokens, parents = draft.tokens[b], draft.tree(b)
    first = shaping[own.start]
    if state.forced is not None:
        deep = len(tokens) if parents is None else trunk(parents)
        chosen = choice.tokens[own.start : own.start + deep + 1]
        verdict = state.forced.verdict(chosen, request.sequence.seed, first.position)
        verdict.path = None if parents is None else list(range(verdict.accepted))
        return verdict
    if request.rule == "match" or not tokens or is_greedy(first) or choice.shaped is None:
        return verify_match(choice.tokens[own], tokens, parents)
    p = distribution(choice.shaped[own], shaping[own])  # [k + 1, V]
    if request.rule == "typical":
        return verify_typical(p, choice.tokens[own], tokens, first.params, parents)
    q = (draft.q[b] if draft.q is not None else None) or [None] * len(tokens)
    noise = uniforms(request.sequence.seed, first.position, len(tokens))
    if request.rule == "block":
        return verify_block(p, q, tokens, noise)
    return verify_reject(p, q, tokens, noise, parents)


def _see(request: RequestState, drafted: list[int], choice: Choice, span: slice, out: StepResult) -> None:
    """Record the target's tokens for `on_verify`, except under `reject` and `block`, where noise must not be reused."""
    sequence = request.sequence
    if request.rule in OWN_NOISE or is_greedy(sequence):
        sound = (*choice.ok[span], False).index(False)
        chosen = tuple(choice.tokens[span][:sound])
        out.seen.append((request, Seen(sequence, len(sequence.tokens), tuple(drafted), chosen)))


def _keep(state: EngineState, plan: StepPlan, b: int, verdict: Verdict, row: int, out: StepResult) -> None:
    """Record a verdict; the hidden state of the last kept row feeds the next draft. `row`: of the last pending token."""
    request, count = plan.requests[b], plan.counts[b] + verdict.accepted
    out.verdicts[b], out.keep[b] = verdict, count
    if state.hidden is not None and request.network in state.drafters:
        path = verdict.path
        out.hidden_slots.append((plan.slots[b], request.sequence.committed + count - 1))
        out.hidden_rows.append(row + (verdict.accepted if path is None else path[-1] + 1 if path else 0))


def _logprobs(
    request: RequestState, logits: torch.Tensor, choice: Choice, rows: list[int], tokens: list[int]
) -> list[TokenLogprob]:
    top = request.sequence.params.logprobs or 0
    return [
        logprobs(logits[row], None if choice.shaped is None else choice.shaped[row], token, top)
        for row, token in zip(rows, tokens, strict=True)
    ]
