"""The MTP drafter: Gemma 4 assistant, queries over the target's shared K/V, unrolled in parallel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from model import FULL, KV, SLIDING, Params, Shape, block, layer_weights, rms, rotary, text_config
from torch import Tensor


@dataclass(frozen=True)
class DrafterShape:
    """Sizes of the drafter; head sizes and K/V heads are the target's."""

    hidden: int = 128
    inner: int = 384
    layers: int = 4
    centroids: int = 128
    top_k: int = 24
    steps: int = 4

    def text(self, target: Shape) -> Shape:
        """The drafter's own text model: every layer shares, the last one is full."""
        return Shape(
            vocab=target.vocab,
            hidden=self.hidden,
            inner=self.inner,
            layers=self.layers,
            period=self.layers,
            shared=self.layers,
            heads=target.heads,
            kv_heads=target.kv_heads,
            head_dim=target.head_dim,
            global_head_dim=target.global_head_dim,
            window=target.window,
            context=target.context,
        )


def assistant_config(shape: DrafterShape, target: Shape) -> dict[str, Any]:
    """Keyword arguments of transformers' Gemma4AssistantConfig."""
    text = text_config(shape.text(target)) | {"final_logit_softcapping": None, "model_type": "gemma4_text"}
    return {
        "text_config": text,
        "backbone_hidden_size": target.hidden,
        "use_ordered_embeddings": True,
        "num_centroids": shape.centroids,
        "centroid_intermediate_top_k": shape.top_k,
        "tie_word_embeddings": True,
    }


def init_drafter(shape: DrafterShape, target: Shape, embed: Tensor, seed: int) -> Params:
    """Fresh weights; the head starts as the target's head on its main directions."""
    from model import init_params

    params = init_params(shape.text(target), seed)
    generator = torch.Generator().manual_seed(seed)
    axes = torch.linalg.svd(embed - embed.mean(0), full_matrices=False).Vh[: shape.hidden].T
    params["model.embed_tokens.weight"] = (embed @ axes).contiguous()
    hidden, back = shape.hidden, target.hidden
    into = torch.randn(hidden, 2 * back, generator=generator) * (2 * back) ** -0.5
    into[:, back:] = axes.T * 0.7
    params["pre_projection.weight"] = into
    params["post_projection.weight"] = axes.clone()
    return params


def draft_tables(target: Shape, length: int) -> dict[str, Any]:
    """Rotary tables of query positions 1..length-1."""
    positions = torch.arange(1, length)
    return {kind: rotary(target, kind, positions) for kind in (SLIDING, FULL)}


def draft_step(p: Params, shape: Shape, inputs: Tensor, kv: KV, table: dict[str, Any]) -> Tensor:
    """Normed drafter states for one step at all positions; `kv[kind]` starts one position earlier."""
    x = F.linear(inputs, p["pre_projection.weight"])
    for i, kind in enumerate(shape.kinds):
        window = shape.window if kind == SLIDING else None
        x, _ = block(layer_weights(p, i), x, kv[kind], table[kind], window, (shape.dim(i), shape.eps))
    return rms(x, p["model.norm.weight"], shape.eps)


def unroll(
    p: Params,
    shape: Shape,
    steps: int,
    seen: tuple[Tensor, Tensor, KV],
    embed: Tensor,
    table: dict[str, Any],
) -> list[Tensor]:
    """Drafter states of every step. Row r is the round whose last token is ids[:, r + 1].

    `seen`: the texts' ids, and the target's hidden states and shared K/V of them.

    Step k (from 0) predicts the token at index r + 2 + k, compared with the target's output at r + 1 + k.
    """
    ids, hidden, kv = seen
    length = ids.shape[1]
    past = {kind: (k[:, :, :-1], v[:, :, :-1]) for kind, (k, v) in kv.items()}
    words = F.embedding(ids, embed) * math.sqrt(embed.shape[1])
    state, out = hidden[:, :-1], []
    for k in range(steps):
        tokens = words[:, 1 + k :]
        tokens = F.pad(tokens, (0, 0, 0, length - 1 - tokens.shape[1]))
        x = draft_step(p, shape, torch.cat((tokens, state), -1), past, table)
        out.append(x)
        state = F.linear(x, p["post_projection.weight"])
    return out


class DraftLoss(torch.autograd.Function):
    """lambda * KL(p, q) + (1 - lambda) * TV(p, q) of a full head, lambda = exp(-3 * acceptance)."""

    piece = 128  # rows at a time: the buffers stay in the cache

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        dx, dw = torch.empty_like(x), torch.zeros_like(weight)
        accepted, loss = x.new_zeros(()), x.new_zeros(())
        nothing = x.new_zeros(())
        for at in range(0, len(x), DraftLoss.piece):
            rows, want = x[at : at + DraftLoss.piece], p[at : at + DraftLoss.piece]
            q = torch.softmax(rows @ weight.T, -1)
            overlap = torch.minimum(q, want).sum(-1)
            mix = float(torch.exp(-3 * overlap.mean()))
            gain = torch.where(q < want, q, nothing)
            # mix * (q - want) - (1 - mix) * (gain - q * sum(gain)), in place
            dz = q.mul_((mix + (1 - mix) * gain.sum(-1))[:, None])
            dz.add_(want, alpha=-mix).add_(gain, alpha=mix - 1)
            torch.mm(dz, weight, out=dx[at : at + DraftLoss.piece])
            dw.addmm_(dz.T, rows)
            accepted += overlap.sum()
            loss += (1 - overlap).sum()
        ctx.save_for_backward(dx, dw)
        ctx.mark_non_differentiable(accepted)
        return loss / len(x), accepted / len(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        dx, dw = ctx.saved_tensors
        scale = grads[0] / len(dx)
        return dx * scale, dw * scale, None


def balanced_clusters(
    points: Tensor, weights: Tensor, count: int, rounds: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Spherical k-means with clusters of equal size; returns (centroids, token ordering)."""
    generator = torch.Generator().manual_seed(seed)
    unit = F.normalize(points, dim=-1)
    centre = unit[torch.multinomial(weights, count, generator=generator)]
    room = len(points) // count
    order = torch.argsort(weights, descending=True)
    for _ in range(rounds):
        near = (unit @ centre.T).argsort(-1, descending=True).tolist()
        free, owner = [room] * count, [0] * len(points)
        for token in order.tolist():
            best = next(c for c in near[token] if free[c])
            owner[token], free[best] = best, free[best] - 1
        which = torch.tensor(owner)
        centre = torch.zeros_like(centre).index_add_(0, which, unit * weights[:, None].sqrt())
        centre = F.normalize(centre, dim=-1)
    return centre, torch.argsort(which, stable=True)


def cluster_targets(ordering: Tensor, p: Tensor, count: int) -> Tensor:
    """Probability mass of every cluster."""
    return p[:, ordering].view(len(p), count, -1).sum(-1)


def masked_logits(p: Params, x: Tensor, top_k: int) -> Tensor:
    """Logits with everything outside the chosen clusters at minus infinity."""
    ordering = p["masked_embedding.token_ordering"]
    centroids = p["masked_embedding.centroids.weight"]
    chosen = (x @ centroids.T).topk(top_k, -1).indices
    keep = torch.zeros(len(x), len(centroids), dtype=torch.bool).scatter_(1, chosen, True)
    allowed = torch.empty(len(x), len(ordering), dtype=torch.bool)
    allowed[:, ordering] = keep.repeat_interleave(len(ordering) // len(centroids), 1)
    return (x @ p["model.embed_tokens.weight"].T).masked_fill(~allowed, float("-inf"))
