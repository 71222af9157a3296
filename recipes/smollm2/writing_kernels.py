"""Two Triton kernels of `writer.py` for a GPU. Each has an equivalent in plain torch there, which CPUs use.

Imported only where there is a GPU, or Triton's interpreter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROW_BLOCK, KEY_BLOCK, VOCAB_BLOCK = 16, 64, 4096
HALVINGS = 16  # of the range in which the threshold of top_p is looked for
LOWEST = 30.0  # below the largest logit: what lies deeper has no chance


@triton.jit
def _attend(q_at, k_at, v_at, position_at, out_at, length, scale, GROUP: tl.constexpr, D: tl.constexpr,
            ROWS: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """One text and one head of keys: its GROUP queries over the keys at 0 .. position."""
    text, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    count = tl.load(position_at + text) + 1
    rows, columns = tl.arange(0, ROWS), tl.arange(0, D)
    at = ((text * heads + head) * GROUP + rows)[:, None] * D + columns[None, :]
    q = tl.load(q_at + at, mask=rows[:, None] < GROUP, other=0.0)
    base = (text * heads + head) * length * D
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, D), tl.float32)
    for start in range(0, count, KEYS):
        keys = start + tl.arange(0, KEYS)
        there = keys < count
        k = tl.load(k_at + base + keys[None, :] * D + columns[:, None], mask=there[None, :], other=0.0)
        v = tl.load(v_at + base + keys[:, None] * D + columns[None, :], mask=there[:, None], other=0.0)
        scores = tl.where(there[None, :], tl.dot(q, k) * scale, -float("inf"))
        new = tl.maximum(top, tl.max(scores, 1))
        shares, kept = tl.exp(scores - new[:, None]), tl.exp(top - new)
        total = total * kept + tl.sum(shares, 1)
        out = out * kept[:, None] + tl.dot(shares.to(v.dtype), v)
        top = new
    tl.store(out_at + at, (out / total[:, None]).to(out_at.dtype.element_ty), mask=rows[:, None] < GROUP)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, scale: float
) -> torch.Tensor:
    """One row of each text over its keys: q [B, heads, d], k and v [B, kv_heads, T, d], positions [B] int64 -> as q."""
    out = torch.empty_like(q)
    texts, heads, size = q.shape
    kv_heads, length = k.shape[1], k.shape[2]
    _attend[(texts, kv_heads)](
        q, k, v, positions, out, length, scale, GROUP=heads // kv_heads, D=size, ROWS=ROW_BLOCK, KEYS=KEY_BLOCK,
        num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _choose(logits_at, temperature_at, top_p_at, seed_at, out_at, vocab, LOWEST_X: tl.constexpr, STEPS: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    """A token of one row: the most likely one at temperature 0, else drawn among those of top_p."""
    row = tl.program_id(0).to(tl.int64)
    temperature, share = tl.load(temperature_at + row), tl.load(top_p_at + row)
    seed = tl.load(seed_at)
    base = logits_at + row * vocab
    best = tl.zeros((), tl.int32)
    top = tl.full((), -float("inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(base + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
        high = tl.max(x, 0)
        best = tl.where(high > top, start + tl.argmax(x, 0), best)
        top = tl.maximum(top, high)
    if temperature > 0:
        total = tl.zeros((), tl.float32)
        for start in range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(base + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
            total += tl.sum(tl.exp((x - top) / temperature), 0)
        wanted = total * tl.minimum(share, 0.99999)
        above = tl.zeros((), tl.float32)
        low = above - LOWEST_X
        for _ in range(STEPS):
            middle = 0.5 * (low + above)
            mass = tl.zeros((), tl.float32)
            for start in range(0, vocab, BLOCK):
                at = start + tl.arange(0, BLOCK)
                x = tl.load(base + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
                x = (x - top) / temperature
                mass += tl.sum(tl.where(x >= middle, tl.exp(x), 0.0), 0)
            low = tl.where(mass >= wanted, middle, low)
            above = tl.where(mass >= wanted, above, middle)
        drawn = tl.zeros((), tl.int32)
        found = tl.full((), -float("inf"), tl.float32)
        for start in range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(base + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
            x = (x - top) / temperature
            even = tl.maximum(tl.rand(seed, (row * vocab + at).to(tl.int32)), 1e-9)
            noisy = tl.where(x >= low, x - tl.log(-tl.log(even)), -float("inf"))
            high = tl.max(noisy, 0)
            drawn = tl.where(high > found, start + tl.argmax(noisy, 0), drawn)
            found = tl.maximum(found, high)
        tl.store(out_at + row, drawn.to(tl.int64))
    else:
        tl.store(out_at + row, best.to(tl.int64))


def choose(
    logits: torch.Tensor, temperatures: torch.Tensor, top_p: torch.Tensor, seed: torch.Tensor
) -> torch.Tensor:
    """Tokens [B] int64 of logits [B, V]; temperatures and top_p [B] float32, seed [1] int64, another for each call."""
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    _choose[(len(logits),)](
        logits, temperatures, top_p, seed, out, logits.shape[1], LOWEST_X=LOWEST, STEPS=HALVINGS, BLOCK=VOCAB_BLOCK,
        num_warps=8,
    )  # fmt: skip
    return out
