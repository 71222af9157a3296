"""Loss and gradient in one pass, in Triton. `scoring.value_and_gradient` has the same in plain torch, which CPUs use.

Imported only where there is a GPU, or Triton's interpreter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.ops.losses import Hybrid


@triton.jit
def _shaped(z_at, log_p_at, row_at, weight_at, value_at, grad_at, count, temperature, greedy, decay,
            BLOCK: tl.constexpr):  # fmt: skip
    """Loss and gradient of one row, as `objectives.shaped`."""
    m = tl.program_id(0).to(tl.int64)
    row, weight = tl.load(row_at + m), tl.load(weight_at + m)
    at = tl.arange(0, BLOCK)
    there = at < count
    z = tl.load(z_at + m * count + at, mask=there, other=-float("inf")).to(tl.float32)
    t = tl.load(log_p_at + row * count + at, mask=there, other=-float("inf"))
    best = tl.argmax(t, 0)
    z = z - tl.max(z, 0)
    t = (t - tl.max(t, 0)) / temperature
    plain = tl.exp(z)
    plain = plain / tl.sum(plain, 0)
    p, q = tl.exp(t), tl.exp(z / temperature)
    p_total, q_total = tl.sum(p, 0), tl.sum(q, 0)
    log_ratio = tl.where(there, (t - tl.log(p_total)) - (z / temperature - tl.log(q_total)), 0.0)
    p, q = p / p_total, q / q_total
    divergence = tl.sum(tl.where(p > 0, p * log_ratio, 0.0), 0)
    alpha = tl.sum(tl.minimum(p, q), 0)
    below = tl.where(q < p, q, 0.0)
    below_total = tl.sum(below, 0)
    share = tl.exp(-decay * alpha)
    hit = tl.sum(tl.where(at == best, plain, 0.0), 0)
    value = share * divergence + (1 - share) * (1 - alpha) - greedy * tl.log(tl.maximum(hit, 1e-30))
    grad = (share * (q - p) - (1 - share) * (below - q * below_total)) / temperature
    grad += greedy * (plain - tl.where(at == best, 1.0, 0.0))
    tl.store(value_at + m, value * weight)
    tl.store(grad_at + m * count + at, (grad * weight).to(grad_at.dtype.element_ty), mask=there)


def shaped(
    logits: torch.Tensor,
    log_p: torch.Tensor,
    rows: torch.Tensor,
    weights: torch.Tensor,
    shape: Hybrid,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weighted losses [M], gradient [M, C] in the logits' dtype) of logits [M, C] against log_p [L, C] at `rows` [M].

    A row is held in registers.
    """
    value = torch.empty(len(logits), device=logits.device)
    grad = torch.empty_like(logits)
    count = logits.shape[1]
    block = triton.next_power_of_2(count)
    _shaped[(len(logits),)](
        logits, log_p, rows, weights, value, grad, count, shape.temperature, shape.greedy, shape.decay,
        BLOCK=block, num_warps=16,
    )  # fmt: skip
    return value, grad
