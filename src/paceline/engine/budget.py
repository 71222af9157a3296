"""How many tokens to draft: pure. The state is a frozen value (`Budget`), every function returns a new one;
learning.py renews it after steps.

The choice maximises the expected tokens per second of the whole batch, (texts + sum of survivals) / (seconds
of the step). The survival of position j is the chance that tokens 0..j of a draft are all kept
(acceptance.py). Inside a round, drafting goes on while the next token is worth its cost, judged by the
confidence in those before it.

Non-anticipating: whether token i is drafted depends only on tokens before i and on earlier steps, never on
token i itself, so `reject` and `block` stay exact (docs/controller.md shows why).
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from paceline.core import MAX_DRAFT_TOKENS, Draft, Sequence
from paceline.engine import acceptance as acc
from paceline.engine.acceptance import Arm, Bins, Firsts, Kind, Totals
from paceline.engine.costs import Costs
from paceline.engine.records import StepRecord
from paceline.engine.rounds import RoundCost
from paceline.ops.base import Stop
from paceline.ops.search import Watch
from paceline.sampling.shape import is_greedy

Want = int | Literal["auto"]
Joined = tuple[int, str | None]  # steps that texts rest from this one on, and why those that are new do

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

# What a plan must promise over none to begin drafting: its first rounds are cold. To go on it need only promise more than
# none.
START = 1.02
TRIED = 1.05  # and to be tried, if steps with drafts took as little as they might
MOST_CREDIT = 2.0  # target steps that are saved for them


class Controller(Protocol):
    def limits(
        self, sequences: list[Sequence], wants: list[Want], drafter_max: int, others: int = 0
    ) -> list[tuple[int, str | None]]:
        """Per row: tokens to draft at most, and the reason code when that is 0. `others`: rows of the step that belong
        to prompts being read."""
        ...

    def rest(self, sequences: list[Sequence], rooms: list[int]) -> tuple[int, Draft | None]:
        """Asked where `limits` leads to no draft, and when a rest is over: steps from this one on in which `limits` need
        not be asked for these texts (0: it has to), and what to copy in this one, where each has room for so many tokens.
        """
        ...

    def join(self, sequences: list[Sequence], wants: list[Want], most: int, untold: int) -> Joined | None:
        """Asked where some texts at rest have ended and as many others come in their place. None: ask `limits`."""
        ...

    def watch(self, sequences: list[Sequence]) -> Watch | None:
        """What tells when there may be something worth copying while they rest. None: there cannot be."""
        ...

    def copies(self, sequences: list[Sequence], rooms: list[int]) -> Draft | None:
        """Asked when it has found something, and after a step with copies: what is worth copying in this one."""
        ...

    def stop(self, sequence_id: int) -> Stop:
        """When a draft of this round ends before its limit, by the confidence in what was drafted so far."""
        ...

    def observe(self, record: StepRecord) -> None: ...

    def forget(self, sequence_id: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """The choice of one step for one kind of drafter."""

    limits: Mapping[int, int]  # sequence id -> tokens
    rate: float  # tokens per second that it promises, without the benefit of the doubt
    token_seconds: float  # of one more token: a row of the target's step, and of one of the network
    round: RoundCost  # of a draft round


@dataclass(frozen=True, slots=True)
class Budget:
    """Everything the controller knows."""

    costs: Costs
    kinds: tuple[Kind, ...]
    arms: Mapping[tuple[int, str], Arm] = field(default_factory=dict)
    bins: Mapping[str, Bins] = field(default_factory=dict)
    firsts: Mapping[str, Firsts] = field(default_factory=dict)
    totals: Mapping[str, Totals] = field(default_factory=dict)
    step: int = 0
    credit: float = 0.0  # seconds that probes may spend
    # seconds that each step with copies amid plain ones costs beside all that, by number of texts: 1, 2 to 3, 4 to 7, ...
    wake: Mapping[int, float] = field(default_factory=dict)
    # what plain steps take on average, over what is typical of them, by number of texts
    uneven: Mapping[int, float] = field(default_factory=dict)
    probing: frozenset[int] = frozenset()  # rows of this step that are probes
    care: float = 0.0  # seconds that deciding and learning take in a step with drafts, lately


def arm_of(budget: Budget, sequence_id: int, kind: Kind) -> Arm:
    return budget.arms.get((sequence_id, kind.name)) or acc.fresh_arm(kind)


def lines_of(budget: Budget, kind: Kind, arm: Arm) -> tuple[acc.Line, ...]:
    """What confidence is worth to texts like one, see `Kind.law`."""
    usual = kind.law(arm.sampled)
    return acc.calibration(budget.bins.get(arm.law), budget.bins.get(usual) if arm.law != usual else None)


def meet(budget: Budget, kind: Kind, sequences: Seq[Sequence]) -> Budget:
    """Give texts that are new to a kind of drafter what is known of it."""
    new = [s for s in sequences if (s.id, kind.name) not in budget.arms]
    if not new:
        return budget
    arms = {}
    for s in new:
        given, masked = bool(s.reference), s.constraint is not None
        arms[s.id, kind.name] = acc.fresh_arm(kind, not is_greedy(s), given=given, masked=masked)
    return replace(budget, arms={**budget.arms, **arms})


def room(sequence: Sequence) -> int:
    """Draft tokens that could still be kept: the last token of a text is always the target's own."""
    return max(sequence.params.max_tokens - sequence.output_len - 1, 0)


