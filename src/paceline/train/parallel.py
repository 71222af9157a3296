"""The assistant network, differentiable, for all positions of a text at once.

It must equal the engine's own draft steps position by position, or acceptance is lost without a trace. With
token t pending (its K/V not yet written) a round is: query at position t for every step; keys j <= t - 1 of
the same text (sliding layers: j >= t - 1 - window); the first input is the target's embedding of token t
beside the target's hidden state at t - 1; step i > 0 takes the embedding of token t + i and the state that
step i - 1 projected. Step i predicts token t + i + 1, so its distribution is compared with the target's at t + i.
Nothing here mixes two anchors, which is why all of them run side by side. Parameters carry the names of the
Hugging Face layout: export is a plain dump.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, slots=True)
class LayerShape:
    kind: str  # "sliding_attention" | "full_attention"
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class DrafterShape:
    """Everything that the arithmetic needs to know of an assistant."""

    layers: tuple[LayerShape, ...]
    heads: int
    hidden: int
    intermediate: int
    vocab: int
    target_hidden: int
    eps: float
    windows: Mapping[str, int | None]  # kind -> window
    inv_freq: Mapping[str, torch.Tensor]  # kind -> [head_dim / 2], zeros where nothing rotates
    clusters: int  # 0 = dense head
    top_clusters: int


@dataclass(slots=True)
class Captured:
    """What the frozen target says of B windows of T tokens, each holding one or more texts side by side."""

    tokens: torch.Tensor  # [B, T] int64
    segments: torch.Tensor  # [B, T] int64, which text of the window; -1 = padding
    counted: torch.Tensor  # [B, T] bool, tokens that the target would write: only these are predicted
    positions: torch.Tensor  # [B, T] int64, from 0 in each text
    embeddings: torch.Tensor  # [B, T, H] scaled input embeddings
    hidden: torch.Tensor  # [B, T, H] after the final norm
    kv: dict[str, tuple[torch.Tensor, torch.Tensor]]  # kind -> K, V [B, kv_heads, T, head_dim], as cached


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x * (mean(x^2) + eps)^-1/2 * weight in float32, returned in x's dtype."""
    y = x.float()
    return (y * (y.pow(2).mean(-1, keepdim=True) + eps).pow(-0.5) * weight.float()).to(x.dtype)


def rotate(x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + d/2) of x [B, heads, A, d] by positions [B, A]."""
    angles = positions[:, None, :, None].float() * inv_freq  # [B, 1, A, d/2]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, shape: DrafterShape, layer: LayerShape) -> None:
        super().__init__()
        self.heads, self.head_dim = shape.heads, layer.head_dim
        self.q_proj = nn.Linear(shape.hidden, shape.heads * layer.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * layer.head_dim, shape.hidden, bias=False)
        self.q_norm = Norm(layer.head_dim, shape.eps)
        self.register_buffer("inv_freq", shape.inv_freq[layer.kind].float().clone(), persistent=False)
        self.inv_freq: torch.Tensor

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor,
    ) -> torch.Tensor:
        batch, anchors, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, anchors, self.heads, self.head_dim)).transpose(1, 2)
        q = rotate(q, positions, self.inv_freq)
        k, v = kv[0].to(q.dtype), kv[1].to(q.dtype)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0, enable_gqa=True)
        projected: torch.Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, anchors, -1))
        return projected


class FeedForward(nn.Module):
    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, shape: DrafterShape, layer: LayerShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape, layer)
        self.mlp = FeedForward(shape)
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)
        self.pre_feedforward_layernorm = Norm(shape.hidden, shape.eps)
        self.post_feedforward_layernorm = Norm(shape.hidden, shape.eps)
        self.register_buffer("layer_scalar", torch.ones(1))
        self.layer_scalar: torch.Tensor

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor,
    ) -> torch.Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), positions, kv, mask))
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar.to(x.dtype)


class Decoder(nn.Module):
    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(
            shape.vocab, shape.hidden
        )  # the tied head; its rows are never looked up
        self.layers = nn.ModuleList(Layer(shape, layer) for layer in shape.layers)
        self.norm = Norm(shape.hidden, shape.eps)


class MaskedEmbedding(nn.Module):
    """Cluster centroids and the order of tokens by cluster. No loss goes through it, see heads.py."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.centroids = nn.Linear(shape.hidden, shape.clusters, bias=False)
        self.register_buffer("token_ordering", torch.arange(shape.vocab))
        self.token_ordering: torch.Tensor


