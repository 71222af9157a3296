"""Compiles what would be launched, for a card that need not be there: a compiler refuses what the interpreter lets pass.

Run as `python tests/compiled.py SCENE FOLDER`, without the interpreter. Nothing is computed; each kernel is compiled
for compute capability 9.0 with the types, constants and options of its launch, and its name is printed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TYPES = {
    torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "i8",
    torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
DONE: set[str] = set()


def kind_of(value: Any) -> str | None:
    """How Triton types an argument; None: as a constant."""
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, bool) or value is None or (isinstance(value, int) and value == 1):
        return None
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32" if isinstance(value, float) else None


def compile_launch(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """In place of `JITFunction.run`."""
    given = dict(zip(self.arg_names, args, strict=False))
    given |= {name: options.pop(name) for name in list(options) if name in self.arg_names}
    fixed = {p.name for p in self.params if p.is_constexpr}
    exact = {p.name for p in self.params if p.do_not_specialize}
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    for name in self.arg_names:
        kind = "i32" if name in exact and isinstance(given[name], int) else kind_of(given[name])
        if name in fixed or kind is None:
            constants[name] = given[name]
        signature[name] = "constexpr" if name in constants else str(kind)
    key = f"{self.fn.__name__} {sorted(signature.items())} {sorted(constants.items(), key=str)} {options}"
    if key not in DONE:
        DONE.add(key)
        target = GPUTarget("cuda", 90, 32)
        triton.compile(ASTSource(self, signature, constants), target=target, options=options)
        print(self.fn.__name__, flush=True)


def draws() -> None:
    """Draws of candidates of each row's own, and the way from step to step of a draft round."""
    from paceline.ops.cuda import drawing
    from paceline.ops.cuda.kernels import chain

    rules = torch.from_numpy(drawing.encode([(1.0, 3, 4, 5, 0.9, -1.0)] * 2))
    drawer = drawing.Drawer(2, 9000, "cpu")
    x = torch.zeros(2, 9000)
    drawer.enqueue(drawing.Logits(x, torch.zeros(2, 9000, dtype=torch.int64)), rules)
    small = torch.zeros(8, dtype=torch.int32)
    chain.gather_kernel[2, 9](x, small, x, 9000, 9000, 9000, B=1024)
    for moves in (0, 1):
        chain.advance_kernel[2, 9](
            x,
            x,
            small,
            small,
            small,
            drawer.tokens,
            drawer.confidence,
            rules,
            small,
            9000,
            9000,
            9000,
            8,
            moves,
            B=1024,
        )


def words() -> None:
    """Products with int4 and int8 in words, of one row and of many, in bfloat16."""
    from paceline.core import ForwardBatch
    from paceline.ops.cuda.runner import CudaRunner
    from paceline.ops.quantize import quantize

    runner = CudaRunner(torch.device("cpu"), torch.bfloat16, trusted=True)
    for weight in (quantize(torch.randn(64, 512), "int4"), quantize(torch.randn(64, 512), "int8")):
        for rows in (1, 70):
            batch = ForwardBatch(
                *(torch.zeros(rows, dtype=t) for t in (torch.int64, torch.int32, torch.int32)), [0, rows]
            )
            given = {"x": torch.zeros(rows, 512)}
            runner.run(lambda ops, own=weight: (ops.linear(ops.given("x", 512), own),), batch, None, given)


def sinks() -> None:
    """Attention with sinks, and experts in MXFP4 with biases behind the clamped gate, of one row and of many."""
    from paceline.kv.cache import KVCache
    from paceline.kv.layout import LayerKV, Layout
    from paceline.ops.base import Experts, Weight
    from paceline.ops.cuda.runner import CudaRunner

    cache = KVCache(
        Layout((LayerKV("full", 2, 64),), {"full": None}),
        {"full": 8},
        max_sequences=1,
        max_tokens=128,
        dtype=torch.bfloat16,
    )
    router = Weight(torch.zeros(4, 256).bfloat16(), "bfloat16")
    first, last = (
        Weight(torch.full((n, 256 // 32 * 17), 120, dtype=torch.uint8), "mxfp4") for n in (512, 256)
    )
    biases = {
        "router_bias": torch.zeros(4),
        "gate_up_bias": torch.zeros(4, 512),
        "down_bias": torch.zeros(4, 256),
    }
    experts = Experts(router, (first,) * 4, (last,) * 4, 2, "clamped", **biases)

    def graph(ops):
        x = ops.given("x", 256)
        ops.store_kv(0, ops.columns(x, 0, 128), ops.columns(x, 128, 256))
        y = ops.sink_attention(x, 0, None, torch.zeros(4))
        return (ops.moe(y, y, experts),)

    runner = CudaRunner(torch.device("cpu"), torch.bfloat16, trusted=True)
    cache.open(1, [0] * 71, share=False)
    for count in (70, 1):
        with cache.tail([(1, [0] * count)]) as tail:
            runner.run(graph, tail.rows(), cache, {"x": torch.zeros(count, 256)})
            tail.commit([count])


def gemma(folder: Path) -> None:
    """A prompt, a step and a draft round of a small Gemma with its assistant, in bfloat16."""
    from checkpoints import build_assistant, build_target
    from paceline.kv.cache import KVCache
    from paceline.models.registry import load_assistant, load_target
    from paceline.ops.base import RoundStart, Stop
    from paceline.ops.cuda.runner import CudaRunner

    build_target("e2b", folder / "target")
    build_assistant("e2b", folder / "drafter")
    target = load_target(folder / "target", runner=CudaRunner(torch.device("cpu"), torch.bfloat16))
    cache = KVCache(
        target.layout,
        dict.fromkeys(target.layout.kinds, 16),
        max_sequences=2,
        max_tokens=128,
        dtype=torch.bfloat16,
    )
    cache.open(1, list(range(80)), share=False)
    for count in (70, 1):
        with cache.tail([(1, list(range(count)))]) as tail:
            target.logits(target.forward(tail.rows(), cache))
            tail.commit([count])
    rule, states = (0.0, 1, 71, 0, 1.0, 0.0), torch.zeros(2, target.hidden_size)
    start = RoundStart([1], [71], [cache.slot(1)])
    load_assistant(folder / "drafter", target).draft_round(start, states, cache, [rule], [Stop(2)])


if __name__ == "__main__":
    triton.runtime.jit.JITFunction.run = compile_launch
    if sys.argv[1] == "gemma":
        gemma(Path(sys.argv[2]))
    elif sys.argv[1] == "words":
        words()
        sinks()
    else:
        draws()
