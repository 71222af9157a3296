"""One function for each kind of launch: it takes places and weights, and gives what enqueues the kernel for a bucket.

Sizes of tiles are chosen here. What decides a row's bits is not chosen here but in `weights.split_of` and attention.py.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.ops import records
from paceline.ops.cuda.context import Context, Keys, Launch
from paceline.ops.cuda.kernels import attention as attending
from paceline.ops.cuda.kernels import rows as rowwise
from paceline.ops.cuda.kernels.linear import linear_kernel, sum_kernel
from paceline.ops.cuda.places import Ref
from paceline.ops.cuda.shape import FEW, lanes_of
from paceline.ops.cuda.weights import INT8, TILE, WORDS, Matrix

NO_NORM = records.Norm(1, None, 0.0)
ELEMENTS = 1024  # of a row, that a program of an elementwise kernel has
TYPES: dict[torch.dtype, Any] = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


def power(count: int) -> int:
    return int(triton.next_power_of_2(count))


def warps(width: int) -> int:
    """For a program that has so many elements of a row at once."""
    return 4 if width <= 2048 else 8


def start(kernel: Any, grid: tuple[int, ...]) -> Any:
    """What takes the arguments of a kernel and enqueues it. Products and sums stay apart, whatever a compiler likes: the
    same arithmetic stands in several kernels, and has to give the same bits."""
    return partial(kernel[grid], enable_fp_fusion=False)


def parts_of(ref: Ref, context: Context) -> int:
    """In how many parts a value lies: with many rows it is whole."""
    return ref.splits if context.bucket.few else 1


def tile_of(matrix: Matrix, rows: int) -> tuple[int, int, int, int, int]:
    """(outputs, rows, inputs, warps, stages) of a program's tile."""
    if matrix.dtype == torch.float32:
        return TILE, 16, matrix.block or 32, 4, 2
    few = rows <= FEW
    lanes = max(16, power(min(rows, FEW)))
    if matrix.block:
        stages = 4 if lanes <= 16 else 3 if lanes <= 32 else 2
        return (TILE, lanes, matrix.block, 4, stages) if few else (2 * TILE, 2 * TILE, matrix.block, 8, 2)
    return (
        (TILE, lanes, 128 if lanes <= 32 else 64, 4, 4)
        if few
        else (128, 256 if rows > 128 else 128, 64, 8, 3)
    )


def by_card(matrix: Matrix) -> bool:
    """Whether integers become bfloat16 by instructions of the card, which Triton's interpreter has not."""
    return matrix.dtype == torch.bfloat16 and isinstance(linear_kernel, triton.runtime.JITFunction)


def linear(matrix: Matrix, x: Ref, out: Ref, bias: Tensor | None, act: int) -> Launch:
    """out = x @ matrix.T, in parts where `out` has them; act: of gate and value that lie output by output."""

    def run(context: Context) -> None:
        rows = context.bucket.rows
        bn, bm, bk, num_warps, stages = tile_of(matrix, rows)
        inner = not context.bucket.few
        even = matrix.part % bk == 0 and matrix.inputs % bk == 0
        grid = triton.cdiv(rows, bm), triton.cdiv(matrix.outputs, bn), 1 if inner else matrix.splits
        start(linear_kernel, grid)(
            x.data, matrix.data, matrix.data if matrix.scale is None else matrix.scale,
            x.data if bias is None else bias, out.data,
            rows, matrix.outputs, matrix.inputs, matrix.part, x.stride, out.stride, out.split_stride,
            KIND=matrix.kind, ACT=act, SPLITS=matrix.splits, INNER=inner, BIAS=bias is not None, EVEN=even,
            ASM=by_card(matrix), DT=TYPES[matrix.dtype], BN=bn, BM=bm, BK=bk, num_warps=num_warps, num_stages=stages,
        )  # fmt: skip

    return run


def add_parts(x: Ref, out: Ref) -> Launch:
    """out = the parts of x, added in order."""

    def run(context: Context) -> None:
        grid = context.bucket.rows, triton.cdiv(x.width, ELEMENTS)
        start(sum_kernel, grid)(
            x.data, out.data, context.bucket.rows, x.width, x.split_stride, x.stride, out.stride, SPLITS=parts_of(x,
            context), B=ELEMENTS
        )  # fmt: skip

    return run


