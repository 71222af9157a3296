"""A lean training forward of the Gemma 4 text architecture, on a flat dict with Hugging Face names.

`tests/recipes` checks it against transformers. It exists because one CPU core has to train the demo pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Params = dict[str, Tensor]
KV = dict[str, tuple[Tensor, Tensor]]
SLIDING, FULL = "sliding_attention", "full_attention"
SOFTCAP = 30.0


@dataclass(frozen=True)
class Shape:
    """The sizes of a text model."""

    vocab: int = 8192
    hidden: int = 256
    inner: int = 512
    layers: int = 12
    period: int = 6  # every so many-th layer is full
    shared: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    global_head_dim: int = 128
    window: int = 256
    context: int = 4096
    eps: float = 1e-6
    kinds: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        kinds = tuple(FULL if (i + 1) % self.period == 0 else SLIDING for i in range(self.layers))
        object.__setattr__(self, "kinds", kinds)

    def dim(self, layer: int) -> int:
        """Head size of a layer."""
        return self.global_head_dim if self.kinds[layer] == FULL else self.head_dim

    def owns_kv(self, layer: int) -> bool:
        """Whether a layer has its own K/V projections."""
        return layer < self.layers - self.shared


def text_config(shape: Shape) -> dict[str, Any]:
    """The same sizes as keyword arguments of transformers' Gemma4TextConfig."""
    return {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "global_head_dim": shape.global_head_dim,
        "num_kv_shared_layers": shape.shared,
        "layer_types": list(shape.kinds),
        "sliding_window": shape.window,
        "max_position_embeddings": shape.context,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "tie_word_embeddings": True,
        "final_logit_softcapping": SOFTCAP,
        "rms_norm_eps": shape.eps,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }


def layer_sizes(shape: Shape, i: int) -> dict[str, tuple[int, ...]]:
    """Names and sizes of one layer's weights."""
    h, q, kv = shape.hidden, shape.heads * shape.dim(i), shape.kv_heads * shape.dim(i)
    sizes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (q, h),
        "self_attn.q_norm.weight": (shape.dim(i),),
        "self_attn.o_proj.weight": (h, q),
        "mlp.gate_proj.weight": (shape.inner, h),
        "mlp.up_proj.weight": (shape.inner, h),
        "mlp.down_proj.weight": (h, shape.inner),
    }
    if shape.owns_kv(i):
        sizes |= {
            "self_attn.k_proj.weight": (kv, h),
            "self_attn.v_proj.weight": (kv, h),
            "self_attn.k_norm.weight": (shape.dim(i),),
        }
    for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
        sizes[f"{name}_layernorm.weight"] = (h,)
    return {f"model.layers.{i}.{name}": size for name, size in sizes.items()}


def init_params(shape: Shape, seed: int) -> Params:
    """Fresh weights: scaled normal matrices, small post norms so that the residual stream starts quiet."""
    generator = torch.Generator().manual_seed(seed)
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab, shape.hidden)}
    for i in range(shape.layers):
        sizes |= layer_sizes(shape, i)
    sizes["model.norm.weight"] = (shape.hidden,)
    params = {}
    for name, size in sizes.items():
        if len(size) == 1:
            params[name] = torch.full(size, 0.3 if "post_" in name else 1.0)
        else:
            std = 0.03 if "embed" in name else size[1] ** -0.5
            params[name] = torch.randn(size, generator=generator) * std
    return params


def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMS norm as Gemma 4 writes it."""
    y = x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    return y if weight is None else y * weight


def rotary(shape: Shape, kind: str, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine tables; full layers rotate a quarter of the head (proportional)."""
    if kind == FULL:
        dim, base = shape.global_head_dim, 1e6
        turning = int(0.25 * dim // 2)
        inverse = torch.zeros(dim // 2)
        inverse[:turning] = 1.0 / (base ** (torch.arange(0, 2 * turning, 2).float() / dim))
    else:
        dim, base = shape.head_dim, 1e4
        inverse = 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))
    angle = positions[..., None].float() * inverse
    angle = torch.cat((angle, angle), -1)
    return angle.cos(), angle.sin()


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding to (batch, length, heads, dim)."""
    half = x.shape[-1] // 2
    flipped = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos[..., None, :] + flipped * sin[..., None, :]


def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Grouped causal attention with scale 1 on (batch, heads, length, dim); `window` limits its reach."""
    groups, length = q.shape[1] // k.shape[1], q.shape[2]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    if window is None or length <= window:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
    if length % window:
        row = torch.arange(length)
        mask = (row[None, :] <= row[:, None]) & (row[None, :] > row[:, None] - window)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
    return attend_blocks(q, k, v, window)


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Sliding attention where every block of queries sees its own and the previous block of keys."""
    b, heads, length, dim = q.shape
    blocks = length // window
    row, column = torch.arange(window)[:, None], torch.arange(-window, window)[None, :]
    mask = ((column <= row) & (column > row - window)).expand(blocks, 1, window, 2 * window).clone()
    mask[0, :, :, :window] = False

    def pieces(x: Tensor) -> Tensor:
        return x.view(b, heads, blocks, window, dim).transpose(1, 2)

    def pairs(x: Tensor) -> Tensor:
        x = pieces(x)
        before = torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1)
        return torch.cat((before, x), 3).flatten(0, 1)

    out = F.scaled_dot_product_attention(
        pieces(q).flatten(0, 1), pairs(k), pairs(v), attn_mask=mask.repeat(b, 1, 1, 1), scale=1.0
    )
    return out.view(b, blocks, heads, window, dim).transpose(1, 2).reshape(b, heads, length, dim)


def tables(shape: Shape, length: int) -> dict[str, Any]:
    """Rotary tables and masks for sequences that start at position 0."""
    positions = torch.arange(length)
    return {
        SLIDING: rotary(shape, SLIDING, positions),
        FULL: rotary(shape, FULL, positions),
    }


def layer_weights(p: Params, i: int) -> Params:
    """One layer's weights under short names."""
    prefix = f"model.layers.{i}."
    return {
        name.removeprefix(prefix).removesuffix(".weight").split(".")[-1]: value
        for name, value in p.items()
        if name.startswith(prefix)
    }


