"""Ask the drafters for proposals, row by row within what the controller allows. A drafter can fail, the text cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from paceline.core import Draft, Sequence, VerifyRule
from paceline.drafters.base import DraftContext, Drafter
from paceline.drafters.guard import ask
from paceline.engine import budget
from paceline.engine.live import Live
from paceline.engine.picker import StepPicker
from paceline.engine.rest import ALWAYS, Rest, nothing
from paceline.engine.scheduler import Work
from paceline.engine.state import EngineState

Resting = tuple[int, Draft | None]  # steps that texts rest, and what they copy in the first of them


def propose(state: EngineState, work: list[Work]) -> Draft:
    """Drafts for all rows of `work`; rows that do not decode, or may not draft, are empty with their reason."""
    if (rest := state.rest) is not None:
        holds = rest.holds(work) or (_join(state, rest, work) and rest.holds(work))  # not if it reads prompts
        if holds and (draft := _go_on(state, rest, work)) is not None:
            return draft
        if (draft := rest.pause(work)) is not None:
            return draft
    state.tell()
    out = Draft.empty(len(work), budget.PREFILL)
    out.q = [None] * len(work)
    groups: dict[str, list[int]] = {}
    others = 0  # rows of prompts
    for i, w in enumerate(work):
        if w.count == 1 and w.last:
            live = state.lives[w.sequence.id]
            if live.parked is not None:
                out.reasons[i] = live.parked
            elif live.drafter not in state.drafters:
                out.reasons[i] = budget.DISABLED if w.sequence.params.drafter == "none" else budget.NO_DRAFTER
            else:
                groups.setdefault(live.drafter, []).append(i)
        else:
            others += w.count
    for name, rows in groups.items():
        _ask(state, state.drafters[name], [state.lives[work[i].sequence.id] for i in rows], rows, others, out)
    state.rest = None
    if not others and not any(out.tokens) and len(groups) < 2:
        return _rest(state, work, out, next(iter(groups), None))
    return out


def _rest(state: EngineState, work: list[Work], out: Draft, drafter: str | None) -> Draft:
    """Nobody has drafted anything: so it is for a while, if the controller says so, but for what may be copied."""
    steps, copies, sequences = ALWAYS, None, [w.sequence for w in work]
    if drafter is not None:
        steps, copies = _copying(state, sequences, state.controller.rest)
    if steps == 0:
        return out
    rest = state.rest = Rest([s.id for s in sequences], steps, nothing(out.reasons), drafter)
    rest.draft(sequences, copies)
    if drafter is not None and copies is None:
        rest.watch = state.controller.watch(sequences)
    return copies or out


def _go_on(state: EngineState, rest: Rest, work: list[Work]) -> Draft | None:
    """What is drafted in a further step of a rest; None if it is over."""
    sequences, copies = [w.sequence for w in work], None
    if rest.steps and rest.lost(sequences):  # most likely there is nothing more: a watch says so for less
        rest.watch, rest.copied = state.controller.watch(sequences), False
    if rest.steps == 0:
        state.tell()
        rest.steps, copies = _copying(state, sequences, state.controller.rest)
    elif rest.stirs():
        state.tell()
        left, ask = rest.steps, state.controller.copies
        rest.steps, copies = _copying(state, sequences, lambda *texts: (left, ask(*texts)))
    if rest.steps == 0:
        return None
    if copies is None and rest.copied:  # what was learnt meanwhile counts
        rest.watch = state.controller.watch(sequences)
    return rest.draft(sequences, copies)


def _copying(
    state: EngineState, sequences: list[Sequence], ask: Callable[[list[Sequence], list[int]], Resting]
) -> Resting:
    """What the controller says of texts at rest. What is copied comes from a stranger, too, see `_ask`."""
    rooms = _rooms(state, sequences)
    try:
        steps, copies = ask(sequences, rooms)
        if copies is not None:
            check_draft(copies, rooms, state.target.vocab_size)
    except Exception as error:  # noqa: BLE001  as in `_ask`
        for sequence in sequences:
            _park(state.lives[sequence.id], error)
        return 0, None
    return steps, copies


def _park(live: Live, error: Exception) -> str:
    """Nothing more is drafted for a text; why."""
    live.parked = f"{budget.DRAFTER_FAILED}: {type(error).__name__}: {error}"[:200]
    return live.parked


def _rooms(state: EngineState, sequences: list[Sequence]) -> list[int]:
    """Tokens that may be drafted: the last one is always the target's own."""
    return [max(state.lives[s.id].room(state.max_len) - 1, 0) for s in sequences]


