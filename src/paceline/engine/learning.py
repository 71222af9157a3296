"""What finished steps have shown: costs, acceptance, what confidence is worth. Pure: it returns a new `Budget`."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from collections.abc import Set
from dataclasses import replace

from paceline.engine import acceptance as acc
from paceline.engine import budget as b
from paceline.engine.acceptance import Kind, Totals
from paceline.engine.audit import COLD
from paceline.engine.budget import Budget
from paceline.engine.costs import Step
from paceline.engine.records import RowRecord, StepRecord
from paceline.engine.rounds import Round

TYPICAL = 12  # steps that are enough to tell the pace of many
ROUNDS = 48  # of a drafter, of all that are learnt from at once, that tell what rounds take
SURE = 3.0  # copies that were kept, after which one may be as long as any
WARM = 12  # steps with drafts in a row until they show what such steps take (without: `COLD`)
FADE_EVERY = 64  # steps after which a drafter that was not used counts as idle for as long
WAKING = 0.2  # what the last copies amid plain steps say of the next
UNEVEN = 0.1  # what the last steps at rest say of how far their mean lies above what is typical of them
RESTED = 24  # plain steps in a row after which nothing is cold any more
MOST_UNEVEN = 1.5  # times what is typical: more is no accident of a few steps, the machine slept
FORGET = 0.999  # of what waking takes, for each step at rest: what was dear once may be tried again
ENOUGH = 128  # drafts, of all that are learnt from at once, that tell what confidence is worth
PROBE_SHARE = 0.005  # of the running time that probes may cost


def observe(budget: Budget, seen: Seq[StepRecord]) -> Budget:
    """Learn from finished steps: costs, acceptance by position and request, calibration, probe credit."""
    costs, spent, probed, used = budget.costs, 0.0, 0.0, set[str]()
    drafted, targets = list[RowRecord](), list[Step]()
    masks: list[float] = []  # seconds for each row
    rounds: dict[str, list[Round]] = {}
    steps = sum([record.times for record in seen])
    at, due, every = 0, 0, steps // TYPICAL + 1
    for record in seen:
        spent += record.seconds + record.more_seconds
        names = record.drafters
        rows = [row for row in record.rows if row.drafted] if names else []
        kind = _main_kind(budget, names) if rows else None
        # a lone probe comes after many steps without one and is no measure of drafts that follow each other
        lone = bool(rows and budget.probing) and all(row.sequence_id in budget.probing for row in rows)
        warm = record.alike >= (WARM if rows else COLD)
        if at + record.times > due and warm and record.tells and not lone:
            name, texts = kind.name if kind is not None else None, len(record.rows)
            taken = _taken(budget, record)
            targets.append(Step(record.target_rows, taken, name, len(rows), texts, record.context))
            due = at + every
        at += record.times
        if record.masked and not record.reading:
            masks.append(record.mask_seconds * len(record.rows) / (record.masked * record.target_rows))
        if not rows:
            continue
        used |= names
        drafted += rows
        if kind is None:
            continue
        if budget.probing:
            probed += _wasted(budget, kind, record, rows, lone)
        if not (costs.is_measured(kind.name) and (lone or not warm)):
            rounds.setdefault(kind.name, []).append(_round(kind, record, rows, warm))
    for name, own in rounds.items():
        costs = costs.observe_rounds(name, own[:: len(own) // ROUNDS + 1])
    costs = costs.observe_targets(targets, max(steps // max(len(targets), 1), 1), spent)
    costs = costs.observe_masks(masks)
    end = budget.step + steps
    if end // FADE_EVERY > budget.step // FADE_EVERY:
        for name in set(costs.draft) - used:
            costs = costs.idle(name, FADE_EVERY)
    most = b.MOST_CREDIT * costs.target(1)
    budget = replace(
        budget, costs=costs, step=end, wake=_waking(budget, seen), uneven=_uneven(budget, seen),
        credit=max(min(budget.credit + PROBE_SHARE * spent - probed, most), -2 * most),
    )  # fmt: skip
    if not drafted:
        return budget
    return of_all(of_texts(budget, [row for row in drafted if not row.learnt]), drafted)


def _round(kind: Kind, record: StepRecord, rows: list[RowRecord], warm: bool) -> Round:
    """What the draft of a step took, put down to one kind."""
    each = [row.drafted for row in rows if row.drafter == kind.name]
    calls = max(each) if kind.sequential else 1
    return Round(calls, sum(each), record.draft_seconds, len(record.rows), warm)


def _wasted(budget: Budget, kind: Kind, record: StepRecord, rows: list[RowRecord], lone: bool) -> float:
    """Seconds that the probes of a step have cost, net of the plain steps that kept tokens have saved."""
    texts = len(record.rows)
    if not lone:  # drafts that pay ran beside them: what is the probes' own share is known from prices only
        return b.probe_price(budget.costs, kind, texts) * sum([r.sequence_id in budget.probing for r in rows])
    without = b.plain(budget.costs.within(texts, record.context, record.masked), texts, texts)
    kept = sum([row.accepted for row in rows])
    return min(record.seconds, 8 * without) - without * (1 + kept / texts)


def _taken(budget: Budget, record: StepRecord) -> float:
    """Seconds of a step, its draft and masks apart; of many at rest on average: what is typical of them was told."""
    taken = record.target_seconds + record.other_seconds
    return taken if record.times == 1 else _unevenness(budget, record) * (taken + record.draft_seconds)


def _unevenness(budget: Budget, record: StepRecord) -> float:
    return budget.uneven.get(len(record.rows).bit_length(), 1.0)


def _uneven(budget: Budget, seen: Seq[StepRecord]) -> dict[int, float]:
    """What warm plain steps take on average over what is typical of them: accidents only make steps longer."""
    uneven = dict(budget.uneven)
    for record in seen:
        warm = record.times > 1 and record.alike - record.times >= RESTED
        if warm and record.tells and not record.drafters and record.seconds > 0:
            mean = (record.seconds + record.more_seconds) / record.times
            size = len(record.rows).bit_length()
            known = uneven.get(size, 1.0)
            uneven[size] = known + UNEVEN * (min(mean / record.seconds, MOST_UNEVEN) - known)
    return uneven


def _waking(budget: Budget, seen: Seq[StepRecord]) -> dict[int, float]:
    """What copies amid plain steps cost beside their rows and proposals, each step of them: what the first step with
    copies took longer than one among others would have, and then what plain ones did until all was warm again.
    """
    spent: float | None = None
    wake, steps, size = dict(budget.wake), 1, 1  # of the copies that were last seen

    def over() -> None:
        if spent is not None:
            wake[size] = max(wake.get(size, 0.0) + WAKING * (spent / steps - wake.get(size, 0.0)), 0.0)

    for record in seen:
        texts, drafters = len(record.rows), record.drafters
        rest = not drafters and 0 <= record.alike - record.times < COLD
        if not rest and (not drafters or record.alike == 1):
            over()
            spent = None
        if not drafters and texts.bit_length() in wake:
            wake[texts.bit_length()] *= FORGET**record.times
        if not (texts and record.tells):
            spent = None
        elif drafters:
            copies = all(kind.name not in drafters for kind in budget.kinds if kind.sequential)
            if not copies:
                spent = None
            elif record.alike == 1:
                spent = _over(budget, record, record.checking, min(drafters))
            steps, size = record.alike, texts.bit_length()
        elif rest and spent is not None:
            spent += _over(budget, record, record.seconds)
    over()
    return wake


def _over(budget: Budget, record: StepRecord, seconds: float, kind: str = "") -> float:
    """Seconds that a step, or several, took longer than expected; of several, than the last of them. Less, if they were
    faster: what is off by chance must even out.
    """
    if record.times > 1:
        usual = _unevenness(budget, record) * seconds
        over = seconds + record.more_seconds - record.times * usual
    else:
        here = budget.costs.of(len(record.rows), record.context, record.masked)
        usual = budget.costs.target(record.target_rows, kind, here)
        over = seconds - usual
    return min(max(over, -2 * usual), 2 * usual)


def is_news(budget: Budget, row: RowRecord) -> bool:
    """Whether what became of a proposal that was made at one go changes what is proposed next, see `offer`: it was
    refused, or nothing was known yet.
    """
    if not row.drafted:
        return False
    for kind in budget.kinds:
        if kind.name == row.drafter and not kind.sequential:
            return row.accepted < row.drafted or b.arm_of(budget, row.sequence_id, kind).hits[0] < SURE
    return False


def teaches(budget: Budget, told: RowRecord) -> bool:
    """Whether what would have become of a copy that was not checked is more than what is thought already: some of it was
    kept, or it was the first of its text.
    """
    kinds = [kind for kind in budget.kinds if kind.name == told.drafter]
    return told.accepted > 0 or any(not b.arm_of(budget, told.sequence_id, kind).copied for kind in kinds)


def _main_kind(budget: Budget, names: Set[str]) -> Kind | None:
    """The kind that a step's drafting time is put down to: the one that needs a call per token, if it took
    part.
    """
    found = [kind for kind in budget.kinds if kind.name in names]
    return next((kind for kind in found if kind.sequential), found[0] if found else None)


def of_texts(budget: Budget, rows: Seq[RowRecord], *, checked: bool = True) -> Budget:
    """Learn what became of drafts, or would have become of them if they had been `checked`, for their texts."""
    arms, firsts = dict(budget.arms), budget.firsts
    by_arm: dict[tuple[int, str], list[RowRecord]] = {}
    for row in rows:
        by_arm.setdefault((row.sequence_id, row.drafter), []).append(row)
    kinds = {kind.name: kind for kind in budget.kinds}
    for (sequence_id, name), own in by_arm.items():
        if (kind := kinds.get(name)) is None:
            continue
        arm = b.arm_of(budget, sequence_id, kind)
        if kind.sequential:
            arm = acc.learn(arm, [(row.drafted, row.accepted) for row in own])
        else:
            if not arm.copied:  # whether it was kept at all is counted for itself
                firsts = {**firsts, arm.law: acc.count_first(firsts.get(arm.law), own[0].accepted)}
                arm, own[0].first = arm._replace(copied=True), True
            seen = [(row.confidence, row.accepted) for row in own if not row.first]
            arm = acc.followed(arm, seen, b.lines_of(budget, kind, arm))
        if checked and sequence_id in budget.probing:
            arm = acc.probed(arm, budget.step, kept=own[-1].accepted > 0)
        arms[sequence_id, name] = arm
    return replace(budget, arms=arms, firsts=firsts)


def of_all(budget: Budget, rows: Seq[RowRecord], *, checked: bool = True) -> Budget:
    """Learn from the same what confidence is worth and what drafters reach, after `of_texts`."""
    bins, totals = dict(budget.bins), dict(budget.totals)
    kinds = {kind.name: kind for kind in budget.kinds}
    sure: dict[str, list[tuple[Seq[float], int]]] = {}  # by law: how sure drafts were, and how many were kept
    outcomes: dict[str, list[tuple[int, int]]] = {}  # by kind
    laws: dict[tuple[int, str], set[str]] = {}  # by text and kind
    for row in rows:
        name, key = row.drafter, (row.sequence_id, row.drafter)
        if name not in kinds:
            continue
        outcomes.setdefault(name, []).append((row.drafted, row.accepted))
        if key not in laws:
            arm = b.arm_of(budget, row.sequence_id, kinds[name])
            laws[key] = {arm.law, kinds[name].law(arm.sampled)}
        told = (row.confidence[1:], row.accepted - 1) if row.first else (row.confidence, row.accepted)
        if told[1] >= 0:
            for law in laws[key]:
                sure.setdefault(law, []).append(told)
    for law, all_told in sure.items():
        bins[law] = acc.calibrate(bins.get(law), all_told[:: len(all_told) // ENOUGH + 1])
    for name, seen in outcomes.items() if checked else ():
        totals[name] = totals.get(name, Totals()).add(seen)
    return replace(budget, bins=bins, totals=totals)


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
