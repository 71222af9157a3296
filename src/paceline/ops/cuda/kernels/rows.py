"""What is done to each row by itself: embedding, norms with the sum around them, gates, single operations.

A program has one row. An input may be the parts of a split matrix product, which are added in order while they are
read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.ops.cuda.kernels.linear import activated, capped


@triton.jit
def load_sum(x, row, stride, at, keep, split_stride, SPLITS: tl.constexpr):
    """x[row, at] as float32, the parts of a product added in order."""
    total = tl.load(x + row * stride + at, mask=keep, other=0.0).to(tl.float32)
    for s in tl.static_range(1, SPLITS):
        total += tl.load(x + s * split_stride + row * stride + at, mask=keep, other=0.0)
    return total


@triton.jit
def embed_kernel(
    tokens,
    table,
    scale,
    out,
    factor,
    width,
    vocabulary,
    out_stride,
    INT8: tl.constexpr,
    BLOCK: tl.constexpr,
    B: tl.constexpr,
):
    """out[row] = table[tokens[row]] * factor. A token outside of the table gives NaN, which the choice refuses.

    BLOCK: inputs of a block of int8 in words, see `weights.in_words`; 0: values lie as they come.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * B + tl.arange(0, B)
    token = tl.load(tokens + row).to(tl.int64)
    known = (token >= 0) & (token < vocabulary)
    keep = (at < width) & known
    place = at
    if BLOCK > 0:
        words: tl.constexpr = BLOCK // 4
        place = at // BLOCK * BLOCK + at % words * 4 + at % BLOCK // words
    value = tl.load(table + token * width + place, mask=keep, other=0.0).to(tl.float32)
    if INT8:
        value = value * tl.load(scale + token, mask=known, other=0.0)
    value = tl.where(known, value * factor, float("nan"))
    tl.store(out + row * out_stride + at, value.to(out.dtype.element_ty), mask=at < width)


