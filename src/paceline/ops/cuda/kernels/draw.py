"""Triton kernels that draw tokens from logits, by the rules of `paceline.sampling`: noise, temperature, filters, ties.

Three launches: `peaks` reads the logits once, `scan` a second time with each row's largest logit known, `finish` puts
the parts of a row together. A row's result depends on that row alone. Sums of probabilities are sums of integers, so
that no order of adding them can change where top_p cuts. Noise and scores are float64, as on the host.
"""

from __future__ import annotations

import triton
import triton.language as tl

GROUP = tl.constexpr(256)  # columns that share one largest logit
GROUPS = tl.constexpr(16)  # of a part: what one program reads
PART = tl.constexpr(4096)
NEAR = tl.constexpr(8.0)  # how far below the largest logit to look for where top_p cuts, at first
WORDS = tl.constexpr(5)  # int64 words of a row's rule, see `drawing.encode`
NO_TOKEN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def mix(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def absorb(start, seed, position):
    h = mix(start)
    h = mix(h ^ seed.to(tl.uint32))
    h = mix(h + (seed >> 32).to(tl.uint32))
    h = mix(h ^ position.to(tl.uint32))
    return mix(h + (position >> 32).to(tl.uint32))


@triton.jit
def scores(y, token, rule, purpose):
    """y plus the noise of each token, float64. log1p(-v) is log(1 - v), whose argument is exact."""
    seed, position = tl.load(rule + 1), tl.load(rule + 2)
    start = tl.full((), 0, tl.uint32) + purpose
    k0 = absorb(start + 0x243F6A88, seed, position)
    k1 = absorb(start + 0x85A308D3, seed, position)
    bits = mix(mix(token.to(tl.uint32) * 0x9E3779B9 + k0) ^ k1)
    v = (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return y.to(tl.float64) - tl.log(-tl.log(1.0 - v))


@triton.jit
def ordered(y):
    """uint32 in the order of y."""
    bits = tl.where(y == 0, 0.0, y).to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def limits(rule):
    """(1 / temperature or 0, top_k or 0, top_p, ln min_p) of a row."""
    first = tl.load(rule)
    factor = first.to(tl.uint32).to(tl.float32, bitcast=True)
    top_p = tl.load(rule + 3).to(tl.float64, bitcast=True)
    least = tl.load(rule + 4).to(tl.uint32).to(tl.float32, bitcast=True)
    return factor, first >> 32, top_p, least


@triton.jit
def largest(group_max, factor, groups, PADDED: tl.constexpr):
    """(largest y of a row, whether it can be drawn from, largest logit)"""
    at = tl.arange(0, PADDED)
    x = tl.load(group_max + at, mask=at < groups, other=float("-inf"))
    nan = tl.max((x != x).to(tl.int32), 0)
    top = tl.max(tl.where(x != x, float("-inf"), x), 0)
    most = top * tl.where(factor == 0, 1.0, factor)
    sound = (nan == 0) & (most < float("inf")) & (most > float("-inf"))
    return most, sound, top


@triton.jit
def peaks(x, x_stride, ids, ids_stride, width, group_max, group_token, near_count, groups, IDS: tl.constexpr):
    """Of each group of columns the largest logit (NaN if there is one) and the lowest token that has it."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    group = part * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < width
    v = tl.load(x + row * x_stride + column, mask=inside, other=float("-inf"))
    nan = tl.max((v != v).to(tl.int32), 1)
    top = tl.max(tl.where(v != v, float("-inf"), v), 1)
    token = column
    if IDS:
        token = tl.load(ids + row * ids_stride + column, mask=inside, other=0).to(tl.int32)
    low = tl.min(tl.where((v == top[:, None]) & inside, token, NO_TOKEN), 1)
    tl.store(group_max + row * groups + group, tl.where(nan > 0, float("nan"), top), mask=group < groups)
    tl.store(group_token + row * groups + group, low, mask=group < groups)
    if part == 0:
        tl.store(near_count + row, 0)


@triton.jit
def kth_group(group_max, k, factor, groups, PADDED: tl.constexpr):
    """The k-th largest y among the largest of groups: at least k columns are as large. -inf if there are fewer groups."""
    at = tl.arange(0, PADDED)
    inside = at < groups
    key = ordered(tl.load(group_max + at, mask=inside, other=float("-inf")) * factor)
    kth = tl.full((), 0, tl.uint32)
    for i in range(32):
        bit = tl.full((), 1, tl.uint32) << (31 - i)
        enough = tl.sum(((key >= (kth | bit)) & inside).to(tl.int32), 0) >= k
        kth = tl.where(enough, kth | bit, kth)
    bits = tl.where(kth >= 0x80000000, kth & 0x7FFFFFFF, kth ^ 0xFFFFFFFF)
    return tl.where(k <= groups, bits.to(tl.float32, bitcast=True), float("-inf"))


@triton.jit
def scan(
    x, x_stride, ids, ids_stride, width, group_max, rules, purpose, groups,
    part_mass, part_score, part_token, part_y, near_y, near_token, near_count, near_room,
    IDS: tl.constexpr, PADDED: tl.constexpr, SCALE: tl.constexpr, SURE: tl.constexpr,
):  # fmt: skip
    """Of each part of a row its mass and best score; of filtered rows a copy of the columns that can be kept."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rule, group_max = rules + row * WORDS, group_max + row * groups
    factor, top_k, top_p, least = limits(rule)
    most, sound, _ = largest(group_max, factor, groups, PADDED)
    noisy = factor != 0
    if sound & (noisy | SURE):
        column = part * PART + tl.arange(0, PART)
        inside = column < width
        y = tl.load(x + row * x_stride + column, mask=inside, other=float("-inf"))
        y = y * tl.where(noisy, factor, 1.0)
        token = column
        if IDS:
            token = tl.load(ids + row * ids_stride + column, mask=inside, other=0).to(tl.int32)
        at = row * tl.num_programs(0) + part
        tl.store(part_mass + at, tl.sum((tl.exp(y - most) * SCALE).to(tl.int64), 0))
        limited = (top_k > 0) & (top_k < width)
        if noisy & (limited | (top_p < 1) | (least > float("-inf"))):
            bound = tl.where(top_p < 1, most - NEAR, most + least)
            if limited:
                bound = kth_group(group_max, top_k, factor, groups, PADDED)
            near = (y >= bound) & inside
            count = near.to(tl.int32)
            place = tl.atomic_add(near_count + row, tl.sum(count, 0)) + tl.cumsum(count, 0) - 1
            near_by = near & (place < near_room)
            tl.store(near_y + row * near_room + place, y, mask=near_by)
            tl.store(near_token + row * near_room + place, token, mask=near_by)
        elif noisy:
            score = tl.where(inside, scores(y, token, rule, purpose), float("-inf"))
            best = tl.max(score, 0)
            first = tl.min(tl.where((score == best) & inside, token, NO_TOKEN), 0)
            tl.store(part_score + at, best)
            tl.store(part_token + at, first)
            tl.store(part_y + at, tl.max(tl.where((score == best) & (token == first), y, float("-inf")), 0))


@triton.jit
def columns(x, near_y, factor, at, count, whole):
    """y of some columns of a row, or of its copied ones; -inf past the end."""
    if whole:
        y = tl.load(x + at, mask=at < count, other=float("-inf")) * factor
    else:
        y = tl.load(near_y + at, mask=at < count, other=float("-inf"))
    return y


@triton.jit
def weight_of(y, key, most, least_key, SCALE: tl.constexpr):
    return tl.where(key >= least_key, (tl.exp(y - most) * SCALE).to(tl.int64), 0)


@triton.jit
def mass_of(x, near_y, factor, count, whole, most, least_key, SCALE: tl.constexpr, TILE: tl.constexpr):
    """The mass of all columns from a key on."""
    total = tl.full((), 0, tl.int64)
    begin = 0  # no `range`: Triton's interpreter takes no loaded number there
    while begin < count:
        y = columns(x, near_y, factor, begin + tl.arange(0, TILE), count, whole)
        total += tl.sum(weight_of(y, ordered(y), most, least_key, SCALE), 0)
        begin += TILE
    return total


@triton.jit
def cut(
    x, near_y, factor, count, whole, most, least_key, wanted,
    BY_MASS: tl.constexpr, SCALE: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """The largest key such that the columns from it on, and from `least_key` on, count or weigh at least `wanted`."""
    WAYS: tl.constexpr = 1 << BITS
    way = tl.arange(0, WAYS)
    digits = tl.full((), 0, tl.uint32)
    for i in range(32 // BITS):
        shift = 32 - BITS * (i + 1)
        tried = digits + (way.to(tl.uint32) << shift)
        held = tl.full((WAYS,), 0, tl.int64)
        begin = 0
        while begin < count:
            at = begin + tl.arange(0, TILE)
            y = columns(x, near_y, factor, at, count, whole)
            key = ordered(y)
            if BY_MASS:
                weight = weight_of(y, key, most, least_key, SCALE)
            else:
                weight = (at < count).to(tl.int64)
            held += tl.sum(tl.where(key[None, :] >= tried[:, None], weight[None, :], 0), 1)
            begin += TILE
        digit = tl.sum(((held.to(tl.float64) >= wanted) & (way > 0)).to(tl.int32), 0)
        digits += digit.to(tl.uint32) << shift
    return digits


@triton.jit
def least_kept(
    x, near_y, factor, count, whole, most, top_k, top_p, limited, total,
    SCALE: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """The key of the smallest logit that top_k and top_p keep."""
    key = tl.full((), 0, tl.uint32)
    if limited:
        key = cut(x, near_y, factor, count, whole, most, key, top_k.to(tl.float64), False, SCALE, TILE, BITS)
    if top_p < 1:
        if limited:
            total = mass_of(x, near_y, factor, count, whole, most, key, SCALE, TILE)
        wanted = top_p * total.to(tl.float64)
        lowest = cut(x, near_y, factor, count, whole, most, key, wanted, True, SCALE, TILE, BITS)
        key = tl.where(lowest > key, lowest, key)
    return key


@triton.jit
def drawn(
    x, ids, near_y, near_token, factor, count, whole, most, key, floor, rule, purpose,
    IDS: tl.constexpr, SCALE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """(token, its y, mass) of a filtered row, of what is kept."""
    score, token = tl.full((), float("-inf"), tl.float64), tl.full((), NO_TOKEN, tl.int32)
    own, mass = tl.full((), float("-inf"), tl.float32), tl.full((), 0, tl.int64)
    begin = 0
    while begin < count:
        at = begin + tl.arange(0, TILE)
        y = columns(x, near_y, factor, at, count, whole)
        if whole:
            names = at
            if IDS:
                names = tl.load(ids + at, mask=at < count, other=0).to(tl.int32)
        else:
            names = tl.load(near_token + at, mask=at < count, other=0)
        candidates = (at < count) & (ordered(y) >= key) & (y >= floor)
        mass += tl.sum(tl.where(candidates, (tl.exp(y - most) * SCALE).to(tl.int64), 0), 0)
        noisy = tl.where(candidates, scores(y, names, rule, purpose), float("-inf"))
        best = tl.max(noisy, 0)
        first = tl.min(tl.where(candidates & (noisy == best), names, NO_TOKEN), 0)
        value = tl.max(tl.where(candidates & (names == first), y, float("-inf")), 0)
        better = (best > score) | ((best == score) & (first < token))
        score, token = tl.where(better, best, score), tl.where(better, first, token)
        own = tl.where(better, value, own)
        begin += TILE
    return token, own, mass


@triton.jit
def filtered(
    x, ids, near_y, near_token, near, near_room, width, most, total, rule, purpose,
    IDS: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """(token, its y, mass) of a filtered row: of its copied columns, or of all where those cannot tell."""
    factor, top_k, top_p, least = limits(rule)
    limited = (top_k > 0) & (top_k < width)
    whole = near > near_room
    if (not whole) & (top_p < 1) & (not limited):
        held = mass_of(x, near_y, factor, near, whole, most, tl.full((), 0, tl.uint32), SCALE, 512)
        whole = held.to(tl.float64) < top_p * total.to(tl.float64)
    if whole:
        key = least_kept(x, near_y, factor, width, whole, most, top_k, top_p, limited, total, SCALE, 4096, 2)
    else:
        key = least_kept(x, near_y, factor, near, whole, most, top_k, top_p, limited, total, SCALE, 512, 4)
    count = tl.where(whole, width, near)
    return drawn(
        x, ids, near_y, near_token, factor, count, whole, most, key, most + least, rule, purpose, IDS, SCALE, 512
    )  # fmt: skip


@triton.jit
def finish(
    x, x_stride, ids, ids_stride, width, group_max, group_token, rules, purpose, groups, parts,
    part_mass, part_score, part_token, part_y, near_y, near_token, near_count, near_room, token_out, sure_out,
    IDS: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr, SCALE: tl.constexpr, SURE: tl.constexpr,
):  # fmt: skip
    """The token of each row, -1 where it has a NaN or nothing finite, and its probability."""
    row = tl.program_id(0).to(tl.int64)
    rule = rules + row * WORDS
    factor, top_k, top_p, least = limits(rule)
    most, sound, top = largest(group_max + row * groups, factor, groups, PADDED)
    limited = (top_k > 0) & (top_k < width)
    part = tl.arange(0, PARTS)
    own, at = part < parts, row * parts + part
    token, y, mass = tl.full((), -1, tl.int32), tl.full((), 0.0, tl.float32), tl.full((), 1, tl.int64)
    if sound:
        if factor == 0:
            group = tl.arange(0, PADDED)
            best = tl.load(group_max + row * groups + group, mask=group < groups, other=float("-inf")) == top
            names = tl.load(group_token + row * groups + group, mask=group < groups, other=NO_TOKEN)
            token, y = tl.min(tl.where(best, names, NO_TOKEN), 0), most
            if SURE:
                mass = tl.sum(tl.load(part_mass + at, mask=own, other=0), 0)
        elif limited | (top_p < 1) | (least > float("-inf")):
            total = tl.sum(tl.load(part_mass + at, mask=own, other=0), 0)
            token, y, mass = filtered(
                x + row * x_stride, ids + row * ids_stride, near_y + row * near_room, near_token + row * near_room,
                tl.load(near_count + row), near_room, width, most, total, rule, purpose, IDS, SCALE,
            )  # fmt: skip
        else:
            score = tl.load(part_score + at, mask=own, other=float("-inf"))
            names = tl.load(part_token + at, mask=own, other=NO_TOKEN)
            token = tl.min(tl.where((score == tl.max(score, 0)) & own, names, NO_TOKEN), 0)
            values = tl.load(part_y + at, mask=own, other=float("-inf"))
            y = tl.max(tl.where(own & (names == token), values, float("-inf")), 0)
            mass = tl.sum(tl.load(part_mass + at, mask=own, other=0), 0)
    tl.store(token_out + row, token)
    if SURE:
        sure = tl.exp(y - most) * (SCALE / mass.to(tl.float64)).to(tl.float32)
        tl.store(sure_out + row, tl.where(sound, tl.minimum(sure, 1.0), 0.0))
