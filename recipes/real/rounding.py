"""What other roundings of activations would bring: emulated in plain torch, over the answers with float32 activations.

    python recipes/real/rounding.py FILE.gguf --answers answers.json --out rounding.json [--schemes ...] [--questions 100]
    python recipes/real/rounding.py --report A.json B.json

ANSWERS is what `answers.py` wrote of that file: its texts are read again, position by position. The weights are those of
the file as float32. Only the inputs of matrices are rounded, as `native/blocks.h` rounds them: each 16 with a scale of
their own, to 8 bits, or to 16 before matrices of 6 and 8 bits. A scheme says what would be done otherwise.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from answers import TOGETHER, Paceline, Row, Text, compare, likeliest, prompts_of, report
from short_questions import QUESTIONS
from torch import Tensor

from paceline.checkpoints.gguf.source import GgufCheckpoint
from paceline.core import ForwardBatch
from paceline.hub.resolve import locate
from paceline.kv.cache import KVCache
from paceline.ops.base import Graph, Weight
from paceline.ops.reference import EagerRunner, ReferenceOps
from paceline.provenance import provenance

WIDE = ("Q6_K", "Q8_0")  # kinds whose inputs have 16 bits today
MOST, MOST_WIDE = 127.0, 127.0 * 254
FACTORS = tuple(0.8 + 0.025 * i for i in range(9))  # of the largest input, that a scale is tried for
IN_LAYER = re.compile(r"layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)_proj")


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the inputs of 4- and 5-bit matrices are rounded."""

    part: int = 16  # inputs that share a scale
    search: bool = False  # the scale of least squared error, not that of the largest input
    exact: tuple[str, ...] = ()  # names of projections that get 16 bits
    ends: int = 0  # so many first and last layers get 16 bits
    all_parts: int = (
        0  # inputs that share a scale in all matrices, the wide ones too, with 8 bits; 0: as today
    )


SCHEMES: dict[str, Scheme | None] = {
    "none (float32 in torch)": None,
    "as it is": Scheme(),
    "scale of least squared error": Scheme(search=True),
    "a scale for each 8": Scheme(part=8),
    "a scale for each 32": Scheme(part=32),
    "first and last layer 16 bits": Scheme(ends=1),
    "first and last three layers 16 bits": Scheme(ends=3),
    "down 16 bits": Scheme(exact=("down",)),
    "down and o 16 bits": Scheme(exact=("down", "o")),
    "q, k, v 16 bits": Scheme(exact=("q", "k", "v")),
    "gate and up 16 bits": Scheme(exact=("gate", "up")),
    "all 16 bits": Scheme(exact=("q", "k", "v", "o", "gate", "up", "down")),
    "8 bits before the head, too": Scheme(all_parts=16),
    "8 bits everywhere, a scale for each 32": Scheme(part=32, all_parts=32),
}


def rounded(x: Tensor, part: int, most: float, search: bool = False) -> Tensor:
    """`x` [N, in] as integers up to `most` times a scale for each `part` inputs."""
    blocks = x.view(-1, part)
    top = blocks.abs().amax(1, keepdim=True).clamp(min=1e-30)
    if not search:
        scale = top / most
        return ((blocks / scale).round() * scale).view(x.shape)
    best, least = torch.empty_like(blocks), torch.full_like(top, torch.inf)
    for factor in FACTORS:
        scale = top * factor / most
        tried = (blocks / scale).round().clamp(-most, most) * scale
        error = (tried - blocks).square().sum(1, keepdim=True)
        best, least = torch.where(error < least, tried, best), torch.minimum(error, least)
    return best.view(x.shape)


class Rounding:
    """Which weight is which, and how its inputs are rounded now."""

    def __init__(self, kinds: Mapping[str, str]) -> None:
        """`kinds`: the block type of each matrix by its name."""
        self.kinds = kinds
        self.scheme: Scheme | None = None
        self._names: dict[int, str] = {}
        self.layers = 0

    def note(self, name: str, weight: Weight) -> Weight:
        """A `Transform` that remembers a weight by its name, and makes it float32."""
        weight = replace(weight, data=weight.data.float())
        self._names[weight.data.data_ptr()] = name
        if inside := IN_LAYER.search(name):
            self.layers = max(self.layers, int(inside[1]) + 1)
        return weight

    def inputs(self, x: Tensor, weight: Weight) -> Tensor:
        if (scheme := self.scheme) is None:
            return x
        name = self._names[weight.data.data_ptr()]
        if scheme.all_parts:
            return rounded(x, scheme.all_parts, MOST)
        inside = IN_LAYER.search(name)
        wide = self.kinds[name] in WIDE
        if inside:
            layer = int(inside[1])
            wide |= inside[2] in scheme.exact or min(layer, self.layers - 1 - layer) < scheme.ends
        return rounded(x, 16, MOST_WIDE) if wide else rounded(x, scheme.part, MOST, scheme.search)


class RoundingOps(ReferenceOps):
    """Plain torch that rounds what matrices are multiplied with."""

    rounding: Rounding

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        return super().linear(self.rounding.inputs(x, weight), weight, bias)


class RoundingRunner(EagerRunner):
    def __init__(self, rounding: Rounding) -> None:
        super().__init__(torch.float32)
        self.rounding = rounding

    @torch.no_grad()
    def run(
        self, graph: Graph, rows: ForwardBatch, cache: KVCache | None, given: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        ops = RoundingOps(rows, cache, given, self.dtype)
        ops.rounding = self.rounding
        return graph(ops)


def measure(args: argparse.Namespace, known: Row) -> None:
    path = locate(args.file, "target")
    if not isinstance(path, Path):
        raise SystemExit(f"{args.file} is not here: `paceline pull {args.file}`")
    if known.setdefault("schemes", args.schemes) != args.schemes:
        raise SystemExit(f"{args.out} has other schemes: name a new file")
    answers = [row["ids"] for row in json.loads(args.answers.read_text(encoding="utf-8"))["rows"]]
    prompts = prompts_of(path, QUESTIONS[: min(args.questions, len(answers))])
    texts = [Text(prompt, answer) for prompt, answer in zip(prompts, answers, strict=False)]
    checkpoint = GgufCheckpoint(path)
    rounding = Rounding({name.removesuffix(".weight"): checkpoint.kind(name) for name in checkpoint.pieces})
    model = Paceline(path, RoundingRunner(rounding), rounding.note)
    known |= {"file": path.name, "machine": provenance(" ".join(sys.argv))}
    rows: list[Row] = known.setdefault("rows", [])
    begin = time.perf_counter()
    while len(rows) < len(texts):
        now = texts[len(rows) : len(rows) + TOGETHER]
        rounding.scheme = None
        true = model.logits(now)
        told = {}
        for name in args.schemes:
            rounding.scheme = SCHEMES[name]
            told[name] = [likeliest(logits) for logits in model.logits(now)]
        for i, text in enumerate(now):
            compared = {name: compare(true[i], text.answer, each[i]) for name, each in told.items()}
            rows.append({"ids": text.answer, **compared})
        args.out.write_text(json.dumps(known))
        print(f"{len(rows)} of {len(texts)} answers ({time.perf_counter() - begin:.0f} s)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", nargs="?")
    parser.add_argument("--answers", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--questions", type=int, default=len(QUESTIONS), help="the first ones only")
    parser.add_argument("--report", type=Path, nargs="+")
    args = parser.parse_args()
    if args.report:
        report(args.report)
        return
    if args.file is None or args.answers is None or args.out is None:
        parser.error("give FILE, --answers and --out, or --report")
    known: Row = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    measure(args, known)


if __name__ == "__main__":
    main()
