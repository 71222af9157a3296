"""What the CPU kernels reach on this machine: linears over their floor, forwards by number of rows, a step's overhead.

python recipes/cpu/kernels.py --out docs/benchmarks [--quick] [--threads N] [--only linear,forward,share]

What is compared is measured alternately in one run; times are medians, the machine should be idle. The floor of a
linear is the larger of weight bytes / read bandwidth and 2 x rows x in x out / multiply-add peak. Both are measured
right before and after each time that is held against them: a shared machine is faster in one moment than in the next.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
import torch.nn.functional as F

import paceline
from paceline.bench.plot import Chart, svg
from paceline.core import ForwardBatch
from paceline.forecast.random_target import RandomWeights, random_target, random_weight
from paceline.forecast.shapes import target_config
from paceline.kv.cache import KVCache
from paceline.memory import Arena
from paceline.models.target import GraphTarget
from paceline.ops import native
from paceline.ops.base import Graph, Weight, WeightKind
from paceline.ops.blocks import BLOCKS
from paceline.ops.native import NativeRunner, measure_peak, measure_read
from paceline.provenance import provenance

SHAPES = ((6144, 1536), (1536, 6144))  # [out, in]: the MLP of E2B, "1536x6144" and "6144x1536" as in -> out
BLOCK_KINDS: tuple[WeightKind, ...] = ("q4_0", "q4_1", "q8_0", "q4_k", "q5_k", "q6_k", "iq4_xs")
KINDS: tuple[WeightKind, ...] = ("float32", "bfloat16", "int8", "int4", *BLOCK_KINDS)
ROWS = tuple(range(1, 9))
CONTEXT = 64  # tokens in the cache before a forward is timed
MEMORY = 192 << 20  # bytes that the copies of one weight fill, so that no cache holds them


def timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def bare(count: int) -> ForwardBatch:
    zeros = torch.zeros(count, dtype=torch.int64)
    return ForwardBatch(zeros, zeros.int(), zeros.int(), [0, count])


class Floors:
    """What this machine can do at most, now: bytes read and floating-point operations per second, by all threads."""

    def __init__(self) -> None:
        self._data = Arena().zeros(MEMORY).view(torch.float32).fill_(1.0)
        self.reads: list[float] = []
        self.peaks: list[float] = []

    def measure(self) -> None:
        self.reads.append(self._data.nbytes / timed(lambda: measure_read(self._data)))
        begin = time.perf_counter()
        operations = measure_peak(100_000)
        self.peaks.append(operations / (time.perf_counter() - begin))

    def least(self, size: float, operations: float) -> float:
        """Seconds at least for so much, by the mean of the last two measurements."""
        return max(2 * size / sum(self.reads[-2:]), 2 * operations / sum(self.peaks[-2:]))

    def as_json(self) -> dict[str, float]:
        return {
            "read": median(self.reads), "read_best": max(self.reads),
            "peak": median(self.peaks), "peak_best": max(self.peaks),
        }  # fmt: skip


def copies_of(shape: tuple[int, int], kind: WeightKind, source: RandomWeights) -> list[Weight]:
    first = random_weight(source, shape, kind)
    return [first, *(random_weight(source, shape, kind) for _ in range(MEMORY // first.nbytes))]


def _graph(weight: Weight) -> Graph:
    return lambda ops: (ops.linear(ops.given("x", weight.in_features), weight),)


def _run_all(runner: NativeRunner, graphs: list[Graph], rows: ForwardBatch, x: torch.Tensor) -> None:
    for graph in graphs:
        runner.run(graph, rows, None, {"x": x})


def _torch_all(weights: list[Weight], x: torch.Tensor) -> None:
    for weight in weights:
        F.linear(x, weight.data)


# bytes of a weight; of blocks as in the file, though 5 and 6 bits take 8 in memory
PER_VALUE = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.5 + 4 / 32} | {
    kind: BLOCKS[kind].size / BLOCKS[kind].elements for kind in BLOCK_KINDS
}

Call = tuple[int, Callable[[], object]]  # how many linears it runs, one after the other


def linear_calls(shape: tuple[int, int]) -> dict[tuple[str, int], Call]:
    """By kind and rows: linears with weights from memory; torch stands beside."""
    source, runner = RandomWeights({}, "bfloat16"), NativeRunner()
    calls: dict[tuple[str, int], Call] = {}
    for kind in KINDS:
        weights = copies_of(shape, kind, source)
        graphs = [_graph(weight) for weight in weights]
        for rows in ROWS:
            x, some = torch.randn(rows, native.apart(shape[1]))[:, : shape[1]], bare(rows)  # as in a forward
            calls[kind, rows] = len(weights), partial(_run_all, runner, graphs, some, x)
            if kind in ("float32", "bfloat16") and rows in (1, 5):
                y = x.to(weights[0].data.dtype)
                calls[f"torch {kind}", rows] = len(weights), partial(_torch_all, weights, y)
    return calls


def linear_report(floors: Floors, repeats: int) -> list[dict[str, Any]]:
    """Medians of one linear by kind and rows: seconds, and how often its floor beside it."""
    lines = []
    for shape in SHAPES:
        calls = linear_calls(shape)
        values = shape[0] * shape[1]
        seen: dict[tuple[str, int], list[tuple[float, float]]] = {key: [] for key in calls}
        with torch.inference_mode():
            for turn in range(repeats + 1):
                for (name, rows), (count, call) in calls.items():
                    floors.measure()
                    seconds = timed(call) / count
                    if name.startswith("torch"):
                        time.sleep(
                            0.05
                        )  # its OpenMP threads still spin: they would slow what is measured next
                    floors.measure()
                    least = floors.least(values * PER_VALUE[name.split()[-1]], 2 * rows * values)
                    if turn:
                        seen[name, rows].append((seconds, seconds / least))
        for name in dict.fromkeys(name for name, _ in calls):
            own = {rows: pairs for (kind, rows), pairs in seen.items() if kind == name}
            lines.append({
                "shape": f"{shape[1]}x{shape[0]}", "weights": name,
                "ms": {n: round(1e3 * median(s for s, _ in pairs), 3) for n, pairs in own.items()},
                "over_floor": {n: round(median(r for _, r in pairs), 2) for n, pairs in own.items()},
                "5_over_1": round(median(five[0] / one[0] for one, five in zip(own[1], own[5], strict=True)), 2),
            })  # fmt: skip
    return lines


def staircase(target: GraphTarget, most: int, repeats: int) -> dict[int, float]:
    """Median seconds of forward and logits for 1..most rows of one text, measured alternately."""
    pages = dict.fromkeys(target.layout.kinds, (CONTEXT + most) // 16 + 2)
    cache = KVCache(
        target.layout,
        pages,
        max_sequences=1,
        max_tokens=CONTEXT + most,
        dtype=target.kv_dtype,
    )
    tokens = [(37 * i) % (target.vocab_size - 10) + 5 for i in range(CONTEXT + most)]
    cache.open(0, tokens, share=False)
    with cache.tail([(0, tokens[:CONTEXT])]) as tail:
        target.forward(tail.rows(), cache)
        tail.commit([CONTEXT])
    rows = {}
    for n in range(1, most + 1):
        with cache.tail([(0, tokens[CONTEXT : CONTEXT + n])]) as tail:
            rows[n] = tail.rows()
    seen: dict[int, list[float]] = {n: [] for n in rows}
    for turn in range(repeats + 1):
        for n, some in rows.items():
            seconds = timed(lambda some=some: target.logits(target.forward(some, cache)))  # type: ignore[misc]
            if turn:
                seen[n].append(seconds)
    return {n: median(values) for n, values in seen.items()}


def forward_report(demo: Path | None, quick: bool) -> list[dict[str, Any]]:
    from paceline.models.registry import load_target
    from paceline.ops.quantize import quantizer

    out = []
    repeats = 5 if quick else 31
    if demo is not None:
        changes: dict[str, dict[str, Any]] = {
            "bfloat16": {}, "float32": {"dtype": torch.float32},
            "int8": {"transform": quantizer("int8")}, "int4": {"transform": quantizer("int4")},
        }  # fmt: skip
        for kind, options in changes.items():
            target = load_target(demo, runner=NativeRunner(), **options)
            out.append(_stairs("demo", kind, staircase(target, 16, repeats)))
    kinds: tuple[WeightKind, ...] = ("bfloat16", "int8", "int4", "q4_0", "q8_0", "q4_k", "q6_k")
    kinds = kinds[:1] if quick else kinds
    for stored in kinds:
        target = random_target(target_config("gemma-4-e2b", 16384), stored, NativeRunner())
        out.append(_stairs("E2B-shaped", stored, staircase(target, 5 if quick else 16, 1 if quick else 7)))
        del target
    return out


def _stairs(model: str, kind: str, seconds: dict[int, float]) -> dict[str, Any]:
    return {
        "model": model, "weights": kind, "ms": {n: round(s * 1e3, 3) for n, s in seconds.items()},
        "5_over_1": round(seconds[5] / seconds[1], 3),
    }  # fmt: skip


def share_report(tokens: int) -> dict[str, Any]:
    """How much of a plain decoding step of `demo` is spent outside the native programs."""
    from paceline import LLM, SamplingParams

    llm = LLM("demo", drafter="none")
    target = llm.engine.state.target
    assert isinstance(target, GraphTarget)
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    begin = tokens // 2  # steps and kernels are measured in the second half of the same text: attention grows
    runner = target.runner
    assert isinstance(runner, NativeRunner)
    list(llm.stream("Once upon a time", SamplingParams(max_tokens=2)))  # records the programs
    plans = {
        name: runner.plan(graph)
        for name, graph in (("forward", target.hidden_graph), ("logits", target.logits_graph))
    }
    programs = [plan.program for plan in plans.values() if plan is not None]
    clocks: list[tuple[float, float]] = []
    for _ in llm.stream("Once upon a time", params):
        clocks.append((time.perf_counter(), sum(program.spent() for program in programs)))
    taken = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(clocks)][begin:]
    steps = sorted(step for step, _ in taken)
    outside = median(1 - native / step for step, native in taken)
    kernels: dict[str, float] = {}
    for name, plan in plans.items():
        assert plan is not None
        for written, _ in enumerate(llm.stream("Once upon a time", params)):
            if written == begin:
                plan.program.profile(True)
        for code, seconds in zip((step[0].code for step in plan.steps), plan.program.seconds(), strict=True):
            part = f"{name}: {code.name.lower() if code.name in ('LINEAR', 'ATTENTION') else 'row ops'}"
            kernels[part] = kernels.get(part, 0.0) + seconds
        plan.program.profile(False)
    step = steps[len(steps) // 20]  # as undisturbed as the kernels' shortest runs
    return {
        "step_ms": round(step * 1e3, 3), "median_step_ms": round(median(steps) * 1e3, 3),
        "kernels_ms": {k: round(v * 1e3, 3) for k, v in kernels.items()},
        "outside_programs": round(outside, 3), "outside_kernels": round(1 - sum(kernels.values()) / step, 3),
        "note": "programs: in the same steps, median; kernels: the shortest run of each op, measured one at a time, "
        "beside the fastest twentieth of the steps",
    }  # fmt: skip


def markdown(result: dict[str, Any]) -> str:
    """The result as tables."""
    said = result["provenance"]
    lines = ["# CPU kernels", "", f"{said['processor']}, {said['kernels']}, {result['threads']} threads, "
             f"torch {said['torch']}, {said['when']}, `{said['command']}`", ""]  # fmt: skip
    if "floors" in result:
        floor = result["floors"]
        lines += [f"Read bandwidth {floor['read'] / 1e9:.1f} GB/s (best {floor['read_best'] / 1e9:.1f}), multiply-add "
                  f"peak {floor['peak'] / 1e9:.0f} GFLOP/s (best {floor['peak_best'] / 1e9:.0f})."]  # fmt: skip
    if "linear" in result:
        lines += ["", "## Linear: ms (times its floor), weights from memory", ""]
        lines += ["| in x out | weights | " + " | ".join(f"{n} rows" for n in ROWS) + " | 5 over 1 |",
                  "|---" * (len(ROWS) + 3) + "|"]  # fmt: skip
        for line in result["linear"]:
            cells = [
                f"{line['ms'][n]:.2f} ({line['over_floor'][n]:.2f})" if n in line["ms"] else "" for n in ROWS
            ]
            lines.append(
                f"| {line['shape']} | {line['weights']} | {' | '.join(cells)} | {line['5_over_1']} |"
            )
    if "forward" in result:
        lines += ["", f"## Forward and logits, ms by rows, {CONTEXT} tokens of context", ""]
        lines += ["| model | weights | " + " | ".join(str(n) for n in range(1, 17)) + " | 5 over 1 |",
                  "|---" * 19 + "|"]  # fmt: skip
        for line in result["forward"]:
            cells = [f"{line['ms'][n]:.2f}" if n in line["ms"] else "" for n in range(1, 17)]
            lines.append(
                f"| {line['model']} | {line['weights']} | {' | '.join(cells)} | {line['5_over_1']} |"
            )
    if "share" in result:
        share = result["share"]
        parts = ", ".join(f"{k} {v} ms" for k, v in share["kernels_ms"].items())
        lines += ["", "## A plain decoding step of demo", "", f"{share['step_ms']} ms, of which {parts}; "
                  f"outside the native programs {share['outside_programs']:.0%}, outside kernels "
                  f"{share['outside_kernels']:.0%} ({share['note']})."]  # fmt: skip
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path("docs/benchmarks"))
@click.option("--threads", type=click.IntRange(min=1), help="Default: one per core.")
@click.option("--quick", is_flag=True, help="Few repetitions: to see that it runs.")
@click.option("--only", default="linear,forward,share", show_default=True)
@click.option("--demo", type=click.Path(path_type=Path), help="A target folder instead of the bundled demo.")
def main(out: Path, threads: int | None, quick: bool, only: str, demo: Path | None) -> None:
    """Measure the CPU kernels; writes kernels.json, kernels.md and kernels-*.svg to --out."""
    threads = threads or native.default_threads()
    native.set_threads(threads)
    torch.set_num_threads(threads)
    parts = set(only.split(","))
    said = provenance(f"python recipes/cpu/kernels.py --only {only}{' --quick' if quick else ''}")
    result: dict[str, Any] = {"provenance": said | {"kernels": native.isa()}, "threads": threads}
    repeats = 2 if quick else 25
    if "linear" in parts:
        floors = Floors()
        result["linear"] = linear_report(floors, repeats)
        result["floors"] = floors.as_json()
    if "forward" in parts:
        bundled = Path(paceline.__file__).parent / "demo" / "target"
        folder = demo or (bundled if (bundled / "config.json").is_file() else None)
        result["forward"] = forward_report(folder, quick)
    if "share" in parts:
        result["share"] = share_report(50 if quick else 300)
    out.mkdir(parents=True, exist_ok=True)
    (out / "kernels.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    text = markdown(result)
    for model in dict.fromkeys(line["model"] for line in result.get("forward", [])):
        series = {f["weights"]: sorted(f["ms"].items()) for f in result["forward"] if f["model"] == model}
        name = f"kernels-{model.lower()}.svg"
        (out / name).write_text(svg(Chart(f"{model}: ms by rows", "rows", "ms", series)).replace(
            "<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1), encoding="utf-8")  # fmt: skip
        text += f"\n![{model}]({name})\n"
    (out / "kernels.md").write_text(text, encoding="utf-8")
    click.echo(text)


if __name__ == "__main__":
    main()