def embed(table: Matrix, out: Ref, factor: float) -> Launch:
    """out = table[tokens] * factor"""
    data = table.data.view(torch.int8) if table.kind == WORDS else table.data

    def run(context: Context) -> None:
        grid = context.bucket.rows, triton.cdiv(table.inputs, ELEMENTS)
        start(rowwise.embed_kernel, grid)(
            context.meta("tokens"), data, data if table.scale is None else table.scale, out.data, factor,
            table.inputs, table.outputs, out.stride, INT8=table.kind in (INT8, WORDS), BLOCK=table.block, B=ELEMENTS,
        )  # fmt: skip

    return run


@dataclass(frozen=True, slots=True)
class Norm:
    """y = residual + norm(x, post), times factor; z = norm(y, pre). None: not there."""

    x: Ref
    residual: Ref | None
    y: Ref | None
    z: Ref | None
    post: records.Norm | None
    pre: records.Norm | None
    factor: float | None


def norm(spec: Norm) -> Launch:
    x, y, z = spec.x, spec.y, spec.z
    to = y or z
    assert to is not None
    post, pre = spec.post or NO_NORM, spec.pre or NO_NORM
    residual, last = spec.residual or x, z or to

    def run(context: Context) -> None:
        start(rowwise.norm_kernel, (context.bucket.rows,))(
            x.data, residual.data, x.data if post.weight is None else post.weight,
            x.data if pre.weight is None else pre.weight,
            to.data, last.data,
            x.width, x.stride, residual.stride, to.stride, last.stride, x.split_stride, post.eps, pre.eps,
            spec.factor or 1.0,
            SPLITS=parts_of(x, context), POST=spec.post is not None, ADD=spec.residual is not None,
            SCALE=spec.factor is not None,
            PRE=spec.pre is not None, POST_WEIGHT=post.weight is not None, PRE_WEIGHT=pre.weight is not None,
            CENTERED=pre.centered, KEEP=y is not None,
            B=power(x.width), num_warps=warps(x.width),
        )  # fmt: skip

    return run


def group_norm(x: Ref, out: Ref, norm: records.Norm) -> Launch:
    """The norm of each of `groups` equal slices of a row."""
    groups, scale, eps = norm.groups, norm.weight, norm.eps
    width = x.width // groups

    def run(context: Context) -> None:
        start(rowwise.group_norm_kernel, (context.bucket.rows, groups))(
            x.data, x.data if scale is None else scale, out.data, width, x.stride, out.stride, x.split_stride, eps,
            SPLITS=parts_of(x, context), WEIGHT=scale is not None, OWN=norm.own, B=power(width),
        )  # fmt: skip

    return run


@dataclass(frozen=True, slots=True)
class Heads:
    """q, k and v (None: not there) on their way: norms, the turn, and q times `factor`."""

    parts: Seq[Ref | None]
    norms: Seq[records.Norm | None]
    out: Ref
    layer: int
    heads: int
    turn: records.Rotary
    factor: float


def heads(spec: Heads) -> Launch:
    q, k, v = spec.parts
    assert q is not None
    modes = [0 if norm is None else 1 if norm.weight is None else 2 for norm in spec.norms]
    eps = [0.0 if norm is None else norm.eps for norm in spec.norms]
    width, frequencies = q.width // spec.heads, spec.turn.frequencies
    own = 0 if k is None else k.width // width

    def run(context: Context) -> None:
        cache = context.cache
        assert cache is not None
        q_norm, k_norm = (
            q.data if norm is None or norm.weight is None else norm.weight for norm in spec.norms[:2]
        )
        table = cache.tables[cache.layout.layers[spec.layer].kind]
        first, second = k or q, v or q
        start(rowwise.heads_kernel, (context.bucket.rows, spec.heads + own + (own if v is not None else 0)))(
            q.data, first.data, second.data, context.meta("positions"), context.meta("slots"), context.meta("count"),
            table,
            frequencies, q_norm, k_norm, spec.out.data, cache.k[spec.layer], cache.v[spec.layer],
            spec.heads, own, width, len(frequencies), q.stride, first.stride, second.stride, spec.out.stride,
            table.stride(0),
            q.split_stride, first.split_stride, second.split_stride, *eps, spec.turn.factor, spec.factor,
            Q_SPLITS=parts_of(q, context), K_SPLITS=parts_of(first, context), V_SPLITS=parts_of(second, context),
            Q_NORM=modes[0], K_NORM=modes[1], V_NORM=modes[2],
            HAS_K=k is not None, HAS_V=v is not None, PAGE=cache.page_size, B=power(width),
            num_warps=1 if width <= 128 else 2,
        )  # fmt: skip
        if k is not None:
            _store_further(context, spec.layer)

    return run