@triton.jit
def norm_kernel(
    x, residual, post, pre, y, z,
    width, x_stride, residual_stride, y_stride, z_stride, split_stride, eps_post, eps_pre, factor,
    SPLITS: tl.constexpr, POST: tl.constexpr, ADD: tl.constexpr, SCALE: tl.constexpr, PRE: tl.constexpr,
    POST_WEIGHT: tl.constexpr, PRE_WEIGHT: tl.constexpr, CENTERED: tl.constexpr, KEEP: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """y = residual + norm(x), times a factor; z = norm(y), of y less its mean where CENTERED. Each part is there as the
    constants say."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, B)
    keep = at < width
    value = load_sum(x, row, x_stride, at, keep, split_stride, SPLITS)
    if POST:
        value = value * tl.rsqrt(tl.sum(value * value) / width + eps_post)
        if POST_WEIGHT:
            value = value * tl.load(post + at, mask=keep, other=0.0)
    if ADD:
        value = tl.load(residual + row * residual_stride + at, mask=keep, other=0.0).to(tl.float32) + value
    if SCALE:
        value = value * factor
    if KEEP:
        tl.store(y + row * y_stride + at, value.to(y.dtype.element_ty), mask=keep)
    if PRE:
        if CENTERED:
            value = tl.where(keep, value - tl.sum(value) / width, 0.0)
        value = value * tl.rsqrt(tl.sum(value * value) / width + eps_pre)
        if PRE_WEIGHT:
            value = value * tl.load(pre + at, mask=keep, other=0.0)
        tl.store(z + row * z_stride + at, value.to(z.dtype.element_ty), mask=keep)


@triton.jit
def group_norm_kernel(
    x, weight, out, width, x_stride, out_stride, split_stride, eps,
    SPLITS: tl.constexpr, WEIGHT: tl.constexpr, OWN: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """The norm of each of the equal slices, `width` wide, of a row. OWN: a slice has weights of its own."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, B)
    keep = at < width
    value = load_sum(x, row, x_stride, group * width + at, keep, split_stride, SPLITS)
    value = value * tl.rsqrt(tl.sum(value * value) / width + eps)
    if WEIGHT:
        value = value * tl.load(weight + (group * width if OWN else 0) + at, mask=keep, other=0.0)
    tl.store(out + row * out_stride + group * width + at, value.to(out.dtype.element_ty), mask=keep)


@triton.jit
def heads_kernel(
    q, k, v, positions, slots, count, table, inv_freq, q_norm, k_norm, q_out, k_out, v_out,
    q_heads, kv_heads, width, half, q_stride, k_stride, v_stride, out_stride, table_stride,
    q_split, k_split, v_split, eps_q, eps_k, eps_v, turn, q_factor,
    Q_SPLITS: tl.constexpr, K_SPLITS: tl.constexpr, V_SPLITS: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
    V_NORM: tl.constexpr, HAS_K: tl.constexpr, HAS_V: tl.constexpr, PAGE: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    """Heads of q, k and v of a row: normed, turned by its position; k and v go into the cache, q to `q_out`.

    *_NORM: 0 none, 1 without a weight, 2 with. The first 2 * half columns are turned, pairs (i, i + half), and
    multiplied with `turn`.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    at = tl.arange(0, B)
    keep = at < width
    partner = tl.where(at < half, at + half, tl.where(at < 2 * half, at - half, at))
    position = tl.load(positions + row)
    angle = position.to(tl.float32) * tl.load(
        inv_freq + tl.where(at < half, at, at - half), mask=at < 2 * half, other=0.0
    )
    cos, sin = tl.cos(angle), tl.sin(angle)
    sin = tl.where(at < half, -sin, sin)
    turned = at < 2 * half
    if head < q_heads:
        value, other = _pair(
            q, row, q_stride, head * width, at, partner, keep, q_norm, q_split, eps_q, width, Q_SPLITS, Q_NORM
        )
        value = tl.where(turned, (value * cos + other * sin) * turn, value) * q_factor
        tl.store(
            q_out + row.to(tl.int64) * out_stride + head * width + at,
            value.to(q_out.dtype.element_ty),
            mask=keep,
        )
    else:
        slot = tl.load(slots + row).to(tl.int64)
        page = tl.load(table + slot * table_stride + position // PAGE).to(tl.int64)
        place = (page * PAGE + position % PAGE) * kv_heads
        keep = keep & (row < tl.load(count))  # rows past the end are padding
        if HAS_K:
            if head < q_heads + kv_heads:
                h = head - q_heads
                value, other = _pair(
                    k,
                    row,
                    k_stride,
                    h * width,
                    at,
                    partner,
                    keep,
                    k_norm,
                    k_split,
                    eps_k,
                    width,
                    K_SPLITS,
                    K_NORM,
                )
                value = tl.where(turned, (value * cos + other * sin) * turn, value)
                tl.store(k_out + (place + h) * width + at, value.to(k_out.dtype.element_ty), mask=keep)
        if HAS_V:
            if head >= q_heads + kv_heads:
                h = head - q_heads - kv_heads
                value, other = _pair(
                    v, row, v_stride, h * width, at, at, keep, v, v_split, eps_v, width, V_SPLITS, V_NORM
                )
                tl.store(v_out + (place + h) * width + at, value.to(v_out.dtype.element_ty), mask=keep)


@triton.jit
def _pair(
    x, row, stride, base, at, partner, keep, weight, split_stride, eps, width,
    SPLITS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """x[row, base + at] and x[row, base + partner], normed over the head."""
    value = load_sum(x, row.to(tl.int64), stride, base + at, keep, split_stride, SPLITS)
    other = load_sum(x, row.to(tl.int64), stride, base + partner, keep, split_stride, SPLITS)
    if NORM > 0:
        root = tl.rsqrt(tl.sum(value * value) / width + eps)
        value, other = value * root, other * root
    if NORM == 2:
        value = value * tl.load(weight + at, mask=keep, other=0.0)
        other = other * tl.load(weight + partner, mask=keep, other=0.0)
    return value, other


@triton.jit
def store_kernel(
    x, positions, slots, count, table, out, heads, width, x_stride, table_stride, split_stride,
    SPLITS: tl.constexpr, PAGE: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """A row's K, or V, [heads * width] into the cache."""
    row = tl.program_id(0)
    at = tl.program_id(1) * B + tl.arange(0, B)
    keep = (at < heads * width) & (row < tl.load(count))
    position, slot = tl.load(positions + row), tl.load(slots + row).to(tl.int64)
    page = tl.load(table + slot * table_stride + position // PAGE).to(tl.int64)
    value = load_sum(x, row.to(tl.int64), x_stride, at, keep, split_stride, SPLITS)
    place = (page * PAGE + position % PAGE) * heads * width
    tl.store(out + place + at, value.to(out.dtype.element_ty), mask=keep)


@triton.jit
def convolve_kernel(
    held, positions, slots, table, taps, bias, out, width, out_stride, table_stride,
    TAPS: tl.constexpr, BIAS: tl.constexpr, PAGE: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """out = the sum of taps[TAPS - 1 - j] * what the row j places before holds in the cache, the oldest first."""
    row = tl.program_id(0)
    at = tl.program_id(1) * B + tl.arange(0, B)
    keep = at < width
    last, slot = tl.load(positions + row), tl.load(slots + row).to(tl.int64)
    total = tl.zeros((B,), tl.float32)
    for j in tl.static_range(TAPS):
        position = last - (TAPS - 1) + j
        there = position >= 0
        position = tl.maximum(position, 0)
        page = tl.load(table + slot * table_stride + position // PAGE).to(tl.int64)
        place = (page * PAGE + position % PAGE) * width
        value = tl.load(held + place + at, mask=keep & there, other=0.0).to(tl.float32)
        total += value * tl.load(taps + j * width + at, mask=keep, other=0.0)
    if BIAS:
        total += tl.load(bias + at, mask=keep, other=0.0)
    tl.store(out + row.to(tl.int64) * out_stride + at, total.to(out.dtype.element_ty), mask=keep)


@triton.jit
def rotary_kernel(
    x, positions, inv_freq, growth, out, width, half, x_stride, out_stride, split_stride, turn, every, most,
    SPLITS: tl.constexpr, GROWS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Heads of a row, turned by its position. GROWS: and multiplied with growth[position // every], of `most` + 1."""
    row, head = tl.program_id(0), tl.program_id(1)
    at = tl.arange(0, B)
    keep = at < width
    partner = tl.where(at < half, at + half, tl.where(at < 2 * half, at - half, at))
    angle = tl.load(positions + row).to(tl.float32) * tl.load(
        inv_freq + tl.where(at < half, at, at - half), mask=at < 2 * half, other=0.0
    )
    cos, sin = tl.cos(angle), tl.sin(angle)
    sin = tl.where(at < half, -sin, sin)
    value = load_sum(x, row.to(tl.int64), x_stride, head * width + at, keep, split_stride, SPLITS)
    other = load_sum(x, row.to(tl.int64), x_stride, head * width + partner, keep, split_stride, SPLITS)
    if GROWS:
        turn *= tl.load(growth + tl.minimum(tl.load(positions + row) // every, most))
    value = tl.where(at < 2 * half, (value * cos + other * sin) * turn, value)
    tl.store(
        out + row.to(tl.int64) * out_stride + head * width + at, value.to(out.dtype.element_ty), mask=keep
    )


@triton.jit
def block_conv_kernel(
    x, mix, base, positions, slots, out, width, group, groups, x_stride, mix_stride, out_stride, x_split, mix_split,
    TAPS: tl.constexpr, X_SPLITS: tl.constexpr, MIX_SPLITS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Sum of the taps of rows before, each base + mix, as far as they are of the same text in this run."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * B + tl.arange(0, B)
    keep = at < width
    slot, here = tl.load(slots + row), tl.load(positions + row)
    total = tl.zeros([B], tl.float32)
    for tap in tl.static_range(TAPS):
        other = row - tap
        inside = other >= 0
        there = tl.where(inside, other, 0)
        inside = inside & (tl.load(slots + there) == slot) & (tl.load(positions + there) == here - tap)
        factor = tl.load(base + tap * width + at, mask=keep, other=0.0)
        factor += load_sum(mix, row, mix_stride, tap * groups + at // group, keep, mix_split, MIX_SPLITS)
        total += factor * load_sum(x, there, x_stride, at, keep & inside, x_split, X_SPLITS)
    tl.store(out + row * out_stride + at, total.to(out.dtype.element_ty), mask=keep)


@triton.jit
def gated_kernel(
    gate, value, out, width, gate_stride, value_stride, out_stride, gate_split, value_split,
    GATE_SPLITS: tl.constexpr, VALUE_SPLITS: tl.constexpr, ACT: tl.constexpr, ONE: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    """out = act(gate) * value, of a tile of a row. ONE: the gate is one number for the row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * B + tl.arange(0, B)
    keep = at < width
    g = load_sum(gate, row, gate_stride, at * 0 if ONE else at, keep, gate_split, GATE_SPLITS)
    v = load_sum(value, row, value_stride, at, keep, value_split, VALUE_SPLITS)
    tl.store(out + row * out_stride + at, (activated(g, ACT) * v).to(out.dtype.element_ty), mask=keep)


@triton.jit
def single_kernel(
    x, y, out, number, width, x_stride, y_stride, out_stride, x_split, y_split,
    OP: tl.constexpr, X_SPLITS: tl.constexpr, Y_SPLITS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """One operation on a tile of a row. OP 0: copy, 1: add, 2: mul, 3: scale, 4: gelu, 5: softcap, 6: bias."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * B + tl.arange(0, B)
    keep = at < width
    value = load_sum(x, row, x_stride, at, keep, x_split, X_SPLITS)
    if OP == 1:
        value = value + load_sum(y, row, y_stride, at, keep, y_split, Y_SPLITS)
    elif OP == 2:
        value = value * load_sum(y, row, y_stride, at, keep, y_split, Y_SPLITS)
    elif OP == 3:
        value = value * number
    elif OP == 4:
        value = activated(value, 1)
    elif OP == 5:
        value = capped(value, number)
    elif OP == 6:
        value = value + tl.load(y + at, mask=keep, other=0.0)
    tl.store(out + row * out_stride + at, value.to(out.dtype.element_ty), mask=keep)
