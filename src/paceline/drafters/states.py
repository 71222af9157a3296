"""Drafters that read the target's hidden states and keep a K/V cache of their own: EAGLE-3, multi-token prediction.

An entry of that cache needs hidden states that only the target's forward of this very row gives. So it is made of the
rows that the engine has kept, and what a round of drafts writes behind them is written over by the next rows. A text
some of whose rows it has not seen is not drafted for. Pages are shared by prefix: an entry depends on its text up to the
token after it.

Rows wait until a draft computes them along. Where none comes, many at once get their K/V and nothing else.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch

from paceline.control.reasons import NoDraftReason
from paceline.core import MAX_DRAFT_TOKENS, Draft, ForwardBatch, Sequence
from paceline.drafters.base import DraftContext, Drafter, Kept, Leaf, take_round
from paceline.drafters.waiting import Waiting
from paceline.errors import CapacityError
from paceline.kv.cache import KVCache
from paceline.kv.tail import Tail
from paceline.models.base import rows_of
from paceline.models.drafters.base import ParallelNet, StateNet, TappedNet
from paceline.ops.base import RoundStart, Rule
from paceline.soft_tokens import MediaRows, content_keys, media_rows
from paceline.tree import preorder, renumbered

PIECES = (512, 64, 16)  # chunk sizes when catching up; small chunks reuse warm memory
WAITING = MAX_DRAFT_TOKENS + 1  # rows that a draft computes along; more get their K/V before
IDLE = 48  # rows that may wait while nothing is drafted, three pieces: K/V of a row take a tenth of a draft's time
Forward = Callable[[ForwardBatch, torch.Tensor, KVCache], tuple[torch.Tensor, ...]]
MEMORY, NO_STATES = NoDraftReason.DRAFTER_MEMORY.value, NoDraftReason.NO_STATES.value


@dataclass(slots=True)
class _Text:
    """Rows that `on_commit` brought and that are not committed in the drafter's cache; the last of them never is."""

    sequence: Sequence
    known: int  # rows of the text that are in the cache or wait
    waiting: Waiting  # the states of those that wait, in order