def block(
    w: Params,
    x: Tensor,
    kv: tuple[Tensor, Tensor] | None,
    angles: tuple[Tensor, Tensor],
    window: int | None,
    size: tuple[int, float],
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """One decoder layer. `kv` is given to layers that share; the others make their own and return it.

    `angles`: cosines and sines of the positions; `size`: head dimension and epsilon of the norms.
    """
    b, n, _ = x.shape
    (cos, sin), (dim, eps) = angles, size
    y = rms(x, w["input_layernorm"], eps)
    q = turn(rms(F.linear(y, w["q_proj"]).view(b, n, -1, dim), w["q_norm"], eps), cos, sin).transpose(1, 2)
    if kv is None:
        k = turn(rms(F.linear(y, w["k_proj"]).view(b, n, -1, dim), w["k_norm"], eps), cos, sin)
        v = rms(F.linear(y, w["v_proj"]).view(b, n, -1, dim), None, eps)
        kv = (k.transpose(1, 2), v.transpose(1, 2))
    y = F.linear(attend(q, *kv, window).transpose(1, 2).reshape(b, n, -1), w["o_proj"])
    x = x + rms(y, w["post_attention_layernorm"], eps)
    y = rms(x, w["pre_feedforward_layernorm"], eps)
    y = F.gelu(F.linear(y, w["gate_proj"]), approximate="tanh") * F.linear(y, w["up_proj"])
    return x + rms(F.linear(y, w["down_proj"]), w["post_feedforward_layernorm"], eps), kv


def hidden_states(
    p: Params, shape: Shape, ids: Tensor, table: dict[str, Any], step: Callable[..., Any] = block
) -> tuple[Tensor, KV]:
    """Final normed hidden states and the shared K/V of the last layer of each kind that owns one."""
    x = F.embedding(ids, p["model.embed_tokens.weight"]) * math.sqrt(shape.hidden)
    kv: KV = {}
    for i, kind in enumerate(shape.kinds):
        given = None if shape.owns_kv(i) else kv[kind]
        x, kv[kind] = step(
            layer_weights(p, i),
            x,
            given,
            table[kind],
            shape.window if kind == SLIDING else None,
            (shape.dim(i), shape.eps),
        )
    return rms(x, p["model.norm.weight"], shape.eps), kv


def cap(z: Tensor) -> Tensor:
    """Final logit soft cap."""
    return SOFTCAP * torch.tanh(z / SOFTCAP)


def logits(p: Params, h: Tensor) -> Tensor:
    """Capped logits of hidden states."""
    return cap(F.linear(h, p["model.embed_tokens.weight"]))


def grad_of_loss(z: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy of raw logits under the soft cap: per-row loss and gradient with respect to `z`."""
    t = torch.tanh(z / SOFTCAP)
    p = torch.softmax(SOFTCAP * t, -1)
    picked = p.gather(1, targets[:, None])
    p = p.scatter_add(1, targets[:, None], torch.full_like(picked, -1.0))
    return -picked.clamp_min(1e-30).log(), p * (1 - t * t)


class HeadLoss(torch.autograd.Function):
    """Mean cross entropy of the tied head in pieces, so that the full logits never exist at once."""

    piece = 512
    grad = staticmethod(grad_of_loss)

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        dh, dw = torch.empty_like(h), torch.zeros_like(weight)
        total = h.new_zeros(())
        for at in range(0, len(h), HeadLoss.piece):
            x = h[at : at + HeadLoss.piece]
            loss, dz = HeadLoss.grad(x @ weight.T, targets[at : at + HeadLoss.piece])
            total += loss.sum()
            torch.mm(dz, weight, out=dh[at : at + HeadLoss.piece])
            dw.addmm_(dz.T, x)
        ctx.save_for_backward(dh, dw)
        return total / len(h)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        dh, dw = ctx.saved_tensors
        scale = grads[0] / len(dh)
        return dh * scale, dw * scale, None
