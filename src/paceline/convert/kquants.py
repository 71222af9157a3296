"""float32 -> the K blocks of GGUF: Q2_K to Q6_K, 256 values each, by the searches that llama.cpp's quantizers make.

Of each 16 or 32 values several scales are tried, and the one with the least weighted error is kept (`make_qx_quants` and
`make_qkx2_quants` of ggml's ggml-quants.c); then scales, and minima, are rounded to what a block has for them, and the
integers are chosen anew. What the blocks mean is said by `ops/blocks.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

ELEMENTS = 256
LARGEST = 1e6  # value whose scales float16 holds in every type
PIECE = 1 << 16  # values that are searched at a time, few enough for a cache
_SYMMETRIC_STEPS = range(-9, 10)  # tenths that the largest integer is moved by


@dataclass(frozen=True, slots=True)
class _Search:
    """Integers 0..most under a scale and a minimum: tries `start`, `start` + 0.1, ... beside `most`."""

    most: int
    start: float
    steps: int
    absolute: bool = False  # whether errors count by their size, not their square


def quantize(kind: str, rows: Tensor) -> Tensor:
    """[n, width] of floats -> uint8 [n, bytes of a row]; width is a multiple of 256, kind "q4_k" and the like."""
    flat = rows.reshape(-1, ELEMENTS)
    step = PIECE // ELEMENTS
    parts = [QUANTIZERS[kind](flat[i : i + step].float()) for i in range(0, len(flat), step)]
    return torch.cat(parts).view(len(rows), -1)


def _divided(numerator: Tensor, other: Tensor) -> Tensor:
    """numerator / other, 0 where other is 0"""
    return torch.where(other == 0, 0.0, numerator / torch.where(other == 0, 1.0, other))


def _symmetric(x: Tensor, most: int) -> Tensor:
    """The scales [n, groups] of x [n, groups, 16] for integers -most..most-1, errors weighted by x squared."""
    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))  # with its sign: it becomes -most
    best, scale = torch.zeros_like(largest), torch.zeros_like(largest)
    weight = x.square()
    for tenths in _SYMMETRIC_STEPS:
        q = (
            (x * _divided(torch.full_like(largest, -(most + 0.1 * tenths)), largest))
            .round()
            .clamp(-most, most - 1)
        )
        xq, qq = (weight * x * q).sum(-1, keepdim=True), (weight * q * q).sum(-1, keepdim=True)
        gain = _divided(xq * xq, qq)
        better = gain > best
        best, scale = torch.where(better, gain, best), torch.where(better, _divided(xq, qq), scale)
    return scale[..., 0]


def _with_minimum(x: Tensor, weight: Tensor, search: _Search) -> tuple[Tensor, Tensor]:
    """(scales, minima), each [n, groups] and not below 0, of x [n, groups, size]: a value is scale * q - minimum."""
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True)
    span, sum_w, sum_x = high - low, weight.sum(-1, keepdim=True), (weight * x).sum(-1, keepdim=True)

    def error(scale: Tensor, least: Tensor, q: Tensor) -> Tensor:
        off = scale * q + least - x
        return (weight * (off.abs() if search.absolute else off.square())).sum(-1, keepdim=True)

    scale, least = span / search.most, low
    best = error(scale, least, (_divided(x - low, scale)).round().clamp(0, search.most))
    for step in range(search.steps + 1):
        factor = _divided(torch.full_like(span, search.most + search.start + 0.1 * step), span)
        q = ((x - low) * factor).round().clamp(0, search.most)
        sum_q, sum_qq = (weight * q).sum(-1, keepdim=True), (weight * q * q).sum(-1, keepdim=True)
        sum_xq = (weight * x * q).sum(-1, keepdim=True)
        over = sum_w * sum_qq - sum_q * sum_q
        new = _divided(sum_w * sum_xq - sum_x * sum_q, over)
        minimum = _divided(sum_qq * sum_x - sum_q * sum_xq, over)
        above = minimum > 0
        new, minimum = torch.where(above, _divided(sum_xq, sum_qq), new), minimum.clamp(max=0)
        error_now = error(new, minimum, q)
        better = (over > 0) & (error_now < best)
        best = torch.where(better, error_now, best)
        scale, least = torch.where(better, new, scale), torch.where(better, minimum, least)
    return scale[..., 0], -least[..., 0]


def _rounded(values: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Values [n, groups], not below 0, as integers up to `most` under one float16: (integers, float16 [n, 1])."""
    top = values.amax(-1, keepdim=True).clamp(min=0)
    q = _divided(most * values, top).round().clamp(0, most)
    return q, (top / most).half()


def _half(values: Tensor) -> Tensor:
    return values.half().contiguous().view(torch.uint8)


