"""Batched sampling from the target with a plain K/V cache, for distillation data and for evaluation."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from model import SLIDING, Params, Shape, logits, rms, rotary, turn
from torch import Tensor


class Cache:
    """Keys and values of the layers that own them; row r starts after `skip[r]` padding tokens."""

    def __init__(self, shape: Shape, rows: int, length: int, skip: Tensor | None = None) -> None:
        self.used = 0
        self.skip = torch.zeros(rows, dtype=torch.long) if skip is None else skip
        self.store = {
            i: torch.zeros(2, rows, shape.kv_heads, length, shape.dim(i))
            for i in range(shape.layers)
            if shape.owns_kv(i)
        }


def cached_mask(cache: Cache, start: int, n: int, window: int | None) -> Tensor:
    """Which of keys 0..start+n-1 the queries at start.. may see, per row: (rows, 1, n, keys)."""
    row, column = torch.arange(start, start + n)[:, None], torch.arange(start + n)[None, :]
    mask = column <= row
    if window is not None:
        mask = mask & (column > row - window)
    alive = (column >= cache.skip[:, None])[:, None, None] | (column == row)
    return mask & alive


@torch.no_grad()
def advance(p: Params, shape: Shape, ids: Tensor, cache: Cache) -> Tensor:
    """Feed tokens after what the cache holds; returns the normed hidden states."""
    start, (b, n), eps = cache.used, ids.shape, shape.eps
    x = F.embedding(ids, p["model.embed_tokens.weight"]) * math.sqrt(shape.hidden)
    places = (torch.arange(start, start + n) - cache.skip[:, None]).clamp_min(0)
    turns = {kind: rotary(shape, kind, places) for kind in set(shape.kinds)}
    masks = {kind: cached_mask(cache, start, n, shape.window if kind == SLIDING else None) for kind in turns}
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
        k, v = kv[kind]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=masks[kind], scale=1.0, enable_gqa=True)
        y = y.transpose(1, 2).reshape(b, n, -1)
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
    model: tuple[Params, Shape],
    prompts: Tensor,
    new: int,
    temperature: Tensor,
    noise: Tensor | int,
    skip: Tensor | None = None,
) -> Tensor:
    """Sample `new` tokens after prompts (padded on the left by `skip`); temperature 0 means greedy, per row.

    `noise`: Gumbel noise [rows, new, vocabulary], or the seed of noise that nobody shares.
    """
    p, shape = model
    rows, start = prompts.shape
    cache = Cache(shape, rows, start + new, skip)
    generator = torch.Generator().manual_seed(noise if isinstance(noise, int) else 0)
    out = [prompts]
    ids = prompts
    for at in range(new):
        z = logits(p, advance(p, shape, ids, cache)[:, -1])
        if not isinstance(noise, int):
            g = noise[:, at]
        else:
            g = -torch.log(-torch.log(torch.rand(z.shape, generator=generator).clamp(1e-10, 1 - 1e-7)))
        ids = (z + temperature[:, None] * g).argmax(-1, keepdim=True)
        out.append(ids)
    return torch.cat(out, 1)


def continue_prompts(
    p: Params, shape: Shape, prompts: list[Tensor], new: int, heat: float, noise: Tensor | None
) -> list[Tensor]:
    """The same for prompts of different lengths, side by side; returns whole texts."""
    longest = max(map(len, prompts))
    skip = torch.tensor([longest - len(prompt) for prompt in prompts])
    padded = torch.stack([F.pad(prompt, (longest - len(prompt), 0)) for prompt in prompts])
    heats = torch.full((len(prompts),), heat)
    rows = continue_rows((p, shape), padded, new, heats, 0 if noise is None else noise, skip)
    return [row[start:] for row, start in zip(rows, skip.tolist(), strict=True)]
