"""Linear attention by the gated delta rule, or Mamba 2: a program has a text, a value head and some columns of its state.

The state is brought on row by row from where it stands in the cache, over kept rows first, and is left where the cache
wants it next; what refused drafts add to it is never stored. Every row is computed alike, whichever forward it is in.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.ops.cuda.kernels.rows import load_sum


@triton.jit
def _held(
    x, recent, at, column, inside, pos, first, start, place, width, stride, split_stride,
    SPLITS: tl.constexpr, RECENT: tl.constexpr,
):  # fmt: skip
    """What the row at `pos` holds: column `at` of this forward's x, or `column` of what was kept; 0 before the text."""
    new = pos >= first
    row = tl.where(new, start + pos - first, 0).to(tl.int64)
    now = load_sum(x, row, stride, at, inside & new, split_stride, SPLITS)
    before = (place * RECENT + tl.where(pos < 0, 0, pos) % RECENT) * width + column
    return now + tl.load(recent + before, mask=inside & (pos >= 0) & (pos < first), other=0.0)


@triton.jit
def _mixed(
    qkv, recent, conv, conv_bias, at, inside, pos, first, start, place, width, channels, stride, split_stride,
    KERNEL: tl.constexpr, SPLITS: tl.constexpr, RECENT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """silu of the convolution over KERNEL rows up to `pos`."""
    total = tl.zeros_like(at).to(tl.float32)
    if BIAS:
        total += tl.load(conv_bias + at, mask=inside, other=0.0)
    for j in tl.static_range(KERNEL):
        x = _held(
            qkv, recent, at, at, inside, pos - (KERNEL - 1) + j, first, start, place, width, stride, split_stride, SPLITS,
            RECENT,
        )  # fmt: skip
        total += x * tl.load(conv + j * channels + at, mask=inside, other=0.0)
    return total / (1.0 + tl.exp(-total))


@triton.jit
def delta_kernel(
    qkv, b, a, state, recent, conv, conv_bias, dt_bias, decay, skip, out,
    starts, counts, places, begins, goals, positions,
    key_heads, heads, key_dim, value_dim, channels, scale, qkv_stride, b_stride, a_stride, out_stride,
    qkv_split, b_split, a_split,
    KERNEL: tl.constexpr, TILED: tl.constexpr, QKV: tl.constexpr, RATE: tl.constexpr, DECAY: tl.constexpr,
    RECENT: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PLAIN: tl.constexpr, BIAS: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """out[row, head * value_dim + column]; QKV, RATE, DECAY: parts of qkv, b and a. See `recur` in ops/reference.py."""
    t, h = tl.program_id(0), tl.program_id(1)
    count = tl.load(counts + t)
    if count == 0:
        return
    start, begin, goal = tl.load(starts + t), tl.load(begins + t), tl.load(goals + t)
    place, first = tl.load(places + t).to(tl.int64), tl.load(positions + start)
    key = h % key_heads if TILED else h // (heads // key_heads)
    d, v = tl.arange(0, K), tl.program_id(2) * V + tl.arange(0, V)
    q_at, k_at = key * key_dim + d, (key_heads + key) * key_dim + d
    v_at, width = 2 * key_heads * key_dim + h * value_dim + v, channels + 2 * heads
    keep = (d < key_dim)[:, None] & (v < value_dim)[None, :]
    at = state + ((place * heads + h) * key_dim + d[:, None]) * value_dim + v[None, :]
    s = tl.load(at, mask=keep & (begin > 0), other=0.0)
    left = s
    for pos in range(begin, first + count):
        q = _mixed(
            qkv, recent, conv, conv_bias, q_at, d < key_dim, pos, first, start, place, width, channels, qkv_stride,
            qkv_split, KERNEL, QKV, RECENT, BIAS,
        )  # fmt: skip
        k = _mixed(
            qkv, recent, conv, conv_bias, k_at, d < key_dim, pos, first, start, place, width, channels, qkv_stride,
            qkv_split, KERNEL, QKV, RECENT, BIAS,
        )  # fmt: skip
        value = _mixed(
            qkv, recent, conv, conv_bias, v_at, v < value_dim, pos, first, start, place, width, channels, qkv_stride,
            qkv_split, KERNEL, QKV, RECENT, BIAS,
        )  # fmt: skip
        rate = _held(
            b,
            recent,
            h,
            channels + h,
            h < heads,
            pos,
            first,
            start,
            place,
            width,
            b_stride,
            b_split,
            RATE,
            RECENT,
        )
        wait = _held(
            a, recent, h, channels + heads + h, h < heads, pos, first, start, place, width, a_stride, a_split, DECAY,
            RECENT,
        )  # fmt: skip
        wait += tl.load(dt_bias + h)
        soft = tl.where(wait > 20.0, wait, tl.log(1.0 + tl.exp(tl.minimum(wait, 20.0))))
        s = s * tl.exp(tl.load(decay + h) * soft)
        if PLAIN:
            change = value * soft
        else:
            q = q * tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale
            k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
            change = (value - tl.sum(s * k[:, None], 0)) / (1.0 + tl.exp(-rate))
        s = s + k[:, None] * change[None, :]
        left = tl.where(pos + 1 == goal, s, left)
        read = tl.sum(s * q[:, None], 0)
        if SKIP:
            read += tl.load(skip + h) * value
        row = tl.maximum(start + pos - first, 0).to(tl.int64)
        tl.store(out + row * out_stride + h * value_dim + v, read, mask=(v < value_dim) & (pos >= first))
    tl.store(at, left, mask=keep)


@triton.jit
def keep_kernel(
    qkv, b, a, recent, starts, counts, places, positions, channels, heads,
    qkv_stride, b_stride, a_stride, qkv_split, b_split, a_split,
    QKV: tl.constexpr, RATE: tl.constexpr, DECAY: tl.constexpr, RECENT: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Keep what the last RECENT rows of a text hold, for states that are brought on later."""
    t = tl.program_id(0)
    count = tl.load(counts + t)
    start, place = tl.load(starts + t), tl.load(places + t).to(tl.int64)
    first = tl.load(positions + start)
    width = channels + 2 * heads
    at = tl.program_id(1) * B + tl.arange(0, B)
    of_b, of_a = at - channels, at - channels - heads
    for i in range(tl.maximum(count - RECENT, 0), count):
        row = (start + i).to(tl.int64)
        x = load_sum(qkv, row, qkv_stride, at, at < channels, qkv_split, QKV)
        x += load_sum(b, row, b_stride, of_b, (of_b >= 0) & (of_b < heads), b_split, RATE)
        x += load_sum(a, row, a_stride, of_a, (of_a >= 0) & (of_a < heads), a_split, DECAY)
        tl.store(recent + (place * RECENT + (first + i) % RECENT) * width + at, x, mask=at < width)