def _chosen(x: Tensor, d: Tensor, m: Tensor, most: int) -> Tensor:
    """Integers 0..most of x [n, groups, size] under the scales d and minima m that blocks hold."""
    return (
        _divided(x + m[..., None], d[..., None].expand_as(x))
        .round()
        .clamp(0, most)
        .to(torch.uint8)
        .flatten(1)
    )


def _crumbs(q: Tensor) -> Tensor:
    """[n, 256] of 0..3 -> [n, 64]: of 32 bytes the first 32 values in the lowest two bits, the next in those above."""
    parts = q.view(len(q), 2, 4, 32)
    return (parts[:, :, 0] | parts[:, :, 1] << 2 | parts[:, :, 2] << 4 | parts[:, :, 3] << 6).flatten(1)


def _nibbles(q: Tensor, group: int) -> Tensor:
    parts = q.view(len(q), -1, 2, group)
    return (parts[:, :, 0] | parts[:, :, 1] << 4).flatten(1)


def _bits(q: Tensor) -> Tensor:
    """[n, 256] of 0 or 1 -> [n, 32]: bit i of a byte is of 32 values i further."""
    parts = q.view(len(q), 8, 32)
    out = parts[:, 0].clone()
    for i in range(1, 8):
        out |= parts[:, i] << i
    return out


def _q2_k(x: Tensor) -> Tensor:
    groups = x.view(len(x), 16, 16)
    scale, least = _with_minimum(groups, groups.abs(), _Search(3, -0.5, 15, absolute=True))
    (s, d), (m, dm) = _rounded(scale, 15), _rounded(least, 15)
    q = _chosen(groups, d.float() * s, dm.float() * m, 3)
    both = s.to(torch.uint8) | m.to(torch.uint8) << 4
    return torch.cat((both, _crumbs(q), _half(d), _half(dm)), dim=1)


def _signed(x: Tensor, most: int, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """(integers plus `most` [n, 256], scales of 16 from -steps to steps-1, float16 [n, 1])."""
    groups = x.view(len(x), 16, 16)
    scale = _symmetric(groups, most)
    largest = scale.gather(-1, scale.abs().argmax(-1, keepdim=True))
    s = _divided(-steps * scale, largest).round().clamp(-steps, steps - 1)
    d = (largest / -steps).half()
    exact = (d.float() * s)[..., None]
    q = _divided(groups, exact.expand_as(groups)).round().clamp(-most, most - 1) + most
    return q.to(torch.uint8).flatten(1), s, d


def _q3_k(x: Tensor) -> Tensor:
    q, s, d = _signed(x, 4, 32)
    raised = (s + 32).to(torch.uint8)
    low = (raised[:, :8] & 15) | (raised[:, 8:] & 15) << 4
    top = (raised >> 4).view(len(x), 4, 4)
    high = top[:, 0] | top[:, 1] << 2 | top[:, 2] << 4 | top[:, 3] << 6
    return torch.cat((_bits(q >> 2), _crumbs(q & 3), low, high, _half(d)), dim=1)


def _six_bits(s: Tensor, m: Tensor) -> Tensor:
    """8 scales and 8 minima of 6 bits in 12 bytes."""
    s, m = s.to(torch.uint8), m.to(torch.uint8)
    first = s[:, :4] | (s[:, 4:] >> 4) << 6
    second = m[:, :4] | (m[:, 4:] >> 4) << 6
    return torch.cat((first, second, (s[:, 4:] & 15) | (m[:, 4:] & 15) << 4), dim=1)


def _in_32(x: Tensor, search: _Search) -> tuple[Tensor, Tensor]:
    """(integers [n, 256], the 16 bytes before them)."""
    groups = x.view(len(x), 8, 32)
    weight = groups.square().mean(-1, keepdim=True).sqrt() + groups.abs()
    scale, least = _with_minimum(groups, weight, search)
    (s, d), (m, dm) = _rounded(scale, 63), _rounded(least, 63)
    q = _chosen(groups, d.float() * s, dm.float() * m, search.most)
    return q, torch.cat((_half(d), _half(dm), _six_bits(s, m)), dim=1)


def _q4_k(x: Tensor) -> Tensor:
    q, head = _in_32(x, _Search(15, -1.0, 20))
    return torch.cat((head, _nibbles(q, 32)), dim=1)


def _q5_k(x: Tensor) -> Tensor:
    q, head = _in_32(x, _Search(31, -0.5, 15))
    return torch.cat((head, _bits(q >> 4), _nibbles(q & 15, 32)), dim=1)


def _q6_k(x: Tensor) -> Tensor:
    q, s, d = _signed(x, 32, 128)
    return torch.cat(
        (_nibbles(q & 15, 64), _crumbs(q >> 4), s.to(torch.int8).view(torch.uint8), _half(d)), dim=1
    )


QUANTIZERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "q2_k": _q2_k, "q3_k": _q3_k, "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k,
}  # fmt: skip
