"""Ask for proposals, as the policy plans them: n-gram lookup for every row, then each network for its rows.

A drafter that fails is not asked again for the request, and the text goes on without it. A policy that fails is a bug of
ours: its exception surfaces.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal

from paceline.control.base import NGRAM, DraftPlan, PlannedRow, PlanRow, Proposal, StopRule
from paceline.control.reasons import NoDraftReason
from paceline.core import OWN_NOISE, Draft, VerifyRule
from paceline.drafters.base import DraftContext, Drafter
from paceline.drafters.guard import ask, failure, lacks
from paceline.engine.picker import StepPicker
from paceline.engine.request import RequestState
from paceline.engine.scheduler import ScheduledChunk
from paceline.engine.state import EngineState
from paceline.ops.base import Stop
from paceline.sampling.shape import is_greedy
from paceline.tree import Shape, depths, preorder, products

Found = tuple[list[int], list[float]]  # tokens of a proposal, and their confidences


@dataclass(slots=True)
class Proposed:
    draft: Draft
    prefill_rows: int = 0
    unused: dict[int, Found] = field(default_factory=dict)  # n-gram proposals not taken, by sequence id
    seconds: dict[str, float] = field(default_factory=dict)  # that drafting took, by network drafter


def propose(state: EngineState, work: list[ScheduledChunk]) -> Proposed:
    """Drafts for all rows of `work`; rows that do not decode, or may not draft, are empty with their reason."""
    out = Proposed(Draft.empty(len(work), NoDraftReason.PREFILL.value))
    out.draft.q = [None] * len(work)
    at = [i for i, w in enumerate(work) if w.count == 1 and w.last]
    out.prefill_rows = sum([w.count for w in work]) - len(at)
    if not at:
        return out
    requests = [state.requests[work[i].sequence.id] for i in at]
    rows = [_plan_row(state, request) for request in requests]
    found = _look_up(state, requests, rows)
    proposals = [None if one is None else Proposal(tuple(one[1])) for one in found]
    plan = state.policy.plan(rows, proposals, out.prefill_rows)
    for j, (i, request, planned) in enumerate(zip(at, requests, plan.rows, strict=True)):
        own = found[j]
        out.draft.reasons[i] = _reason(state, request, planned)
        if planned.drafter == NGRAM and planned.limit and own is not None:
            out.draft.tokens[i], out.draft.confidence[i] = own[0][: planned.limit], own[1][: planned.limit]
            out.draft.drafter[i], out.draft.reasons[i] = NGRAM, None
        elif own is not None and own[0]:
            out.unused[request.sequence.id] = own
    _ask_networks(state, requests, at, plan, out)
    return out


def _plan_row(state: EngineState, request: RequestState) -> PlanRow:
    sequence = request.sequence
    name = request.network
    drafter = state.drafters.get(name) if name is not None and name not in request.parked else None
    most = drafter.max_tokens if drafter is not None else 0
    if drafter is not None and drafter.needs_hidden and not _has_hidden(state, request):
        most = 0
    told = state.listener(request) if most and state.listens else None
    if told is not None and lacks(told, sequence, request.parked):
        most = 0
    want: int | Literal["auto"] | None = sequence.params.draft_tokens
    if sequence.params.drafter == "none":
        want = 0
    elif want is None:
        want = state.draft_tokens
    return PlanRow(
        sequence.id, want, max(request.room(state.max_len) - 1, 0), name if drafter is not None else None, most,
        not is_greedy(sequence), state.tree if getattr(drafter, "branches", False) and request.rule != "block" else None,
    )  # fmt: skip


def _has_hidden(state: EngineState, request: RequestState) -> bool:
    slot = state.cache.slot(request.sequence.id)
    return state.hidden_at.get(slot) == request.sequence.committed - 1


def _reason(state: EngineState, request: RequestState, planned: PlannedRow) -> str | None:
    """Why a row drafts nothing. A network that is asked and says nothing has no proposal."""
    if planned.limit:
        return NoDraftReason.NO_PROPOSAL.value
    if planned.reason in (NoDraftReason.NO_DRAFTER, NoDraftReason.NO_PROPOSAL):
        if request.parked:
            return next(iter(request.parked.values()))
        told = state.listener(request)
        if told is not None and (why := lacks(told, request.sequence, request.parked)):
            return why
    return None if planned.reason is None else planned.reason.value


def _look_up(state: EngineState, requests: list[RequestState], rows: list[PlanRow]) -> list[Found | None]:
    """What n-gram lookup finds, by row; None where it is not asked."""
    out: list[Found | None] = [None] * len(requests)
    drafter = state.drafters.get(NGRAM)
    asked = [i for i, request in enumerate(requests) if request.copies and NGRAM not in request.parked]
    if drafter is None or not asked:
        return out
    limits = [min(rows[i].room, drafter.max_tokens) if rows[i].want != 0 else 0 for i in asked]
    draft = _ask(state, drafter, [requests[i] for i in asked], [Stop(limit) for limit in limits])
    if draft is not None:
        for i, tokens, confidence in zip(asked, draft.tokens, draft.confidence, strict=True):
            out[i] = tokens, confidence
    return out


def _ask_networks(
    state: EngineState, requests: list[RequestState], at: list[int], plan: DraftPlan, out: Proposed
) -> None:
    """Let each network draft for the rows that are planned for it, and copy what it says."""
    groups: dict[str, list[int]] = {}
    for j, planned in enumerate(plan.rows):
        if planned.limit and planned.drafter is not None and planned.drafter != NGRAM:
            groups.setdefault(planned.drafter, []).append(j)
    for name, rows in groups.items():
        own = [requests[j] for j in rows]
        begin = time.perf_counter()
        stops, trees = [_stop(plan.rows[j], plan.stop) for j in rows], [plan.rows[j].tree for j in rows]
        draft = _ask(state, state.drafters[name], own, stops, trees)
        out.seconds[name] = time.perf_counter() - begin
        for n, j in enumerate(rows):
            i = at[j]
            if draft is None:
                out.draft.reasons[i] = requests[j].parked[name]
            elif draft.tokens[n]:
                out.draft.tokens[i], out.draft.confidence[i] = draft.tokens[n], draft.confidence[n]
                out.draft.drafter[i], out.draft.reasons[i] = name, None
                if draft.q is not None and out.draft.q is not None:
                    out.draft.q[i] = draft.q[n] or None
                if draft.parents is not None and draft.parents[n] is not None:
                    out.draft.parents = out.draft.parents or [None] * len(out.draft.tokens)
                    out.draft.parents[i] = draft.parents[n]


def _stop(planned: PlannedRow, rule: StopRule) -> Stop:
    """The plan's stop rule for one row. Its first token is drafted whatever it is worth."""
    return Stop(planned.limit, planned.chance[1:], planned.worth, rule.price, rule.call)