class MemoryDrafter(Drafter):
    """Its hooks, and for which texts it has room; how it drafts is its kinds' own."""

    needs_hidden = False
    blind = True

    def __init__(self, name: str, net: TappedNet, cache: KVCache, max_tokens: int = MAX_DRAFT_TOKENS) -> None:
        self.name, self.cache, self.max_tokens = name, cache, max_tokens
        self.taps, self._shift = net.taps, net.shift
        self._texts: dict[int, _Text] = {}
        # of texts that are gone: to touch new memory takes longer than to copy states
        self._spare: list[Waiting] = []
        self._lacking: dict[int, str] = {}  # texts that cannot be drafted for, and why
        self._ids = None if net.ids is None else net.ids[None]

    # -- hooks of the engine -------------------------------------------------------------------------------------

    def begin(self, sequence: Sequence) -> int:
        self.forget(sequence.id)
        tokens, shift = sequence.tokens, self._shift
        keys = content_keys(tokens, sequence.media)
        salt = f"{sequence.salt}\0{keys[:shift]}"
        try:
            if len(tokens) + MAX_DRAFT_TOKENS >= self.cache.max_tokens or not self.cache.fits(1):
                raise CapacityError("the drafter's cache is full")
            # an entry stands for its last token
            known = self.cache.open(
                sequence.id, [*tokens[shift:], 0], salt, share=len(tokens) >= shift,
                keys=keys[shift:] if sequence.media else None,
            )  # fmt: skip
        except CapacityError:
            self._lacking[sequence.id] = MEMORY
            return len(tokens)
        self._texts[sequence.id] = _Text(sequence, known, self._spare.pop() if self._spare else Waiting())
        return known

    def on_commit(self, news: list[Kept]) -> None:
        for rows in news:
            text = self._texts.get(rows.sequence.id)
            if text is None:
                continue
            count, skip = len(rows), text.known - rows.first
            if skip < 0:
                self._drop(rows.sequence.id, NO_STATES)
            elif skip < count:
                text.waiting.add(rows, skip)
                text.known += count - skip
                if len(text.waiting) > (IDLE if text.known > rows.sequence.prompt_len else WAITING):
                    self._catch_up(text)

    def lacks(self, sequence: Sequence) -> str | None:
        text = self._texts.get(sequence.id)
        if text is None:
            return self._lacking.get(sequence.id, NO_STATES)
        begun = len(text.waiting) or not self._shift
        return None if begun and text.known == len(sequence.tokens) - 1 else NO_STATES

    def forget(self, sequence_id: int) -> None:
        text = self._texts.get(sequence_id)
        if text is not None and len(text.waiting) > WAITING:
            self._catch_up(text)  # whoever goes on from this text shares its pages
        self._close(sequence_id)

    def _close(self, sequence_id: int) -> None:
        self._lacking.pop(sequence_id, None)
        if (text := self._texts.pop(sequence_id, None)) is not None:
            self.cache.close(sequence_id)
            self._spare += text.waiting.cleared()

    def _drop(self, sequence_id: int, reason: str) -> None:
        """Give up a text and its memory until it is computed anew."""
        self._close(sequence_id)
        self._lacking[sequence_id] = reason

    def _catch_up(self, text: _Text) -> None:
        """Compute waiting rows in whole chunks. The rest, and the last `shift` rows, are computed with the next draft."""
        sequence, states = text.sequence, text.waiting.all()
        while (left := len(states) - self._shift) >= PIECES[-1]:
            count = next(piece for piece in PIECES if piece <= left)
            first = self.cache.committed(sequence.id) + self._shift
            try:
                tail = self.cache.tail([(sequence.id, sequence.tokens[first : first + count])])
            except CapacityError:
                return self._drop(sequence.id, MEMORY)
            self._absorb(sequence, states[:count])
            tail.commit([count])
            states = states[count:]
        text.waiting.keep(len(states))
        return None

    @abstractmethod
    def _absorb(self, sequence: Sequence, states: torch.Tensor) -> None:
        """Write K/V of the next rows of a text, for which there is room."""

    # -- drafting --------------------------------------------------------------------------------------------------

    @abstractmethod
    def draft(self, context: DraftContext) -> Draft:
        """As `Drafter`."""

    def _capped(self, context: DraftContext) -> DraftContext:
        """The same with limits that it can fill."""
        return context.within([min(limit, self.max_tokens) for limit in context.limits])

    def _with_room(self, context: DraftContext) -> list[int]:
        """The rows that draft in this round, with pages for the whole of it. The newest give way."""
        active = [
            b
            for b, limit in enumerate(context.limits)
            if limit > 0 and self.lacks(context.sequences[b]) is None
        ]
        for text in [self._texts[context.sequences[b].id] for b in active]:
            if len(text.waiting) > WAITING:
                self._catch_up(text)
        active = [b for b in active if self.lacks(context.sequences[b]) is None]
        while active:
            rows = [(context.sequences[b], context.limits[b]) for b in active]
            try:
                self.cache.tail([(s.id, [0] * (self._waiting(s) + self._ahead(limit))) for s, limit in rows])
                return active
            except CapacityError:
                self._drop(context.sequences[active.pop()].id, MEMORY)
        return active

    def _waiting(self, sequence: Sequence) -> int:
        """Rows that have been brought and are not committed."""
        return len(sequence.tokens) - 1 - self.cache.committed(sequence.id)

    @abstractmethod
    def _ahead(self, limit: int) -> int:
        """Rows that a draft of so many tokens writes behind those."""

    def _candidates(self, count: int) -> torch.Tensor | None:
        return None if self._ids is None else self._ids.expand(count, -1)


