"""The gated delta rule in plain torch, row by row: what `ReferenceOps.delta_rule` computes for one text."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.ops.base import DeltaRule


def recur(x: Tensor, state: Tensor, goal: int, rule: DeltaRule) -> tuple[Tensor, Tensor]:
    """(what each row reads [T, value heads * value_dim], the state after `goal` rows).

    x [history + T, ...] is what rows hold, `state` [value heads, key_dim, value_dim] that before the first of the T.
    """
    kernel, channels = rule.conv.shape
    count, heads, keys = len(x) - kernel + 1, rule.value_heads, rule.key_heads * rule.key_dim
    mixed = torch.stack([x[t : t + count, :channels] * rule.conv[t].to(x) for t in range(kernel)]).sum(0)
    q, k, v = torch.split(F.silu(mixed), [keys, keys, channels - 2 * keys], dim=-1)
    head = torch.arange(heads)
    of = head % rule.key_heads if rule.tiled else head // (heads // rule.key_heads)
    q, k = (part.view(count, rule.key_heads, -1)[:, of] for part in (q, k))
    q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (q, k))
    q, v = q * rule.key_dim**-0.5, v.view(count, heads, -1)
    b, a = torch.split(x[kernel - 1 :, channels:], heads, dim=-1)
    rate = torch.sigmoid(b)  # [T, heads]
    fade = torch.exp(rule.decay.to(x) * F.softplus(a + rule.dt_bias.to(x)))
    at_goal, reads = state, []
    for t in range(count):
        state = state * fade[t, :, None, None]
        change = (v[t] - torch.einsum("hkv,hk->hv", state, k[t])) * rate[t, :, None]
        state = state + k[t, :, :, None] * change[:, None]
        reads.append(torch.einsum("hkv,hk->hv", state, q[t]).flatten())
        if t + 1 == goal:
            at_goal = state
    return torch.stack(reads), at_goal
