"""Layouts of integers: AWQ, GPTQ (and auto-round), compressed-tensors, bitsandbytes' 8 bits, MLX.

Each opens the tensors of one linear as a `Matrix`; `form_of` says which form holds its values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from paceline.checkpoints.quantized.matrices import GROUP, Matrix, unpacked
from paceline.errors import WeightsError

Form = Literal["U8", "I8", "Q8_0", "Q5_0", "Q4_1", "Q5_1", "BF16"]  # U8: int4
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where a word has the values of eight neighbouring outputs


@dataclass(frozen=True, slots=True)
class Packing:
    """What is known of a matrix before it is read."""

    bits: int
    inputs: int
    group: int  # inputs that share a scale; all of them: `inputs`
    symmetric: bool  # no zero points, or all in the middle
    ordered: bool = False  # groups are no runs of inputs
    added: bool = False  # a float is added to the values of each group, instead of zero points

    @property
    def said(self) -> str:
        """For a person: how many bits, in which groups."""
        groups = "one scale a row" if self.group == self.inputs else f"groups of {self.group}"
        kind = "" if self.symmetric else ", with minima" if self.added else ", with zero points"
        return f"{self.bits} bits, {groups}{kind}{', in an order of their own' if self.ordered else ''}"


def form_of(packing: Packing) -> Form:
    """The smallest form that holds all values exactly; bfloat16 where none does."""
    whole = packing.inputs % GROUP == 0 and packing.group % GROUP == 0 and not packing.ordered
    if packing.added:
        return "BF16" if not whole or packing.bits > 5 else "Q5_1" if packing.bits == 5 else "Q4_1"
    if whole and (packing.bits <= 3 or (packing.bits == 4 and packing.symmetric)):
        return "U8"
    if packing.bits == 8 and packing.symmetric and packing.group == packing.inputs:
        return "I8"
    if not whole or (packing.bits == 8 and not packing.symmetric):
        return "BF16"
    return "Q8_0" if packing.bits > 4 else "Q5_0"


def of_gptq(bits: int, first: int, packing: Packing) -> Callable[..., Matrix]:
    """qweight int32 [inputs * bits / 32, out], qzeros [groups, out * bits / 32], scales [groups, out], g_idx [inputs].

    `first`: what is added to stored zero points, 1 in the first version of the format.
    """

    def open_(qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None = None) -> Matrix:
        if (
            first and 32 % bits == 0
        ):  # whole words were counted down, so a zero point of 0 borrowed from its neighbour
            qzeros = (qzeros.long() + (2**32 - 1) // (2**bits - 1)).to(torch.int32)
            zero = unpacked(qzeros, bits).to(torch.int16)
        else:
            zero = (unpacked(qzeros, bits).to(torch.int16) + first) & (2**bits - 1)
        zero = zero.T[: qweight.shape[1]].contiguous()  # [out, groups]
        order = None if g_idx is None else _order(g_idx, len(scales))
        made = Matrix(lambda rows: torch.empty(0), scales.float().T.contiguous(), packing.inputs, order=order)

        def integers(rows: slice) -> Tensor:
            q = unpacked(qweight[:, rows].T, bits)[:, : packing.inputs].to(torch.int16)
            return q - made.by_input(zero[rows])

        return Matrix(integers, made.scale, packing.inputs, order=order)

    return open_


def _order(g_idx: Tensor, groups: int) -> Tensor:
    order = g_idx.long()
    if order.numel() and not 0 <= int(order.min()) <= int(order.max()) < groups:
        raise WeightsError(
            f"g_idx names groups {int(order.min())} to {int(order.max())} of {groups}: download it again"
        )
    return order


def of_awq(packing: Packing) -> Callable[..., Matrix]:
    """qweight int32 [inputs, out / 8], eight outputs a word in an order of their own; qzeros [groups, out / 8]; scales
    [groups, out]."""

    def turned(words: Tensor) -> Tensor:
        """[n, k] -> uint8 [n, 8 * k], outputs in their own order."""
        return unpacked(words, 4).view(len(words), -1, 8)[..., AWQ_ORDER].flatten(1)

    def open_(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Matrix:
        scale = scales.float().T.contiguous()
        zero = turned(qzeros).to(torch.int16).T.contiguous()
        made = Matrix(lambda rows: torch.empty(0), scale, packing.inputs)

        def integers(rows: slice) -> Tensor:
            first, last = rows.start // 8, -(-rows.stop // 8)
            q = turned(qweight[:, first:last])[:, rows.start - 8 * first : rows.stop - 8 * first]
            return q.T.to(torch.int16) - made.by_input(zero[rows])

        return Matrix(integers, scale, packing.inputs)

    return open_


def of_packed(bits: int, packing: Packing, ends: tuple[str, ...]) -> Callable[..., Matrix]:
    """compressed-tensors' weight_packed int32 [out, inputs * bits / 32] with weight_scale [out, groups]. `ends`: what
    else is there: weight_zero_point, packed along the outputs, and weight_g_idx [inputs]."""
    middle = 2 ** (bits - 1)

    def open_(packed: Tensor, scale: Tensor, *others: Tensor) -> Matrix:
        by_end = dict(zip(ends, others, strict=True))
        groups = scale.float().reshape(scale.shape[0], -1).contiguous()
        order = _order(by_end[".weight_g_idx"], groups.shape[1]) if ".weight_g_idx" in by_end else None
        zero = by_end.get(".weight_zero_point")
        if zero is not None and zero.dtype == torch.int32:
            zero = unpacked(zero.T, bits).T[: len(groups)].to(torch.int16) - middle
        made = Matrix(lambda rows: torch.empty(0), groups, packing.inputs, order=order)

        def integers(rows: slice) -> Tensor:
            q: Tensor = unpacked(packed[rows], bits)[:, : packing.inputs].to(torch.int16) - middle
            return q if zero is None else q - made.by_input(zero[rows].to(torch.int16))

        return Matrix(integers, groups, packing.inputs, order=order)

    return open_


def of_bytes(packing: Packing, factor: float = 1.0) -> Callable[..., Matrix]:
    """int8 [out, inputs] with a scale for the matrix, a row, or each group of a row, and maybe zero points."""

    def open_(data: Tensor, scale: Tensor, zero: Tensor | None = None) -> Matrix:
        out = len(data)
        groups = (scale.double() * factor).float().reshape(-1, 1) if scale.dim() < 2 else scale.float()
        groups = groups.expand(out, -1).contiguous()
        made = Matrix(lambda rows: torch.empty(0), groups, packing.inputs)
        zeros = None if zero is None else zero.reshape(-1, groups.shape[1]).expand(out, -1).to(torch.int16)

        def integers(rows: slice) -> Tensor:
            q = data[rows].to(torch.int16)
            return q if zeros is None else q - made.by_input(zeros[rows])

        return Matrix(integers, groups, packing.inputs)

    return open_


def hqq_floats(bits: int, shape: tuple[int, ...]) -> Callable[..., Tensor]:
    """HQQ's W_q uint8 [n, k], of which each `bits` from the highest on are rows of a matrix, one below the other; scale
    and zero point are floats, of each of its rows or columns. In bfloat16."""

    def make(packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        out = torch.empty(packed.shape[0] * (8 // bits), packed.shape[1], dtype=torch.bfloat16)
        scale, zero = (part.float().expand(out.shape) for part in (scale, zero))
        for i, shift in enumerate(range(8 - bits, -1, -bits)):
            rows = slice(i * len(packed), (i + 1) * len(packed))
            out[rows] = ((packed >> shift & (2**bits - 1)).float() - zero[rows]) * scale[rows]
        return out.view(shape)

    return make


def of_mlx(bits: int, packing: Packing) -> Callable[..., Matrix]:
    """weight uint32 [..., out, inputs * bits / 32], scales and biases [..., out, groups]: a value is q * scale + bias."""

    def open_(weight: Tensor, scales: Tensor, biases: Tensor) -> Matrix:
        words = weight.view(torch.int32).flatten(0, -2)
        scale, least = (part.float().flatten(0, -2).contiguous() for part in (scales, biases))
        return Matrix(lambda rows: unpacked(words[rows], bits).to(torch.int16), scale, packing.inputs, least)

    return open_