class EntryDrafter(MemoryDrafter):
    """A draft begins with what the network gives for a text's last entry."""

    net: StateNet | ParallelNet

    def __init__(
        self, name: str, net: StateNet | ParallelNet, cache: KVCache, max_tokens: int = MAX_DRAFT_TOKENS
    ) -> None:
        super().__init__(name, net, cache, max_tokens)
        self.net = net

    def _absorb(self, sequence: Sequence, states: torch.Tensor) -> None:
        first = self.cache.committed(sequence.id) + 1
        tail = self.cache.tail([(sequence.id, sequence.tokens[first : first + len(states)])])
        self.net.feed(self._seen(tail.rows(self.net.device), [sequence]), states, self.cache)

    def _seen(self, rows: ForwardBatch, sequences: Seq[Sequence]) -> ForwardBatch:
        """`rows`, each of which reads the token after it, with the soft tokens among these. All rows are causal."""
        if any(s.media for s in sequences):
            firsts = [self.cache.committed(s.id) for s in sequences]
            rows_of_media = media_rows([s.media for s in sequences], firsts, rows.starts, self._shift)
            rows.media = None if rows_of_media is None else MediaRows(rows_of_media.pieces, None)
        return rows

    def _next(self, sequence: Sequence) -> list[int]:
        """The tokens of the entries that wait, one at least."""
        return sequence.tokens[self.cache.committed(sequence.id) + 1 :]

    def _look(self, sequences: Seq[Sequence], forward: Forward) -> tuple[tuple[torch.Tensor, ...], list[int]]:
        """Compute what waits: (what that gives for all of it, the last row of each text)."""
        states, rows, tail = self._waits(sequences)
        out = forward(rows, states, self.cache)
        self._took(sequences, rows, tail)
        return out, [end - 1 for end in rows.starts[1:]]

    def _waits(self, sequences: Seq[Sequence]) -> tuple[torch.Tensor, ForwardBatch, Tail]:
        """(states, rows) of all that waits of some texts, and the space for it."""
        states = joined([self._texts[s.id].waiting.all() for s in sequences])
        tail = self.cache.tail([(s.id, self._next(s)) for s in sequences])
        return states, self._seen(tail.rows(self.net.device), sequences), tail

    def _took(self, sequences: Seq[Sequence], rows: ForwardBatch, tail: Tail) -> None:
        """Commit the rows just computed, except each text's last: the token after it may still be refused."""
        tail.commit([end - begin - 1 for begin, end in zip(rows.starts, rows.starts[1:], strict=False)])
        for s in sequences:
            self._texts[s.id].waiting.keep(1)


