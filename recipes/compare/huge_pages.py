"""A forward of the bundled target with its weights and K/V in huge pages, beside ordinary ones: one process, in turns.

    python recipes/compare/huge_pages.py [--rounds 40] [--context 200] [--rows 1 2 4 8 16] [--texts 1]

With `--texts 16` each of 16 texts has one row, whatever `--rows` says. Each kind is loaded twice, so that the ratio of a
kind to itself says how far noise alone goes. Medians of rounds; exits with 1 if the logits differ.
"""

from __future__ import annotations

import argparse
import statistics
import time
from importlib import resources
from pathlib import Path
from unittest import mock

import torch

from paceline import memory
from paceline.core import ForwardBatch
from paceline.kv.cache import KVCache
from paceline.kv.store import PAGE_SIZE
from paceline.models.families.gemma4.target import GemmaTarget
from paceline.models.registry import load_target
from paceline.ops.native import NativeRunner

KINDS = ("ordinary", "huge", "ordinary again", "huge again")
WARM, TIMED = 4, 10  # forwards of a turn


class Loaded:
    """The target, with texts of `context` tokens in its cache."""

    def __init__(self, huge: bool, context: int, texts: int, longest: int) -> None:
        zeros = memory.Arena.zeros if huge else lambda own, count: torch.zeros(count, dtype=torch.uint8)
        with mock.patch.object(memory.Arena, "zeros", zeros):
            path = Path(str(resources.files("paceline") / "demo" / "target"))
            self.target: GemmaTarget = load_target(path, runner=NativeRunner())
            self.target.runner.prepare([self.target.hidden_graph, self.target.logits_graph])
            pages = texts * (-(-(context + longest) // PAGE_SIZE) + 1)
            self.cache = KVCache(
                self.target.layout, dict.fromkeys(self.target.layout.kinds, pages), max_sequences=texts,
                max_tokens=context + longest, dtype=self.target.kv_dtype,
            )  # fmt: skip
        self.tokens = [5 + 37 * i % 8000 for i in range(context + longest)]
        self.context, self.texts = context, texts
        for text in range(texts):
            self.cache.open(text, self.tokens, share=False)
            with self.cache.tail([(text, self.tokens[:context])]) as tail:
                self.target.forward(tail.rows(), self.cache)
                tail.commit([context])

    def rows(self, count: int) -> ForwardBatch:
        new = self.tokens[self.context : self.context + count]
        with self.cache.tail([(text, new) for text in range(self.texts)]) as tail:
            return tail.rows()

    def logits(self, rows: ForwardBatch) -> torch.Tensor:
        return self.target.logits(self.target.forward(rows, self.cache))

    def seconds(self, rows: ForwardBatch) -> float:
        taken = []
        for _ in range(WARM + TIMED):
            begin = time.perf_counter()
            self.logits(rows)
            taken.append(time.perf_counter() - begin)
        return statistics.median(taken[WARM:])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--texts", type=int, default=1)
    args = parser.parse_args()
    if min(args.rounds, args.context, args.texts, *args.rows) < 1:
        parser.error("rounds, context, rows and texts are 1 or more")
    if why := memory.why_not():
        parser.error(why)
    counts = args.rows if args.texts == 1 else [1]
    with torch.inference_mode():
        all_loaded = [Loaded("huge" in kind, args.context, args.texts, max(counts)) for kind in KINDS]
        for count in counts:
            rows = [loaded.rows(count) for loaded in all_loaded]
            first, *others = (own.logits(r).clone() for own, r in zip(all_loaded, rows, strict=True))
            if not all(torch.equal(first, other) for other in others):
                raise SystemExit("the logits differ")
            turns = []
            for turn in range(args.rounds):
                order = range(len(KINDS)) if turn % 2 else reversed(range(len(KINDS)))
                taken = {i: all_loaded[i].seconds(rows[i]) for i in order}
                turns.append([taken[i] for i in range(len(KINDS))])
            ratios = [statistics.median(turn[i] / turn[0] for turn in turns) for i in range(len(KINDS))]
            said = "  ".join(f"{kind} {ratio:.3f}" for kind, ratio in zip(KINDS, ratios, strict=True))
            plain = statistics.median(turn[0] for turn in turns)
            print(f"{args.texts} x {count} rows  {1e3 * plain:.2f} ms  {said}", flush=True)


if __name__ == "__main__":
    main()
