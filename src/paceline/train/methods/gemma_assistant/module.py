"""The Gemma 4 assistant, differentiable, for all positions of a text at once.

It must equal the engine's own draft steps position by position, or acceptance is lost without a trace. A round is:
query at position t (the pending token) for every step; keys j <= t - 1 of the same text (sliding layers: j >= t - 1 -
window); the first input is the target's embedding of token t beside the target's hidden state at t - 1; step i > 0
takes the embedding of token t + i and the state that step i - 1 projected. Parameters carry the names of the Hugging
Face layout: export is a plain dump.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from paceline.train.parallel import Captured, DraftModule, Norm, rotate, seen_keys


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


class DrafterModule(DraftModule):
    """A trainable assistant. Its loss scores the whole vocabulary."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape, self.vocab = shape, shape.vocab
        self.model = Decoder(shape)
        self.pre_projection = nn.Linear(2 * shape.target_hidden, shape.hidden, bias=False)
        self.post_projection = nn.Linear(shape.hidden, shape.target_hidden, bias=False)
        self.masked_embedding = MaskedEmbedding(shape) if shape.clusters else None
        self.runs_otherwise = bool(shape.clusters)

    @property
    def head(self) -> torch.Tensor:
        """[V, hidden]"""
        return self.model.embed_tokens.weight

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """All parameters that a loss over the full vocabulary reaches, by name."""
        return [(n, p) for n, p in self.named_parameters() if not n.startswith("masked_embedding")]

    def unroll(self, captured: Captured, anchors: torch.Tensor, steps: int) -> list[torch.Tensor]:
        rows = torch.arange(anchors.shape[0], device=anchors.device)[:, None]
        positions = captured.positions[rows, anchors]  # [B, A]
        masks = {
            k: seen_keys(captured, anchors, self.shape.windows[k])
            for k in {x.kind for x in self.shape.layers}
        }
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