@dataclass(slots=True)
class _Tree:
    """The branches of a draft that go on, or went on."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    states: list[torch.Tensor] = field(default_factory=list)  # what the step of each token takes


class StateDrafter(EntryDrafter):
    """Token by token, each from the network's own state for the one before."""

    branches = True
    net: StateNet

    def _ahead(self, limit: int) -> int:
        return limit - 1

    def draft(self, context: DraftContext) -> Draft:
        picker = context.picker
        active = self._with_room(context)
        if not active:
            return picker.draft(self.name)
        wide = any(picker.width(b) > 1 for b in active)
        if not wide and self._in_one(context, active):
            return picker.draft(self.name)
        hidden, logits = self._first(context, active)
        if wide:
            return self._tree(context, active, hidden, logits)
        if self._whole(context, active, hidden, logits):
            return picker.draft(self.name)
        drafted: dict[int, list[int]] = {}
        for step in range(max(context.limits[b] for b in active)):
            if step:
                logits, hidden = self.net.step(self._rows(context, active, drafted), hidden, self.cache)
            tokens = picker.pick(active, step, logits, self._candidates(len(active)))
            drafted = {b: [*drafted.get(b, ()), token] for b, token in zip(active, tokens, strict=True)}
            left = set(picker.go_on([b for b in active if step + 1 < context.limits[b]], step))
            on = [i for i, b in enumerate(active) if b in left]
            if not on:
                break
            if len(on) < len(active):
                hidden, active = rows_of(hidden, on), [active[i] for i in on]
        return picker.draft(self.name)

    def _tree(
        self, context: DraftContext, active: list[int], hidden: torch.Tensor, logits: torch.Tensor
    ) -> Draft:
        """Draft level by level. A level computes all branches anew, as one forward: few rows, of a small network."""
        picker = context.picker
        grown: dict[int, _Tree] = {b: _Tree() for b in active}
        ends = [-1] * len(active)  # of the branches, in the trees
        leaves = [Leaf(b, -1, 0) for b in active]
        while leaves := picker.grow(leaves, logits, self._candidates(len(leaves))):
            new: list[int] = []
            for leaf in leaves:
                tree = grown[leaf.row]
                tree.tokens.append(leaf.token)
                tree.parents.append(ends[leaf.source])
                tree.states.append(hidden[leaf.source].clone())
                new.append(len(tree.tokens) - 1)
            ends = new
            trees = [(b, grown[b]) for b in dict.fromkeys(leaf.row for leaf in leaves)]
            try:
                logits, hidden = self._level(context, trees, leaves, ends)
            except CapacityError:
                break
        return picker.draft(self.name)

    def _level(
        self, context: DraftContext, trees: list[tuple[int, _Tree]], leaves: list[Leaf], ends: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits after each of `leaves`, which are at the places `ends` of the trees, and the states of the next step."""
        orders = [preorder(tree.parents, [1.0] * len(tree.parents)) for _, tree in trees]
        items = []
        for (b, tree), order in zip(trees, orders, strict=True):
            s = context.sequences[b]
            items.append((s.id, self._next(s) + [tree.tokens[node] for node in order]))
        parents = [renumbered(tree.parents, order) for (_, tree), order in zip(trees, orders, strict=True)]
        with self.cache.tail(items, parents) as tail:
            rows = tail.rows(self.net.device, [1] * len(items))
            states = [
                tree.states[node] for (_, tree), order in zip(trees, orders, strict=True) for node in order
            ]
            logits, after = self.net.step(rows, torch.stack(states), self.cache)
        place = {
            (b, node): start + order.index(node)
            for (b, _), order, start in zip(trees, orders, rows.starts, strict=False)
            for node in order
        }
        at = [place[leaf.row, end] for leaf, end in zip(leaves, ends, strict=True)]
        return rows_of(logits, at), rows_of(after, at)

    def _first(self, context: DraftContext, active: Seq[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute what waits, and score the first token of each draft: (state of the next step, logits)."""
        (after, normed), last = self._look([context.sequences[b] for b in active], self.net.absorb)
        return _ends(after, last), self.net.logits(_ends(normed, last))

    def _rows(self, context: DraftContext, active: Seq[int], drafted: dict[int, list[int]]) -> ForwardBatch:
        """The rows of a further step: the last token of each draft, one position further."""
        items = [(context.sequences[b], drafted[b]) for b in active]
        tail = self.cache.tail([(s.id, self._next(s) + tokens) for s, tokens in items])
        return tail.rows(self.net.device, [len(tokens) for _, tokens in items])

    def _in_one(self, context: DraftContext, active: list[int]) -> bool:
        """Compute what waits and draft all tokens in one call, where the requests are simple and the runner can."""
        rules = context.picker.rules(active)
        if rules is None or self.net.device.type != "cpu":
            return False
        sequences = [context.sequences[b] for b in active]
        states, rows, tail = self._waits(sequences)
        if rows.media is not None:
            return False
        last = [end - 1 for end in rows.starts[1:]]
        tokens, positions = [s.tokens[-1] for s in sequences], [len(s.tokens) - 2 for s in sequences]
        slots = [self.cache.slot(s.id) for s in sequences]
        lead = self.net.lead(rows, last)
        start = RoundStart(tokens, positions, slots, self.net.ids, moves=True, lead=lead)
        if not self._round(context, active, start, states, rules):
            return False
        self._took(sequences, rows, tail)
        return True

    def _whole(
        self, context: DraftContext, active: list[int], hidden: torch.Tensor, logits: torch.Tensor
    ) -> bool:
        """Draft all tokens in one call, the first one from `logits`, where the runner can."""
        rules = context.picker.rules(active)
        if rules is None:
            return False
        texts = [context.sequences[b] for b in active]
        slots = [self.cache.slot(text.id) for text in texts]
        places = [len(text.tokens) - 1 for text in texts]
        start = RoundStart([0] * len(texts), places, slots, self.net.ids, moves=True, first=logits)
        return self._round(context, active, start, hidden, rules)

    def _round(
        self,
        context: DraftContext,
        active: list[int],
        start: RoundStart,
        states: torch.Tensor,
        rules: list[Rule],
    ) -> bool:
        """`states`: what it begins with; a rule for each row."""
        stops = []
        for b in active:
            stop, limit = context.picker.stop(b), context.limits[b]
            stops.append(stop if stop.limit <= limit else stop._replace(limit=limit))
        drawn = self.net.draft_round(start, states, self.cache, rules, stops)
        if drawn is None:
            return False
        take_round(context.picker, active, drawn)
        return True


def _ends(values: torch.Tensor, last: list[int]) -> torch.Tensor:
    """values[last]; of one text a view, which nothing writes to before the next round."""
    single = len(last) == 1 and values.is_cpu
    return values[last[0] : last[0] + 1] if single else rows_of(values, last)


def joined(parts: Seq[torch.Tensor]) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0]
    if parts[0].is_cpu and parts[0].dtype != torch.bfloat16:
        return torch.from_numpy(np.concatenate([part.numpy() for part in parts]))
    return torch.cat(list(parts))
