"""How many tokens each row drafts: the lengths that maximise the expected tokens per second of the whole batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from paceline.control.cost_model import CostModel

MARGIN = (
    1.02  # drafts have to promise that much more than none: the best of several guesses is guessed too high
)
TREE_ROWS = 2  # of the drafter for each token of a tree: some are drawn and not taken


@dataclass(slots=True)  # not frozen: made for each row of each step
class Option:
    """What one row may draft."""

    row: int
    drafter: str | None  # the network; None: a proposal, which costs nothing to make
    survival: Sequence[float]  # [tokens] that the first 1, 2, ... are all kept, falling
    chances: Sequence[float] = ()  # [tokens] of a network: that each is kept if those before it are
    depths: Sequence[int] = ()  # of a tree, whose tokens are its likeliest: how deep they are; empty: a chain


@dataclass(frozen=True, slots=True)
class Allocation:
    taken: Mapping[int, tuple[Option, int]]  # by row: what it drafts, and how many tokens of it, above 0
    tokens: float  # that the step is expected to write
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Batch:
    """The step without the rows that are to be decided."""

    rows: int  # target rows
    texts: int  # tokens that it writes at least: one for each decoding request


def allocate(
    options: Sequence[Option], batch: Batch, costs: CostModel, *, least: int | None = None
) -> Allocation:
    """The prefix of all (row, position), sorted by survival, with the best rate. Nothing taken: plain is best.

    `least`: the shortest prefix that is better than plain instead, of so many tokens at least.
    """
    candidates = [
        (-survival, position, option.row, option.drafter, option.depths)
        for option in options
        for position, survival in enumerate(option.survival)
    ]
    candidates.sort(key=itemgetter(0, 1, 2))
    steps = costs.steps(batch.rows, len(candidates), True)
    prices = {
        option.drafter: costs.draft_cost(option.drafter) for option in options if option.drafter is not None
    }
    depth = dict.fromkeys(prices, 0)
    best_tokens, best_seconds = float(batch.texts), costs.step_seconds(batch.rows, False)
    best_rate, best_count = MARGIN * best_tokens / best_seconds, 0
    tokens, drafting = float(batch.texts), 0.0
    for count, (negative, position, _, drafter, depths) in enumerate(candidates, 1):
        tokens -= negative
        if drafter is not None:
            base, call, token = prices[drafter]
            drafting += token * TREE_ROWS if depths else token
            deep = depths[position] if depths else position + 1
            if deep > depth[drafter]:
                drafting += call + (base if not depth[drafter] else 0.0)
                depth[drafter] = deep
        seconds = steps[count] + drafting
        if tokens > best_rate * seconds:
            best_rate, best_count, best_tokens, best_seconds = tokens / seconds, count, tokens, seconds
        if least is not None and best_count and count >= least:
            break
    by_row = {option.row: option for option in options}
    taken: dict[int, tuple[Option, int]] = {}
    for _, position, row, _, _ in candidates[:best_count]:
        taken[row] = by_row[row], position + 1  # of a row, the positions rise
    return Allocation(taken, best_tokens, best_seconds)


def best_of(
    networks: Mapping[int, Option], lookups: Mapping[int, Option], batch: Batch, costs: CostModel
) -> Allocation:
    """The best of: proposals alone, the networks alone, and each row what gains it more. Options by row."""
    if not lookups or not networks:
        return allocate([*(lookups or networks).values()], batch, costs)
    ways = [allocate([*some.values()], batch, costs) for some in (lookups, networks)]
    rate = max([way.rate for way in ways])
    price = rate * costs.row_seconds(batch.rows, len(networks))
    mixed = dict(networks)
    for row, option in lookups.items():
        other = networks.get(row)
        if other is not None and other.drafter is not None:
            _, call, token = costs.draft_cost(other.drafter)
            gain = proposal_gain(other.survival, price + rate * token, rate * call / len(networks))
            if gain > proposal_gain(option.survival, price):
                continue
        mixed[row] = option
    return max([*ways, allocate([*mixed.values()], batch, costs)], key=_rate)


def _rate(way: Allocation) -> float:
    return way.rate


def least_survival(batch: Batch, more: int, costs: CostModel) -> float:
    """A token that is kept more rarely pays for no row of this step, however many of up to `more` share its price."""
    plain = costs.step_seconds(batch.rows, False)
    counts = [1 << n for n in range(more.bit_length())]
    least = [(costs.step_seconds(batch.rows + n, False) - plain) / n for n in counts]
    return 0.7 * batch.texts / plain * min(least, default=0.0)


def proposal_gain(survival: Sequence[float], price: float, call: float = 0.0) -> float:
    """Tokens that a row's best draft gains, net of `price` for each token and `call` for each call of a network."""
    best = gain = 0.0
    for value in survival:
        gain += value - price - call
        best = max(best, gain)
    return best


def break_even(drafter: str | None, batch: Batch, rows: int, costs: CostModel) -> float:
    """The least share of drafted tokens that must be kept for drafts of some length to pay; above 1 none can.

    Tried for one row and for all `rows` together, since they share the calls of the network.
    """
    plain = batch.texts / costs.step_seconds(batch.rows, False)
    shares = []
    for drafting in {1, rows}:
        for length in (1, 2, 4, 8):
            seconds = costs.step_seconds(batch.rows + drafting * length, True)
            if drafter is not None:
                seconds += costs.draft_seconds(drafter, length, drafting * length)
            shares.append((plain * seconds - batch.texts) / (drafting * length))
    return min(shares)