def plain(costs: Costs, rows: int, texts: int) -> float:
    """Seconds of a step of so many texts without a draft: of its rows, others belong to prompts that are being read."""
    return costs.target(min(rows, max(texts, 1)))


def choose(
    budget: Budget, kind: Kind, caps: Mapping[int, int], rows: int, texts: int, margin: float = 1.0
) -> Plan:
    """Draft lengths of at most caps[id], beside `rows` target rows that run anyway for `texts` texts.

    Tokens are taken in order of survival (which never rises along a row) and the prefix of that order with
    the best rate wins; all prefixes are looked at, since a staircase has more than one summit. Where something is known
    of the drafts, it must promise `margin` times the rate of none, with the benefit of the doubt.
    """
    costs = budget.costs
    base, step, slope = costs.drafting(kind.name, len(caps))
    entries: list[tuple[float, int, int]] = []  # (-survival, depth, id)
    sure: dict[int, float] = {}  # share of that without the benefit of the doubt
    known = kind.known  # or of some row it was seen what its drafts are worth
    for sequence_id, cap in caps.items():
        arm = arm_of(budget, sequence_id, kind)
        share, known = acc.sober(arm, len(caps)), known or arm.tries[0] >= acc.PARKED_WINDOW - 1
        sure[sequence_id] = (1.0 - arm.hope) / share
        hoped = [value for value in arm.survive[:cap] if value > 0.03]
        entries += [(-share * value, j, sequence_id) for j, value in enumerate(hoped)]
    entries.sort()
    tokens, depth, drafting, best, takes = float(texts), 0, 0.0, 0, 0.0
    # prompts that are read beside the texts are work of their own: only what drafting adds to them counts
    without = plain(costs, rows, texts)
    read = without - costs.target(rows)
    best_rate, checked = tokens / without, costs.targets(rows + 1, kind.name)
    for count, (survival, j, _) in enumerate(entries, 1):
        tokens -= survival
        if depth == 0:
            drafting = base + budget.care + (0.0 if kind.sequential else step)
        drafting += slope + (step if j >= depth and kind.sequential else 0.0)
        depth = max(depth, j + 1)
        now = next(checked) + read + drafting
        if tokens / now > best_rate:
            best_rate, best, takes = tokens / now, count, now
        elif (tokens - survival * (len(entries) - count)) / now < best_rate:
            break  # even if all others survived like this one and were free
    if known and best_rate < margin * texts / without:
        best = 0
    limits, tokens, rate = dict.fromkeys(caps, 0), float(texts), texts / without
    for survival, j, sequence_id in entries[:best]:
        limits[sequence_id] = j + 1
        tokens -= survival * sure[sequence_id]
    if best:
        rate = max(tokens / takes, rate)
    token = _last_row(costs, kind, rows, best or 4) + slope
    return Plan(limits, rate, token, (base, step, slope))


