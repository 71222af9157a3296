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

from paceline.control.base import NGRAM, DraftPlan, PlannedRow, PlanRow, Proposal, StopRule, heat_of
from paceline.control.reasons import NoDraftReason
from paceline.core import OWN_NOISE, Draft, VerifyRule
from paceline.drafters.base import DraftContext, Drafter
from paceline.drafters.guard import ask, failure, lacks, unread
from paceline.engine.picker import StepPicker
from paceline.engine.plan import Found, StepPlan
from paceline.engine.request import RequestState
from paceline.engine.state import EngineState
from paceline.ops.base import Stop
from paceline.sampling.shape import is_greedy
from paceline.tree import Shape, depths, preorder, products

_NO_PROPOSAL = NoDraftReason.NO_PROPOSAL.value
_IDS = {int}  # types of token ids: a bool is none


def propose(state: EngineState, plan: StepPlan) -> None:
    """Drafts for all rows of `plan`; rows that do not decode, or may not draft, stay empty with their reason."""
    at = plan.decoding
    if not at:
        return
    hidden = _has_hidden(state, plan)
    rows = [_plan_row(state, plan.requests[b], hidden[b]) for b in at]
    lookups = _look_up(state, plan, at, rows)
    proposals = [None if lookup is None else Proposal(tuple(lookup[1])) for lookup in lookups]
    wanted = state.policy.plan(rows, proposals, plan.prefill_rows)
    draft = plan.draft
    for b, own, planned in zip(at, lookups, wanted.rows, strict=True):
        if planned.reason is NoDraftReason.GIVEN_UP:
            _give_up(state, plan.requests[b])
        draft.reasons[b] = _reason(state, plan.requests[b], planned)
        if own is None:
            continue
        if planned.drafter == NGRAM and planned.limit:
            draft.tokens[b], draft.confidence[b] = own[0][: planned.limit], own[1][: planned.limit]
            draft.drafter[b], draft.reasons[b] = NGRAM, None
        elif own[0]:
            plan.lookups[b] = own
    _ask_networks(state, plan, at, wanted, hidden)


def _has_hidden(state: EngineState, plan: StepPlan) -> list[bool]:
    """Which rows have the target's hidden state before their last token."""
    at = state.hidden_at
    return [
        at.get(slot) == request.sequence.committed - 1
        for slot, request in zip(plan.slots, plan.requests, strict=True)
    ]


def _plan_row(state: EngineState, request: RequestState, has_hidden: bool) -> PlanRow:
    sequence, drafter = request.sequence, state.drafter_of(request)
    most, tree = 0, None
    if drafter is not None:
        most = drafter.max_tokens if has_hidden or not drafter.needs_hidden else 0
        if most and drafter.taps and lacks(drafter, sequence, request.parked):
            most = 0
        tree = state.tree if drafter.branches and request.rule != "block" else None
    draft_tokens: int | Literal["auto"] | None = sequence.params.draft_tokens
    if sequence.params.drafter == "none":
        draft_tokens = 0
    elif draft_tokens is None:
        draft_tokens = state.draft_tokens
    return PlanRow(
        sequence.id, draft_tokens, max(request.room(state.max_len) - 1, 0),
        None if drafter is None else request.network, most,
        0 if is_greedy(sequence) else heat_of(sequence.params.temperature), tree,
        drafter is not None and (bool(drafter.taps) or drafter.observes),
        unread(drafter, sequence, request.parked) if drafter is not None and most else 0, sequence.output_len,
    )  # fmt: skip


def _reason(state: EngineState, request: RequestState, planned: PlannedRow) -> str | None:
    """Why a row drafts nothing. A network that is asked and says nothing has no proposal."""
    if planned.limit:
        return _NO_PROPOSAL
    if planned.reason in (NoDraftReason.NO_DRAFTER, NoDraftReason.NO_PROPOSAL):
        if request.parked:
            return next(iter(request.parked.values()))
        drafter = state.drafter_of(request)
        if drafter is not None and drafter.taps and (why := lacks(drafter, request.sequence, request.parked)):
            return why
    return None if planned.reason is None else planned.reason.value


