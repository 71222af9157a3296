"""Turn verdicts into text: advance the sequences, stop where the request says so, and say what was new.

Tokens after a stop were never said: they reach neither the text, nor the ids, nor the log probabilities, nor usage.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

import torch

from paceline.core import Delta, FinishReason, TokenLogprob, Verdict
from paceline.engine.plan import StepPlan, StepResult
from paceline.engine.request import Origin, RequestState
from paceline.engine.state import EngineState
from paceline.tree import depths

_DRAFTED: list[Origin] = ["draft"]


def emit(state: EngineState, plan: StepPlan, result: StepResult) -> list[Delta]:
    deltas: list[Delta] = []
    draft = plan.draft
    for row, (request, verdict) in enumerate(zip(plan.requests, result.verdicts, strict=True)):
        if request.sequence.id not in state.requests:
            continue  # it failed in this step
        request.sequence.committed += result.keep[row]
        request.mu = result.thresholds.get(row, request.mu)
        if verdict is None:
            continue
        parents, tokens = draft.tree(row), draft.tokens[row]
        deep = range(1, len(tokens) + 1) if parents is None else depths(parents)
        request.record(deep, verdict.accepted, draft.reasons[row], draft.drafter[row])
        deltas.append(_advance(state, request, tokens, verdict, result.logprobs[row]))
    return deltas


def embed(state: EngineState, plan: StepPlan, hidden: torch.Tensor, starts: Seq[int]) -> list[Delta]:
    """Take the states [N, H] of prompts whose embedding is asked for; those that are read to their ends are done."""
    deltas: list[Delta] = []
    for row, request in enumerate(plan.requests):
        pool, sequence = request.pool, request.sequence
        if pool is None or sequence.id not in state.requests:
            continue
        count, last = plan.counts[row], plan.last[row]
        if last or pool.wants_all:
            states = hidden[starts[row] : starts[row] + count].detach().float().cpu().numpy()
            pool.push(states, sequence.committed - count)
        if last:
            request.stats.seconds = time.perf_counter() - request.submitted
            state.end(request)
            made = Delta(
                request.request_id, request.index, "", [], [], finish_reason="stop", stats=request.stats
            )
            made.embedding = pool.vector()
            deltas.append(made)
    return deltas


def _advance(
    state: EngineState,
    request: RequestState,
    drafted: list[int],
    verdict: Verdict,
    logprobs: list[TokenLogprob],
) -> Delta:
    """Append what was kept, as far as the text goes on, and describe it."""
    sequence = request.sequence
    accepted = [drafted[place] for place in verdict.places]
    new, finish = _cut(request, [*accepted, verdict.next_token], state.max_len)
    text = ""
    if request.stream is not None:
        ends = finish == "stop" and new[-1] not in request.stream.signs
        shown = new[:-1] if ends else new  # the token that ends a text is not part of it
        pushed = request.stream.push(shown)
        text = pushed.text
        if pushed.stopped:
            new, finish = new[: pushed.kept_tokens], "stop"
        elif finish is not None:
            text += request.stream.finish() + (request.stream.told(new[-1]) if ends else "")
    delta = _delta(request, new, verdict.accepted, logprobs, text)
    delta.proposed = drafted if verdict.path is None else accepted + _others(drafted, verdict.path)
    if sequence.constraint is not None and not _follow(state, request, new):
        return delta
    if finish is not None:
        delta.finish_reason, delta.stats = finish, request.stats
        request.stats.seconds = time.perf_counter() - request.submitted
        state.end(request)
    return delta


def cut_off(state: EngineState, request: RequestState) -> Delta:
    """End a text where it is, with what was held back of it."""
    text = request.stream.finish() if request.stream is not None else ""
    request.text += text
    request.stats.seconds = time.perf_counter() - request.submitted
    state.end(request)
    name, index = request.request_id, request.index
    return Delta(name, index, text, [], [], finish_reason="length", stats=request.stats)


def _others(drafted: list[int], path: list[int]) -> list[int]:
    return [token for place, token in enumerate(drafted) if place not in path]


def _follow(state: EngineState, request: RequestState, new: list[int]) -> bool:
    """Let the constraint follow the text. One that raises ends its own text; the other rows must still advance."""
    assert request.sequence.constraint is not None
    try:
        request.sequence.constraint.commit(new)
    except Exception as error:  # noqa: BLE001  a constraint is third-party code, as a drafter may be
        state.fail(request, f"the constraint failed: {error}")
        return False
    return True


def _cut(request: RequestState, new: list[int], max_len: int) -> tuple[list[int], FinishReason | None]:
    """`new` up to and including the token that ends the text, and why it ends; a stop goes before the length.

    Before min_tokens an end token is forbidden, unless a constraint leaves nothing else: then it ends the text, too.
    """
    room = request.room(max_len)
    if not request.stop_ids.isdisjoint(new):
        for j, token in enumerate(new[:room]):
            if token in request.stop_ids:
                return new[: j + 1], "stop"
    if len(new) >= room:
        return new[:room], "length"
    return new, None


def _delta(
    request: RequestState, new: list[int], accepted: int, logprobs: list[TokenLogprob], text: str
) -> Delta:
    count, stats = len(new), request.stats
    if not stats.emitted:
        stats.first_token_seconds = time.perf_counter() - request.submitted
    origins: list[Origin] = ["target"] if accepted == 0 else ([*_DRAFTED * accepted, "target"])[:count]
    request.sequence.tokens += new
    request.counts.add(new)
    request.text += text
    request.origins += origins
    request.logprobs += logprobs[:count]
    stats.emitted += count
    return Delta(request.request_id, request.index, text, new, origins, logprobs=logprobs[:count])
