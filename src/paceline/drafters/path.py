"""A block drafter that walks a path (DFlash 2): of a row's best tokens it takes the one that also follows the one before.

Where a text is sampled, the best are found with the noise that the target will use at the position: it often lifts a
token that is not among the likeliest ones.
"""

from __future__ import annotations

import torch

from paceline.drafters.base import DraftContext
from paceline.drafters.block import BlockDrafter
from paceline.models.drafters.base import PathNet


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
