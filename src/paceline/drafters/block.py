"""Drafters of whole blocks: the text's last token and masks behind it, all rows of a draft from one forward (DFlash).

The block has its full length whatever is wanted, since its rows see each other: a shorter one would draft other tokens.
"""

from __future__ import annotations

import torch

from paceline.core import MAX_DRAFT_TOKENS, Draft, ForwardBatch, Numbers, Sequence
from paceline.drafters.base import DraftContext, take_round
from paceline.drafters.states import MemoryDrafter, joined
from paceline.kv.cache import KVCache
from paceline.models.base import rows_of
from paceline.models.drafters.base import BlockNet, ChainedNet, PathNet
from paceline.ops.base import ChainStart
from paceline.ops.uploads import upload


class BlockDrafter(MemoryDrafter):
    blind = False  # its entries hold states alone

    def __init__(self, name: str, net: BlockNet, cache: KVCache) -> None:
        super().__init__(name, net, cache, min(net.block - net.first, MAX_DRAFT_TOKENS))
        self.net = net

    def _absorb(self, sequence: Sequence, states: torch.Tensor) -> None:
        first = self.cache.committed(sequence.id)
        tail = self.cache.tail([(sequence.id, sequence.tokens[first : first + len(states)])])
        self.net.absorb(tail.rows(self.net.device), states, self.cache)

    def _ahead(self, limit: int) -> int:
        return self.net.block

    def draft(self, context: DraftContext) -> Draft:
        context = self._capped(context)
        active = self._with_room(context)
        if active:
            steps = max(context.limits[b] for b in active)
            self._pick(context, active, self._states(context, active, steps))
        return context.picker.draft(self.name)

    def _states(self, context: DraftContext, active: list[int], steps: int) -> torch.Tensor:
        """What the head reads of the first `steps` drafted tokens of each text, side by side [len(active) * steps, H]."""
        texts = [context.sequences[b] for b in active]
        self._take_in(texts)
        masks = [self.net.mask] * (self.net.block - 1)
        rows = self.cache.tail([(s.id, [s.tokens[-1], *masks]) for s in texts]).rows(self.net.device)
        states = self.net.block_states(rows, self.cache)
        first = self.net.first
        return rows_of(
            states, [start + first + step for start in rows.starts[: len(texts)] for step in range(steps)]
        )

    def _pick(self, context: DraftContext, active: list[int], states: torch.Tensor) -> None:
        """Draw the tokens of each text."""
        picker, steps = context.picker, len(states) // len(active)
        wanted = [(b, step) for b in active for step in range(context.limits[b])]
        begin = {b: i * steps for i, b in enumerate(active)}
        place = {where: i for i, where in enumerate(wanted)}
        logits = self.net.logits(rows_of(states, [begin[b] + step for b, step in wanted]))
        for step in range(steps):
            scores = rows_of(logits, [place[b, step] for b in active])
            picker.pick(active, step, scores, self._candidates(len(active)))
            active = picker.go_on([b for b in active if step + 1 < context.limits[b]], step)
            if not active:
                break

    def _take_in(self, texts: list[Sequence]) -> None:
        """Compute all that waits, in one forward."""
        behind = [(s, self._texts[s.id]) for s in texts if len(self._texts[s.id].waiting)]
        if not behind:
            return
        tail = self.cache.tail([(s.id, s.tokens[self.cache.committed(s.id) : -1]) for s, _ in behind])
        states = joined([text.waiting.all() for _, text in behind])
        self.net.absorb(tail.rows(self.net.device), states, self.cache)
        tail.commit([len(text.waiting) for _, text in behind])
        for _, text in behind:
            text.waiting.keep(0)


class ChainedBlockDrafter(BlockDrafter):
    """Each token is scored beside the one that was drawn before it (DSpark)."""

    net: ChainedNet

    def _pick(self, context: DraftContext, active: list[int], states: torch.Tensor) -> None:
        picker, steps = context.picker, len(states) // len(active)
        given = {"base": self.net.logits(states), "hidden": states}
        last = [context.sequences[b].tokens[-1] for b in active]
        rules = picker.rules(active)
        if rules is not None:
            stops = [picker.stop(b) for b in active]
            stops = [
                s._replace(limit=min(s.limit, context.limits[b])) for s, b in zip(stops, active, strict=True)
            ]
            start = ChainStart(last, given, self.net.ids, self.net.confident, self.net.state_width)
            drawn = self.net.chain_round(start, rules, stops)
            if drawn is not None:
                return take_round(picker, active, drawn)
        at = [i * steps for i in range(len(active))]  # of each text in `given`
        state = states.new_zeros(len(active), self.net.state_width)
        for step in range(steps):
            places = [0] * len(active)
            rows = ForwardBatch.of((last, places, places), [0, len(active)], self._tensors)
            own = {name: rows_of(value, [i + step for i in at]) for name, value in given.items()}
            logits, sure, after = self.net.chain(rows, {**own, "state": state})
            words = None if sure is None else sure[:, 0].tolist()
            last = picker.pick(active, step, logits, self._candidates(len(active)), words)
            left = set(picker.go_on([b for b in active if step + 1 < context.limits[b]], step))
            on = [i for i, b in enumerate(active) if b in left]
            if not on:
                return None
            state = state if after is None else rows_of(after, on)
            active, at, last = ([values[i] for i in on] for values in (active, at, last))
        return None

    def _tensors(self, numbers: Numbers) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens, device = upload(numbers[0], self.net.device), self.net.device
        positions, slots = (upload(values, device, torch.int32) for values in numbers[1:])
        return tokens, positions, slots


class PathDrafter(BlockDrafter):
    net: PathNet

    def _pick(self, context: DraftContext, active: list[int], states: torch.Tensor) -> None:
        picker, steps = context.picker, len(states) // len(active)
        scores, projected = self.net.logits(states), self.net.projected(states)
        last = {b: context.sequences[b].tokens[-1] for b in active}
        begin = {b: i * steps for i, b in enumerate(active)}
        for step in range(steps):
            best = [picker.best(b, scores[begin[b] + step], self.net.top_k) for b in active]
            logits = [
                own + self.net.follows(last[b], projected[begin[b] + step], ids)
                for b, (own, ids) in zip(active, best, strict=True)
            ]
            candidates = torch.stack([ids for _, ids in best]).to(scores.device)
            tokens = picker.pick(active, step, torch.stack(logits).to(scores.device), candidates)
            last = dict(zip(active, tokens, strict=True))
            active = picker.go_on([b for b in active if step + 1 < context.limits[b]], step)
            if not active:
                break
