"""Drafters of one layer with K/V of its own, differentiable, for all rounds of a text at once, as the engine drafts.

Entry p joins the target's states of row p with the token p + 1. A round with token t pending starts at entry t - 1 and
sees the entries up to it as the target left them, and its own further steps, each of which takes what the step before
gave in place of the target's states. It must equal the engine's own draft steps position by position.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import nn

from paceline.models.layers.decoder_config import DecoderConfig
from paceline.models.layers.rotary import inverse_frequencies
from paceline.train.parallel import Captured, DraftModule, Norm, rotate, seen_keys

Keys = list[
    tuple[torch.Tensor, torch.Tensor]
]  # K and V [B, kv_heads, n, head_dim]: of all entries, then of own steps


class Attention(nn.Module):
    def __init__(self, layer: DecoderConfig, width: int) -> None:
        """`width`: of what q, k and v are made of."""
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = layer.heads, layer.kv_heads, layer.head_dim
        self.q_proj = nn.Linear(width, layer.heads * layer.head_dim, bias=False)
        self.k_proj = nn.Linear(width, layer.kv_heads * layer.head_dim, bias=False)
        self.v_proj = nn.Linear(width, layer.kv_heads * layer.head_dim, bias=False)
        self.o_proj = nn.Linear(layer.heads * layer.head_dim, layer.hidden_size, bias=False)
        self.q_norm = Norm(layer.head_dim, layer.eps) if layer.head_norms else None
        self.k_norm = Norm(layer.head_dim, layer.eps) if layer.head_norms else None
        self.scale = layer.head_dim**-0.5 * layer.rotary.attention**2
        inv_freq = inverse_frequencies(layer.rotary, layer.head_dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.inv_freq: torch.Tensor

    def _split(self, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """[B, n, heads * d] -> [B, heads, n, d]"""
        x = x.view(*x.shape[:-1], -1, self.head_dim)
        return (x if norm is None else norm(x)).transpose(1, 2)

    def keys(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k = rotate(self._split(self.k_proj(x), self.k_norm), positions, self.inv_freq)
        return k, self._split(self.v_proj(x), None)

    def queries(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[B, n, width] -> [B, heads, n, d], scaled"""
        scaled: torch.Tensor = (
            rotate(self._split(self.q_proj(x), self.q_norm), positions, self.inv_freq) * self.scale
        )
        return scaled

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, keys: Keys, mask: torch.Tensor
    ) -> torch.Tensor:
        """x [B, A, width]. The first of `keys` are of all entries, of which `mask` [B, 1, A, T] lets some be seen; of the
        others each row sees its own.
        """
        batch, rows, _ = x.shape
        group = self.heads // self.kv_heads
        q = self.queries(x, positions).view(batch, self.kv_heads, group, rows, self.head_dim)
        (k0, v0), *own = keys
        scores = (q.flatten(2, 3) @ k0.mT).view(batch, self.kv_heads, group, rows, -1)
        scores = scores.float().masked_fill(~mask[:, None], -torch.inf)
        apart = [(q * k[:, :, None]).sum(-1, keepdim=True).float() for k, _ in own]
        shares = torch.cat([scores, *apart], -1).softmax(-1).to(q.dtype)
        count = k0.shape[2]
        out = (shares[..., :count].flatten(2, 3) @ v0).view(q.shape)
        for i, (_, v) in enumerate(own):
            out = out + shares[..., count + i, None] * v[:, :, None]
        mixed: torch.Tensor = self.o_proj(out.flatten(1, 2).transpose(1, 2).flatten(2))
        return mixed


class FeedForward(nn.Module):
    def __init__(self, layer: DecoderConfig) -> None:
        super().__init__()
        hidden, inner = layer.hidden_size, layer.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Recurrent(DraftModule):
    """What these drafters have in common; `head` and the layer are the subclass's."""

    @property
    @abstractmethod
    def attention(self) -> Attention: ...

    @abstractmethod
    def first(self, captured: Captured) -> torch.Tensor:
        """What the first step takes of every entry, of the target: [B, T, hidden]"""

    @abstractmethod
    def joined(self, token: torch.Tensor, carried: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of embedded tokens and what a step takes: (what attention reads, what it is added to)."""

    @abstractmethod
    def after(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the row with attention added: (what the head reads, what the next step takes)."""

    def embedded(self, captured: Captured) -> torch.Tensor:
        return captured.embeddings

    def unroll(self, captured: Captured, anchors: torch.Tensor, steps: int) -> list[torch.Tensor]:
        rows = torch.arange(anchors.shape[0], device=anchors.device)[:, None]
        entry, mask = anchors - 1, seen_keys(captured, anchors)
        dtype = self.attention.q_proj.weight.dtype
        token, first = self.embedded(captured).to(dtype), self.first(captured)
        # entry p takes token p + 1; the last one of a window has none, and no round sees it
        keys = [self.attention.keys(self.joined(token.roll(-1, 1), first)[0], captured.positions)]
        carried, positions = first[rows, entry], captured.positions[rows, entry]
        states = []
        for i in range(steps):
            read, residual = self.joined(token[rows, anchors + i], carried)
            if i:
                keys.append(self.attention.keys(read, positions + i))
            state, carried = self.after(residual + self.attention(read, positions + i, keys, mask))
            states.append(state)
        return states
