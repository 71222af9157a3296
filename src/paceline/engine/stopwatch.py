"""What steps and draft rounds cost on this machine, timed at start-up through the engine itself.

A cost that is only guessed has to be found out while users wait, and a bare forward is not a step: beside the Python of
a step, and after a draft round, the caches are cold. Only ratios decide how much to draft, and a shared machine is
faster in one moment than in the next; so every block of steps is held against the plain ones right before and after
it, and the median of a few turns counts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from paceline.core import Draft, SamplingParams
from paceline.drafters.base import DraftContext, Drafter
from paceline.engine.acceptance import Kind
from paceline.engine.controller import FixedController
from paceline.engine.costs import Chill, DraftCost, Profile, Reach, staircase
from paceline.engine.engine import Engine, EngineParts
from paceline.engine.records import StepRecord

TURNS = 4
WARM, TIMED = 2, 3  # steps of a block: a step after others of its kind is what is in use
PLAIN_WARM, PLAIN_TIMED = 16, 8  # after a draft round it takes a dozen until the caches have recovered
WEIGHT = 32  # of a measured round against what is guessed
PROMPT = 8  # tokens of a text, if it takes time to read more
CONTEXT, FAR = 192, 1024  # tokens of a usual and of a long text, where they are soon read:
FAST = 5e-3  # seconds of a plain step at which they are


class Shape(NamedTuple):
    """A step: each of `texts` texts checks `k` drafted tokens, made by the network or out of thin air."""

    texts: int
    k: int
    network: bool

    @property
    def rows(self) -> int:
        return self.texts * (self.k + 1)


class Timing(NamedTuple):
    """Of a step, in seconds or as a multiple of a plain step of one text: its draft, and all else."""

    draft: float
    step: float


PLAIN = Shape(1, 0, False)
SHAPES = (  # the most telling first: a slow target may have no time for more
    PLAIN, Shape(1, 4, False), Shape(1, 4, True), Shape(1, 1, False), Shape(1, 8, False), Shape(1, 1, True),
    Shape(1, 2, False), Shape(1, 3, False), Shape(1, 5, False), Shape(1, 16, False), Shape(1, 11, False),
    Shape(4, 0, False), Shape(4, 3, False), Shape(4, 3, True), Shape(4, 1, False), Shape(4, 1, True),
    Shape(4, 7, False),
)  # fmt: skip
STEEPNESS = (PLAIN, Shape(1, 8, False))
MORE = 4  # tokens drafted, to tell what a context costs once from what it costs each row
REACH = (PLAIN, Shape(1, MORE, False))


class Switch:
    """The drafter of the texts that are timed: a network, or tokens that cost nothing and are hardly ever right."""

    name, max_tokens = "switch", 16

    def __init__(self, network: Drafter | None) -> None:
        self.inner = network
        self.network = False
        self.needs_hidden = network is not None and network.needs_hidden

    def draft(self, context: DraftContext) -> Draft:
        out = Draft.empty(len(context.limits), "no proposal")
        if self.network and self.inner is not None:
            try:
                return self.inner.draft(context)
            except Exception:  # noqa: BLE001  it is priced by nothing; requests will say why it failed
                return out
        for row, limit in enumerate(context.limits):
            out.tokens[row], out.confidence[row] = [0] * limit, [0.0] * limit
        return out

    def forget(self, sequence_id: int) -> None:
        if self.inner is not None:
            self.inner.forget(sequence_id)


class Watch(FixedController):
    """Drafts `k` tokens and keeps the record of the last step."""

    def __init__(self) -> None:
        super().__init__(0)
        self.last: StepRecord | None = None

    def observe(self, record: StepRecord) -> None:
        self.last = record


class Stopwatch:
    """Runs blocks of steps of one shape on an engine of its own. The cache is empty before and after."""

    def __init__(self, parts: EngineParts, kind: Kind | None) -> None:
        network = parts.drafters[parts.default_drafter] if kind is not None else None
        self._switch, self._watch = Switch(network), Watch()
        self._engine = Engine(
            replace(
                parts, controller=self._watch, drafters={Switch.name: self._switch},
                default_drafter=Switch.name, prefix_cache=False, draft_tokens="auto",
            )
        )  # fmt: skip
        self._vocab, self._chunk = parts.target.vocab_size, parts.prefill_chunk
        self._names: list[str] = []
        self._prompt = PROMPT
        self._room = 0  # tokens that every text can still take
        self.plain: list[float] = []  # by turn: seconds of a plain step
        most = parts.max_batch
        self.shapes = [s for s in SHAPES if s.texts <= most and (kind is not None or not s.network)]

    def close(self) -> None:
        for name in self._names:
            self._engine.cancel(name)
        self._names.clear()
        self._room = 0

    def turns(self, shapes: Seq[Shape], turns: int, limit: float) -> dict[Shape, list[Timing]]:
        """What each shape took in each turn, as multiples. What there is no time for, or cannot be run, is not there.

        The first turn is one step of each, to know what the slowest targets can do within `limit` seconds; it
        records the plans of the others, and counts only where nothing else does.
        """
        end = time.perf_counter() + limit
        out: dict[Shape, list[Timing]] = {}
        self.plain.clear()
        try:
            for turn in range(turns + 1):
                order = shapes if turn == 0 else sorted(shapes)
                taken = dict(self._turn(order, single=turn == 0, end=end))
                if PLAIN not in taken:
                    break
                before = taken[PLAIN].step
                again = self._block(PLAIN, single=turn == 0)
                after = again.step if again is not None else before
                if turn == 1:
                    self.plain.clear()
                self.plain.append(min(before, after))
                if before < FAST and self._prompt == PROMPT:
                    self._prompt = max(PROMPT, min(CONTEXT, self._engine.max_len // 2))
                    self.close()
                for shape, value in taken.items():
                    plain = before if shape == PLAIN else (before + after) / 2
                    known = out.setdefault(shape, [])
                    if turn == 1:
                        known.clear()
                    known.append(Timing(value.draft / plain, value.step / plain))
                if time.perf_counter() > end:
                    break
        finally:
            self.close()
        return out

    def reach(self, plain: float) -> Reach:
        """What longer contexts cost, if a plain step takes `plain` seconds at the usual one; zeros if it is not known."""
        near, far = self._prompt, min(FAR, self._engine.max_len * 3 // 4)
        if near == PROMPT or far < 2 * near:
            return 0.0, 0.0, 0.0
        seen: dict[tuple[int, int], list[float]] = {}  # by prompt and tokens drafted
        try:
            for prompt in (near, far, near):
                self.close()
                self._prompt = prompt
                for shape in REACH * (1 if prompt == near else 2):
                    value = self._block(shape, single=False)
                    if value is None:
                        return 0.0, 0.0, 0.0
                    seen.setdefault((prompt, shape.k), []).append(value.step)
        finally:
            self.close()
            self._prompt = near
        typical = {where: min(seconds) for where, seconds in seen.items()}
        scale = plain / typical[near, 0] / (far - near)
        once, all_rows = (max(typical[far, k] - typical[near, k], 0.0) * scale for k in (0, MORE))
        return once, max(all_rows - once, 0.0) / MORE, float(near)

    def _turn(self, order: Seq[Shape], *, single: bool, end: float) -> Iterator[tuple[Shape, Timing]]:
        """(shape, seconds of its steps), a block of each; at least of the first two, then as long as there is time."""
        for count, shape in enumerate(order):
            if count >= 2 and time.perf_counter() > end:
                return
            value = self._block(shape, single=single)
            if value is not None:
                yield shape, value

    def _block(self, shape: Shape, *, single: bool) -> Timing | None:
        """Typical seconds of steps of a shape in a row; None if it cannot be run."""
        warm, timed = (PLAIN_WARM, PLAIN_TIMED) if shape == PLAIN else (WARM, TIMED)
        warm, timed = (0, 1) if single else (warm, timed)
        if not self._seat(shape.texts, (warm + timed) * (shape.k + 1)):
            return None
        self._switch.network, self._watch.k = shape.network, shape.k
        for _ in range(warm):
            self._engine.step()
        records = [self._step(shape) for _ in range(timed)]
        told = [r for r in records if r is not None]
        if not told:
            return None
        return Timing(
            median([r.draft_seconds for r in told]),
            median([r.target_seconds + r.other_seconds for r in told]),
        )

    def _step(self, shape: Shape) -> StepRecord | None:
        """The record of a step in which all texts did what they were told."""
        self._engine.step()
        record = self._watch.last
        told = record is not None and record.target_rows == shape.rows and len(record.rows) == shape.texts
        return record if told else None

    def _seat(self, texts: int, tokens: int) -> bool:
        """Let so many texts be ready to write `tokens` tokens; False if there is no room for them."""
        most = self._engine.max_len - self._prompt - 2
        if tokens > most:
            return False
        reading = texts * -(-self._prompt // self._chunk)  # steps, at most
        if len(self._names) > texts or tokens + reading > self._room:
            self.close()
        if not self._names:
            self._room = most
        if len(self._names) == texts:
            reading = 0
        self._room -= tokens + reading
        self._watch.k = 0
        while len(self._names) < texts:
            name = f"stopwatch-{len(self._names)}"
            prompt = [(7 * len(self._names) + i) % self._vocab for i in range(self._prompt)]
            self._engine.add(name, prompt, SamplingParams(max_tokens=self._engine.max_len, ignore_eos=True))
            self._names.append(name)
        for _ in range(reading):
            if self._step(Shape(texts, 0, False)) is not None:
                break
        return True


def measure_steps(parts: EngineParts, kind: Kind | None, limit: float) -> Profile | None:
    """Steps by target rows, and what rounds of `parts.default_drafter`, of this kind, add to them.

    Takes about `limit` seconds, longer if two steps do. What cannot be seen is left out: a drafter that fails or has
    nothing to say, a batch that is not allowed. None without a plain step and another one.
    """
    watch = Stopwatch(parts, kind)
    turns = watch.turns(watch.shapes, TURNS, 0.75 * limit)
    typical = {
        shape: Timing(median([t.draft for t in seen]), median([t.step for t in seen]))
        for shape, seen in turns.items()
    }
    plain = median(watch.plain) if watch.plain else 0.0
    free = {shape: timing.step * plain for shape, timing in typical.items() if not shape.network}
    rungs = {shape.rows: seconds for shape, seconds in free.items() if shape.texts == 1}
    if len(rungs) < 2:
        return None
    text = _text(rungs, free)
    for shape, seconds in free.items():
        rungs.setdefault(shape.rows, seconds - text * (shape.texts - 1))
    rows = sorted(rungs)
    profile = Profile(tuple(rows), tuple(rungs[n] for n in rows), text=text, reach=watch.reach(plain))
    drafted = {shape: timing for shape, timing in typical.items() if shape.network}
    if kind is None or not drafted:
        return profile
    price, longer = DraftCost.like(plain), dict[int, list[float]]()
    for shape, timing in drafted.items():
        same = turns.get(shape._replace(network=False), [])
        longer.setdefault(shape.texts, []).extend(
            [(net.step - free.step) * plain for net, free in zip(turns[shape], same, strict=False)]
        )
        for _ in range(WEIGHT):
            price = price.add(shape.k, shape.texts * shape.k, timing.draft * plain, decay=1.0)
    return replace(profile, rounds={kind.name: price.fit()}, chill={kind.name: _chill(longer)})


def _text(alone: Mapping[int, float], free: Mapping[Shape, float]) -> float:
    """Seconds that a step of several texts takes longer, for each further text, than one text with as many rows."""
    rows = sorted(alone)
    table = staircase(rows, [alone[n] for n in rows], rows[-1])
    more = [
        (seconds - table[shape.rows - 1]) / (shape.texts - 1)
        for shape, seconds in free.items()
        if shape.texts > 1 and shape.rows <= rows[-1]
    ]
    return max(median(more), 0.0) if more else 0.0


def _chill(longer: dict[int, list[float]]) -> Chill:
    """What a step takes longer after a round, from such differences by texts."""
    found = sorted((texts, max(median(seconds), 0.0)) for texts, seconds in longer.items() if seconds)
    if not found:
        return 0.0, 0.0
    (few, first), (many, last) = found[0], found[-1]
    return first, max(last - first, 0.0) / (many - few) if many > few else 0.0


def steepness(parts: EngineParts, limit: float) -> float | None:
    """What nine rows cost now as a multiple of one; None if that cannot be seen."""
    seen = Stopwatch(parts, None).turns(STEEPNESS, 2, limit).get(STEEPNESS[1])
    return median([timing.step for timing in seen]) if seen else None
