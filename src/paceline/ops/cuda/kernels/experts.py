"""Mixtures of experts, and heads that score a few clusters of tokens.

Few rows: a program for each (row, expert) pair and tile of outputs. Many rows: pairs are listed by expert first, and a
program goes over the pairs of its expert. A pair is a column of the matrix instruction in both, so its bits are equal.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.ops.cuda.kernels.linear import activated, clamped, dot_float, dot_int4, dot_int8
from paceline.ops.cuda.kernels.rows import load_sum


@triton.jit
def route_kernel(
    scores, bias, expert_scale, out, experts, split_stride, stride, out_stride, kept_groups,
    SPLITS: tl.constexpr, SIGMOID: tl.constexpr, BIASED: tl.constexpr, RENORM: tl.constexpr, SCALE: tl.constexpr,
    TOP: tl.constexpr,
    GROUPS: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Of a row's scores: the shares of the TOP experts, then their numbers,
    as float32. Ties go to the lowest number."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, E)
    keep = at < experts
    x = load_sum(scores, row, stride, at, keep, split_stride, SPLITS)
    if SIGMOID:
        law = 1.0 / (1.0 + tl.exp(-x))
        choice = tl.where(keep, law + tl.load(bias + at, mask=keep, other=0.0), float("-inf"))
        if GROUPS > 1:
            grouped = choice.reshape(GROUPS, E // GROUPS)
            best = tl.max(grouped, 1)
            first = tl.argmax(grouped, 1)
            others = tl.where(tl.arange(0, E // GROUPS)[None, :] == first[:, None], float("-inf"), grouped)
            worth = best + tl.max(others, 1)
            g = tl.arange(0, GROUPS)
            ahead = (worth[None, :] > worth[:, None]) | (
                (worth[None, :] == worth[:, None]) & (g[None, :] < g[:, None])
            )
            stays = tl.sum(ahead.to(tl.int32), 1) < kept_groups
            choice = tl.where(stays[:, None], grouped, float("-inf")).reshape(E)
    else:
        x = tl.where(keep, x, float("-inf"))
        law = tl.exp(x - tl.max(x))
        law = law / tl.sum(law)
        worth = law
        if BIASED:
            worth = law + tl.load(bias + at, mask=keep, other=0.0)
        choice = tl.where(keep, worth, float("-inf"))
    total = 0.0
    for rank in range(TOP):
        chosen = tl.argmax(choice, 0)
        share = tl.sum(tl.where(at == chosen, law, 0.0))
        total += share
        choice = tl.where(at == chosen, float("-inf"), choice)
        tl.store(out + row * out_stride + TOP + rank, chosen.to(tl.float32))
        tl.store(out + row * out_stride + rank, share)
    tl.debug_barrier()
    for rank in range(TOP):
        share = tl.load(out + row * out_stride + rank)
        if RENORM:
            share = share / (total + (1e-20 if BIASED else 0.0))
        if SCALE:
            chosen = tl.load(out + row * out_stride + TOP + rank).to(tl.int32)
            share = share * tl.load(expert_scale + chosen)
        tl.store(out + row * out_stride + rank, share)


@triton.jit(do_not_specialize=["pairs", "capacity"])
def list_kernel(
    route,
    listed,
    counts,
    pairs,
    route_stride,
    capacity,
    TOP: tl.constexpr,
    B: tl.constexpr,
):
    """For each expert: the pairs (row * TOP + rank) that it is chosen in, in order, and how many."""
    e = tl.program_id(0)
    count = 0
    for start in range(0, pairs, B):
        p = start + tl.arange(0, B)
        chosen = tl.load(
            route + (p // TOP).to(tl.int64) * route_stride + TOP + p % TOP, mask=p < pairs, other=-1.0
        )
        mine = (chosen.to(tl.int32) == e) & (p < pairs)
        place = count + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(listed + e.to(tl.int64) * capacity + place, p, mask=mine)
        count += tl.sum(mine.to(tl.int32))
    tl.store(counts + e, count)


@triton.jit
def _expert_tile(
    x, w, scale, bias, out, n, p, inside, expert, outputs, inputs, per_row, x_stride, out_stride,
    KIND: tl.constexpr, ASM: tl.constexpr, EVEN: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr,
    TOP: tl.constexpr, DT: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    row = (p // TOP).to(tl.int64)
    rank = p % TOP
    m = row * x_stride + rank * per_row
    r = expert.to(tl.int64) * outputs + tl.minimum(n, outputs - 1)
    acc = tl.zeros([BN, BM], tl.float32)
    if KIND % 2 == 0 and KIND > 0:
        acc = dot_int4(acc, w, scale, x, r, m, inside, 0, inputs, inputs, 1, DT, BK, ASM, EVEN, KIND == 4)
    elif KIND == 3:
        acc = dot_int8(acc, w, x, r, m, inside, 0, inputs, inputs, 1, DT, BK, ASM, EVEN)
    else:
        acc = dot_float(acc, w, x, r, m, inside, 0, inputs, inputs, 1, BK, EVEN, DT)
    if KIND % 2 == 1:
        acc = acc * tl.load(scale + r)[:, None]
    if BIAS:
        acc += tl.load(bias + r)[:, None]
    if ACT > 0:
        gate, value = tl.split(acc.reshape(BN // 2, 2, BM).permute(0, 2, 1))
        if ACT == 4:
            result = clamped(gate, value)
        else:
            result = activated(gate, ACT) * value
        o = tl.program_id(1) * (BN // 2) + tl.arange(0, BN // 2)
        width = outputs // 2
    else:
        result, o, width = acc, n, outputs
    to = out + (row * out_stride + rank * width)[None, :] + o[:, None]
    tl.store(to, result.to(out.dtype.element_ty), mask=inside[None, :] & (o < width)[:, None])


@triton.jit(do_not_specialize=["capacity"])
def experts_kernel(
    x, route, listed, counts, w, scale, bias, out, outputs, inputs, per_row, x_stride, route_stride, out_stride,
    capacity,
    LISTED: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr, EVEN: tl.constexpr, ACT: tl.constexpr,
    BIAS: tl.constexpr, TOP: tl.constexpr, DT: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[row, rank * width + output] of the expert that is chosen in (row, rank); `per_row`: columns of x for a rank.

    KIND, ASM and EVEN as in `linear_kernel`, BIAS [expert, output]. ACT: outputs 2i and 2i + 1 are gate and value.
    """
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    c = tl.arange(0, BM)
    if LISTED:
        expert = tl.program_id(0)
        count = tl.load(counts + expert)
        for start in range(0, count, BM):
            inside = start + c < count
            p = tl.load(listed + expert.to(tl.int64) * capacity + start + c, mask=inside, other=0)
            _expert_tile(
                x, w, scale, bias, out, n, p, inside, expert, outputs, inputs, per_row, x_stride, out_stride, KIND,
                ASM, EVEN, ACT, BIAS, TOP, DT, BN, BM, BK,
            )  # fmt: skip
    else:
        pair = tl.program_id(0)
        at = route + (pair // TOP).to(tl.int64) * route_stride + TOP + pair % TOP
        expert = tl.load(at).to(tl.int32)
        _expert_tile(
            x, w, scale, bias, out, n, pair + c * 0, c == 0, expert, outputs, inputs, per_row, x_stride, out_stride,
            KIND, ASM, EVEN, ACT, BIAS, TOP, DT, BN, BM, BK,
        )  # fmt: skip


@triton.jit
def mix_kernel(
    route,
    x,
    out,
    width,
    route_stride,
    x_stride,
    out_stride,
    TOP: tl.constexpr,
    B: tl.constexpr,
):
    """The sum of a row's experts times their shares, in the order of their ranks."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * B + tl.arange(0, B)
    keep = at < width
    total = tl.zeros([B], tl.float32)
    for rank in range(TOP):
        share = tl.load(route + row * route_stride + rank)
        total += share * tl.load(x + row * x_stride + rank * width + at, mask=keep, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + at, total.to(out.dtype.element_ty), mask=keep)


@triton.jit
def clusters_kernel(
    scores, ordering, chosen, ids, clusters, size, split_stride, stride, chosen_stride, ids_stride,
    SPLITS: tl.constexpr, TOP: tl.constexpr, SIZE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The TOP clusters of a row, best first, and the ids of their tokens. Ties go to the lowest number."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, C)
    x = load_sum(scores, row, stride, at, at < clusters, split_stride, SPLITS)
    x = tl.where(at < clusters, x, float("-inf"))
    s = tl.arange(0, SIZE)
    for rank in range(TOP):
        best = tl.argmax(x, 0)
        x = tl.where(at == best, float("-inf"), x)
        tl.store(chosen + row * chosen_stride + rank, best)
        token = tl.load(ordering + best.to(tl.int64) * size + s, mask=s < size)
        tl.store(ids + row * ids_stride + rank * size + s, token, mask=s < size)


@triton.jit
def gather_kernel(
    x, chosen, w, scale, out, size, inputs, x_stride, chosen_stride, out_stride,
    INT8: tl.constexpr, DT: tl.constexpr, SIZE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Logits of the tokens of a chosen cluster, whose rows of `w` lie together."""
    row, rank = tl.program_id(0).to(tl.int64), tl.program_id(1)
    s = tl.arange(0, SIZE)
    r = tl.load(chosen + row * chosen_stride + rank).to(tl.int64) * size + s
    total = tl.zeros([SIZE], tl.float32)
    for k in range(0, inputs, BK):
        kk = k + tl.arange(0, BK)
        keep = (s < size)[:, None] & (kk < inputs)[None, :]
        wt = tl.load(w + r[:, None] * inputs + kk[None, :], mask=keep, other=0.0).to(tl.float32)
        xt = tl.load(x + row * x_stride + kk, mask=kk < inputs, other=0.0).to(DT).to(tl.float32)
        total += tl.sum(wt * xt[None, :], 1)
    if INT8:
        total = total * tl.load(scale + r, mask=s < size, other=0.0)
    tl.store(out + row * out_stride + rank * size + s, total, mask=s < size)
