"""Multi-token prediction: Gemma 4's assistant network reads the target's hidden state and K/V and drafts a few tokens.

It keeps no cache. All steps of a round have one position, that of the pending token (the last text token, whose
K/V the target has not computed yet), and see only committed keys.
"""

from __future__ import annotations

import torch

from paceline.core import MAX_DRAFT_TOKENS, Draft, ForwardBatch
from paceline.drafters.base import DraftContext, Drafter, Leaf, take_round
from paceline.models.base import rows_of
from paceline.models.drafters.base import AssistantNet
from paceline.ops.base import RoundStart


class MTPDrafter(Drafter):
    name = "mtp"
    needs_hidden = True
    branches = True

    def __init__(self, net: AssistantNet, max_tokens: int = MAX_DRAFT_TOKENS) -> None:
        self.net = net
        self.max_tokens = max_tokens

    def draft(self, context: DraftContext) -> Draft:
        active = [b for b, k in enumerate(context.limits) if k > 0 and context.has_hidden[b]]
        if not active or context.states is None:
            return context.picker.draft(self.name)
        tokens = [context.sequences[b].tokens[-1] for b in active]
        start = RoundStart(
            tokens, [len(context.sequences[b].tokens) - 1 for b in active], [context.slots[b] for b in active]
        )
        wide = any(context.picker.width(b) > 1 for b in active)
        if not wide and self._whole_round(context, active, start):
            return context.picker.draft(self.name)
        hidden = context.hidden(active)
        assert hidden is not None
        if wide:
            return self._tree(context, active, start, hidden)
        device = hidden.device
        positions, slots = torch.tensor([start.positions, start.slots], dtype=torch.int32, device=device)
        for step in range(max(context.limits[b] for b in active)):
            ids = torch.tensor(tokens, dtype=torch.int64, device=device)
            out = self.net.step(
                ForwardBatch(ids, positions, slots, list(range(len(active) + 1))), hidden, context.cache
            )
            tokens = context.picker.pick(active, step, out.logits, out.ids)
            left = set(context.picker.go_on([b for b in active if step + 1 < context.limits[b]], step))
            on = [i for i, b in enumerate(active) if b in left]
            if not on:
                break
            hidden = out.hidden
            if len(on) < len(active):
                keep = torch.tensor(on, device=device)
                hidden, positions, slots = hidden[keep], positions[keep], slots[keep]
                tokens, active = [tokens[i] for i in on], [active[i] for i in on]
        return context.picker.draft(self.name)

    def _tree(
        self, context: DraftContext, active: list[int], start: RoundStart, hidden: torch.Tensor
    ) -> Draft:
        """Draft level by level: nothing is kept of a step, so all branches of a level are rows of one."""
        at = {b: (start.positions[i], start.slots[i]) for i, b in enumerate(active)}
        leaves = [Leaf(b, -1, token) for b, token in zip(active, start.tokens, strict=True)]
        while True:
            ids = torch.tensor([leaf.token for leaf in leaves], dtype=torch.int64, device=hidden.device)
            places = torch.tensor([at[leaf.row] for leaf in leaves], dtype=torch.int32, device=hidden.device)
            positions, slots = places.T.contiguous()
            rows = ForwardBatch(ids, positions, slots, list(range(len(leaves) + 1)))
            out = self.net.step(rows, hidden, context.cache)
            leaves = context.picker.grow(leaves, out.logits, out.ids)
            if not leaves:
                return context.picker.draft(self.name)
            hidden = rows_of(out.hidden, [leaf.source for leaf in leaves])

    def _whole_round(self, context: DraftContext, active: list[int], start: RoundStart) -> bool:
        """Draft all steps in one call, where the requests are simple enough and the runner can."""
        rules = context.picker.rules(active)
        if rules is None or context.states is None:
            return False
        stops = [context.picker.stop(b)._replace(limit=context.limits[b]) for b in active]
        drawn = self.net.draft_round(start, context.states, context.cache, rules, stops)
        if drawn is None:
            return False
        take_round(context.picker, active, drawn)
        return True

    def forget(self, sequence_id: int) -> None:
        """Nothing is kept per sequence."""
