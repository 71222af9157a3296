"""The policy of `auto`: in each step, the draft lengths that promise the most tokens per second of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from paceline.control.acceptance import (
    TRIES,
    AcceptanceEstimator,
    PairPrior,
    ProposalEstimator,
    TreeEstimator,
    likeliest,
)
from paceline.control.allocation import (
    TREE_ROWS,
    Allocation,
    Batch,
    Option,
    allocate,
    best_of,
    break_even,
    least_survival,
)
from paceline.control.base import (
    NGRAM,
    DraftPlan,
    PlannedRow,
    PlanRow,
    Proposal,
    RowOutcome,
    StepOutcome,
    StopRule,
    heat_of,
)
from paceline.control.betting import FIRST_LOOK, LOOK, SHORTEST, Purse
from paceline.control.confidence import ConfidenceCalibrator, worth_of
from paceline.control.cost_model import CostModel, CostTable
from paceline.control.fixed import fixed_row, no_draft
from paceline.control.giving_up import HOPELESS, Use
from paceline.control.reasons import NoDraftReason
from paceline.core import MAX_DRAFT_TOKENS
from paceline.tree import Shape

REFERENCE = 128  # drafted steps for each plain one that shows what plain steps take
IDLE = 16  # steps for which a network that did not pay is not thought about, where nobody else drafts
TREES = REFERENCE // 4  # steps with chains until a tree shows what trees bring
LEAST_REST = 64  # tokens that a text is thought to go on for at least
DEEPER = 2  # tokens beyond its planned length that a row may draft while its confidence pays for them


@dataclass(frozen=True, slots=True)
class KnownPair:
    """What is known of a drafter with this target before it runs here."""

    acceptance: tuple[float, ...] = ()  # by position, given that all before were kept
    bins: tuple[tuple[float, float], ...] = ()  # (kept, tried) by confidence
    heat: int = 0  # of the texts that it was measured on


@dataclass(frozen=True, slots=True)
class Learnt:
    """What is worth keeping for the next start."""

    table: CostTable
    pairs: Mapping[tuple[str, bool], KnownPair]  # of drafters that drafted, by whether text was sampled
    drafts: Mapping[str, int]  # by drafter


@dataclass(slots=True)
class _Request:
    estimators: dict[tuple[str, int], AcceptanceEstimator] = field(default_factory=dict)
    proposals: ProposalEstimator = field(default_factory=ProposalEstimator)
    heat: int = 0
    promised: list[float] = field(default_factory=list)  # of its next tree, by its chains
    drafted: int = -1  # the last step in which a network drafted for it
    idle: int = 0  # the step from which its network is thought about again,
    winning: bool = False  # its last bet gained
    use: Use = field(default_factory=Use)
    unread: int = 0  # tokens that its network has to read before it drafts
    why: NoDraftReason = NoDraftReason.NO_CONFIDENCE  # and why it drafts nothing until then

    def park(self, step: int, dear: bool) -> None:
        """Its network does not pay in this step: nobody thinks of it for a while."""
        self.why = NoDraftReason.PARKED_BY_COST if dear else NoDraftReason.NO_CONFIDENCE
        self.idle = step + IDLE


class _Pairs:
    """What is known of each drafter, by its name and the heat of the text. What a confidence is worth is the same at all
    temperatures, since it is that of the shaped distribution: only greedy text is apart.
    """

    def __init__(self, known: Mapping[tuple[str, bool], KnownPair]) -> None:
        self._known = dict(known)
        self._priors: dict[tuple[str, int], PairPrior] = {}
        self._confidence: dict[tuple[str, bool], ConfidenceCalibrator] = {}
        self._trees: dict[tuple[str, bool], TreeEstimator] = {}

    def prior(self, drafter: str, heat: int) -> PairPrior:
        """Begins as that of the nearest temperature at which something was seen."""
        key, sampled = (drafter, heat), heat > 0
        if key not in self._priors:
            known = self._known.get((drafter, sampled), KnownPair())
            others = [at for name, at in self._priors if name == drafter and at and sampled]
            nearest = min(others, key=lambda at: abs(at - heat), default=0)
            near = self._priors[drafter, nearest] if nearest else None
            self._priors[key] = PairPrior(drafter, known.acceptance, sampled=sampled, near=near)
            self._priors[key].alarms = heat <= known.heat  # hotter than measured, less is expected
            self._priors[key].judged &= heat <= heat_of(1.0)
        return self._priors[key]

    def trees(self, drafter: str, sampled: bool) -> TreeEstimator:
        return self._trees.setdefault((drafter, sampled), TreeEstimator())

    def confidence(self, drafter: str, sampled: bool) -> ConfidenceCalibrator:
        key = drafter, sampled
        if key not in self._confidence:
            self._confidence[key] = ConfidenceCalibrator(self._known.get(key, KnownPair()).bins)
        return self._confidence[key]

    def learnt(self) -> tuple[dict[tuple[str, bool], KnownPair], dict[str, int]]:
        """(what drafts have shown, how many there were). Of sampled texts, those of the temperature with the most."""
        pairs: dict[tuple[str, bool], KnownPair] = {}
        drafts: dict[str, int] = {}
        for (name, heat), prior in sorted(self._priors.items(), key=lambda item: item[1].drafts):
            if prior.drafts >= TRIES:
                bins = self.confidence(name, heat > 0).bins
                pairs[name, heat > 0] = KnownPair(tuple(prior.accept), bins, heat)
                drafts[name] = drafts.get(name, 0) + prior.drafts
        return pairs, drafts

    def goes_without(self, row: PlanRow, use: Use, costs: CostModel, *, new: bool) -> bool:
        """Whether a text is to go on without its network. What a full batch cannot pay for may pay in the next text."""
        if row.drafter is None or not row.follows:
            return False
        prior, hopeless = self.prior(row.drafter, row.heat), self.hopeless(row, costs)
        return use.refused(prior, hopeless) if new else use.over(prior, hopeless)

    def hopeless(self, row: PlanRow, costs: CostModel) -> bool:
        """Whether all texts together keep far less than would pay for a text alone."""
        assert row.drafter is not None, "a row with a network"
        most = self.prior(row.drafter, row.heat).most()
        return most < HOPELESS and most < HOPELESS * break_even(row.drafter, Batch(1, 1), 1, costs)


class AdaptivePolicy:
    def __init__(
        self,
        table: CostTable,
        known: Mapping[tuple[str, bool], KnownPair] | None = None,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        """`table`: as measured at load. `known`: by (drafter, whether text is sampled). `warn`: gets alarms."""
        self.table = table
        self._costs = CostModel(table)
        self._pairs, self._warn = _Pairs(known or {}), warn
        self._requests: dict[int, _Request] = {}
        self._chains = 0  # steps with chains since one with trees
        self._step = 0
        self._drafted = 0  # steps with drafts since a plain one
        self._measuring = False  # the last step was plain to see what plain ones take
        self._purse = Purse.of(table.seconds[0])
        self._betting = False  # the drafts of this step are a bet
        self._asked: dict[str, int] = {}  # the step in which a drafter was last asked

    def plan(
        self, rows: Seq[PlanRow], free_proposals: Seq[Proposal | None], prefill_rows: int = 0
    ) -> DraftPlan:
        self._step += 1
        self._betting = False
        if len(rows) != len(free_proposals):
            raise ValueError(
                f"{len(free_proposals)} proposals for {len(rows)} rows: give one or None for each"
            )
        out: list[PlannedRow | None] = []
        for row, proposal in zip(rows, free_proposals, strict=True):
            new, request = row.id not in self._requests, self._request(row)
            request.unread = row.unread
            draft_tokens = 1 if row.draft_tokens == "auto" else row.draft_tokens
            reason = no_draft(row, proposal, draft_tokens)
            auto = new and reason is None and row.draft_tokens == "auto"
            if auto and self._pairs.goes_without(row, request.use, self._costs, new=True):
                reason = NoDraftReason.GIVEN_UP
            if reason is not None:
                out.append(PlannedRow(None, 0, reason))
            else:
                out.append(None if row.draft_tokens == "auto" else fixed_row(row, proposal, draft_tokens))
        fixed, self._measuring = [planned for planned in out if planned is not None], False
        if len(fixed) == len(out):
            return DraftPlan(tuple(fixed))
        batch = Batch(len(rows) + prefill_rows + sum([planned.limit for planned in fixed]), len(rows))
        return self._decide(rows, free_proposals, batch, out)

    def _decide(
        self, rows: Seq[PlanRow], proposals: Seq[Proposal | None], batch: Batch, out: list[PlannedRow | None]
    ) -> DraftPlan:
        """The rows of `out` that are None."""
        networks: dict[int, Option] = {}
        trees: dict[int, Option] = {}
        proposals_by_row: dict[int, Option] = {}
        for i, planned in enumerate(out):
            if planned is None:
                self._found(i, rows[i], proposals[i], proposals_by_row)
        awake = [i for i, planned in enumerate(out) if planned is None and self._awake(rows[i])]
        if not awake and not proposals_by_row:
            return self._parked(rows, networks, batch, out)
        floor = least_survival(batch, MAX_DRAFT_TOKENS * len(rows), self._costs) if awake else 0.0
        for i in awake:
            self._network(i, rows[i], floor, networks)
            self._tree(i, rows[i], networks, trees)
        best = self._best(networks, proposals_by_row, trees, batch)
        if unpaid := self._unpaid(rows, best, batch):
            awake_too = {i: option for i, option in networks.items() if i not in unpaid}
            branching = {i: option for i, option in trees.items() if i not in unpaid}
            best = self._best(awake_too, proposals_by_row, branching, batch)
        self._measuring = bool(best.taken) and self._drafted >= REFERENCE and batch.rows == len(rows)
        if best.taken and not self._measuring:
            return self._drafting(rows, out, best, batch)
        if self._measuring:
            self._drafted = 0
            idle = PlannedRow(None, 0, NoDraftReason.MEASURING)
            return DraftPlan(tuple([planned or idle for planned in out]))
        return self._parked(rows, networks, batch, out)

    def _best(
        self,
        networks: dict[int, Option],
        lookups: dict[int, Option],
        trees: dict[int, Option],
        batch: Batch,
    ) -> Allocation:
        best = best_of(networks, lookups, batch, self._costs)
        if not trees:
            return best
        tree = allocate([*(lookups | networks | trees).values()], batch, self._costs)
        return self._chain_or_tree(best, tree)

    def _unpaid(self, rows: Seq[PlanRow], best: Allocation, batch: Batch) -> set[int]:
        """Rows whose network would have to read more than its drafts bring back in the rest of the text, as far as one
        can know: a text goes on for as long as it has, and for `LEAST_REST` tokens.
        """
        reading = {i: self._reading(rows[i], option) for i, (option, _) in best.taken.items()}
        if not any(reading.values()):
            return set()
        plain = self._costs.step_seconds(batch.rows, False) / batch.texts  # of a token
        gain = (best.tokens * plain - best.seconds) / best.tokens  # seconds of a token, of the whole batch,
        share = batch.texts / len(best.taken)  # of which those that draft have all

        def rest(row: PlanRow) -> int:
            return min(row.room + 1, max(row.written, LEAST_REST))

        return {i for i, seconds in reading.items() if seconds > gain * share * rest(rows[i])}

    def _reading(self, row: PlanRow, option: Option) -> float:
        """Seconds that the network of an option reads before it drafts for a row."""
        return 0.0 if option.drafter is None else self._costs.reading_seconds(option.drafter, row.unread)

    def _awake(self, row: PlanRow) -> bool:
        return self._request(row).idle <= self._step

    def _parked(
        self,
        rows: Seq[PlanRow],
        networks: dict[int, Option],
        batch: Batch,
        out: Seq[PlannedRow | None],
    ) -> DraftPlan:
        """Nothing is promised to pay: why, or a bet."""
        bet = self._bet(rows, networks, batch)
        if bet is not None:
            self._betting = True
            return self._drafting(rows, out, bet, batch)
        drafters = sorted({option.drafter for option in networks.values() if option.drafter is not None})
        dear = {name for name in drafters if break_even(name, batch, len(rows), self._costs) > 1.0}
        planned: list[PlannedRow] = []
        for i, row in enumerate(out):
            if row is not None:
                planned.append(row)
                continue
            request = self._request(rows[i])
            if i in networks:
                request.park(self._step, networks[i].drafter in dear)
                if self._pairs.goes_without(rows[i], request.use, self._costs, new=False):
                    request.why = NoDraftReason.GIVEN_UP
            planned.append(PlannedRow(None, 0, request.why))
        return DraftPlan(tuple(planned))

    def _bet(self, rows: Seq[PlanRow], networks: Mapping[int, Option], batch: Batch) -> Allocation | None:
        """What would be drafted if texts were as easy as their own drafts allow; or a network that was not asked for
        long, whatever it is thought to cost. None if neither, or if the purse does not pay for it.
        """
        hopes: list[Option] = []
        late: list[Option] = []
        for i, option in networks.items():
            assert option.drafter is not None, "a network"
            own = self._estimator(self._request(rows[i]), option.drafter)
            if self._step - self._asked.get(option.drafter, FIRST_LOOK - LOOK) >= LOOK:
                own.age()
                few = own.hopes()[: min(SHORTEST, len(option.survival))]
                late.append(Option(i, option.drafter, list(accumulate(few, mul)), few))
            if not self._pairs.hopeless(rows[i], self._costs):
                chances = own.hopes()[: min(rows[i].drafter_max, rows[i].room)]
                hopes.append(Option(i, option.drafter, list(accumulate(chances, mul)), chances))
        best = allocate(hopes, batch, self._costs, least=SHORTEST) if hopes else None
        if (best is None or not best.taken) and late:
            latest = late[0]
            seconds = self._seconds(batch, {latest.row: (latest, len(latest.survival))})
            best = Allocation(
                {latest.row: (latest, len(latest.survival))}, batch.texts + sum(latest.survival), seconds
            )
        if best is None or not best.taken:
            return None
        plain = self._costs.step_seconds(batch.rows, False)
        # a text whose last bet gained goes on, and so does one that is to show whether the network fits by now
        asked = [self._requests[rows[i].id] for i in best.taken]
        owes = any(request.winning or request.use.shows for request in asked)
        reading = sum([self._reading(rows[i], option) for i, (option, _) in best.taken.items()])
        if owes and reading <= plain:
            return best
        return best if self._purse.affords(self._seconds(batch, best.taken) + reading - plain) else None

    def _seconds(self, batch: Batch, taken: Mapping[int, tuple[Option, int]]) -> float:
        """Of a step in which these drafts are made and verified."""
        lengths: dict[str, list[int]] = {}
        for option, length in taken.values():
            if option.drafter is not None:
                lengths.setdefault(option.drafter, []).append(length)
        seconds = self._costs.step_seconds(batch.rows + sum(map(sum, lengths.values())), True)
        for name, each in lengths.items():
            seconds += self._costs.draft_seconds(name, max(each), sum(each))
        return seconds

    def _found(self, i: int, row: PlanRow, proposal: Proposal | None, lookups: dict[int, Option]) -> None:
        if proposal is not None and proposal.confidence:
            lines = self._pairs.confidence(NGRAM, row.heat > 0).lines()
            survival = self._request(row).proposals.survival(proposal.confidence[: row.room], lines)
            lookups[i] = Option(i, None, survival)

    def _network(self, i: int, row: PlanRow, floor: float, networks: dict[int, Option]) -> None:
        most = min(row.drafter_max, row.room)
        if row.drafter is not None and most > 0:
            chances = self._estimator(self._request(row), row.drafter).chances(floor)[:most]
            networks[i] = Option(i, row.drafter, list(accumulate(chances, mul)), chances)

    def _tree(self, i: int, row: PlanRow, networks: dict[int, Option], trees: dict[int, Option]) -> None:
        chain = networks.get(i)
        if chain is not None and chain.drafter is not None and row.tree is not None:
            request, most = self._request(row), min(row.drafter_max, row.room)
            request.promised, depths = likeliest(chain.chances, row.tree)
            survival = self._pairs.trees(chain.drafter, row.heat > 0).survival(request.promised[:most])
            trees[i] = Option(i, chain.drafter, survival, survival, depths)

    def _chain_or_tree(self, chain: Allocation, tree: Allocation) -> Allocation:
        """The faster one, and now and then a tree, so that it is known what they bring."""
        self._chains += 1
        if not tree.taken or (tree.rate <= chain.rate and self._chains < TREES):
            return chain
        self._chains = 0
        return tree

    def _drafting(
        self, rows: Seq[PlanRow], out: Seq[PlannedRow | None], best: Allocation, batch: Batch
    ) -> DraftPlan:
        """The plan that takes what was found best."""
        self._drafted += 1
        planned = [row or self._planned(rows[i], *best.taken.get(i, (None, 0))) for i, row in enumerate(out)]
        return DraftPlan(tuple(planned), self._stop(planned, batch, best.rate))

    def _planned(self, row: PlanRow, option: Option | None, length: int) -> PlannedRow:
        if option is None:
            return PlannedRow(None, 0, NoDraftReason.NO_CONFIDENCE)
        if option.drafter is None:
            return PlannedRow(NGRAM, length)
        if option.depths:
            assert row.tree is not None
            most = min(length + DEEPER, len(option.survival))
            shape = Shape(min(max(option.depths[:length]) + DEEPER, row.tree.depth), row.tree.width)
            return PlannedRow(option.drafter, most, None, tuple(option.chances[:most]), (), shape)
        lines = self._pairs.confidence(option.drafter, row.heat > 0).lines()
        chances = tuple(option.chances[: length + DEEPER])
        return PlannedRow(option.drafter, len(chances), None, chances, lines)

    def _stop(self, planned: Seq[PlannedRow], batch: Batch, rate: float) -> StopRule:
        """What one more token, and one more call, cost in tokens at the plan's own speed."""
        drafters = {row.drafter for row in planned if row.chance and row.drafter is not None}
        if not drafters:
            return StopRule()
        costs = [self._costs.draft_cost(drafter) for drafter in drafters]
        row_seconds = self._costs.row_seconds(batch.rows, sum([row.limit > 0 for row in planned]))
        return StopRule(
            rate * (row_seconds + max([cost.token for cost in costs])),
            rate * max([cost.call for cost in costs]),
        )

    def observe(self, outcome: StepOutcome) -> None:
        behind = self._behind(outcome)
        for row in outcome.rows:
            self._learn(row, alone=len(outcome.rows) == 1)
        if outcome.prefill_rows or not outcome.timed:
            return
        verifying = outcome.drafted > 0
        rows = len(outcome.rows) + outcome.drafted
        rounds = _rounds(outcome)
        if not behind:
            self._costs.observe_machine(rows, outcome.target_seconds, rounds)
        self._costs.observe(rows, verifying, outcome.target_seconds, rare=self._measuring and not verifying)
        for drafter, (calls, tokens, seconds) in rounds.items():
            self._costs.observe_draft(drafter, calls, tokens, seconds, behind=drafter in behind)
            if drafter in behind:
                drafting = self._costs.draft_seconds(drafter, calls, tokens)
                self._costs.observe_reading(drafter, behind[drafter], seconds, drafting)
            self._asked[drafter] = self._step
        spent = outcome.target_seconds + sum(outcome.draft_seconds.values())
        self._purse.earn(spent)
        if self._betting:
            plain, texts = self._costs.step_seconds(len(outcome.rows), False), len(outcome.rows)
            lost = spent - plain * (1.0 + sum([row.accepted for row in outcome.rows]) / texts)
            self._purse.settle(lost)
            for row in outcome.rows:
                if row.drafted and row.id in self._requests:
                    self._requests[row.id].winning = lost < 0.0

    def _behind(self, outcome: StepOutcome) -> dict[str, int]:
        """Networks whose round began with what they had not read of some text, its prompt or what plain steps wrote; and
        how many tokens that were.
        """
        behind: dict[str, int] = {}
        for row in outcome.rows:
            request = self._requests.get(row.id)
            if request is not None and row.drafter is not None and row.drafted and row.drafter != NGRAM:
                if request.drafted != self._step - 1:
                    behind[row.drafter] = behind.get(row.drafter, 0) + request.unread
                request.drafted = self._step
        return behind

    def _learn(self, row: RowOutcome, *, alone: bool) -> None:
        request = self._requests.get(row.id)
        if request is None:
            return
        if row.unused:
            self._learn_proposal(request, row.unused, row.agreed)
        if row.drafter is None or not row.drafted:
            request.use.plain += alone
            return
        if row.drafter == NGRAM:
            self._learn_proposal(request, row.confidence, row.accepted)
            return
        request.idle = 0
        request.use.drafted(self._pairs.prior(row.drafter, request.heat), alone=alone)
        key = row.drafter, request.heat > 0
        self._estimator(request, row.drafter).add(row.drafted, row.accepted)
        if row.likeliest:
            self._pairs.trees(*key).add(row.likeliest, request.promised)
        else:
            self._pairs.confidence(*key).add(row.confidence, row.accepted)
        prior = self._pairs.prior(row.drafter, request.heat)
        for line in (prior.misread(), prior.alarm()):
            if line is not None and self._warn is not None:
                self._warn(line)

    def _learn_proposal(self, request: _Request, confidence: Seq[float], accepted: int) -> None:
        calibrator = self._pairs.confidence(NGRAM, request.heat > 0)
        lines = calibrator.lines()
        request.proposals.add([worth_of(lines, c) for c in confidence], accepted)
        calibrator.add(confidence, accepted)

    def learnt(self) -> Learnt:
        """What steps and drafts have shown so far."""
        return Learnt(self._costs.learnt(), *self._pairs.learnt())

    def forget(self, id: int) -> None:
        self._requests.pop(id, None)

    def _request(self, row: PlanRow) -> _Request:
        request = self._requests.get(row.id)
        if request is None:
            request = self._requests[row.id] = _Request(heat=row.heat)
        return request

    def _estimator(self, request: _Request, drafter: str) -> AcceptanceEstimator:
        key = drafter, request.heat
        if key not in request.estimators:
            request.estimators[key] = AcceptanceEstimator(self._pairs.prior(*key))
        return request.estimators[key]


def _rounds(outcome: StepOutcome) -> dict[str, tuple[int, int, float]]:
    """(calls, tokens, seconds) of each network's round."""
    rounds: dict[str, tuple[int, int, float]] = {}
    for drafter, seconds in outcome.draft_seconds.items():
        own = [row for row in outcome.rows if row.drafter == drafter and row.drafted]
        if own:
            tokens = sum([len(row.likeliest) * TREE_ROWS or row.drafted for row in own])
            rounds[drafter] = max([row.levels or row.drafted for row in own]), tokens, seconds
    return rounds
