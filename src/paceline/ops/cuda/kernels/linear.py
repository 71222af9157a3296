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

BLOCK = 256  # inputs that are packed together in int4, and
BYTES = 128  # in int8: word j of a block holds inputs j, j + 32, j + 64, ...
GROUP = 32  # inputs of an int4 scale


@triton.jit
def dot_float(
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
def _nibbles(words, low, high):
    """Eight tiles of bfloat16: nibble i of each word, minus 8, times scale i of its output.

    low, high [outputs, 1]: the four scales each, as one int64. 0x4300 is 128, whose last bits count ones. Two words give
    two neighbours of each tile, which is what a register holds; where tiles are computed one by one, taking bytes apart
    costs more than reading them.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, s, u, v;
        prmt.b32 a, $8, $9, 0x5410;
        prmt.b32 b, $8, $9, 0x7632;
        mov.b64 {u, v}, $10;
        lop3.b32 $0, a, 0x000F000F, 0x43004300, 0xEA;
        shr.u32 a, a, 4;
        lop3.b32 $1, a, 0x000F000F, 0x43004300, 0xEA;
        shr.u32 a, a, 4;
        lop3.b32 $2, a, 0x000F000F, 0x43004300, 0xEA;
        shr.u32 a, a, 4;
        lop3.b32 $3, a, 0x000F000F, 0x43004300, 0xEA;
        mov.b32 a, 0xC308C308;
        add.rn.bf16x2 $0, $0, a;
        add.rn.bf16x2 $1, $1, a;
        add.rn.bf16x2 $2, $2, a;
        add.rn.bf16x2 $3, $3, a;
        prmt.b32 s, u, u, 0x1010;
        mul.rn.bf16x2 $0, $0, s;
        prmt.b32 s, u, u, 0x3232;
        mul.rn.bf16x2 $1, $1, s;
        prmt.b32 s, v, v, 0x1010;
        mul.rn.bf16x2 $2, $2, s;
        prmt.b32 s, v, v, 0x3232;
        mul.rn.bf16x2 $3, $3, s;
        mov.b64 {u, v}, $12;
        lop3.b32 $4, b, 0x000F000F, 0x43004300, 0xEA;
        shr.u32 b, b, 4;
        lop3.b32 $5, b, 0x000F000F, 0x43004300, 0xEA;
        shr.u32 b, b, 4;
        lop3.b32 $6, b, 0x000F000F, 0x43004300, 0xEA;
        shr.u32 b, b, 4;
        lop3.b32 $7, b, 0x000F000F, 0x43004300, 0xEA;
        add.rn.bf16x2 $4, $4, a;
        add.rn.bf16x2 $5, $5, a;
        add.rn.bf16x2 $6, $6, a;
        add.rn.bf16x2 $7, $7, a;
        prmt.b32 s, u, u, 0x1010;
        mul.rn.bf16x2 $4, $4, s;
        prmt.b32 s, u, u, 0x3232;
        mul.rn.bf16x2 $5, $5, s;
        prmt.b32 s, v, v, 0x1010;
        mul.rn.bf16x2 $6, $6, s;
        prmt.b32 s, v, v, 0x3232;
        mul.rn.bf16x2 $7, $7, s;
        }""",
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,l,l,l,l",
        [words, low, high], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _fractions(words, low, high):
    """The same of floats of four bits: a sign, two bits of exponent, one of fraction.

    Where bfloat16 has the end of its exponent and the beginning of its fraction they mean 2^-126 as much: scales say so.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, s, u, v, p, q;
        prmt.b32 a, $8, $9, 0x5410;
        prmt.b32 b, $8, $9, 0x7632;
        shl.b32 q, a, 12;
        and.b32 q, q, 0x80008000;
        shl.b32 p, a, 6;
        lop3.b32 $0, p, 0x01C001C0, q, 0xEA;
        shl.b32 q, a, 8;
        and.b32 q, q, 0x80008000;
        shl.b32 p, a, 2;
        lop3.b32 $1, p, 0x01C001C0, q, 0xEA;
        shl.b32 q, a, 4;
        and.b32 q, q, 0x80008000;
        shr.u32 p, a, 2;
        lop3.b32 $2, p, 0x01C001C0, q, 0xEA;
        and.b32 q, a, 0x80008000;
        shr.u32 p, a, 6;
        lop3.b32 $3, p, 0x01C001C0, q, 0xEA;
        mov.b64 {u, v}, $10;
        prmt.b32 s, u, u, 0x1010;
        mul.rn.bf16x2 $0, $0, s;
        prmt.b32 s, u, u, 0x3232;
        mul.rn.bf16x2 $1, $1, s;
        prmt.b32 s, v, v, 0x1010;
        mul.rn.bf16x2 $2, $2, s;
        prmt.b32 s, v, v, 0x3232;
        mul.rn.bf16x2 $3, $3, s;
        shl.b32 q, b, 12;
        and.b32 q, q, 0x80008000;
        shl.b32 p, b, 6;
        lop3.b32 $4, p, 0x01C001C0, q, 0xEA;
        shl.b32 q, b, 8;
        and.b32 q, q, 0x80008000;
        shl.b32 p, b, 2;
        lop3.b32 $5, p, 0x01C001C0, q, 0xEA;
        shl.b32 q, b, 4;
        and.b32 q, q, 0x80008000;
        shr.u32 p, b, 2;
        lop3.b32 $6, p, 0x01C001C0, q, 0xEA;
        and.b32 q, b, 0x80008000;
        shr.u32 p, b, 6;
        lop3.b32 $7, p, 0x01C001C0, q, 0xEA;
        mov.b64 {u, v}, $12;
        prmt.b32 s, u, u, 0x1010;
        mul.rn.bf16x2 $4, $4, s;
        prmt.b32 s, u, u, 0x3232;
        mul.rn.bf16x2 $5, $5, s;
        prmt.b32 s, v, v, 0x1010;
        mul.rn.bf16x2 $6, $6, s;
        prmt.b32 s, v, v, 0x3232;
        mul.rn.bf16x2 $7, $7, s;
        }""",
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,l,l,l,l",
        [words, low, high], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _bytes(words):
    """Four tiles of bfloat16: byte i of each word. 128 plus its last bits, minus 128, or 256 with the first bit set."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b;
        prmt.b32 a, $4, $5, 0x0400;
        lop3.b32 b, a, 0x00800080, 0x43004300, 0xEA;
        lop3.b32 a, a, 0x007F007F, 0x43004300, 0xEA;
        sub.rn.bf16x2 $0, a, b;
        prmt.b32 a, $4, $5, 0x0501;
        lop3.b32 b, a, 0x00800080, 0x43004300, 0xEA;
        lop3.b32 a, a, 0x007F007F, 0x43004300, 0xEA;
        sub.rn.bf16x2 $1, a, b;
        prmt.b32 a, $4, $5, 0x0602;
        lop3.b32 b, a, 0x00800080, 0x43004300, 0xEA;
        lop3.b32 a, a, 0x007F007F, 0x43004300, 0xEA;
        sub.rn.bf16x2 $2, a, b;
        prmt.b32 a, $4, $5, 0x0703;
        lop3.b32 b, a, 0x00800080, 0x43004300, 0xEA;
        lop3.b32 a, a, 0x007F007F, 0x43004300, 0xEA;
        sub.rn.bf16x2 $3, a, b;
        }""",
        "=&r,=&r,=&r,=&r,r,r", [words], dtype=(tl.bfloat16,) * 4, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _nibble(words, scale, i: tl.constexpr, DT: tl.constexpr, FLOATS: tl.constexpr):
    """One tile of `_nibbles`, or of `_fractions`, in any type."""
    n = (words >> (4 * i)) & 15
    own = tl.load(scale + i)
    if FLOATS:
        m = n & 7
        twice = tl.where(m < 4, m, tl.where(m < 6, 2 * m - 4, 4 * m - 16))
        signed = tl.where(n > 7, -twice, twice).to(tl.float32)
        part = own.to(tl.float32) * 5.421010862427522e-20 * 1.0842021724855044e-19  # 2^-64 and 2^-63
        return (signed * part[:, None]).to(DT)
    else:
        return ((n.to(DT) - 8.0) * own.to(DT)[:, None]).to(DT)


@triton.jit
def _inputs(x, m, k, inside, inputs, x_stride, W: tl.constexpr, DT: tl.constexpr, EVEN: tl.constexpr):
    """W inputs [W, BM] of each row, from k on."""
    kk = k + tl.arange(0, W)
    keep = inside[None, :] if EVEN else inside[None, :] & (kk < inputs)[:, None]
    return tl.load(x + m[None, :] * x_stride + kk[:, None], mask=keep, other=0.0).to(DT)


@triton.jit
def dot_int4(
    acc, w, scale, x, n, m, inside, start, stop, inputs, x_stride,
    DT: tl.constexpr, BK: tl.constexpr, ASM: tl.constexpr, EVEN: tl.constexpr, FLOATS: tl.constexpr,
):  # fmt: skip
    """The same of int4 weights: BK inputs are BK / 8 words, see `weights.in_words`, a row is padded to whole BK.

    FLOATS: of floats of four bits (MXFP4), scales times 2^126.
    """
    W: tl.constexpr = BK // 8
    padded = tl.cdiv(inputs, BK) * BK
    for k in range(start, stop, BK):
        at = w + n[:, None].to(tl.int64) * (padded // 8) + (k // 8 + tl.arange(0, W))[None, :]
        words = tl.load(at, eviction_policy="evict_first")
        own = scale + n.to(tl.int64) * (padded // W) + k // W
        if ASM:
            four = (scale.to(tl.pointer_type(tl.int64)) + n.to(tl.int64) * (padded // BK * 2) + k // BK * 2)[
                :, None
            ]
            if FLOATS:
                w0, w1, w2, w3, w4, w5, w6, w7 = _fractions(words, tl.load(four), tl.load(four + 1))
            else:
                w0, w1, w2, w3, w4, w5, w6, w7 = _nibbles(words, tl.load(four), tl.load(four + 1))
        else:
            w0, w1 = _nibble(words, own, 0, DT, FLOATS), _nibble(words, own, 1, DT, FLOATS)
            w2, w3 = _nibble(words, own, 2, DT, FLOATS), _nibble(words, own, 3, DT, FLOATS)
            w4, w5 = _nibble(words, own, 4, DT, FLOATS), _nibble(words, own, 5, DT, FLOATS)
            w6, w7 = _nibble(words, own, 6, DT, FLOATS), _nibble(words, own, 7, DT, FLOATS)
        acc = tl.dot(w0, _inputs(x, m, k, inside, inputs, x_stride, W, DT, EVEN), acc, input_precision="ieee")
        acc = tl.dot(
            w1, _inputs(x, m, k + W, inside, inputs, x_stride, W, DT, EVEN), acc, input_precision="ieee"
        )
        acc = tl.dot(
            w2, _inputs(x, m, k + 2 * W, inside, inputs, x_stride, W, DT, EVEN), acc, input_precision="ieee"
        )
        acc = tl.dot(
            w3, _inputs(x, m, k + 3 * W, inside, inputs, x_stride, W, DT, EVEN), acc, input_precision="ieee"
        )
        acc = tl.dot(
            w4, _inputs(x, m, k + 4 * W, inside, inputs, x_stride, W, DT, EVEN), acc, input_precision="ieee"
        )
        acc = tl.dot(
            w5, _inputs(x, m, k + 5 * W, inside, inputs, x_stride, W, DT, EVEN), acc, input_precision="ieee"
        )
        acc = tl.dot(
            w6, _inputs(x, m, k + 6 * W, inside, inputs, x_stride, W, DT, EVEN), acc, input_precision="ieee"
        )
        acc = tl.dot(
            w7, _inputs(x, m, k + 7 * W, inside, inputs, x_stride, W, DT, EVEN), acc, input_precision="ieee"
        )
    return acc


@triton.jit
def dot_int8(
    acc, w, x, n, m, inside, start, stop, inputs, x_stride,
    DT: tl.constexpr, BK: tl.constexpr, ASM: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The same of int8 weights in words: BK inputs are BK / 4 words, see `weights.in_words`."""
    W: tl.constexpr = BK // 4
    for k in range(start, stop, BK):
        at = w + n[:, None].to(tl.int64) * (inputs // 4) + (k // 4 + tl.arange(0, W))[None, :]
        words = tl.load(at, eviction_policy="evict_first")
        if ASM:
            w0, w1, w2, w3 = _bytes(words)
        else:
            w0, w1 = ((words << 24) >> 24).to(DT), ((words << 16) >> 24).to(DT)
            w2, w3 = ((words << 8) >> 24).to(DT), (words >> 24).to(DT)
        acc = tl.dot(w0, _inputs(x, m, k, inside, inputs, x_stride, W, DT, EVEN), acc, input_precision="ieee")
        acc = tl.dot(
            w1, _inputs(x, m, k + W, inside, inputs, x_stride, W, DT, EVEN), acc, input_precision="ieee"
        )
        acc = tl.dot(
            w2, _inputs(x, m, k + 2 * W, inside, inputs, x_stride, W, DT, EVEN), acc, input_precision="ieee"
        )
        acc = tl.dot(
            w3, _inputs(x, m, k + 3 * W, inside, inputs, x_stride, W, DT, EVEN), acc, input_precision="ieee"
        )
    return acc


@triton.jit
def activated(gate, ACT: tl.constexpr):
    """1: gelu (the tanh approximation), 2: silu, 3: sigmoid, 5: relu; float32."""
    if ACT == 1:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        # tanh by exp of a value that is never positive
        e = tl.exp(-2.0 * tl.abs(inner))
        t = (1.0 - e) / (1.0 + e)
        return 0.5 * gate * (1.0 + tl.where(inner < 0, -t, t))
    elif ACT == 2:
        return gate / (1.0 + tl.exp(-gate))
    elif ACT == 5:
        return tl.where(gate < 0, 0.0, gate)
    else:
        return 1.0 / (1.0 + tl.exp(-gate))


@triton.jit
def capped(x, cap):
    """cap * tanh(x / cap), by exp of a value that is never positive."""
    e = tl.exp(-2.0 * tl.abs(x / cap))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t) * cap


@triton.jit
def clamped(gate, value):
    """The activation of gpt-oss's experts, see `LIMIT` in ops/base.py. What is no number stays none."""
    g = tl.where(gate > 7.0, 7.0, gate)
    v = tl.where(value > 7.0, 7.0, tl.where(value < -7.0, -7.0, value))
    return g / (1.0 + tl.exp(-1.702 * g)) * (v + 1.0)


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    x, w, scale, bias, out,
    rows, outputs, inputs, part, x_stride, out_stride, split_stride,
    KIND: tl.constexpr, ACT: tl.constexpr, SPLITS: tl.constexpr, INNER: tl.constexpr, BIAS: tl.constexpr,
    EVEN: tl.constexpr, ASM: tl.constexpr, DT: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[(part,) row, output] = x @ weight.T. KIND 0: float, 1: int8 with a scale per output, 2: int4, 3: int8 in words,
    4: MXFP4.

    `part`: inputs of each of SPLITS parts. INNER: this program goes over all parts. ACT: outputs 2i and 2i + 1 are gate
    and value of result i. BIAS is added to the first part. EVEN: parts are whole tiles, and so are the outputs. ASM:
    integers become bfloat16 by instructions of the card, to the same bits.
    """
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = m < rows
    row = tl.minimum(n, outputs - 1)  # of the weight: what lies past the end is computed and not stored
    total = tl.zeros([BN, BM], tl.float32)
    first = 0 if INNER else tl.program_id(2)
    for s in range(first, SPLITS if INNER else first + 1):
        start = s * part
        stop = tl.minimum(start + part, inputs)
        acc = tl.zeros([BN, BM], tl.float32)
        if KIND % 2 == 0 and KIND > 0:
            acc = dot_int4(
                acc, w, scale, x, row, m, inside, start, stop, inputs, x_stride, DT, BK, ASM, EVEN, KIND == 4
            )
        elif KIND == 3:
            acc = dot_int8(acc, w, x, row, m, inside, start, stop, inputs, x_stride, DT, BK, ASM, EVEN)
        else:
            acc = dot_float(acc, w, x, row, m, inside, start, stop, inputs, x_stride, BK, EVEN, DT)
        if KIND % 2 == 1:
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
    B: tl.constexpr,
):
    """out [count, width] = the parts of x [SPLITS, count, width], added in order."""
    at = tl.program_id(1) * B + tl.arange(0, B)
    row = tl.program_id(0).to(tl.int64)
    keep = at < width
    total = tl.load(x + row * x_stride + at, mask=keep)
    for s in tl.static_range(1, SPLITS):
        total += tl.load(x + s * split_stride + row * x_stride + at, mask=keep)
    tl.store(out + row * out_stride + at, total.to(out.dtype.element_ty), mask=keep)
