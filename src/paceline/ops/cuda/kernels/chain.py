"""From one step of a draft round to the next: the drawn token and the hidden state become inputs, and a note is kept."""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.ops.cuda.kernels.draw import WORDS


@triton.jit
def gather_kernel(states, slots, hidden, width, states_stride, hidden_stride, B: tl.constexpr):
    """hidden[row] = states[slots[row]]"""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    slot = tl.load(slots + row).to(tl.int64)
    value = tl.load(states + slot * states_stride + at, mask=at < width, other=0.0)
    tl.store(hidden + row * hidden_stride + at, value.to(hidden.dtype.element_ty), mask=at < width)


@triton.jit
def advance_kernel(
    after, hidden, tokens, positions, ends, drawn, confidence, rules, log,
    width, after_stride, hidden_stride, log_rows, moves, B: tl.constexpr,
):  # fmt: skip
    """What was drawn becomes each row's input, one position on if the round moves, and goes to log[step]."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * B + tl.arange(0, B)
    value = tl.load(after + row * after_stride + at, mask=at < width, other=0.0)
    tl.store(hidden + row * hidden_stride + at, value.to(hidden.dtype.element_ty), mask=at < width)
    if block == 0:
        token = tl.load(drawn + row)
        tl.store(
            tokens + row, tl.maximum(token, 0)
        )  # one that could not be drawn ends its row when the host reads it
        tl.store(positions + row, tl.load(positions + row) + moves)
        tl.store(ends + row, tl.load(ends + row) + moves)
        rule = rules + row * WORDS
        least = tl.load(rule + 4)
        step = least >> 32
        tl.store(rule + 2, tl.load(rule + 2) + 1)
        tl.store(rule + 4, least + (tl.full((), 1, tl.int64) << 32))
        to = log + step * 2 * log_rows + row
        tl.store(to, token)
        tl.store(to + log_rows, tl.load(confidence + row).to(tl.int32, bitcast=True))