class DrafterModule(nn.Module):
    """A trainable assistant. `unroll` gives states, `logits` scores them over the whole vocabulary."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        self.pre_projection = nn.Linear(2 * shape.target_hidden, shape.hidden, bias=False)
        self.post_projection = nn.Linear(shape.hidden, shape.target_hidden, bias=False)
        self.masked_embedding = MaskedEmbedding(shape) if shape.clusters else None

    @property
    def head(self) -> torch.Tensor:
        """[V, hidden]"""
        return self.model.embed_tokens.weight

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """All parameters that a loss over the full vocabulary reaches, by name."""
        return [(n, p) for n, p in self.named_parameters() if not n.startswith("masked_embedding")]

    def unroll(self, captured: Captured, anchors: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """States [B, A, hidden] of `steps` draft steps for anchors [B, A] (the window index t of the pending
        token).

        Anchors need t >= 1 with t - 1 in the same text, and t + steps - 1 < T; `valid_steps` says which steps
        count.
        """
        rows = torch.arange(anchors.shape[0], device=anchors.device)[:, None]
        positions = captured.positions[rows, anchors]  # [B, A]
        masks = {kind: self._mask(captured, anchors, kind) for kind in {x.kind for x in self.shape.layers}}
        carried = captured.hidden[rows, anchors - 1]  # [B, A, H]
        states = []
        for i in range(steps):
            x = self.pre_projection(torch.cat((captured.embeddings[rows, anchors + i], carried), dim=-1))
            for layer, spec in zip(self.model.layers, self.shape.layers, strict=True):
                x = layer(x, positions, captured.kv[spec.kind], masks[spec.kind])
            x = self.model.norm(x)
            carried = self.post_projection(x)
            states.append(x)
        return states

    def _mask(self, captured: Captured, anchors: torch.Tensor, kind: str) -> torch.Tensor:
        """[B, 1, A, T]: which cached keys an anchor sees."""
        index = torch.arange(captured.tokens.shape[1], device=anchors.device)  # [T]
        segment = captured.segments.gather(1, anchors)  # [B, A]
        distance = anchors[:, :, None] - 1 - index  # [B, A, T]
        seen = (distance >= 0) & (captured.segments[:, None, :] == segment[:, :, None])
        window = self.shape.windows[kind]
        if window is not None:
            seen &= distance <= window
        seen |= (distance == 0) & ~seen.any(
            -1, keepdim=True
        )  # no key at all would make NaN; such anchors never count
        return seen[:, None]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., V], float32."""
        return F.linear(states, self.head.to(states.dtype)).float()

    @torch.no_grad()
    def running_logits(self, states: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, V] as it will run: with a centroid head all but the candidates are -inf."""
        logits = self.logits(states)
        if self.masked_embedding is None:
            return logits
        scores = F.linear(states, self.masked_embedding.centroids.weight.to(states.dtype))
        chosen = scores.topk(self.shape.top_clusters, dim=-1).indices  # [n, top]
        candidates = self.masked_embedding.token_ordering.view(self.shape.clusters, -1)[chosen].flatten(1)
        keep = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, candidates, True)
        return logits.masked_fill(~keep, float("-inf"))


def choose_anchors(
    captured: Captured, steps: int, count: int, generator: torch.Generator | None
) -> torch.Tensor:
    """[B, A] window indices: all that `unroll` can run from (count 0), else `count` of them drawn evenly."""
    length = captured.tokens.shape[1]
    every = torch.arange(1, max(2, length - steps), device=captured.tokens.device)
    if not count or count >= len(every):
        return every.expand(captured.tokens.shape[0], -1)
    picks = [torch.randperm(len(every), generator=generator)[:count].sort().values for _ in captured.tokens]
    return every[torch.stack(picks).to(every.device)]


def valid_steps(captured: Captured, anchors: torch.Tensor, steps: int) -> torch.Tensor:
    """[B, A, steps]: whether step i has a counted token to predict and all that it reads lies in the
    anchor's text.
    """
    segment = captured.segments.gather(1, anchors)  # [B, A]
    begun = (captured.segments.gather(1, anchors - 1) == segment) & (segment >= 0)
    ahead = [anchors + i + 1 for i in range(steps)]
    same = torch.stack([captured.segments.gather(1, at) == segment for at in ahead], dim=-1)
    wanted = torch.stack([captured.counted.gather(1, at) for at in ahead], dim=-1)
    return same & wanted & begun[:, :, None]
