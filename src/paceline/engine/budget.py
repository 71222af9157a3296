"""How many tokens to draft: pure. The state is a frozen value (`Budget`), every function returns a new one.

The choice maximises the expected tokens per second of the whole batch, (texts + sum of survivals) / (seconds
of the step). The survival of position j is the chance that tokens 0..j of a draft are all kept
(acceptance.py). Inside a round, drafting goes on while the next token is worth its cost, judged by the
confidence in those before it.

Non-anticipating: whether token i is drafted depends only on tokens before i and on earlier steps, never on
token i itself, so `reject` and `block` stay exact (docs/controller.md shows why).
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from paceline.core import MAX_DRAFT_TOKENS, Sequence
from paceline.engine import acceptance as acc
from paceline.engine.acceptance import Arm, Bins, Kind, Totals
from paceline.engine.costs import Costs, Round, Step
from paceline.engine.records import Asked, RowRecord, StepRecord
from paceline.sampling.shape import is_greedy

Want = int | Literal["auto"]

PARKED_BY_COST = "parked by cost"  # no acceptance would pay at this load
NO_CONFIDENCE = "no confidence"  # this request's drafts are kept too rarely to pay
NO_PROPOSAL = "no proposal"  # the drafter had nothing to say
DISABLED = "disabled by request"
NO_ROOM = "budget"  # the text ends before a draft could be kept
MEMORY = "memory"
PREFILL = "prefill"
DRAFTER_FAILED = "drafter failed"
NO_DRAFTER = "no drafter"
MEASURING = "measuring"  # plain steps amid drafts, to see what they take

TYPICAL = 12  # steps that are enough to tell the pace of many
SURE = 3.0  # copies that were kept, after which one may be as long as any
WARM = 4  # steps with drafts, or without, in a row until they show what such steps take: the first are cold
FADE_EVERY = 64  # steps after which a drafter that was not used counts as idle for as long
START = 1.1  # what a plan must promise over none to begin drafting: its first rounds are cold
MARGIN = 1.03  # and to go on: what it does not know costs something too
PROBE_SHARE = 0.005  # of the running time that probes may cost
MOST_CREDIT = 2.0  # target steps that are saved for them


class Controller(Protocol):
    def limits(
        self, sequences: list[Sequence], wants: list[Want], drafter_max: int, others: int = 0
    ) -> list[tuple[int, str | None]]:
        """Per row: tokens to draft at most, and the reason code when that is 0. `others`: rows of the step that belong
        to prompts being read."""
        ...

    def rest(self) -> int:
        """Steps after this one in which `limits` would draft nothing for the same rows, as far as is known now."""
        ...

    def go_on(self, sequence_id: int, step: int, confidence: float) -> bool:
        """Whether to draft one more token, after `step` + 1 were drafted, the last with `confidence`."""
        ...

    def observe(self, record: StepRecord) -> None: ...

    def forget(self, sequence_id: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """The choice of one step for one kind of drafter."""

    limits: Mapping[int, int]  # sequence id -> tokens
    rate: float  # tokens per second that it promises
    rows: int  # target rows of the step without any draft
    token_seconds: float  # mean cost of a planned token, its draft and its target row together
    row_seconds: float  # of that, its target row: a token that is drawn already costs no more


@dataclass(frozen=True, slots=True)
class Look:
    """What a step pays for tokens that are looked up: their number is decided when they are seen."""

    costs: Costs
    rows: int  # target rows of the step without any draft
    texts: int
    rate: float  # tokens per second without them
    prices: list[float] = field(default_factory=list)  # of 1, 2, ... tokens, as far as anybody asked

    def price(self, tokens: int) -> float:
        """Seconds of so many more rows for a text, at the price of all texts doing the same."""
        for more in range(len(self.prices) + 1, tokens + 1):
            self.prices.append(self.costs.adding(self.rows, more * self.texts) / self.texts)
        return self.prices[tokens - 1]


@dataclass(frozen=True, slots=True)
class Budget:
    """Everything the controller knows."""

    costs: Costs
    kinds: tuple[Kind, ...]
    arms: Mapping[tuple[int, str], Arm] = field(default_factory=dict)
    bins: Mapping[str, Bins] = field(default_factory=dict)
    totals: Mapping[str, Totals] = field(default_factory=dict)
    step: int = 0
    credit: float = 0.0  # seconds that probes may spend
    probing: frozenset[int] = frozenset()  # rows of this step that are probes


def arm_of(budget: Budget, sequence_id: int, kind: Kind) -> Arm:
    return budget.arms.get((sequence_id, kind.name)) or acc.fresh_arm(kind)


def meet(budget: Budget, kind: Kind, sequences: Seq[Sequence]) -> Budget:
    """Give texts that are new to a kind of drafter what is known of it."""
    new = [s for s in sequences if (s.id, kind.name) not in budget.arms]
    if not new:
        return budget
    arms = {(s.id, kind.name): acc.fresh_arm(kind, not is_greedy(s)) for s in new}
    return replace(budget, arms={**budget.arms, **arms})


def room(sequence: Sequence) -> int:
    """Draft tokens that could still be kept: the last token of a text is always the target's own."""
    return max(sequence.params.max_tokens - sequence.output_len - 1, 0)