def _join(state: EngineState, rest: Rest, work: list[Work]) -> bool:
    """Whether texts that rest go on resting with others in the place of those that have ended."""
    if not rest.newcomers(work):
        return False
    lives = [state.lives[w.sequence.id] for w in work]
    if any(live.parked or live.drafter != rest.drafter for live in lives):
        return False
    wants, drafter = [_want(state, live) for live in lives], state.drafters[lives[0].drafter]
    joined = state.controller.join([w.sequence for w in work], wants, drafter.max_tokens, rest.untold.steps)
    if joined is not None:
        rest.go_on(work, *joined)
        if rest.steps:
            rest.watch = state.controller.watch([w.sequence for w in work])
    return joined is not None


def _ask(
    state: EngineState, drafter: Drafter, lives: list[Live], rows: list[int], others: int, out: Draft
) -> None:
    """Let one drafter propose for its rows and copy what it says into `out`."""
    sequences = [live.sequence for live in lives]
    wants = [_want(state, live) for live in lives]
    allowed = state.controller.limits(sequences, wants, drafter.max_tokens, others)
    if not any(k for k, _ in allowed):
        for row, (_, reason) in zip(rows, allowed, strict=True):
            out.reasons[row] = reason
        return
    limits = [min(k, room) for (k, _), room in zip(allowed, _rooms(state, sequences), strict=True)]
    for row, (k, reason), limit in zip(rows, allowed, limits, strict=True):
        out.reasons[row] = reason if k == 0 else budget.NO_ROOM if limit == 0 else budget.NO_PROPOSAL
    if not any(limits):
        return
    slots = [state.cache.slot(s.id) for s in sequences]
    has_hidden = [
        state.hidden_at.get(slot) == s.committed - 1 for slot, s in zip(slots, sequences, strict=True)
    ]
    states = state.hidden if drafter.needs_hidden else None
    picker = StepPicker(lives, state.controller, state.target.vocab_size)
    context = DraftContext(sequences, limits, slots, states, has_hidden, state.cache, picker)
    try:
        draft = ask(drafter, context)
        check_draft(draft, limits, state.target.vocab_size)
        _check_laws(draft, [live.rule for live in lives])
    except Exception as error:  # noqa: BLE001  a drafter is a stranger: whatever it raises costs speed, never text
        for live, row in zip(lives, rows, strict=True):
            out.reasons[row] = _park(live, error)
        return
    for j, row in enumerate(rows):
        out.tokens[row], out.confidence[row] = draft.tokens[j], draft.confidence[j]
        out.drafter[row] = draft.drafter[j] if draft.drafter else drafter.name
        if draft.tokens[j]:
            out.reasons[row] = None
        if draft.q is not None and out.q is not None:
            out.q[row] = draft.q[j] or None


def _want(state: EngineState, live: Live) -> int | Literal["auto"]:
    want = live.sequence.params.draft_tokens
    if want is None:
        want = state.draft_tokens  # type: ignore[assignment]
    return want  # type: ignore[return-value]


def check_draft(draft: Draft, limits: list[int], vocab_size: int) -> None:
    """Raise ValueError for a proposal that is no proposal."""
    if len(draft.tokens) != len(limits) or len(draft.confidence) != len(limits):
        raise ValueError(f"{len(draft.tokens)} rows proposed, {len(limits)} asked for")
    for tokens, confidence, limit in zip(draft.tokens, draft.confidence, limits, strict=True):
        if len(tokens) > limit or len(confidence) != len(tokens):
            raise ValueError(
                f"{len(tokens)} tokens with {len(confidence)} confidences, at most {limit} allowed"
            )
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise ValueError(f"token {token!r} is not an id in 0..{vocab_size - 1}")


def _check_laws(draft: Draft, rules: list[VerifyRule]) -> None:
    """Raise ValueError if a token that `reject` or `block` will judge does not come with a law."""
    if len(draft.drafter) not in (0, len(rules)):
        raise ValueError(f"{len(draft.drafter)} drafter names for {len(rules)} rows")
    if draft.q is None:
        return
    if len(draft.q) != len(rules):
        raise ValueError(f"{len(draft.q)} rows of laws for {len(rules)} rows")
    for tokens, laws, rule in zip(draft.tokens, draft.q, rules, strict=True):
        if rule == "match" or not laws:
            continue
        if len(laws) != len(tokens):
            raise ValueError(f"{len(tokens)} tokens with {len(laws)} laws")
        for law in laws:
            if law is not None and (
                law.dim() != 1 or not abs(float(law.sum()) - 1) < 1e-3 or float(law.min()) < 0
            ):
                raise ValueError("a token's law must be probabilities of one dimension that sum to 1")
