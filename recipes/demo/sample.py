"""Batched sampling from the target with a plain K/V cache, for distillation data and for evaluation."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from model import SLIDING, Params, Shape, logits, rms, rotary, turn
from torch import Tensor


class Cache:
    """Keys and values of the layers that own them, for rows of equal length."""

    def __init__(self, shape: Shape, rows: int, length: int) -> None:
        self.used = 0
        self.store = {
            i: torch.zeros(2, rows, shape.kv_heads, length, shape.dim(i))
            for i in range(shape.layers)
            if shape.owns_kv(i)
        }


def attend_cached(q: Tensor, k: Tensor, v: Tensor, start: int, window: int | None) -> Tensor:
    """Attention of queries at positions start.. over keys 0..start+n-1."""
    n, total = q.shape[2], k.shape[2]
    row, column = torch.arange(start, start + n)[:, None], torch.arange(total)[None, :]
    mask = column <= row
    if window is not None:
        mask = mask & (column > row - window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0, enable_gqa=True)


@torch.no_grad()
def advance(p: Params, shape: Shape, ids: Tensor, cache: Cache) -> Tensor:
    """Feed tokens after what the cache holds; returns the normed hidden states."""
    start, (b, n), eps = cache.used, ids.shape, shape.eps
    x = F.embedding(ids, p["model.embed_tokens.weight"]) * math.sqrt(shape.hidden)
    turns = {kind: rotary(shape, kind, torch.arange(start, start + n)) for kind in set(shape.kinds)}
    kv = {}
    for i, kind in enumerate(shape.kinds):
        name, dim = f"model.layers.{i}.", shape.dim(i)
        y = rms(x, p[name + "input_layernorm.weight"], eps)
        q = F.linear(y, p[name + "self_attn.q_proj.weight"]).view(b, n, -1, dim)
        q = turn(rms(q, p[name + "self_attn.q_norm.weight"], eps), *turns[kind]).transpose(1, 2)
        if shape.owns_kv(i):
            k = F.linear(y, p[name + "self_attn.k_proj.weight"]).view(b, n, -1, dim)
            v = F.linear(y, p[name + "self_attn.v_proj.weight"]).view(b, n, -1, dim)
            k = turn(rms(k, p[name + "self_attn.k_norm.weight"], eps), *turns[kind])
            cache.store[i][0][:, :, start : start + n] = k.transpose(1, 2)
            cache.store[i][1][:, :, start : start + n] = rms(v, None, eps).transpose(1, 2)
            kv[kind] = cache.store[i][:, :, :, : start + n]
        window = shape.window if kind == SLIDING else None
        y = attend_cached(q, kv[kind][0], kv[kind][1], start, window).transpose(1, 2).reshape(b, n, -1)
        x = x + rms(
            F.linear(y, p[name + "self_attn.o_proj.weight"]), p[name + "post_attention_layernorm.weight"], eps
        )
        y = rms(x, p[name + "pre_feedforward_layernorm.weight"], eps)
        y = F.gelu(F.linear(y, p[name + "mlp.gate_proj.weight"]), approximate="tanh") * F.linear(
            y, p[name + "mlp.up_proj.weight"]
        )
        y = F.linear(y, p[name + "mlp.down_proj.weight"])
        x = x + rms(y, p[name + "post_feedforward_layernorm.weight"], eps)
    cache.used = start + n
    return rms(x, p["model.norm.weight"], eps)


def gumbel(rows: int, length: int, vocab: int, seed: int) -> Tensor:
    """Noise keyed by row and position, shared by target and drafter under the match rule."""
    uniform = torch.rand(rows, length, vocab, generator=torch.Generator().manual_seed(seed))
    return -torch.log(-torch.log(uniform.clamp(1e-10, 1 - 1e-7)))


@torch.no_grad()
def continue_rows(
    p: Params,
    shape: Shape,
    prompts: Tensor,
    new: int,
    temperature: Tensor,
    seed: int,
    noise: Tensor | None = None,
) -> Tensor:
    """Sample `new` tokens after prompts of equal length; temperature 0 means greedy (one value per row)."""
    rows, start = prompts.shape
    cache = Cache(shape, rows, start + new)
    generator = torch.Generator().manual_seed(seed)
    out = [prompts]
    ids = prompts
    for at in range(new):
        z = logits(p, advance(p, shape, ids, cache)[:, -1])
        if noise is not None:
            g = noise[:, at]
        else:
            g = -torch.log(-torch.log(torch.rand(z.shape, generator=generator).clamp(1e-10, 1 - 1e-7)))
        ids = (z + temperature[:, None] * g).argmax(-1, keepdim=True)
        out.append(ids)
    return torch.cat(out, 1)