def plain(costs: Costs, rows: int, texts: int) -> float:
    """Seconds of a step of so many texts without a draft: of its rows, others belong to prompts that are being read."""
    return costs.target(min(rows, max(texts, 1)))


def choose(
    budget: Budget, kind: Kind, caps: Mapping[int, int], rows: int, texts: int, margin: float = MARGIN
) -> Plan:
    """Draft lengths of at most caps[id], beside `rows` target rows that run anyway for `texts` texts.

    Tokens are taken in order of survival (which never rises along a row) and the prefix of that order with
    the best rate wins; all prefixes are looked at, since a staircase has more than one summit. Where something is known
    of the drafts, it must promise `margin` times the rate of none.
    """
    costs = budget.costs
    base, step, slope = costs.drafting(kind.name, len(caps))
    entries: list[tuple[float, int, int]] = []  # (-survival, depth, id)
    known = kind.known  # or of some row it was seen what its drafts are worth
    for sequence_id, cap in caps.items():
        arm = arm_of(budget, sequence_id, kind)
        share, known = acc.sober(arm, len(caps)), known or arm.tries[0] >= acc.PARKED_WINDOW - 1
        hoped = [value for value in arm.survive[:cap] if value > 0.03]
        entries += [(-share * value, j, sequence_id) for j, value in enumerate(hoped)]
    entries.sort()
    tokens, depth, drafting, best, spent = float(texts), 0, 0.0, 0, 0.0
    # prompts that are read beside the texts are work of their own: only what drafting adds to them counts
    without = plain(costs, rows, texts)
    read = without - costs.target(rows)
    best_rate = tokens / without
    for count, (survival, j, _) in enumerate(entries, 1):
        tokens -= survival
        if depth == 0:
            drafting = base + (0.0 if kind.sequential else step)
        drafting += slope + (step if j >= depth and kind.sequential else 0.0)
        depth = max(depth, j + 1)
        now = costs.target(rows + count) + read + drafting
        if tokens / now > best_rate:
            best_rate, best, spent = tokens / now, count, now - without
        elif (tokens - survival * (len(entries) - count)) / now < best_rate:
            break  # even if all others survived like this one and were free
    if known and best_rate < margin * texts / without:
        best, best_rate, spent = 0, texts / without, 0.0
    limits = dict.fromkeys(caps, 0)
    for _, j, sequence_id in entries[:best]:
        limits[sequence_id] = j + 1
    row = costs.adding(rows, best or 4) / (best or 4)
    return Plan(limits, best_rate, rows, spent / max(best, 1), row)


def break_even(budget: Budget, kind: Kind, rows: int, texts: int, auto_rows: int) -> float:
    """The least chance of a token to be kept at which drafts would pay, if all had it. Beyond 1 probing is pointless."""
    costs = budget.costs
    base, step, slope = costs.drafting(kind.name, auto_rows)
    without = plain(costs, rows, texts)
    least = float("inf")
    for more, calls in ((1, 1), (auto_rows, 1), (2 * auto_rows, 2), (4 * auto_rows, 4)):
        seconds = costs.adding(rows, more) + base + step * (calls if kind.sequential else 1) + slope * more
        least = min(least, texts * seconds / (without * more))
    return least


def probe_price(costs: Costs, kind: Kind, rows: int) -> float:
    """Seconds that a probe of one token adds to a step, as far as is known."""
    return sum(costs.drafting(kind.name)) + costs.adding(rows, 1)


