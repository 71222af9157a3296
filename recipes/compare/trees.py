"""Trees of drafts beside chains with as many target rows: tokens a step, and what a step costs.

    python recipes/compare/trees.py [--target demo] [--rows 6 8 12] [--texts 8] [--tokens 96]
    python recipes/compare/trees.py --shape gemma-4-e2b [--quantize int4] [--rows 8] [--rounds 40]

The first writes texts of three workloads, greedily and sampled, with a fixed number of rows in each step: one of the text
and those of the draft. It times nothing. The second needs no checkpoint: a model of a published shape with random weights
does steps with a chain and with a tree in turn. It says how long the target took and how long the drafter, by medians.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator

from paceline.assembly import build_engine
from paceline.bench.synthetic import random_prompts, synthetic_engine
from paceline.bench.workloads import Bounds, prompts
from paceline.config import EngineConfig
from paceline.control.base import StepOutcome
from paceline.control.fixed import FixedPolicy
from paceline.core import MAX_DRAFT_TOKENS, SamplingParams
from paceline.engine.engine import Engine
from paceline.engine.forced import ForcedAcceptance
from paceline.tree import Shape

WORKLOADS = ("code", "prose", "json")
LONGEST = 512


def shapes(nodes: int) -> Iterator[Shape | None]:
    """A chain, then trees that so many tokens fill."""
    yield None
    for depth, width in ((2, 2), (2, 4), (3, 2), (3, 3), (4, 2), (4, 3), (4, 4), (6, 2), (6, 4), (11, 4)):
        if min(depth, 6) <= nodes <= depth * width:
            yield Shape(depth, width)


def tokens_a_step(args: argparse.Namespace) -> None:
    engine = build_engine(
        EngineConfig(
            target=args.target, drafter=args.drafter, draft_tree="6x4", max_model_len=LONGEST, draft_tokens=4
        )
    )
    assert engine.tokenizer is not None
    bounds = Bounds(64, engine.state.target.vocab_size)
    for temperature in (0.0, 0.8):
        print(f"temperature {temperature:g}: tokens a step of {', '.join(WORKLOADS)}")
        for rows in args.rows:
            for shape in shapes(rows - 1):
                engine.state.tree = shape
                params = SamplingParams(
                    max_tokens=args.tokens,
                    temperature=temperature,
                    seed=1,
                    draft_tokens=rows - 1,
                    ignore_eos=True,
                )
                found = []
                for name in WORKLOADS:
                    texts = prompts(name, engine.tokenizer, bounds, args.texts)
                    done = engine.run({str(i): (prompt.tokens, params) for i, prompt in enumerate(texts)})
                    stats = [texts[0].stats for texts in done.values()]
                    found.append(sum(s.emitted for s in stats) / sum(s.steps for s in stats))
                what = "chain" if shape is None else f"tree {shape.depth}x{shape.width}"
                each = "  ".join(f"{value:5.2f}" for value in found)
                print(f"  {rows:2} rows  {what:9}  {each}  mean {statistics.mean(found):5.2f}", flush=True)


class Turns(FixedPolicy):
    """Drafts a chain and a tree of as many tokens in turn, and keeps what each step took."""

    def __init__(self, nodes: int) -> None:
        super().__init__(nodes)
        self.engine: Engine
        self.shape: Shape | None = None
        self.seconds: dict[Shape | None, list[tuple[float, float]]] = {}

    def observe(self, outcome: StepOutcome) -> None:
        if outcome.drafted == self.k and not outcome.prefill_rows and outcome.timed:
            drafting = sum(outcome.draft_seconds.values())
            self.seconds.setdefault(self.engine.state.tree, []).append((outcome.target_seconds, drafting))
        self.engine.state.tree = None if self.engine.state.tree else self.shape


def seconds_of_a_step(args: argparse.Namespace) -> None:
    options = {
        "quantize": args.quantize,
        "drafter": "mtp",
        "draft_tree": "6x4",
        "draft_tokens": 4,
        "max_batch": 1,
    }
    engine = synthetic_engine(args.shape, ForcedAcceptance((0.0,)), options, print)
    (prompt,) = random_prompts(engine.state.target.vocab_size, 1)
    for rows in args.rows:
        for shape in [shape for shape in shapes(rows - 1) if shape is not None]:
            policy = Turns(rows - 1)
            policy.engine, policy.shape = engine, shape
            engine.state.policy, engine.state.tree = policy, None
            params = SamplingParams(max_tokens=2 * args.rounds + 4, ignore_eos=True, draft_tokens=rows - 1)
            engine.run({"a": (prompt.tokens, params)})
            (target, drafting), (target_tree, drafting_tree) = (
                [statistics.median(column) for column in zip(*policy.seconds[which][1:], strict=True)]
                for which in (None, shape)
            )
            print(
                f"{rows} rows: chain {1e3 * target:.2f} ms + {1e3 * drafting:.2f} ms of drafting, tree "
                f"{shape.depth}x{shape.width} {1e3 * target_tree:.2f} ms + {1e3 * drafting_tree:.2f} ms: target "
                f"{target_tree / target:.3f}, all {(target_tree + drafting_tree) / (target + drafting):.3f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="demo")
    parser.add_argument("--drafter", default="mtp")
    parser.add_argument("--rows", type=int, nargs="+", default=[6, 8, 12])
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--shape", help="of `paceline bench --shape`")
    parser.add_argument("--quantize", choices=["int8", "int4"])
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    if not all(3 <= rows <= MAX_DRAFT_TOKENS + 1 for rows in args.rows):
        parser.error(
            f"--rows counts one row of the text and those of its draft: give 3 to {MAX_DRAFT_TOKENS + 1}"
        )
    (tokens_a_step if args.shape is None else seconds_of_a_step)(args)


if __name__ == "__main__":
    main()
