"""Matrix products for one row and for thousands, with bits that do not depend on how many rows there are.

A program computes a tile [outputs, rows] of `weight @ x.T`, the weights as first operand of the matrix instruction, and
adds up along the inputs in one order. What would change that order belongs to the weight: into how many parts its
inputs are split (`splits`), and that a tile has at least 64 outputs, so that the instruction is the same. The rows of a
tile are columns of that instruction, and each column is computed alike whatever stands in the others.

With few rows each part of the inputs has programs of its own, and whoever reads the result adds the parts in order. With
many rows one program goes over the parts and adds them in the same order.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 256  # inputs that are packed together in int4: byte j of a block holds inputs j and j + 128
GROUP = 32  # inputs of an int4 scale


@triton.jit
def ready(PDL: tl.constexpr):
    """First in every kernel: the next one may be brought up now, and what the last one wrote is there.

    PDL: programmatic dependent launch, from compute capability 9.0 on.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _fetch(w, row, width, start, stop, LINES: tl.constexpr):
    """Ask for the first lines of 128 bytes of some rows, which no kernel writes, before the last kernel has ended."""
    each: tl.constexpr = 1024 // w.dtype.element_ty.primitive_bitwidth
    at = tl.minimum(start + tl.arange(0, LINES) * each, stop - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [w + row[:, None].to(tl.int64) * width + at[None, :]],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _dot_float(
    acc, w, x, n, m, inside, start, stop, inputs, x_stride,
    BK: tl.constexpr, EVEN: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """acc [BN, BM] plus a part of the inputs, of weights in rows of `inputs`."""
    for k in range(start, stop, BK):
        kk = k + tl.arange(0, BK)
        at = w + n[:, None].to(tl.int64) * inputs + kk[None, :]
        x_at = x + m[None, :] * x_stride + kk[:, None]
        if EVEN:
            wt = tl.load(at, eviction_policy="evict_first")
            xt = tl.load(x_at, mask=inside[None, :], other=0.0)
        else:
            wt = tl.load(at, mask=(kk < stop)[None, :], other=0)
            xt = tl.load(x_at, mask=inside[None, :] & (kk < stop)[:, None], other=0.0)
        acc = tl.dot(wt.to(DT), xt.to(DT), acc, input_precision="ieee")
    return acc


@triton.jit
def _dot_int4(
    acc, w, scale, x, n, m, inside, start, stop, inputs, x_stride, DT: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """The same of int4 weights, see `weights.in_blocks`: BK is a block, a row has ceil(inputs / BK) of them."""
    half: tl.constexpr = BK // 2
    groups: tl.constexpr = BK // 64  # of one half
    rows: tl.constexpr = n.shape[0]
    padded = tl.cdiv(inputs, BK) * BK
    j = tl.arange(0, half)
    for k in range(start, stop, BK):
        at = w + n[:, None].to(tl.int64) * (padded // 2) + (k // 2 + tl.arange(0, half))[None, :]
        both = tl.load(at, eviction_policy="evict_first")
        at_scale = (
            scale + n[:, None].to(tl.int64) * (padded // 32) + (k // 32 + tl.arange(0, groups))[None, :]
        )
        low_scale = tl.load(at_scale).to(DT)
        high_scale = tl.load(at_scale + groups).to(DT)
        if DT == tl.bfloat16:  # 0x4300 is 128, whose last bits count ones
            low = ((both & 15).to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - 136.0
            high = ((both >> 4).to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - 136.0
        else:
            low, high = (both & 15).to(DT) - 8.0, (both >> 4).to(DT) - 8.0
        low = (low.reshape(rows, groups, 32) * low_scale[:, :, None]).reshape(rows, half)
        high = (high.reshape(rows, groups, 32) * high_scale[:, :, None]).reshape(rows, half)
        kk = k + j
        x_at = x + m[None, :] * x_stride + kk[:, None]
        x_low = tl.load(x_at, mask=inside[None, :] & (kk < inputs)[:, None], other=0.0)
        x_high = tl.load(x_at + half, mask=inside[None, :] & (kk + half < inputs)[:, None], other=0.0)
        acc = tl.dot(low.to(DT), x_low.to(DT), acc, input_precision="ieee")
        acc = tl.dot(high.to(DT), x_high.to(DT), acc, input_precision="ieee")
    return acc


@triton.jit
def activated(gate, ACT: tl.constexpr):
    """1: gelu (the tanh approximation), 2: silu, 3: sigmoid; float32."""
    if ACT == 1:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        # tanh by exp of a value that is never positive
        e = tl.exp(-2.0 * tl.abs(inner))
        t = (1.0 - e) / (1.0 + e)
        return 0.5 * gate * (1.0 + tl.where(inner < 0, -t, t))
    elif ACT == 2:
        return gate / (1.0 + tl.exp(-gate))
    else:
        return 1.0 / (1.0 + tl.exp(-gate))


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    x, w, scale, bias, out,
    rows, outputs, inputs, part, x_stride, out_stride, split_stride,
    KIND: tl.constexpr, ACT: tl.constexpr, SPLITS: tl.constexpr, INNER: tl.constexpr, BIAS: tl.constexpr,
    EVEN: tl.constexpr, PDL: tl.constexpr, DT: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[(part,) row, output] = x @ weight.T. KIND 0: float, 1: int8 with a scale per output, 2: int4.

    `part`: inputs of each of SPLITS parts. INNER: this program goes over all parts. ACT: outputs 2i and 2i + 1 are gate
    and value of result i. BIAS is added to the first part. EVEN: parts are whole tiles, and so are the outputs.
    """
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = m < rows
    row = tl.minimum(n, outputs - 1)  # of the weight: what lies past the end is computed and not stored
    total = tl.zeros([BN, BM], tl.float32)
    first = 0 if INNER else tl.program_id(2)
    if PDL and not INNER:
        width = tl.cdiv(inputs, BK) * BK // 2 if KIND == 2 else inputs
        begins = first * part // 2 if KIND == 2 else first * part
        _fetch(w, row, width, begins, width, 8)
    ready(PDL)
    for s in range(first, SPLITS if INNER else first + 1):
        start = s * part
        stop = tl.minimum(start + part, inputs)
        acc = tl.zeros([BN, BM], tl.float32)
        if KIND == 2:
            acc = _dot_int4(acc, w, scale, x, row, m, inside, start, stop, inputs, x_stride, DT, BK)
        else:
            acc = _dot_float(acc, w, x, row, m, inside, start, stop, inputs, x_stride, BK, EVEN, DT)
        if KIND == 1:
            acc = acc * tl.load(scale + row)[:, None]
        if BIAS:
            if s == 0:
                acc += tl.load(bias + row)[:, None]
        if INNER and SPLITS > 1:
            total = total + acc if s > 0 else acc
        else:
            total = acc
    if ACT > 0:
        pair = total.reshape(BN // 2, 2, BM).permute(0, 2, 1)
        gate, value = tl.split(pair)
        n = tl.program_id(1) * (BN // 2) + tl.arange(0, BN // 2)
        total = activated(gate, ACT) * value
        outputs = outputs // 2
    base = out if INNER else out + tl.cast(first, tl.int64) * split_stride
    keep = inside[None, :] & (n < outputs)[:, None]
    tl.store(
        base + m[None, :].to(tl.int64) * out_stride + n[:, None], total.to(out.dtype.element_ty), mask=keep
    )


@triton.jit(do_not_specialize=["count"])
def sum_kernel(
    x,
    out,
    count,
    width,
    split_stride,
    x_stride,
    out_stride,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
    B: tl.constexpr,
):
    """out [count, width] = the parts of x [SPLITS, count, width], added in order."""
    ready(PDL)
    at = tl.program_id(1) * B + tl.arange(0, B)
    row = tl.program_id(0).to(tl.int64)
    keep = at < width
    total = tl.load(x + row * x_stride + at, mask=keep)
    for s in tl.static_range(1, SPLITS):
        total += tl.load(x + s * split_stride + row * x_stride + at, mask=keep)
    tl.store(out + row * out_stride + at, total.to(out.dtype.element_ty), mask=keep)