def _last_row(costs: Costs, kind: Kind, rows: int, more: int) -> float:
    """Seconds of each of the last rows of a step: of half of those drafted, since one may be a whole stair, or none."""
    last = more - more // 2
    return (costs.target(rows + more, kind.name) - costs.target(rows + more - last, kind.name)) / last


def break_even(budget: Budget, kind: Kind, rows: int, texts: int, auto_rows: int) -> float:
    """The least chance of a token to be kept at which drafts would pay, if all had it. Beyond 1 probing is pointless."""
    costs = budget.costs
    base, step, slope = costs.drafting(kind.name, auto_rows)
    base, without, bare = base + budget.care, plain(costs, rows, texts), costs.target(rows)
    least = float("inf")
    # of one row alone, and of all; a copy is short or long, and costs no call for each token
    alone, lengths = (1, (1, 2, 4)) if kind.sequential else (4, (1, 2, 4, MAX_DRAFT_TOKENS))
    for more, calls in ((alone, 1), *((n * auto_rows, n) for n in lengths)):
        checked = costs.target(rows + more, kind.name) - bare
        seconds = checked + base + step * (calls if kind.sequential else 1) + slope * more
        least = min(least, texts * seconds / (without * more))
    return least


def probe_price(costs: Costs, kind: Kind, rows: int) -> float:
    """Seconds that a probe of one token adds to a step, as far as is known."""
    return sum(costs.drafting(kind.name)) + costs.adding(rows, 1, kind.name)


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
        arm = arm._replace(parked=False)
    elif not arm.parked:
        arm = acc.parked(arm, budget.step)
    elif may_probe(budget, kind, arm, rows):
        arm, probes, limit = arm._replace(due=budget.step + arm.wait), True, 1
    else:
        return budget, 0
    probing = budget.probing | {sequence_id} if probes else budget.probing
    return replace(budget, arms={**budget.arms, (sequence_id, kind.name): arm}, probing=probing), limit


def stop(plan: Plan, arm: Arm, worth: Seq[acc.Line]) -> Stop:
    """A draft goes on while the next token is worth drawing and checking, if all so far survive with the chance that
    their confidence says; nothing about the next one itself enters, its own chance is the text's average there. Rows
    share a step of the network.
    """
    price, step = plan.rate * plan.token_seconds, plan.rate * plan.round[1]
    return Stop(MAX_DRAFT_TOKENS, arm.accept[1:], worth, price, step)


def stop_of(budget: Budget, plans: Mapping[str, Plan], sequence_id: int) -> Stop | None:
    """Of a row that a network drafts for, None if none does."""
    for kind in budget.kinds:
        if kind.sequential and kind.name in plans and sequence_id in plans[kind.name].limits:
            arm = arm_of(budget, sequence_id, kind)
            return stop(plans[kind.name], arm, lines_of(budget, kind, arm))
    return None


def shared(plan: Plan, arms: Seq[Arm], limits: Seq[int], copies: Seq[float], *, anyway: bool) -> list[int]:
    """What a network drafts of `limits`, by row, where copies were found that gain so many tokens net of their cost (0:
    none): each row takes what gains more, but copies alone do where a round would not pay for what it takes whoever
    takes part (`anyway`: there is one in any case).
    """
    base, step, _ = plan.round
    price = plan.rate * plan.token_seconds
    more = [sum(a.survive[:n]) - price * n - gain for a, n, gain in zip(arms, limits, copies, strict=True)]
    out = [0 if gain and own <= 0 else n for n, gain, own in zip(limits, copies, more, strict=True)]
    gained = sum([own for n, own in zip(out, more, strict=True) if n])
    pays = anyway or gained >= plan.rate * (base + step * max(out))
    return out if pays else [0] * len(out)
