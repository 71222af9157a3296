"""The EAGLE-3 head (arXiv 2503.01840) for training: all draft rounds of a text at once, K depths, as drafting does it.

Entry p joins the target's states of row p with the token p + 1. A round that starts at entry p sees the entries up to p
as the target left them, and its own further depths: that is EAGLE-3's training-time test.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    inner: int = 1536  # width of the feed-forward part
    hidden: int = 576
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    layers: tuple[int, ...] = (2, 15, 27)  # whose states it reads
    eps: float = 1e-5
    theta: float = 1e5

    @property
    def parts(self) -> tuple[int, int, int]:
        """Widths of q, k and v."""
        return self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim


class Head(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, hidden, taps = shape, shape.hidden, len(shape.layers)
        self.fc = matrix(hidden, taps * hidden)
        self.fc_norm = nn.Parameter(torch.ones(taps, hidden))
        self.input_layernorm = nn.Parameter(torch.ones(hidden))
        self.hidden_norm = nn.Parameter(torch.ones(hidden))
        self.qkv = matrix(sum(shape.parts), 2 * hidden)
        self.o = matrix(hidden, shape.parts[0])
        self.post_attention_layernorm = nn.Parameter(torch.ones(hidden))
        self.gate_up = matrix(2 * shape.inner, hidden)
        self.down = matrix(hidden, shape.inner)
        self.norm = nn.Parameter(torch.ones(hidden))
        inv_freq = 1.0 / shape.theta ** (torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def fused(self, states: Tensor) -> Tensor:
        """[B, T, taps, H] of the target -> the input of the first depth."""
        normed = F.rms_norm(states.float(), (self.shape.hidden,), None, self.shape.eps) * self.fc_norm
        return F.linear(normed.flatten(-2), self.fc).float()

    def forward(self, states: Tensor, embedded: Tensor, depths: int) -> list[Tensor]:
        """states [B, T, taps, H] of rows 0.., embedded [B, T + depths - 1, H] of tokens 1..: `depths` tensors [B, T, H],
        what the target's head reads; entry p of depth j predicts token p + 2 + j."""
        shape, count = self.shape, states.shape[1]

        def norm(x: Tensor, weight: Tensor) -> Tensor:
            return F.rms_norm(x, (shape.hidden,), weight, shape.eps)

        x, later, out = self.fused(states), [], []
        e = norm(embedded.float(), self.input_layernorm)
        angle = torch.arange(count + depths)[:, None] * self.inv_freq
        cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
        causal = torch.ones(count, count, dtype=torch.bool).tril()
        k0 = v0 = None
        for j in range(depths):
            n = norm(x, self.hidden_norm)
            joined = torch.cat([e[:, j : j + count], n], -1)
            q, k, v = (by_head(y, shape.head_dim) for y in F.linear(joined, self.qkv).split(shape.parts, -1))
            at = slice(j, j + count)
            q, k = turn(q, cos[at], sin[at]) * shape.head_dim**-0.5, turn(k, cos[at], sin[at])
            k, v = (y.repeat_interleave(shape.heads // shape.kv_heads, 1) for y in (k, v))
            if j == 0:
                k0, v0 = k, v
            else:
                later.append((k, v))
            scores = (q.to(k0.dtype) @ k0.mT).float().masked_fill(~causal, -torch.inf)
            own = [(q * k.float()).sum(-1, keepdim=True) for k, _ in later]
            shares = torch.cat([scores, *own], -1).softmax(-1)
            mixed = (shares[..., :count].to(v0.dtype) @ v0).float()
            for i, (_, v) in enumerate(later):
                mixed = mixed + shares[..., count + i, None] * v
            a = n + F.linear(mixed.transpose(1, 2).flatten(2), self.o)
            gate, up = F.linear(norm(a, self.post_attention_layernorm), self.gate_up).chunk(2, -1)
            x = a + F.linear(F.silu(gate) * up, self.down)
            out.append(norm(x, self.norm))
        return out

    def tensors(self) -> dict[str, Tensor]:
        """By the names of the `speculators` format."""
        at = "layers.0."
        q, k, v = self.qkv.split(self.shape.parts)
        gate, up = self.gate_up.chunk(2)
        found = {
            "fc.weight": self.fc, "norm.weight": self.norm,
            f"{at}input_layernorm.weight": self.input_layernorm, f"{at}hidden_norm.weight": self.hidden_norm,
            f"{at}self_attn.q_proj.weight": q, f"{at}self_attn.k_proj.weight": k, f"{at}self_attn.v_proj.weight": v,
            f"{at}self_attn.o_proj.weight": self.o,
            f"{at}post_attention_layernorm.weight": self.post_attention_layernorm,
            f"{at}mlp.gate_proj.weight": gate, f"{at}mlp.up_proj.weight": up, f"{at}mlp.down_proj.weight": self.down,
        }  # fmt: skip
        return found | {f"fc_norm.{i}.weight": w for i, w in enumerate(self.fc_norm)}


def matrix(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) / math.sqrt(columns))


def by_head(x: Tensor, head_dim: int) -> Tensor:
    """[B, T, heads * d] -> [B, heads, T, d]"""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    return (x * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


class DraftLoss(torch.autograd.Function):
    """KL(p, q) over the draft vocabulary, mean over rows, without its constant -H(p); and mean alpha = sum min(p, q).

    x [N, H], head [D, H] bfloat16 and frozen, p [N, D] float32. The gradient, q - p, is taken by hand: it is cheap.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, head: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        q = F.linear(x.to(head.dtype), head).float().softmax(-1)
        some = slice(None, None, 8)  # enough to tell how it goes
        loss = -(p[some] * q[some].clamp_min(1e-9).log()).sum(-1).mean()
        alpha = torch.minimum(p[some], q[some]).sum(-1).mean()
        ctx.save_for_backward(q.sub_(p).div_(len(x)).to(head.dtype) @ head)
        return loss, alpha

    @staticmethod
    def backward(ctx: Any, dloss: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = ctx.saved_tensors
        return grad.float() * dloss, None, None
