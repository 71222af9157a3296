"""Draft rounds scored against the target: the loss of a batch, and what a held-out batch says of
acceptance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

from paceline.train.objectives import (
    Laws,
    Objective,
    Weighting,
    acceptance,
    expected_tokens,
    position_weights,
)
from paceline.train.parallel import Captured, DrafterModule, choose_anchors, valid_steps

CHECKPOINT_BYTES = 256 << 20  # logits of one draft step beyond which they are computed twice instead of kept

TargetLogits = Callable[[torch.Tensor], torch.Tensor]  # [M, H] -> [M, V] float32


@dataclass(frozen=True, slots=True)
class Plan:
    """How a batch becomes a loss."""

    objective: Objective
    weights: Weighting
    decay: float
    draft_tokens: int
    anchors: int


@dataclass(slots=True)
class Acceptance:
    """Held-out acceptance by draft position, teacher-forced on the text. Only rounds with all K steps
    count.
    """

    greedy: list[float]  # [K] share of positions whose most likely tokens agree
    sampled: list[float]  # [K] mean 1 - TV at temperature 1
    greedy_tokens: float  # expected tokens per target step, bonus included, if every draft has K tokens
    sampled_tokens: float
    rounds: int

    @property
    def score(self) -> float:
        """What early stopping looks at: expected tokens per step, mean of temperature 0 and 1."""
        return (self.greedy_tokens + self.sampled_tokens) / 2


class TargetLaws:
    """log p at the window indices that a batch asks for, each computed once."""

    def __init__(self, captured: Captured, logits: TargetLogits, anchors: torch.Tensor, steps: int) -> None:
        needed = torch.zeros_like(captured.tokens, dtype=torch.bool)
        for i in range(steps):
            needed.scatter_(1, anchors + i, True)
        with torch.no_grad():
            self._log_p = torch.log_softmax(logits(captured.hidden[needed]).float(), dim=-1)
        self._row = (needed.flatten().long().cumsum(0) - 1).view(needed.shape)

    def at(self, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """[n, V] for window rows [n] and indices [n]."""
        return self._log_p[self._row[rows, index]]


def batch_loss(
    module: DrafterModule,
    captured: Captured,
    logits: TargetLogits,
    plan: Plan,
    generator: torch.Generator | None,
) -> tuple[torch.Tensor, int]:
    """Mean weighted loss over the batch's draft positions, and how many there were."""
    steps = plan.draft_tokens
    anchors = choose_anchors(captured, steps, plan.anchors, generator)
    valid = valid_steps(captured, anchors, steps)
    laws = TargetLaws(captured, logits, anchors, steps)
    with _autocast(anchors.device):
        states = module.unroll(captured, anchors, steps)
    losses, alphas = [], []
    for i in range(steps):
        rows, columns = valid[..., i].nonzero(as_tuple=True)
        index = anchors[rows, columns] + i
        log_p, tokens = laws.at(rows, index), captured.tokens[rows, index + 1]
        loss, alpha = _score(module, states[i][rows, columns], log_p, tokens, plan)
        grid = torch.zeros(anchors.shape, dtype=torch.float32, device=anchors.device)
        losses.append(grid.index_put((rows, columns), loss))
        alphas.append(grid.index_put((rows, columns), alpha))
    weights = position_weights(plan.weights, torch.stack(alphas, -1).flatten(0, 1), plan.decay)
    total = (torch.stack(losses, -1).flatten(0, 1) * weights).sum()
    count = int(valid.sum())
    return total / max(1, count), count


def _score(
    module: DrafterModule, states: torch.Tensor, log_p: torch.Tensor, tokens: torch.Tensor, plan: Plan
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss [n] and acceptance [n] of one draft step; the large [n, V] values are recomputed in the
    backward pass.
    """

    def run(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        laws = Laws(log_p, torch.log_softmax(module.logits(states), dim=-1), tokens)
        alpha = acceptance(laws).detach() if plan.weights == "credit" else torch.zeros_like(laws.log_q[:, 0])
        return plan.objective(laws), alpha

    if log_p.nbytes <= CHECKPOINT_BYTES:
        return run(states)
    loss, alpha = checkpoint(run, states, use_reentrant=False)
    return loss, alpha


def _autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


@dataclass(slots=True)
class Observed:
    """Per round and draft position, [R, K]: agreement of the most likely tokens, 1 - TV, and the drafter's
    top chance.
    """

    hits: torch.Tensor
    alphas: torch.Tensor
    confidence: torch.Tensor
    valid: torch.Tensor


@torch.no_grad()
def observe(module: DrafterModule, captured: Captured, logits: TargetLogits, steps: int) -> Observed:
    """What the drafter would do from every position of a batch."""
    anchors = choose_anchors(captured, steps, 0, None)
    valid = valid_steps(captured, anchors, steps)
    laws = TargetLaws(captured, logits, anchors, steps)
    with _autocast(anchors.device):
        states = module.unroll(captured, anchors, steps)
    hits, alphas, confidence = (torch.zeros(valid.shape, device=anchors.device) for _ in range(3))
    for i in range(steps):
        rows, columns = valid[..., i].nonzero(as_tuple=True)
        index = anchors[rows, columns] + i
        log_p = laws.at(rows, index)
        log_q = torch.log_softmax(module.logits(states[i][rows, columns]), dim=-1)
        hits[rows, columns, i] = (log_p.argmax(-1) == log_q.argmax(-1)).float()
        alphas[rows, columns, i] = acceptance(Laws(log_p, log_q, captured.tokens[rows, index + 1]))
        confidence[rows, columns, i] = log_q.max(-1).values.exp()
    return Observed(*(x.flatten(0, 1).cpu() for x in (hits, alphas, confidence, valid)))


def summarise(seen: list[Observed]) -> Acceptance:
    """Acceptance over several batches."""
    hits, alphas = torch.cat([x.hits for x in seen]), torch.cat([x.alphas for x in seen])
    valid = torch.cat([x.valid for x in seen])
    whole = valid.all(1)
    hits, alphas = hits[whole], alphas[whole]
    if not len(hits):
        return Acceptance([], [], 1.0, 1.0, 0)
    every = torch.ones_like(hits, dtype=torch.bool)
    return Acceptance(
        hits.mean(0).tolist(),
        alphas.mean(0).tolist(),
        expected_tokens(hits, every),
        expected_tokens(alphas, every),
        len(hits),
    )