def _give_up(state: EngineState, request: RequestState) -> None:
    """The text goes on without its network, which is told nothing of it any more."""
    drafter = state.drafter_of(request)
    if drafter is not None:
        assert request.network is not None, "it has a drafter"
        request.parked[request.network] = NoDraftReason.GIVEN_UP.value
        drafter.forget(request.sequence.id)


def _look_up(state: EngineState, plan: StepPlan, at: list[int], rows: list[PlanRow]) -> list[Found | None]:
    """What n-gram lookup finds for the rows `at` of the plan; None where it is not asked."""
    out: list[Found | None] = [None] * len(at)
    drafter = state.drafters.get(NGRAM)
    if drafter is None:
        return out
    asked = [j for j, b in enumerate(at) if plan.requests[b].copies and NGRAM not in plan.requests[b].parked]
    if not asked:
        return out
    stops = [Stop(min(rows[j].room, drafter.max_tokens) if rows[j].draft_tokens != 0 else 0) for j in asked]
    draft = _ask(state, drafter, plan, _Asked([at[j] for j in asked], stops))
    if draft is not None:
        for j, tokens, confidence in zip(asked, draft.tokens, draft.confidence, strict=True):
            out[j] = tokens, confidence
    return out


def _ask_networks(
    state: EngineState, plan: StepPlan, at: list[int], wanted: DraftPlan, hidden: list[bool]
) -> None:
    """Let each network draft for the rows that are planned for it."""
    groups: dict[str, list[int]] = {}
    for j, planned in enumerate(wanted.rows):
        if planned.limit and planned.drafter is not None and planned.drafter != NGRAM:
            groups.setdefault(planned.drafter, []).append(j)
    for name, own in groups.items():
        begin = time.perf_counter()
        rows = [at[j] for j in own]
        stops = [_stop(wanted.rows[j], wanted.stop) for j in own]
        asked = _Asked(rows, stops, [wanted.rows[j].tree for j in own], [hidden[b] for b in rows])
        draft = _ask(state, state.drafters[name], plan, asked)
        plan.seconds[name] = time.perf_counter() - begin
        for n, b in enumerate(rows):
            if draft is None:
                plan.draft.reasons[b] = plan.requests[b].parked[name]
            elif draft.tokens[n]:
                plan.take(b, draft, n, name)


def _stop(planned: PlannedRow, rule: StopRule) -> Stop:
    """The plan's stop rule for one row. Its first token is drafted whatever it is worth."""
    return Stop(planned.limit, planned.chance[1:], planned.worth, rule.price, rule.call)


@dataclass(frozen=True, slots=True)
class _Asked:
    """For which rows of a plan a drafter is asked, and what is said of each of them."""

    rows: list[int]
    stops: list[Stop]  # where its draft ends
    trees: list[Shape | None] = field(default_factory=list)  # how it may branch; empty: not
    has_hidden: list[bool] = field(
        default_factory=list
    )  # the target's state of its last token; empty: nobody asks


def _ask(state: EngineState, drafter: Drafter, plan: StepPlan, asked: _Asked) -> Draft | None:
    """What a drafter proposes, checked; None if it failed, and then it is not asked again for these rows."""
    rows, stops = asked.rows, asked.stops
    requests, limits = [plan.requests[b] for b in rows], [stop.limit for stop in stops]
    states = state.hidden if drafter.needs_hidden else None
    picker = StepPicker(requests, stops, state.target.vocab_size, asked.trees)
    context = DraftContext(
        [request.sequence for request in requests], limits, [plan.slots[b] for b in rows], states,
        asked.has_hidden or [False] * len(rows), state.cache, picker,
    )  # fmt: skip
    try:
        draft = ask(drafter, context)
        check_draft(draft, limits, state.target.vocab_size)
        draft.cut(state.target.readable)
        _check_distributions(draft, [request.rule for request in requests])
        if draft.parents is not None:
            _check_trees(draft, draft.parents, picker)
    except Exception as error:  # noqa: BLE001  whatever a third party's drafter raises costs speed, never text
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
        if tokens and ({*map(type, tokens)} != _IDS or min(tokens) < 0 or max(tokens) >= vocab_size):
            wrong = next(t for t in tokens if type(t) is not int or not 0 <= t < vocab_size)
            raise ValueError(f"token {wrong!r} is not an id in 0..{vocab_size - 1}")


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
