"""What `auto` has decided for some rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from math import inf

from paceline.core import MAX_DRAFT_TOKENS, Sequence
from paceline.engine.audit import TRIAL
from paceline.engine.budget import MEASURING, NO_CONFIDENCE, Plan, Want
from paceline.engine.copies import Look
from paceline.engine.fixed import Limit, fixed_limit
from paceline.ops.base import Stop
from paceline.sampling.shape import is_greedy

REST = 128  # steps that a plan without drafts holds,
LONGEST_IDLE = 1024, 2048  # and for others like its own, greedy and sampled ones
MUCH = 1.1  # what a plan promises over none from which on it is held for longer, since it is hardly wrong
PLANNING = 0.03, 0.015  # of the time that planning may take at first, where little and where much is promised
HOLD, LONGEST_HOLD = 2, (32, 64)  # steps that a plan which drafts holds: longer each time that it stays one
IDLING = 0.001  # of the time that planning may take where texts come and go and nothing is drafted
# how many texts, their drafter, whether all are greedy, whether all are new, how many are under a constraint
Kin = tuple[int, str | None, bool, bool, int]


def kin_of(sequences: Seq[Sequence], wants: Seq[Want], new: int) -> Kin | None:
    """What texts of which so many are new have in common; None if they do not, or none is."""
    kin = {(s.params.drafter, is_greedy(s)) for s in sequences}
    if not new or len(kin) > 1 or set(wants) != {"auto"}:
        return None
    masked = sum([s.constraint is not None for s in sequences])
    return (len(sequences), *kin.pop(), new == len(sequences), masked)


def caps_of(sequences: Seq[Sequence], drafter_max: int) -> dict[int, int]:
    """The most that may be drafted for each text."""
    return {s.id: fixed_limit(s, MAX_DRAFT_TOKENS, drafter_max)[0] for s in sequences}


@dataclass(slots=True)
class Choice:
    """What was decided for some rows, and until which step it holds."""

    ids: list[int]
    plans: dict[str, Plan]
    limits: dict[str, dict[int, int]]  # by kind: tokens that a row may get of it
    out: list[Limit]  # by row, where nothing is looked up
    caps: dict[int, int]  # rows whose length is ours to choose, and their most
    rows: int  # target rows that run whatever is drafted
    looks: dict[str, Look] = field(default_factory=dict)  # kinds that can be looked up, and would pay
    asked: dict[int, int] = field(default_factory=dict)  # by row: tokens of a kind that drafts one by one
    stops: dict[int, Stop] = field(default_factory=dict)  # by row, as this plan knows it
    look: int = 0  # the step before which nothing has to be looked up
    looked: bool = False  # in this step
    until: int = 0
    hold: int = 0  # steps that it holds though it drafts
    probes: int = 0  # steps that its probes may still last
    trial: bool = False  # it drafts to see what that costs
    trial_due: float = inf  # the step from which to try that, if it would pay were it cheaper than is thought
    plain: float = 0.0  # seconds of a step without any draft, as far as that was asked
    sampled: bool = False  # all texts are
    teaches: bool = True  # its steps tell what steps take

    @property
    def drafts(self) -> bool:
        return any(limit for limit, _ in self.out)

    @property
    def rests(self) -> bool:
        """It was thought out, and nothing is drafted by it."""
        return bool(self.plans) and not self.hold and not self.drafts

    @property
    def reason(self) -> str | None:
        """Why a text that could be drafted for is not."""
        return next(
            (reason for i, (_, reason) in zip(self.ids, self.out, strict=True) if i in self.caps), None
        )

    def for_others(self, caps: dict[int, int], until: int) -> Choice:
        """The same for as many other texts, of which each that is new takes the place of one that is gone."""
        free = iter([i for i in caps if i not in self.ids])
        new = {i: i if i in caps else next(free) for i in self.ids}
        at = {new[i]: limit for i, limit in zip(self.ids, self.out, strict=True)}

        def own(limits: Mapping[int, int]) -> dict[int, int]:
            return {new[i]: min(limit, caps[new[i]]) for i, limit in limits.items()}

        out = [(min(at[i][0], cap), at[i][1]) for i, cap in caps.items()]
        return replace(
            self,
            ids=list(caps),
            plans={name: replace(plan, limits=own(plan.limits)) for name, plan in self.plans.items()},
            limits={name: {} if name in self.looks else own(of) for name, of in self.limits.items()},
            out=out,
            caps=caps,
            asked=own(self.asked),
            stops={},
            look=0,
            looked=False,
            until=until,
        )

    @property
    def drafted_rows(self) -> int:
        """Of the target, if all that may be drafted is."""
        return self.rows + sum([limit for limit, _ in self.out])

    def hold_for(self, before: Choice | None, planning: float, probing: Set[int], gain: float) -> None:
        """Settle for how many steps it holds if it drafts: the more the longer a plan takes, `planning` in its steps, and
        the more it promises, `gain` over none, and twice as many each time that it stays one that drafts. 0: it drafts
        nothing, or `probing` rows do.
        """
        limits = [row for own in self.limits.values() for row in own.items()]
        if not any(limit and i not in probing for i, limit in limits):
            return
        much = gain >= MUCH
        first = max(int(planning / PLANNING[much]), HOLD)
        hold = 2 * before.hold if before is not None and before.hold else first
        self.hold = TRIAL[self.sampled] if self.trial else min(hold, LONGEST_HOLD[much])

    def left(self, now: int) -> int:
        """Steps from this one on in which neither a plan nor a look is due."""
        return max((min(self.until, self.look) if self.looks else self.until) - now, 0)

    def measuring(self, until: int, before: Choice | None) -> Choice:
        """Plain steps for the same texts, to see what they take, amid what was decided before."""
        hold = before.hold if before is not None and before.hold else HOLD
        out = [(0, MEASURING) if i in self.caps else own for i, own in zip(self.ids, self.out, strict=True)]
        return Choice(self.ids, {}, {}, out, self.caps, self.rows, until=until, hold=hold)

    def for_some(self, ids: list[int]) -> Choice:
        """The same for some of its texts."""
        out = dict(zip(self.ids, self.out, strict=True))
        return replace(
            self,
            ids=ids,
            limits={name: {i: own[i] for i in ids if i in own} for name, own in self.limits.items()},
            out=[out[i] for i in ids],
            caps={i: self.caps[i] for i in ids},
            rows=len(ids),
            asked={i: self.asked[i] for i in ids if i in self.asked},
            teaches=False,
        )

    def end_probes(self, kept: Set[int], probing: Set[int], networks: Collection[str]) -> bool:
        """A step of a probe is over: it lasts while its tokens are kept. True after a run of them: think again, else it
        goes on without those that were not.
        """
        self.probes -= 1
        if kept and not self.probes:
            return True
        self.probes = self.probes if kept else 0
        ended = probing - kept
        for name in networks:
            own = self.limits.get(name, {})
            own.update(dict.fromkeys(ended & own.keys(), 0))
        self.asked = {i: limit for i, limit in self.asked.items() if i not in ended}
        self.out = [
            (0, NO_CONFIDENCE) if i in ended else limit for i, limit in zip(self.ids, self.out, strict=True)
        ]
        return False


def begun(sequences: Seq[Sequence], wants: Seq[Want], drafter_max: int) -> Choice:
    """Nothing is decided yet but what requests have asked for."""
    choice = Choice([s.id for s in sequences], {}, {}, [], {}, len(sequences))
    for sequence, want in zip(sequences, wants, strict=True):
        limit, reason = fixed_limit(sequence, MAX_DRAFT_TOKENS if want == "auto" else want, drafter_max)
        choice.out.append((limit, reason))
        if want == "auto" and limit:
            choice.caps[sequence.id] = limit
        else:
            choice.rows += limit
    return choice


class Before:
    """What was decided a moment ago, for steps in which only the texts have changed: a plan takes time."""

    def __init__(self) -> None:
        self._known: dict[Kin, tuple[int, Choice]] = {}  # until when, and what
        self._drafting: tuple[Kin, Choice] | None = None  # the last plan for several texts, if it drafts

    def keep(self, kin: Kin, choice: Choice, now: int, planning: float) -> None:
        """A plan for texts of that kin, if nothing is drafted by it, or for a single one, of which nothing is known yet.
        `planning`: what one takes, in plain steps.
        """
        texts, *_, new, _ = kin
        if choice.rests:
            hold = min(planning / IDLING, LONGEST_IDLE[choice.sampled], choice.trial_due - now)
            self._known[kin] = now + int(hold), choice
        elif texts == 1 and new and choice.plans and choice.drafts and not (choice.trial or choice.probes):
            self._known[kin] = now + REST, replace(choice)

    def drafts(self, kin: Kin | None, choice: Choice) -> None:
        """What was planned for several texts, if it drafts, serves those that come for as long as it would have held."""
        own = choice.plans and choice.drafts and choice.hold and not (choice.trial or choice.probes)
        self._drafting = (kin, choice) if kin is not None and kin[0] > 1 and own else None

    def others(
        self, kin: Kin, last: Choice | None, caps: dict[int, int], new: Set[int], now: int
    ) -> Choice | None:
        """A plan for others of that kin; one without drafts, if those of them that are not new rest by the `last` one."""
        if not all(caps[i] for i in new):
            return None
        drafting = self._drafting
        if drafting is not None and _alike(drafting[0], kin) and now < drafting[1].until:
            return drafting[1].for_others(caps, drafting[1].until)
        until, choice = self._known.get(kin, (0, None))
        if choice is None or now >= until:
            return None
        if new != caps.keys() and not (
            last is not None and last.rests and last.caps.keys() >= caps.keys() - new
        ):
            return None
        return choice.for_others(caps, now + (choice.hold or REST))


def _alike(one: Kin, other: Kin) -> bool:
    """As many texts of the same sort, some of which may be new."""
    (texts, drafter, greedy, _, masked), (texts2, drafter2, greedy2, _, masked2) = one, other
    return (texts, drafter, greedy, masked) == (texts2, drafter2, greedy2, masked2)


def going_on(last: Choice | None, ids: list[int], now: int) -> Choice | None:
    """Of the `last` plan, for those of its texts that go on beside a prompt that is being read."""
    if last is None or not last.plans or last.probes or now >= last.until or last.rows != len(last.ids):
        return None
    return last.for_some(ids) if last.caps.keys() >= set(ids) else None