def _ask(
    state: EngineState,
    drafter: Drafter,
    requests: list[RequestState],
    stops: list[Stop],
    trees: Seq[Shape | None] = (),
) -> Draft | None:
    """What a drafter proposes, checked; None if it failed, and then it is not asked again for these requests."""
    sequences, limits = [request.sequence for request in requests], [stop.most for stop in stops]
    slots = [state.cache.slot(s.id) for s in sequences]
    has_hidden = [_has_hidden(state, request) for request in requests]
    states = state.hidden if drafter.needs_hidden else None
    picker = StepPicker(requests, stops, state.target.vocab_size, trees)
    context = DraftContext(sequences, limits, slots, states, has_hidden, state.cache, picker)
    try:
        draft = ask(drafter, context)
        check_draft(draft, limits, state.target.vocab_size)
        draft.cut(state.target.readable)
        _check_distributions(draft, [request.rule for request in requests])
        if draft.parents is not None:
            _check_trees(draft, draft.parents, picker)
    except Exception as error:  # noqa: BLE001  a drafter is a stranger: whatever it raises costs speed, never text
        for request in requests:
            request.parked[drafter.name] = failure(error)
        return None
    return draft


def check_draft(draft: Draft, limits: Seq[int], vocab_size: int) -> None:
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


def _check_trees(draft: Draft, parents: list[list[int] | None], picker: StepPicker) -> None:
    """Put each tree into preorder. Raise ValueError for one that is none, or that was not asked for."""
    if len(parents) != len(draft.tokens):
        raise ValueError(f"{len(parents)} rows of parents for {len(draft.tokens)} rows")
    for i, (tree, tokens) in enumerate(zip(parents, draft.tokens, strict=True)):
        if tree is None:
            continue
        if len(tree) != len(tokens) or not all(-1 <= parent < node for node, parent in enumerate(tree)):
            raise ValueError(f"{len(tokens)} tokens with parents {tree}: each has one before it, or -1")
        if len(set(zip(tree, tokens, strict=True))) < len(tokens):
            raise ValueError("a token has twice the same token after it")
        if max(Counter(depths(tree)).values(), default=0) > picker.width(i):
            raise ValueError(f"more than {picker.width(i)} tokens stand beside each other")
        # neighbours stay in the order in which they were drawn, or those that are likelier to be kept come first
        weight = products(tree, draft.confidence[i]) if picker.prunes(i) else [1.0] * len(tree)
        draft.select(i, preorder(tree, weight))


def _check_distributions(draft: Draft, rules: list[VerifyRule]) -> None:
    """Raise ValueError if a token that `reject` or `block` will verify does not come with a distribution."""
    if len(draft.drafter) not in (0, len(rules)):
        raise ValueError(f"{len(draft.drafter)} drafter names for {len(rules)} rows")
    if draft.q is None:
        return
    if len(draft.q) != len(rules):
        raise ValueError(f"{len(draft.q)} rows of distributions for {len(rules)} rows")
    for tokens, distributions, rule in zip(draft.tokens, draft.q, rules, strict=True):
        if rule in OWN_NOISE or not distributions:
            continue
        if len(distributions) != len(tokens):
            raise ValueError(f"{len(tokens)} tokens with {len(distributions)} distributions")
        for distribution in distributions:
            if distribution is not None and (
                distribution.dim() != 1
                or not abs(float(distribution.sum()) - 1) < 1e-3
                or float(distribution.min()) < 0
            ):
                raise ValueError(
                    "a token's distribution must be probabilities of one dimension that sum to 1"
                )
