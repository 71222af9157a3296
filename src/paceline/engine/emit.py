"""Turn verdicts into text: advance the sequences, stop where the request says so, and say what was new.

Tokens after a stop were never said: they reach neither the text, nor the ids, nor the log probabilities, nor usage.
"""

from __future__ import annotations

import time

from paceline.core import Delta, Draft, FinishReason, TokenLogprob, Verdict
from paceline.engine.judge import Judged
from paceline.engine.live import Live, Origin
from paceline.engine.scheduler import Work
from paceline.engine.state import EngineState

_DRAFTED: list[Origin] = ["draft"]


def emit(state: EngineState, work: list[Work], draft: Draft, judged: Judged) -> list[Delta]:
    deltas: list[Delta] = []
    for i, w in enumerate(work):
        if w.sequence.id not in state.lives:
            continue  # it failed in this step
        live = state.lives[w.sequence.id]
        verdict = judged.verdicts[i]
        w.sequence.committed += judged.keep[i]
        if verdict is None:
            continue
        live.record(len(draft.tokens[i]), verdict.accepted, draft.reasons[i], draft.drafter[i])
        deltas.append(_advance(state, live, draft.tokens[i], verdict, judged.logprobs[i]))
    return deltas


def _advance(
    state: EngineState, live: Live, drafted: list[int], verdict: Verdict, logprobs: list[TokenLogprob]
) -> Delta:
    """Append what was kept, as far as the text goes on, and describe it."""
    sequence = live.sequence
    new, finish = _cut(live, [*drafted[: verdict.accepted], verdict.next_token], state.max_len)
    text = ""
    if live.stream is not None:
        shown = new[:-1] if finish == "stop" else new  # the token that ends a text is not part of it
        pushed = live.stream.push(shown)
        text = pushed.text
        if pushed.stopped:
            new, finish = new[: pushed.kept_tokens], "stop"
        elif finish is not None:
            text += live.stream.finish()
    delta = _delta(live, new, verdict.accepted, logprobs, text)
    delta.proposed = drafted
    if sequence.constraint is not None and not _follow(state, live, new):
        return delta
    if finish is not None:
        delta.finish_reason, delta.stats = finish, live.stats
        live.stats.seconds = time.perf_counter() - live.submitted
        state.end(live)
    return delta


def _follow(state: EngineState, live: Live, new: list[int]) -> bool:
    """Let the constraint follow the text. One that raises ends its own text; the other rows must still advance."""
    assert live.sequence.constraint is not None
    try:
        live.sequence.constraint.commit(new)
    except Exception as error:  # noqa: BLE001  a constraint is a stranger, as a drafter is
        state.fail(live, f"the constraint failed: {error}")
        return False
    return True


def _cut(live: Live, new: list[int], max_len: int) -> tuple[list[int], FinishReason | None]:
    """`new` up to and including the token that ends the text, and why it ends; a stop goes before the length.

    Before min_tokens an end token is forbidden, unless a constraint leaves nothing else: then it ends the text, too.
    """
    room = live.room(max_len)
    if not live.stop_ids.isdisjoint(new):
        for j, token in enumerate(new[:room]):
            if token in live.stop_ids:
                return new[: j + 1], "stop"
    if len(new) >= room:
        return new[:room], "length"
    return new, None


def _delta(live: Live, new: list[int], accepted: int, logprobs: list[TokenLogprob], text: str) -> Delta:
    count, stats = len(new), live.stats
    if not stats.emitted:
        stats.first_token_seconds = time.perf_counter() - live.submitted
    origins: list[Origin] = ["target"] if accepted == 0 else ([*_DRAFTED * accepted, "target"])[:count]
    live.sequence.tokens += new
    live.counts.add(new)
    live.text += text
    live.origins += origins
    live.logprobs += logprobs[:count]
    stats.emitted += count
    return Delta(live.request, live.index, text, new, origins, logprobs=logprobs[:count])