def may_probe(budget: Budget, kind: Kind, arm: Arm, rows: int) -> bool:
    """Whether a parked row may be probed now: it is due, and there is credit for it beside those that probe already."""
    if not arm.parked or budget.step < arm.due:
        return False
    price = probe_price(budget.costs, kind, rows)
    most = MOST_CREDIT * budget.costs.target(1)
    floor = (
        -2.0 * price if arm.wait == 1 else min(price, most)
    )  # after a kept probe the next may run on credit
    return budget.credit - price * len(budget.probing) >= floor


def settle(budget: Budget, kind: Kind, sequence_id: int, limit: int, rows: int) -> tuple[Budget, int]:
    """Park a row that is planned no draft, bring back one that is, or let a parked one probe: its final
    limit.
    """
    arm, probes = arm_of(budget, sequence_id, kind), False
    if limit:
        if not arm.parked:
            return budget, limit
        arm = replace(arm, parked=False)
    elif not arm.parked:
        arm = acc.parked(arm, budget.step)
    elif may_probe(budget, kind, arm, rows):
        arm, probes, limit = replace(arm, due=budget.step + arm.wait), True, 1
    else:
        return budget, 0
    probing = budget.probing | {sequence_id} if probes else budget.probing
    return replace(budget, arms={**budget.arms, (sequence_id, kind.name): arm}, probing=probing), limit


def worth(plan: Plan, arm: Arm, step: int, survival: float) -> bool:
    """Whether token `step` + 1 is worth its target row when the tokens up to `step` survive with chance `survival`.

    Nothing about token `step` + 1 itself enters: its own chance is the request's average at that position.
    """
    if step + 1 >= MAX_DRAFT_TOKENS:
        return False
    return survival * arm.accept[step + 1] >= plan.rate * plan.row_seconds


def offer(budget: Budget, kind: Kind, arm: Arm, look: Look, confidence: list[float]) -> tuple[int, float]:
    """(tokens worth checking, tokens they gain net of their cost) of a proposal made at one go.

    Only for proposals that are a function of the text so far (n-gram), or the choice would look at what it
    decides. What its confidence is worth counts until the text has shown what its own copies are worth; it starts
    with four tokens, and each copy that is kept lets the next be four longer.
    """
    confidence = confidence[: 4 + 4 * int(arm.hits[0])]
    slope = budget.costs.drafting(kind.name)[2]
    bins = budget.bins.get(kind.law(arm.sampled))
    best, length, kept, alive = 0.0, 0, 0.0, 1.0
    for j, value in enumerate(confidence[:MAX_DRAFT_TOKENS]):
        own = arm.tries[j] / (arm.tries[j] + arm.weight)
        alive *= own * arm.accept[j] + (1 - own) * acc.calibrated(bins, value)
        kept += alive
        net = kept - MARGIN * look.rate * (look.price(j + 1) + slope * (j + 1))
        if net > best:
            best, length = net, j + 1
        elif alive < 0.03:
            break
    return length, best


def expected(budget: Budget, kind: Kind, arm: Arm, plan: Plan, length: int) -> float:
    """Tokens that `length` drafted ones gain on average, net of their cost."""
    return sum(arm.survive[:length]) - plan.rate * plan.token_seconds * length


