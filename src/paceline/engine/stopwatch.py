"""What steps and draft rounds cost on this machine, timed at start-up through the engine itself.

A cost that is only guessed has to be found out while users wait, and a bare forward is not a step: beside the Python of
a step, and after a draft round, the caches are cold. Only ratios decide how much to draft, and a shared machine is
faster in one moment than in the next; so every block of steps is held against the plain ones right before and after
it, and the median of a few turns counts.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from paceline.core import Draft, SamplingParams
from paceline.drafters.base import DraftContext, Drafter
from paceline.engine.acceptance import Kind
from paceline.engine.costs import Chill, Profile, Reach, staircase
from paceline.engine.engine import Engine, EngineParts
from paceline.engine.fixed import FixedController
from paceline.engine.records import StepRecord
from paceline.engine.rounds import DraftCost

TURNS = 6
NEAR = 4  # blocks between two plain ones
WARM, TIMED = 2, 3  # steps of a block: a step after others of its kind is what is in use
PLAIN_WARM, PLAIN_TIMED = 16, 8  # after a draft round it takes a dozen until the caches have recovered
WEIGHT = 32  # of a measured round against what is guessed
PROMPT = 8  # tokens of a text, if it takes time to read more
CONTEXT, FAR = 192, 1024  # tokens of a usual and of a long text, where they are soon read:
GROWN = 64  # tokens that a usual text may be longer: what a context costs is measured for itself
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
VISITS = 4  # of a long text, between those of a usual one


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


class Table:
    """Texts of one engine, ready to write side by side."""

    def __init__(self, parts: EngineParts, ids: Iterator[int]) -> None:
        self.engine = Engine(parts, ids)
        self.names: list[str] = []
        self.context = 0  # tokens of a text, lately
        self._room = 0  # tokens that every text can still take

    def close(self) -> None:
        for name in self.names:
            self.engine.cancel(name)
        self.names.clear()
        self.context = 0

    def seat(self, texts: int, tokens: int, prompt: int, reading: int) -> bool:
        """Let `texts` texts of `prompt` tokens have room for `tokens` more. Whether prompts are still to be read, in at
        most `reading` steps.
        """
        if self.names and tokens > self._room:
            self.close()
        new = not self.names
        if new:
            self._room = self.engine.max_len - prompt - 2 - reading
            vocab = self.engine.state.target.vocab_size
            for i in range(texts):
                ids = [(7 * i + j) % vocab for j in range(prompt)]
                params = SamplingParams(max_tokens=self.engine.max_len, ignore_eos=True)
                self.engine.add(f"stopwatch-{i}", ids, params, salt="stopwatch")
                self.names.append(f"stopwatch-{i}")
        self._room -= tokens
        return new


class Stopwatch:
    """Runs blocks of steps of one shape, each number of texts with an engine of its own.

    The cache is empty before and after.
    """

    def __init__(self, parts: EngineParts, kind: Kind | None) -> None:
        network = parts.drafters[parts.default_drafter] if kind is not None else None
        self._switch, self._watch = Switch(network), Watch()
        self._parts = replace(
            parts, controller=self._watch, drafters={Switch.name: self._switch},
            default_drafter=Switch.name, prefix_cache=True, draft_tokens="auto",
        )  # fmt: skip
        self._ids = itertools.count()
        self._tables: dict[int, Table] = {}  # by number of texts
        self._prompt = PROMPT
        self._contexts: list[float] = []  # tokens of the texts that were timed
        self.plain: list[float] = []  # seconds of a plain step, again and again
        most = parts.max_batch
        self.shapes = [s for s in SHAPES if s.texts <= most and (kind is not None or not s.network)]

    def close(self) -> None:
        for table in self._tables.values():
            table.close()
        self._parts.cache.prefix.clear()

    def turns(self, shapes: Seq[Shape], turns: int, limit: float) -> dict[Shape, list[Timing]]:
        """What each shape took in each turn, as multiples. What there is no time for, or cannot be run, is not there.

        The first turn is one step of each, to know what the slowest targets can do within `limit` seconds; it
        records the plans of the others, and counts only where nothing else does.
        """
        end = time.perf_counter() + limit
        out: dict[Shape, list[Timing]] = {}
        self.plain.clear()
        self._contexts.clear()
        try:
            for turn in range(turns + 1):
                earlier, shorter = len(self.plain), len(self._contexts)
                order = [
                    s for s in (shapes if turn == 0 else sorted(shapes, reverse=turn % 2 == 0)) if s != PLAIN
                ]
                for shape, timing in self._turn(order, single=turn == 0, end=end):
                    known = out.setdefault(shape, [])
                    if turn == 1:
                        known.clear()
                    known.append(timing)
                if turn == 1 and len(self.plain) > earlier:
                    del self.plain[:earlier]
                    del self._contexts[:shorter]
                if time.perf_counter() > end:
                    break
                if max(self.plain, default=FAST) < FAST and self._prompt == PROMPT:
                    self._prompt = max(PROMPT, min(CONTEXT, self._parts.cache.max_tokens // 2))
                    self.close()
        finally:
            self.close()
        return out

    def _turn(self, order: Seq[Shape], *, single: bool, end: float) -> Iterator[tuple[Shape, Timing]]:
        """(shape, its steps as multiples of the plain ones before and after it); at least one, then as long as there
        is time.
        """
        before = self._block(PLAIN, single=single)
        if before is None:
            return
        yield PLAIN, Timing(before.draft / before.step, 1.0)
        for first in range(0, len(order), len(order) if single else NEAR):
            taken: list[tuple[Shape, Timing]] = []
            for shape in order[first : first + (len(order) if single else NEAR)]:
                if (first or taken) and time.perf_counter() > end:
                    break
                value = self._block(shape, single=single)
                if value is not None:
                    taken.append((shape, value))
            if not taken:
                return
            after = self._block(PLAIN, single=single) or before
            plain = (before.step + after.step) / 2
            self.plain.append(plain)
            yield from ((shape, Timing(value.draft / plain, value.step / plain)) for shape, value in taken)
            before = after

    def reach(self, plain: float, limit: float) -> Reach:
        """What longer contexts cost, if a plain step takes `plain` seconds at the usual one; zeros if it is not known.

        Takes about `limit` seconds, longer if one visit does.
        """
        near, far = self._prompt, min(FAR, self._parts.cache.max_tokens * 3 // 4)
        if near == PROMPT or far < 2 * near:
            return 0.0, 0.0, 0.0
        end, usual = time.perf_counter() + limit, median(self._contexts)
        beyond: list[tuple[float, float]] = []  # what a far step takes longer, plain and with more rows
        try:
            before = self._visit(near)
            for _ in range(VISITS):
                there, after = self._visit(far), self._visit(near)
                if before is None or there is None or after is None:
                    return 0.0, 0.0, 0.0
                here = [(one + other) / 2 for one, other in zip(before, after, strict=True)]
                one, more = ((long - short) / here[0] for long, short in zip(there, here, strict=True))
                beyond.append((one, more))
                before = after
                if time.perf_counter() > end:
                    break
        finally:
            self.close()
            self._prompt = near
        scale = plain / (far - near)
        once, all_rows = (max(median(values), 0.0) * scale for values in zip(*beyond, strict=True))
        return once, max(all_rows - once, 0.0) / MORE, usual

    def _visit(self, prompt: int) -> tuple[float, ...] | None:
        """Seconds of the steps of `REACH` where a text begins with so many tokens."""
        for table in self._tables.values():
            table.close()  # their prompts stay in the prefix cache
        self._prompt = prompt
        blocks = [self._block(shape, single=False) for shape in REACH]
        return None if None in blocks else tuple([block.step for block in blocks if block is not None])

    def _block(self, shape: Shape, *, single: bool) -> Timing | None:
        """Typical seconds of steps of a shape in a row; None if it cannot be run."""
        warm, timed = (PLAIN_WARM, PLAIN_TIMED) if shape == PLAIN else (WARM, TIMED)
        warm, timed = (0, 1) if single else (warm, timed)
        table = self._seat(shape, (warm + timed) * (shape.k + 1))
        if table is None:
            return None
        self._switch.network, self._watch.k = shape.network, shape.k
        for _ in range(warm):
            table.engine.step()
        told = [record for _ in range(timed) if (record := self._step(table, shape)) is not None]
        if not told:
            return None
        self._contexts.append(table.context)
        return Timing(
            median([r.draft_seconds for r in told]),
            median([r.target_seconds + r.other_seconds for r in told]),
        )

    def _step(self, table: Table, shape: Shape) -> StepRecord | None:
        """The record of a step in which all texts did what they were told."""
        table.engine.step()
        record = self._watch.last
        if record is None or record.target_rows != shape.rows or len(record.rows) != shape.texts:
            return None
        table.context = record.context // shape.texts
        return record

    def _seat(self, shape: Shape, tokens: int) -> Table | None:
        """A table whose texts are ready to write `tokens` tokens; None if there is no room for them."""
        reading = shape.texts * -(-self._prompt // self._parts.prefill_chunk)  # steps, at most
        table = self._tables.get(shape.texts)
        if table is None:
            table = self._tables[shape.texts] = Table(self._parts, self._ids)
        if tokens + reading > table.engine.max_len - self._prompt - 2:
            return None
        if table.context > self._prompt + GROWN > PROMPT + GROWN:
            table.close()  # its prompt is in the prefix cache
        others = [other for other in self._tables.values() if other is not table and other.names]
        if sum([len(other.names) for other in others]) + shape.texts > self._parts.cache.max_sequences:
            for other in others:
                other.close()
        if table.seat(shape.texts, tokens, self._prompt, reading):
            self._watch.k = 0
            for _ in range(reading):
                if self._step(table, Shape(shape.texts, 0, False)) is not None:
                    break
        return table


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
    profile = Profile(
        tuple(rows), tuple(rungs[n] for n in rows), text=text, reach=watch.reach(plain, 0.25 * limit)
    )
    drafted = {shape: timing for shape, timing in typical.items() if shape.network}
    if kind is None or not drafted:
        return profile
    price, longer = DraftCost.like(plain), dict[int, list[float]]()
    for shape, timing in drafted.items():
        same = turns.get(shape._replace(network=False), [])
        longer.setdefault(shape.texts, []).extend(
            [(net.step - free.step) * plain for net, free in zip(turns[shape], same, strict=False)]
        )
        price = price.add([(shape.k, shape.texts * shape.k, timing.draft * plain)] * WEIGHT, kept=1.0)
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
