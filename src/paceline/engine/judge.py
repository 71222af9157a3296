"""Let the target look at what was proposed: shape, verify, and say what to keep of every row."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from paceline.core import Draft, TokenLogprob, Verdict
from paceline.engine.live import Live
from paceline.engine.picker import ConstraintFailed, logit_rows
from paceline.engine.scheduler import Work
from paceline.engine.state import EngineState
from paceline.models.base import rows_of
from paceline.sampling.choose import Choice, choose, law, logprobs
from paceline.sampling.shape import LogitRow, is_greedy
from paceline.sampling.verify import uniforms, verify_block, verify_match, verify_reject


@dataclass(slots=True)
class Judged:
    keep: list[int]  # [B] tokens of each row's tail that become committed
    verdicts: list[Verdict | None]  # [B] None: nothing was sampled (prefill) or the text failed
    logprobs: list[list[TokenLogprob]]  # [B][accepted + 1], empty if not asked for
    hidden_slots: list[tuple[int, int]] = field(default_factory=list)  # (cache slot, text position)
    hidden_rows: list[int] = field(default_factory=list)  # row of the hidden state that belongs there


def judge(
    state: EngineState, work: list[Work], draft: Draft, hidden: torch.Tensor, starts: list[int]
) -> Judged:
    """hidden [N, H] are the rows of the step, starts [B + 1] their offsets."""
    out = Judged([w.count for w in work], [None] * len(work), [[] for _ in work])
    wanted: list[int] = []  # rows of `hidden` whose logits are needed
    shaping: list[LogitRow] = []
    spans: list[tuple[int, int]] = []  # (index into work, first index into `wanted`)
    for i, w in enumerate(work):
        if w.last:
            first = starts[i] + w.count - 1
            rows = _shaping(state, state.lives[w.sequence.id], i, draft)
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
        live = state.lives[work[i].sequence.id]
        end = first + len(draft.tokens[i]) + 1
        found = _verdict(state, live, i, draft, (choice, shaping, first, end))
        verdict = _sound(found, choice.ok[first:end], draft.tokens[i])
        if verdict is None:
            out.keep[i] = 0
            mask = shaping[first].mask
            state.fail(live, _NAN if mask is None or mask.any() else _SHUT, scrub=True)
            continue
        _keep(state, live, work[i], verdict, out, (i, starts[i], wanted[first]))
        if live.sequence.params.logprobs is not None:
            out.logprobs[i] = _logprobs(
                live, logits, choice, first, [*draft.tokens[i][: verdict.accepted], verdict.next_token]
            )
    return out


_NAN = (
    "the model's scores for this text are not numbers (NaN): check the weights with `paceline check`, "
    "or load them with dtype=float32"
)
_SHUT = "the constraint failed: it allows no token here"
_UNJUDGED = "the constraint failed on the draft"


def _shaping(state: EngineState, live: Live, i: int, draft: Draft) -> list[LogitRow]:
    """What shapes the logits of row i; nothing if its constraint failed, which ends this text only.

    Under `match` a draft on which the constraint fails is given up: no drafter may decide whether a text fails.
    """
    try:
        return logit_rows(live, draft.tokens[i])
    except ConstraintFailed as error:
        if live.rule == "match" and draft.tokens[i]:
            draft.tokens[i], draft.confidence[i], draft.reasons[i] = [], [], _UNJUDGED
            return _shaping(state, live, i, draft)
        state.fail(live, f"the constraint failed: {error}")
        return []


def _sound(verdict: Verdict, ok: Seq[bool], tokens: list[int]) -> Verdict | None:
    """`verdict` as far as there were tokens to choose; what came before stands, as without a draft. None: no token."""
    if all(ok[: verdict.accepted + 1]):
        return verdict
    end = list(ok).index(False)
    return Verdict(end - 1, tokens[end - 1]) if end else None


def _verdict(
    state: EngineState, live: Live, i: int, draft: Draft, span: tuple[Choice, list[LogitRow], int, int]
) -> Verdict:
    choice, shaping, first, end = span
    tokens = draft.tokens[i]
    if state.forced is not None:
        return state.forced.verdict(choice.tokens[first:end], live.sequence.seed, shaping[first].position)
    if live.rule == "match" or not tokens or is_greedy(shaping[first]) or choice.shaped is None:
        return verify_match(choice.tokens[first:end], tokens)
    p = law(choice.shaped[first:end], shaping[first:end])  # [k + 1, V]
    laws = draft.q[i] if draft.q is not None else None
    q = list(laws) if laws is not None else [None] * len(tokens)
    noise = uniforms(live.sequence.seed, shaping[first].position, len(tokens))
    verify = verify_reject if live.rule == "reject" else verify_block
    return verify(p, q, tokens, noise)


def _keep(
    state: EngineState, live: Live, w: Work, verdict: Verdict, out: Judged, where: tuple[int, int, int]
) -> None:
    """Record a verdict; the hidden state of the last kept row feeds the next draft."""
    i, _, row = where
    out.verdicts[i] = verdict
    out.keep[i] = w.count + verdict.accepted
    if live.network not in state.drafters:
        return
    position = w.sequence.committed + w.count + verdict.accepted - 1
    out.hidden_slots.append((state.cache.slot(w.sequence.id), position))
    out.hidden_rows.append(row + verdict.accepted)


def _logprobs(
    live: Live, logits: torch.Tensor, choice: Choice, first: int, tokens: list[int]
) -> list[TokenLogprob]:
    top = live.sequence.params.logprobs or 0
    return [
        logprobs(logits[first + j], None if choice.shaped is None else choice.shaped[first + j], token, top)
        for j, token in enumerate(tokens)
    ]
