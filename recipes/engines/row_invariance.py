"""What equal bits cost on a CPU: linears whose sums have one order for any number of rows, beside a library's.

    python recipes/engines/row_invariance.py [--threads N] [--turns 9] [--work FOLDER]

paceline's kernels add a row's products in the same order whatever rows stand beside it. torch's `linear` (oneDNN or MKL)
chooses a kernel, and with it the order of sums, by the number of rows. Both get the same weights, from memory and not
from a cache, and take turns. The table says how long each takes, and how many of the first row's outputs the library
changes when other rows stand beside it. Its makers promise no equal bits, so that is no fault.

This is no bound on what free sums could bring: it is what a library that may use them reaches here. Run it on an idle
machine; it takes under a minute.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import torch
import torch.nn.functional as F

from paceline.core import ForwardBatch
from paceline.forecast.random_target import RandomWeights, random_weight
from paceline.ops import native
from paceline.ops.base import Graph, Weight
from paceline.ops.native import NativeRunner

SHAPES = ((8960, 1536), (1536, 8960))  # [out, in]: the MLP of Qwen2.5 1.5B
ROWS = (1, 2, 4, 8, 16, 64, 256)
MEMORY = 160 << 20  # bytes that the copies of one weight fill, so that no cache holds them
Kind = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Line:
    """Milliseconds of one linear. `changed`: outputs of the first row that are not those of the row alone, of all."""

    weights: str
    shape: str
    rows: int
    ours_ms: float
    library_ms: float
    ours_changed: int
    library_changed: int
    outputs: int


class Linears:
    """The same weights for both: enough copies that each is read from memory."""

    def __init__(self, kind: Kind, shape: tuple[int, int], threads: int) -> None:
        source = RandomWeights({}, "bfloat16")
        first = random_weight(source, shape, kind)
        self.weights = [first, *(random_weight(source, shape, kind) for _ in range(MEMORY // first.nbytes))]
        self._runner = NativeRunner(threads)
        self._graphs = [_graph(weight) for weight in self.weights]
        self._width = shape[1]
        self._dtype = first.data.dtype

    def rows(self, count: int) -> torch.Tensor:
        """[count, in] float32 as a forward has them; the first row is always the same."""
        torch.manual_seed(1)
        return torch.randn(max(ROWS), native.apart(self._width))[:count, : self._width]

    def ours(self, x: torch.Tensor) -> torch.Tensor:
        """Of the last copy, after all of them."""
        batch = _batch(len(x))
        for graph in self._graphs:
            (out,) = self._runner.run(graph, batch, None, {"x": x})
        return out

    def library(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self._dtype)
        for weight in self.weights:
            out = F.linear(x, weight.data)
        return out


def _graph(weight: Weight) -> Graph:
    return lambda ops: (ops.linear(ops.given("x", weight.in_features), weight),)


def _batch(count: int) -> ForwardBatch:
    zeros = torch.zeros(count, dtype=torch.int64)
    return ForwardBatch(zeros, zeros.int(), zeros.int(), [0, count])


@torch.inference_mode()
def measure(kind: Kind, shape: tuple[int, int], threads: int, turns: int) -> Iterator[Line]:
    made = Linears(kind, shape, threads)
    alone = {name: getattr(made, name)(made.rows(1))[0].clone() for name in ("ours", "library")}
    for count in ROWS:
        x = made.rows(count)
        seconds: dict[str, list[float]] = {"ours": [], "library": []}
        changed = {}
        for turn in range(turns + 1):
            for name, seen in seconds.items():
                begin = time.perf_counter()
                out = getattr(made, name)(x)
                if turn:
                    seen.append(time.perf_counter() - begin)
                changed[name] = int((out[0] != alone[name]).sum())
                time.sleep(0.02)  # the library's threads still spin: they would slow what is measured next
        ms = {name: 1e3 * median(seen) / len(made.weights) for name, seen in seconds.items()}
        named = f"{shape[1]} to {shape[0]}"
        yield Line(
            kind, named, count, ms["ours"], ms["library"], changed["ours"], changed["library"], shape[0]
        )


def table(lines: list[Line]) -> Iterator[str]:
    yield (
        "| weights | inputs to outputs | rows | ours, ms | library, ms | ours / library "
        "| first row's outputs changed, ours | library |"
    )
    yield "|---|---|" + "---:|" * 6
    for line in lines:
        changed = (f"{count:,} of {line.outputs:,}" for count in (line.ours_changed, line.library_changed))
        cells = [line.weights, line.shape, str(line.rows), f"{line.ours_ms:.2f}", f"{line.library_ms:.2f}"]
        yield "| " + " | ".join([*cells, f"{line.ours_ms / line.library_ms:.2f}", *changed]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=native.default_threads())
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--work", type=Path, help="write row_invariance.json there, for page.py")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    kinds: tuple[Kind, ...] = ("float32", "bfloat16")
    asked = [(kind, shape) for kind in kinds for shape in SHAPES]
    lines = [line for kind, shape in asked for line in measure(kind, shape, given.threads, given.turns)]
    print("\n".join(table(lines)))
    if given.work is not None:
        said = {"threads": given.threads, "isa": native.isa(), "torch": torch.__version__}
        values = {**said, "lines": [asdict(line) for line in lines]}
        (given.work / "row_invariance.json").write_text(json.dumps(values, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
