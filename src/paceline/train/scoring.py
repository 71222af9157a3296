"""Losses over a large vocabulary in pieces: nothing of size [rows, V] outlives its piece.

The gradient of each piece is taken while its distributions are at hand, so the backward pass only scales what is
there. On a CPU a piece fits the cache, which is worth more than the arithmetic; on a GPU it bounds the
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from paceline.ops import native
from paceline.ops.losses import Hybrid, hybrid_loss
from paceline.train.objectives import GREEDY_SHARE, HYBRID_DECAY, USED_AT, Laws, Objective, hybrid, shaped

CPU_PIECE, GPU_PIECE = 2 << 20, 256 << 20  # bytes of one [rows, C] float32
KERNEL_PIECE = 16 << 20  # the same where a kernel of ours does what stands between two matrix products
MOST_CANDIDATES = 16_384  # of a kernel that holds a row in registers


@dataclass(slots=True)
class Scored:
    """M drafted positions to be scored against the target's distributions."""

    log_p: torch.Tensor  # [L, C] float32
    best: torch.Tensor  # [L] the target's most likely token, -1 if it cannot be drafted
    row: torch.Tensor  # [M] which distribution each one meets
    tokens: torch.Tensor  # [M] what the text has there, -1 if it cannot be drafted

    def distributions(self, part: slice, logits: torch.Tensor) -> Laws:
        row, log_q = self.row[part], torch.log_softmax(logits.float(), dim=-1)
        return Laws(self.log_p[row], log_q, self.tokens[part], self.best[row])


def pieces(rows: int, vocab: int, device: torch.device, on_cpu: int = CPU_PIECE) -> Iterator[slice]:
    """Slices of `rows` that are cheap to hold."""
    size = max(1, (on_cpu if device.type == "cpu" else GPU_PIECE) // (4 * vocab))
    for start in range(0, rows, size):
        yield slice(start, min(rows, start + size))


@dataclass(frozen=True, slots=True)
class Task:
    """What the rows are scored by: the sum of weight * objective."""

    scored: Scored
    weights: torch.Tensor  # [M]
    objective: Objective


class HeadLoss(torch.autograd.Function):
    """The value of a task for states [M, d] through a head [V, d]: a scalar, float32."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, head: torch.Tensor, task: Task) -> torch.Tensor:
        learns = ctx.needs_input_grad[1]
        by_states = torch.empty_like(states)
        by_head = torch.zeros_like(head, dtype=torch.float32) if learns else None
        # logits need more digits than bfloat16 has: float16 on a GPU, and CPUs do not multiply that fast
        dtype = back = states.dtype
        if states.dtype == torch.bfloat16:
            dtype, back = (torch.float16, torch.float16) if states.is_cuda else (torch.float32, back)
        weight, behind = head.to(dtype), head.to(back)
        total = torch.zeros((), device=states.device)
        piece = KERNEL_PIECE if on_kernels(task.objective) else CPU_PIECE
        for part in pieces(len(states), len(head), states.device, piece):
            x = states[part].to(dtype)
            loss, grad = value_and_gradient(task, part, F.linear(x, weight).detach())
            by_states[part] = (grad.to(back) @ behind).to(states.dtype)
            if by_head is not None:
                by_head += grad.T @ x
            total += loss
        ctx.save_for_backward(by_states, by_head)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        by_states, by_head = ctx.saved_tensors
        return by_states * grads[0], None if by_head is None else by_head * grads[0], None


# What our kernels need of an objective.
KERNELS: Mapping[Objective, Hybrid] = {
    shaped: Hybrid(USED_AT, GREEDY_SHARE, HYBRID_DECAY),
    hybrid: Hybrid(1.0, 0.0, HYBRID_DECAY),
}


def on_kernels(objective: Objective) -> bool:
    """Whether the CPU's kernels have it in one pass, and are there."""
    return objective in KERNELS and native.available()


def value_and_gradient(task: Task, part: slice, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of some rows, a scalar, and its gradient by their logits [n, C], in their type."""
    scored, weights = task.scored, task.weights[part]
    if task.objective is shaped and logits.is_cuda and logits.shape[1] <= MOST_CANDIDATES:
        from paceline.train import kernels

        row = scored.row[part].contiguous()
        value, grad = kernels.shaped(logits, scored.log_p, row, weights.float(), KERNELS[shaped])
        return value.sum(), grad
    if logits.device.type == "cpu" and logits.dtype != torch.float64 and on_kernels(task.objective):
        row, grad = scored.row[part].contiguous(), logits.float().contiguous()
        shape, by_row = KERNELS[task.objective], weights.float().contiguous()
        value = hybrid_loss(grad, scored.log_p, row, scored.best, by_row, shape).sum()
        return value, grad.to(logits.dtype)
    logits.requires_grad_()
    with torch.enable_grad():
        loss = (task.objective(scored.distributions(part, logits)) * weights).sum()
    (grad,) = torch.autograd.grad(loss, logits)
    return loss.detach(), grad


def head_loss(states: torch.Tensor, head: torch.Tensor, task: Task) -> torch.Tensor:
    """`HeadLoss`, typed."""
    loss: torch.Tensor = HeadLoss.apply(states, head, task)  # type: ignore[no-untyped-call]
    return loss


@torch.no_grad()
def score(
    states: torch.Tensor,
    scored: Scored,
    logits: Callable[[torch.Tensor], torch.Tensor],
    measures: tuple[Objective, ...],
) -> torch.Tensor:
    """[len(measures), M]: functions of the distributions, without a gradient; `logits` turns states [n, d] into [n,
    V].
    """
    out = torch.empty(len(measures), len(states), device=states.device)
    for part in pieces(len(states), scored.log_p.shape[1], states.device):
        distributions = scored.distributions(part, logits(states[part]))
        for i, measure in enumerate(measures):
            out[i, part] = measure(distributions).float()
    return out