def store(parts: Seq[Ref], layer: int) -> Launch:
    """A row's K, and V where there is one, into the cache."""

    def run(context: Context) -> None:
        cache = context.cache
        assert cache is not None
        spec = cache.layout.layers[layer]
        table = cache.tables[spec.kind]
        for part, to in zip(parts, (cache.k[layer], cache.v[layer])):
            start(rowwise.store_kernel, (context.bucket.rows, triton.cdiv(part.width, ELEMENTS)))(
                part.data, context.meta("positions"), context.meta("slots"), context.meta("count"), table, to,
                spec.kv_heads, part.width // spec.kv_heads, part.stride, table.stride(0), part.split_stride,
                SPLITS=parts_of(part, context), PAGE=cache.page_size, B=ELEMENTS,
            )  # fmt: skip
        _store_further(context, layer)

    return run


def convolve(out: Ref, layer: int, taps: Tensor, bias: Tensor | None) -> Launch:
    """A short convolution over what the rows of a text have stored."""

    def run(context: Context) -> None:
        cache = context.cache
        assert cache is not None
        table = cache.tables[cache.layout.layers[layer].kind]
        start(rowwise.convolve_kernel, (context.bucket.rows, triton.cdiv(out.width, ELEMENTS)))(
            cache.k[layer], context.meta("positions"), context.meta("slots"), table, taps,
            taps if bias is None else bias, out.data, out.width, out.stride, table.stride(0),
            TAPS=len(taps), BIAS=bias is not None, PAGE=cache.page_size, B=ELEMENTS,
        )  # fmt: skip

    return run


def block_conv(x: Ref, mix: Ref, base: Tensor, out: Ref) -> Launch:
    """A convolution over the rows of a text in this run, whose taps hang on the row."""
    taps, groups = len(base), mix.width // len(base)

    def run(context: Context) -> None:
        start(rowwise.block_conv_kernel, (context.bucket.rows, triton.cdiv(x.width, ELEMENTS)))(
            x.data, mix.data, base, context.meta("positions"), context.meta("slots"), out.data, x.width,
            x.width // groups, groups, x.stride, mix.stride, out.stride, x.split_stride, mix.split_stride,
            TAPS=taps, X_SPLITS=parts_of(x, context), MIX_SPLITS=parts_of(mix, context), B=ELEMENTS,
        )  # fmt: skip

    return run


def _store_further(context: Context, layer: int) -> None:
    """Rows of trees are stored once more for each further branch that holds them."""
    if not context.bucket.further:
        return
    cache = context.cache
    assert cache is not None
    spec, k, v = cache.layout.layers[layer], cache.k[layer], cache.v[layer]
    table = cache.tables[spec.kind]
    for part in (k,) if v is k else (k, v):
        width = part.shape[1] * part.shape[2]
        start(attending.further_kernel, (context.bucket.further, triton.cdiv(width, ELEMENTS)))(
            part, context.meta("further_rows"), context.meta("further_slots"), context.meta("positions"),
            context.meta("slots"),
            table, context.meta("further_count"), width, table.stride(0), PAGE=cache.page_size, B=ELEMENTS,
        )  # fmt: skip


def rotary(x: Ref, out: Ref, turn: records.Rotary) -> Launch:
    """The heads of a row, each turned by its position."""
    inv_freq, growth = turn.frequencies, turn.growth
    width = x.width // turn.heads
    factors, every = (inv_freq, 1) if growth is None else (growth.factors, growth.every)

    def run(context: Context) -> None:
        start(rowwise.rotary_kernel, (context.bucket.rows, turn.heads))(
            x.data, context.meta("positions"), inv_freq, factors, out.data, width, len(inv_freq), x.stride,
            out.stride, x.split_stride, turn.factor, every, len(factors) - 1,
            SPLITS=parts_of(x, context), GROWS=growth is not None, B=power(width),
        )  # fmt: skip

    return run