def observe(budget: Budget, seen: Seq[tuple[StepRecord, Asked]]) -> Budget:
    """Learn from finished steps: costs, acceptance by position and request, calibration, probe credit."""
    costs, spent, probed, drafted, used = budget.costs, 0.0, 0.0, [], set()
    targets: list[Step] = []
    rounds: dict[str, list[Round]] = {}
    steps = sum([record.times for record, _ in seen])
    at, due, every = 0, 0, steps // TYPICAL + 1
    for record, asked in seen:
        spent += record.seconds + record.more_seconds
        rows = [row for row in record.rows if row.drafted]
        kind = _main_kind(budget, rows) if rows else None
        # a lone probe comes after many steps without one and is no measure of drafts that follow each other
        lone = bool(rows) and all(row.sequence_id in budget.probing for row in rows)
        if at >= due and record.alike >= WARM and not record.masked and not lone:
            name, texts = kind.name if kind is not None else None, len(record.rows)
            taken = record.target_seconds + record.other_seconds
            targets.append(Step(record.target_rows, taken, name, len(rows), texts, record.context))
            due = at + every
        at += record.times
        if not rows:
            continue
        used |= {row.drafter for row in rows}
        drafted += [row for row in rows if not row.learnt]
        if kind is None:
            continue
        if budget.probing:
            probed += _wasted(budget, kind, record, rows, lone)
        if not (lone and costs.is_measured(kind.name)):
            each = [max(asked.get(r.sequence_id, 0), r.drafted) for r in rows if r.drafter == kind.name]
            calls = max(each) if kind.sequential else 1
            warm = record.alike >= WARM
            took = Round(calls, sum(each), record.draft_seconds, len(record.rows), warm)
            rounds.setdefault(kind.name, []).append(took)
    for name, own in rounds.items():
        costs = costs.observe_rounds(name, own)
    costs = costs.observe_targets(targets, max(steps // max(len(targets), 1), 1))
    end = budget.step + steps
    if end // FADE_EVERY > budget.step // FADE_EVERY:
        for name in set(costs.draft) - used:
            costs = costs.idle(name, FADE_EVERY)
    most = MOST_CREDIT * costs.target(1)
    budget = replace(
        budget, costs=costs, step=end,
        credit=max(min(budget.credit + PROBE_SHARE * spent - probed, most), -2 * most),
    )  # fmt: skip
    return observe_rows(budget, drafted) if drafted else budget


def _wasted(budget: Budget, kind: Kind, record: StepRecord, rows: list[RowRecord], lone: bool) -> float:
    """Seconds that the probes of a step have cost, net of the plain steps that kept tokens have saved."""
    texts = len(record.rows)
    if not lone:  # drafts that pay ran beside them: what is the probes' own share is known from prices only
        return probe_price(budget.costs, kind, texts) * sum([r.sequence_id in budget.probing for r in rows])
    without = plain(budget.costs.within(texts, record.context), texts, texts)
    kept = sum([row.accepted for row in rows])
    return min(record.seconds, 8 * without) - without * (1 + kept / texts)


def is_news(budget: Budget, row: RowRecord) -> bool:
    """Whether what became of a proposal that was made at one go changes what is proposed next, see `offer`: it was
    refused, or nothing was known yet.
    """
    if not row.drafted:
        return False
    for kind in budget.kinds:
        if kind.name == row.drafter and not kind.sequential:
            return row.accepted < row.drafted or arm_of(budget, row.sequence_id, kind).hits[0] < SURE
    return False


def _main_kind(budget: Budget, rows: list[RowRecord]) -> Kind | None:
    """The kind that a step's drafting time is put down to: the one that needs a call per token, if it took
    part.
    """
    names = {row.drafter for row in rows}
    found = [kind for kind in budget.kinds if kind.name in names]
    return max(found, key=lambda kind: kind.sequential, default=None)


def observe_rows(budget: Budget, rows: Seq[RowRecord], *, checked: bool = True) -> Budget:
    """Learn from what became of drafts, or would have become of them."""
    arms, bins, totals = dict(budget.arms), dict(budget.bins), dict(budget.totals)
    kinds = {kind.name: kind for kind in budget.kinds}
    by_arm: dict[tuple[int, str], list[RowRecord]] = {}
    for row in rows:
        if row.drafter in kinds:
            by_arm.setdefault((row.sequence_id, row.drafter), []).append(row)
    for (sequence_id, name), own in by_arm.items():
        kind = kinds[name]
        arm = acc.learn(arm_of(budget, sequence_id, kind), [(r.drafted, r.accepted) for r in own])
        if checked and sequence_id in budget.probing:
            arm = acc.probed(arm, budget.step, kept=own[-1].accepted > 0)
        arms[sequence_id, name] = arm
        law = kind.law(arm.sampled)
        for row in own:
            bins[law] = acc.calibrate(bins.get(law), row.confidence, row.accepted)
            if checked:
                totals[name] = totals.get(name, Totals()).add(row.drafted, row.accepted)
    return replace(budget, arms=arms, bins=bins, totals=totals)


def forget(budget: Budget, gone: Set[int]) -> Budget:
    """Drop what was learnt from some texts."""
    arms = {key: arm for key, arm in budget.arms.items() if key[0] not in gone}
    return replace(budget, arms=arms, probing=budget.probing - gone)


def alarm(budget: Budget) -> tuple[Budget, list[str]]:
    """Warnings, each once, about drafters whose tokens are kept far too rarely for their pair."""
    said = []
    for kind in budget.kinds:
        totals = budget.totals.get(kind.name)
        text = acc.alarm(kind, totals) if totals else None
        if text and totals:
            said.append(text)
            budget = replace(budget, totals={**budget.totals, kind.name: replace(totals, alarmed=True)})
    return budget, said
