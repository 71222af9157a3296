"""Draft rounds scored against the target: the loss of a batch, and what a held-out batch says of
acceptance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from paceline.ops import native
from paceline.train.objectives import (
    Laws,
    Objective,
    Weighting,
    acceptance,
    expected_tokens,
    position_weights,
)
from paceline.train.parallel import Captured, DraftModule, choose_anchors, valid_steps
from paceline.train.scoring import Scored, Task, head_loss, pieces, score

WIDE = 512  # columns from which a CPU multiplies matrices as bfloat16: narrower ones take little time
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


@dataclass(slots=True)
class Drafted:
    """All counted draft positions of a batch, side by side."""

    valid: torch.Tensor  # [B, A, K]
    states: torch.Tensor  # [M, hidden]
    scored: Scored  # [M]

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """[M] -> [B * A, K], zeros where nothing counts."""
        out = torch.zeros(self.valid.shape, dtype=values.dtype, device=values.device)
        return out.masked_scatter(self.valid, values).flatten(0, 1)


def draft_all(
    module: DraftModule, captured: Captured, logits: TargetLogits, anchors: torch.Tensor, steps: int
) -> Drafted:
    """Unroll `steps` draft steps from anchors [B, A] and line them up with the target's distributions.

    `logits` may be of all tokens, or only of those that can be drafted: then the distributions are over these.
    """
    valid = valid_steps(captured, anchors, steps)
    row, anchor, step = valid.nonzero(as_tuple=True)  # [M] each
    index = anchors[row, anchor] + step
    needed = torch.zeros_like(captured.tokens, dtype=torch.bool)
    needed[row, index] = True
    place = (needed.flatten().long().cumsum(0) - 1).view(needed.shape)
    with _autocast(module.head):
        states = torch.stack(module.unroll(captured, anchors, steps), dim=2)  # [B, A, K, hidden]
    log_p, best = target_laws(captured.hidden[needed], logits, module)
    tokens = module.places(captured.tokens[row, index + 1])
    return Drafted(valid, states[valid], Scored(log_p, best, place[row, index], tokens))


@torch.no_grad()
def target_laws(
    hidden: torch.Tensor, logits: TargetLogits, module: DraftModule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the target at states [L, H]: log p [L, C] of the tokens that can be drafted, float32, and the place [L] of the
    most likely token among them, -1 where it cannot be drafted.
    """
    count = len(module.head)
    out = torch.empty(len(hidden), count, device=hidden.device)
    best = torch.empty(len(hidden), dtype=torch.long, device=hidden.device)
    for part in pieces(len(hidden), module.vocab, hidden.device):
        log_p = torch.log_softmax(logits(hidden[part]).float(), dim=-1)
        if log_p.shape[1] == count:
            out[part], best[part] = log_p, log_p.argmax(-1)
        else:
            out[part], best[part] = log_p[:, module.ids], module.places(log_p.argmax(-1))
    return out, best


def batch_loss(
    module: DraftModule,
    captured: Captured,
    logits: TargetLogits,
    plan: Plan,
    generator: torch.Generator | None,
) -> tuple[torch.Tensor, int]:
    """Mean weighted loss over the batch's draft positions, and how many there were."""
    anchors = choose_anchors(captured, plan.draft_tokens, plan.anchors, generator)
    drafted = draft_all(module, captured, logits, anchors, plan.draft_tokens)
    alphas = torch.zeros(len(drafted.states), device=anchors.device)
    sure = module.sureness(drafted.states)
    if plan.weights == "credit" or sure is not None:
        alphas = score(drafted.states.detach(), drafted.scored, module.logits, (acceptance,))[0]
    weights = position_weights(plan.weights, drafted.spread(alphas), plan.decay)
    flat = weights[drafted.valid.flatten(0, 1)]
    task = Task(drafted.scored, flat, plan.objective)
    total = head_loss(drafted.states, module.head, task)
    for states in module.beside(drafted.states):
        total = total + head_loss(states, module.head, task)
    if sure is not None:
        total = (
            total
            + (flat * F.binary_cross_entropy_with_logits(sure, alphas.clamp(0, 1), reduction="none")).sum()
        )
    count = len(drafted.states)
    return total / max(1, count), count


def _autocast(head: torch.Tensor) -> torch.autocast:
    """bfloat16 for matrices: on a GPU, and on CPUs that multiply it faster than float32 where they are large."""
    kind = head.device.type
    pays = head.shape[1] >= WIDE and native.available() and native.bf16_dot()
    return torch.autocast(kind, dtype=torch.bfloat16, enabled=kind == "cuda" or pays)


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
def observe(
    module: DraftModule, captured: Captured, logits: TargetLogits, steps: int, *, running: bool = False
) -> Observed:
    """What the drafter would do from every position of a batch; `running`: with its centroid head, if it
    has one.
    """
    anchors = choose_anchors(captured, steps, 0, None)
    drafted = draft_all(module, captured, logits, anchors, steps)
    head = module.running_logits if running else module.logits
    hits, alphas, chances = score(drafted.states, drafted.scored, head, (agreement, acceptance, confidence))
    hits, alphas, chances = (drafted.spread(x).cpu() for x in (hits, alphas, chances))
    return Observed(hits, alphas, chances, drafted.valid.flatten(0, 1).cpu())


def agreement(distributions: Laws) -> torch.Tensor:
    """[N]: 1 where the most likely tokens agree."""
    return distributions.best == distributions.log_q.argmax(-1)


def confidence(distributions: Laws) -> torch.Tensor:
    """[N]: the drafter's own probability of its most likely token."""
    return distributions.log_q.max(-1).values.exp()


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