@dataclass(frozen=True, slots=True)
class Attend:
    q: Ref
    out: Ref
    keys: Keys
    sinks: Tensor | None  # [heads], float32
    softcap: float | None = None  # of scores, see `Ops.attention`


def attention(spec: Attend) -> Launch:
    keys, q, out = spec.keys, spec.q, spec.out

    def run(context: Context) -> None:
        cache = context.cache
        assert cache is not None
        layer = cache.layout.layers[keys.layer]
        group, per_kv = lanes_of(keys.heads // layer.kv_heads)
        groups = layer.kv_heads * per_kv
        number = context.reach(keys)
        tiles, sections = context.bucket.tiles[number], context.bucket.sections[number]
        k, v, table = cache.k[keys.layer], cache.v[keys.layer], cache.tables[layer.kind]
        lanes, whole = attending.COLUMNS, not context.bucket.few
        d, dv = power(layer.head_dim), power(layer.value_dim)
        block = 64 if d <= 512 else 32
        parts = tiles * groups * sections
        part_out = context.scratch("attention", 1 if whole else parts * lanes * layer.value_dim)
        part_mass = context.scratch("mass", 1 if whole else parts * 2 * lanes)
        dtype = k.dtype if k.dtype in TYPES else torch.float32
        common: dict[str, Any] = {"WINDOW": keys.window, "SEES": keys.sees, "GROUP": group, "R": lanes}
        common["SINKS"], sinks = spec.sinks is not None, q.data if spec.sinks is None else spec.sinks
        rows = context.meta("positions"), context.meta("ends"), context.meta("reach")
        start(attending.attention_kernel, (tiles, groups, 1 if whole else sections))(
            q.data, k, v, table, context.tiles(number), *rows, context.meta("slots"), sinks, out.data,
            part_out, part_mass,
            layer.kv_heads, per_kv, layer.head_dim, layer.value_dim, q.stride, out.stride, table.stride(0), sections,
            spec.softcap or 1.0, CAPPED=spec.softcap is not None, WHOLE=whole,
            D=max(16, d), DV=max(16, dv), BN=block, PAGE=cache.page_size, DT=TYPES[dtype],
            num_warps=4 if d <= 256 else 8, num_stages=2 if d <= 128 else 1, **common,
        )  # fmt: skip
        if not whole:
            columns = min(64, max(16, dv))
            start(attending.join_kernel, (tiles, groups, triton.cdiv(layer.value_dim, columns)))(
                context.tiles(number), *rows, sinks, out.data, part_out, part_mass, layer.value_dim, out.stride,
                sections, B=columns, **common,
            )  # fmt: skip

    return run


def gated(gate: Ref, value: Ref, out: Ref, act: int) -> Launch:
    """out = act(gate) * value; a gate of one column is one for the whole row."""

    def run(context: Context) -> None:
        start(rowwise.gated_kernel, (context.bucket.rows, triton.cdiv(value.width, ELEMENTS)))(
            gate.data, value.data, out.data, value.width, gate.stride, value.stride, out.stride, gate.split_stride,
            value.split_stride, GATE_SPLITS=parts_of(gate, context), VALUE_SPLITS=parts_of(value, context), ACT=act,
            ONE=gate.width == 1 and value.width > 1, B=ELEMENTS,
        )  # fmt: skip

    return run


def single(op: int, x: Ref, y: Ref | None, out: Ref, number: float, vector: Tensor | None) -> Launch:
    """One operation of `single_kernel`."""
    second = y or x

    def run(context: Context) -> None:
        start(rowwise.single_kernel, (context.bucket.rows, triton.cdiv(out.width, ELEMENTS)))(
            x.data, second.data if vector is None else vector, out.data, number, out.width, x.stride, second.stride,
            out.stride,
            x.split_stride, second.split_stride, OP=op, X_SPLITS=parts_of(x, context), Y_SPLITS=parts_of(second,
            context), B=ELEMENTS,
        )  # fmt: skip

    return run
