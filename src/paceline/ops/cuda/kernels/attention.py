"""Attention over paged keys, in sections whose ends belong to the positions of keys, never to the length of a text.

A tile is up to 16 query rows (rows of one text times the heads that share a K/V head). Keys are the first operand of
the matrix instruction and query rows its columns,
so that a row's result does not depend on its neighbours. Each section
gives a maximum, a sum and a weighted sum of values; sections are joined in order. With few rows every section of a tile
has a program of its own and `join_kernel` joins them; with many rows one program does both,
in the same order. A section
that a row does not see changes nothing, to the bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.ops.cuda.kernels.linear import capped

_SECTION = tl.constexpr(128)  # keys, up to position
_SHORT = tl.constexpr(4096)  # from which on sections have
_LONG = tl.constexpr(512)
COLUMNS = 16  # query rows of a tile, times the heads of a group


def section_of(position: int) -> int:
    """The section in which the key at `position` lies."""
    section, short, long = int(_SECTION.value), int(_SHORT.value), int(_LONG.value)
    return position // section if position < short else short // section + (position - short) // long


@triton.jit
def _section_of(position):
    return tl.where(
        position < _SHORT, position // _SECTION, _SHORT // _SECTION + (position - _SHORT) // _LONG
    )


@triton.jit
def _section_start(section):
    return tl.where(
        section < _SHORT // _SECTION, section * _SECTION, _SHORT + (section - _SHORT // _SECTION) * _LONG
    )


@triton.jit
def _columns(
    tiles,
    positions,
    ends,
    reach,
    WINDOW: tl.constexpr,
    SEES: tl.constexpr,
    GROUP: tl.constexpr,
    R: tl.constexpr,
):
    """Of a tile: each column's row, head, whether there is one, its first and last key; and those of all together.

    SEES 1: a row sees itself and what is before; 0: what is before it (and a window one key further back); 2: all rows
    of its text in this run.
    """
    t = tl.program_id(0)
    first, count = tl.load(tiles + 2 * t), tl.load(tiles + 2 * t + 1)
    c = tl.arange(0, R)
    inside = c < count * GROUP
    row = first + tl.where(inside, c // GROUP, 0)
    here = tl.load(positions + row)
    if SEES == 2:
        last = tl.load(ends + row)
    else:
        last = here - (1 - SEES)
    low = tl.zeros_like(last)
    if WINDOW >= 0:
        if SEES == 0:
            low = tl.maximum(here - WINDOW - 1, 0)
        else:
            low = tl.maximum(here - WINDOW + 1, 0)
        if SEES == 1:  # rows of a picture see all of it
            last = tl.maximum(last, tl.load(reach + row))
    begin = tl.min(tl.where(inside, low, 2147483647))
    end = tl.max(tl.where(inside, last, -1))
    return first, count, row, c % GROUP, inside, low, last, begin, end


@triton.jit
def _section(
    q_t, k, v, table, section, begin, end, low, last, inside, kv, kv_heads, key_width, value_width, cap,
    CAPPED: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, R: tl.constexpr, BN: tl.constexpr, PAGE: tl.constexpr,
    DT: tl.constexpr,
):  # fmt: skip
    """(maximum [R], sum [R], weighted sum [DV, R]) over the keys of one section that columns see."""
    d, dv = tl.arange(0, D), tl.arange(0, DV)
    most = tl.full([R], float("-inf"), tl.float32)
    mass = tl.zeros([R], tl.float32)
    out = tl.zeros([DV, R], tl.float32)
    start = tl.maximum(_section_start(section), begin // BN * BN)
    stop = tl.minimum(_section_start(section + 1), end + 1)
    for j0 in range(start, stop, BN):
        j = j0 + tl.arange(0, BN)
        known = (j <= end) & (j >= begin)
        page = tl.load(table + j // PAGE, mask=known, other=0).to(tl.int64)
        place = (page * PAGE + j % PAGE) * kv_heads + kv
        keys = tl.load(
            k + (place * key_width)[:, None] + d[None, :],
            mask=known[:, None] & (d < key_width)[None, :],
            other=0.0,
        )
        score = tl.dot(keys.to(DT), q_t, input_precision="ieee")  # [BN, R]
        if CAPPED:
            score = capped(score, cap)
        sees = (j[:, None] <= last[None, :]) & (j[:, None] >= low[None, :]) & inside[None, :]
        score = tl.where(sees, score, float("-inf"))
        higher = tl.maximum(most, tl.max(score, 0))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp(score - safe[None, :])
        fade = tl.exp(most - safe)
        mass = mass * fade + tl.sum(p, 0)
        values = tl.load(
            v + (place * key_width)[:, None] + dv[None, :],
            mask=known[:, None] & (dv < value_width)[None, :],
            other=0.0,
        )
        out = out * fade[None, :]
        out = tl.dot(tl.trans(values.to(DT)), p.to(DT), out, input_precision="ieee")
        most = higher
    return most, mass, out


@triton.jit
def _join(most, mass, out, most_s, mass_s, out_s):
    """What two neighbours come to; of rows that see nothing of the second exactly the first."""
    higher = tl.maximum(most, most_s)
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    fade, share = tl.exp(most - safe), tl.exp(most_s - safe)
    return higher, mass * fade + mass_s * share, out * fade[None, :] + out_s * share[None, :]


@triton.jit
def _sunk(most, mass, total, sinks, head, inside):
    """With the share of a key that has the score `sinks` of the head, and no value."""
    sink = tl.load(sinks + head, mask=inside, other=0.0)
    higher = tl.maximum(most, sink)
    fade = tl.exp(most - higher)
    return mass * fade + tl.exp(sink - higher), total * fade[None, :]


@triton.jit(do_not_specialize=["sections"])
def attention_kernel(
    q, k, v, table, tiles, positions, ends, reach, slots, sinks, out, part_out, part_mass,
    kv_heads, per_kv, key_width, value_width, q_stride, out_stride, table_stride, sections, cap,
    WINDOW: tl.constexpr, SEES: tl.constexpr, GROUP: tl.constexpr, SINKS: tl.constexpr, WHOLE: tl.constexpr,
    CAPPED: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, R: tl.constexpr, BN: tl.constexpr, PAGE: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """One tile and K/V head; WHOLE: all sections, else that of program_id(2), written to `part_out` and `part_mass`."""
    first, count, row, head, inside, low, last, begin, end = _columns(
        tiles, positions, ends, reach, WINDOW, SEES, GROUP, R
    )
    if count == 0:
        return
    h = tl.program_id(1)  # a group of GROUP heads, of which `per_kv` share a K/V head
    kv = h // per_kv
    d, dv = tl.arange(0, D), tl.arange(0, DV)
    pages = table + tl.load(slots + first).to(tl.int64) * table_stride
    at = q + row.to(tl.int64)[None, :] * q_stride + (h * GROUP + head)[None, :] * key_width + d[:, None]
    q_t = tl.load(at, mask=inside[None, :] & (d < key_width)[:, None], other=0.0).to(DT)  # [D, R]
    s0, s1 = _section_of(begin), _section_of(tl.maximum(end, 0))
    if WHOLE:
        most = tl.full([R], float("-inf"), tl.float32)
        mass = tl.zeros([R], tl.float32)
        total = tl.zeros([DV, R], tl.float32)
        for s in range(s0, s1 + 1):
            most_s, mass_s, out_s = _section(
                q_t, k, v, pages, s, begin, end, low, last, inside, kv, kv_heads, key_width, value_width, cap,
                CAPPED, D, DV, R, BN, PAGE, DT,
            )  # fmt: skip
            most, mass, total = _join(most, mass, total, most_s, mass_s, out_s)
        if SINKS:
            mass, total = _sunk(most, mass, total, sinks, h * GROUP + head, inside)
        total = total / tl.where(mass == 0.0, 1.0, mass)[None, :]
        to = (
            out
            + row.to(tl.int64)[None, :] * out_stride
            + (h * GROUP + head)[None, :] * value_width
            + dv[:, None]
        )
        tl.store(to, total.to(out.dtype.element_ty), mask=inside[None, :] & (dv < value_width)[:, None])
    else:
        z = tl.program_id(2)
        if s0 + z <= s1:
            most_s, mass_s, out_s = _section(
                q_t, k, v, pages, s0 + z, begin, end, low, last, inside, kv, kv_heads, key_width, value_width, cap,
                CAPPED, D, DV, R, BN, PAGE, DT,
            )  # fmt: skip
            part = ((tl.program_id(0) * tl.num_programs(1) + h) * sections + z).to(tl.int64)
            c = tl.arange(0, R)
            tl.store(part_mass + part * (2 * R) + c, most_s)
            tl.store(part_mass + part * (2 * R) + R + c, mass_s)
            to = part_out + part * (R * value_width) + c[None, :] * value_width + dv[:, None]
            tl.store(to, out_s, mask=inside[None, :] & (dv < value_width)[:, None])


@triton.jit(do_not_specialize=["sections"])
def join_kernel(
    tiles, positions, ends, reach, sinks, out, part_out, part_mass, value_width, out_stride, sections,
    WINDOW: tl.constexpr, SEES: tl.constexpr, GROUP: tl.constexpr, SINKS: tl.constexpr, R: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    """Join the sections of a tile, B columns of its values at a time."""
    _, count, row, head, inside, _, _, begin, end = _columns(
        tiles, positions, ends, reach, WINDOW, SEES, GROUP, R
    )
    if count == 0:
        return
    h = tl.program_id(1)
    c, dv = tl.arange(0, R), tl.program_id(2) * B + tl.arange(0, B)
    part = ((tl.program_id(0) * tl.num_programs(1) + h) * sections).to(tl.int64)
    most = tl.full([R], float("-inf"), tl.float32)
    mass = tl.zeros([R], tl.float32)
    total = tl.zeros([B, R], tl.float32)
    keep = inside[None, :] & (dv < value_width)[:, None]
    for z in range(0, _section_of(tl.maximum(end, 0)) - _section_of(begin) + 1):
        most_s = tl.load(part_mass + (part + z) * (2 * R) + c)
        mass_s = tl.load(part_mass + (part + z) * (2 * R) + R + c)
        at = part_out + (part + z) * (R * value_width) + c[None, :] * value_width + dv[:, None]
        most, mass, total = _join(most, mass, total, most_s, mass_s, tl.load(at, mask=keep, other=0.0))
    if SINKS:
        mass, total = _sunk(most, mass, total, sinks, h * GROUP + head, inside)
    total = total / tl.where(mass == 0.0, 1.0, mass)[None, :]
    to = (
        out + row.to(tl.int64)[None, :] * out_stride + (h * GROUP + head)[None, :] * value_width + dv[:, None]
    )
    tl.store(to, total.to(out.dtype.element_ty), mask=keep)


@triton.jit
def further_kernel(
    store, rows, slots_to, positions, slots, table, count, width, table_stride, PAGE: tl.constexpr,
    B: tl.constexpr
):  # fmt: skip
    """Copy a row's K or V [width] to where a further branch of a tree reads it."""
    i = tl.program_id(0)
    at = tl.program_id(1) * B + tl.arange(0, B)
    row = tl.load(rows + i)
    position = tl.load(positions + row)
    source = tl.load(table + tl.load(slots + row).to(tl.int64) * table_stride + position // PAGE).to(tl.int64)
    target = tl.load(table + tl.load(slots_to + i).to(tl.int64) * table_stride + position // PAGE).to(
        tl.int64
    )
    keep = (at < width) & (i < tl.load(count))
    value = tl.load(store + (source * PAGE + position % PAGE) * width + at, mask=keep)
    tl.store(store + (target * PAGE + position % PAGE) * width + at, value, mask=keep)
