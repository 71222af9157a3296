"""What a card has to show before its results are used: right products, and bits that do not depend on the other rows.

Small matrices of each kind of weight are multiplied with 1 to 257 rows, and a short text is attended to in pieces of
several sizes. It runs once for a process, a kind and a device; kernels that it compiles are those that a model uses.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from paceline.core import ForwardBatch
from paceline.kv.cache import KVCache
from paceline.kv.layout import LayerKV, Layout
from paceline.ops.base import Ops, Runner, Value, Weight, WeightKind
from paceline.ops.quantize import quantize
from paceline.ops.reference import dequantize

ROWS = (1, 5, 16, 17, 64, 257)
SHAPE = 192, 2048  # outputs and inputs: several tiles, and parts of the inputs
WRONG = 0.02  # of the norm of the right result, which products of bfloat16 are well within
HEADS, WIDTH, TEXT = 4, 64, 200
CHUNKS = (1, 7, 65)


def failures(runner: Runner, kinds: Iterable[str], device: torch.device, dtype: torch.dtype) -> list[str]:
    """What was wrong, a line each; none: all is well. `kinds`: float, int8, int4 and mxfp4, of the weights to be used."""
    lines = [line for kind in sorted(set(kinds)) if (line := _products(runner, kind, device, dtype))]
    line = _attention(runner, device, dtype)
    return [*lines, *([line] if line else [])]


def _products(runner: Runner, kind: str, device: torch.device, dtype: torch.dtype) -> str | None:
    data = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(device)
    weight = _weight(data, kind, dtype)
    x = torch.randn(ROWS[-1], SHAPE[1], generator=torch.Generator().manual_seed(1)).to(device)
    wanted = x.double() @ dequantize(weight, None, torch.float32).double().T

    def graph(ops: Ops) -> tuple[Value, ...]:
        return (ops.linear(ops.given("x", SHAPE[1]), weight),)

    alone: Tensor | None = None
    for rows in ROWS:
        (got,) = runner.run(graph, _bare(rows, device), None, {"x": x[:rows]})
        wrong = float((got - wanted[:rows]).norm() / wanted[:rows].norm())
        if not wrong < WRONG:
            return f"products with {kind} weights are off by {wrong:.1%} for {rows} rows"
        alone = got[:1].clone() if alone is None else alone
        if not torch.equal(got[:1], alone):
            return f"products with {kind} weights of one row have other bits beside {rows - 1} more rows"
    return None


def _weight(data: Tensor, kind: str, dtype: torch.dtype) -> Weight:
    if kind == "float":
        return Weight(data.to(dtype), _NAMES[dtype])
    if kind != "mxfp4":
        return quantize(data, "int8" if kind == "int8" else "int4")
    blocks = torch.randint(
        0, 256, (len(data), data.shape[1] // 32, 17), generator=torch.Generator().manual_seed(3)
    )
    blocks[..., 0] = 120 + blocks[..., 0] % 4  # exponents
    return Weight(blocks.flatten(1).to(data.device, torch.uint8), "mxfp4")


def _attention(runner: Runner, device: torch.device, dtype: torch.dtype) -> str | None:
    layout = Layout((LayerKV("full", HEADS // 2, WIDTH),), {"full": None})
    values = torch.randn(3, TEXT, HEADS * WIDTH, generator=torch.Generator().manual_seed(2)).to(device)
    narrow = HEADS // 2 * WIDTH

    def graph(ops: Ops) -> tuple[Value, ...]:
        ops.store_kv(0, ops.given("k", narrow), ops.given("v", narrow))
        return (ops.attention(ops.given("q", HEADS * WIDTH), 0, HEADS, None, True),)

    whole: Tensor | None = None
    for chunk in (TEXT, *CHUNKS):
        cache = KVCache(layout, {"full": 16}, max_sequences=1, max_tokens=256, dtype=dtype, device=device)
        cache.open(0, [0] * TEXT)
        parts = []
        for start in range(0, TEXT, chunk):
            stop = min(start + chunk, TEXT)
            with cache.tail([(0, [0] * (stop - start))]) as tail:
                given = dict(
                    zip(("q", "k", "v"), (values[0, start:stop] / 8, *values[1:, start:stop, :narrow]))
                )
                parts.append(runner.run(graph, tail.rows(device), cache, given)[0].clone())
                tail.commit([stop - start])
        got = torch.cat(parts)
        if whole is None:
            whole = got
            if (line := _far(got, values, narrow)) is not None:
                return line
        elif not torch.equal(got, whole):
            return f"attention in pieces of {chunk} rows has other bits than all at once"
    return None


def _far(got: Tensor, values: Tensor, narrow: int) -> str | None:
    q = (values[0] / 8).view(TEXT, HEADS, WIDTH).transpose(0, 1).double()
    k, v = (
        part[:, :narrow].view(TEXT, -1, WIDTH).repeat_interleave(2, 1).transpose(0, 1).double()
        for part in values[1:]
    )
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
    wanted = wanted.transpose(0, 1).flatten(1)
    wrong = float((got - wanted).norm() / wanted.norm())
    return None if wrong < WRONG else f"attention is off by {wrong:.1%}"


def _bare(rows: int, device: torch.device) -> ForwardBatch:
    small = torch.zeros(rows, dtype=torch.int32, device=device)
    return ForwardBatch(small.long(), small, small, [0, rows])


_NAMES: dict[torch.dtype, WeightKind] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
