"""Decoding of the bundled pair with keys and values as pairs of bfloat16, beside float32: one process, in turns.

    python recipes/compare/packed_cache.py [--rounds 8] [--workload code] [--batch 1 4 16] [--draft-tokens 0]

Greedy texts as `paceline bench` writes them, both engines with the same draft length (0: plain decoding). The ratio is
that of their speeds, the median of rounds with its quartiles.
"""

from __future__ import annotations

import argparse
from unittest import mock

from paceline.assembly import build_engine
from paceline.bench import runner, workloads
from paceline.bench.stats import spread
from paceline.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.ops import native

TOKENS, LONGEST = 128, 1024


def load(batch: int, draft_tokens: int, packed: bool) -> Engine:
    config = EngineConfig(
        target="demo",
        drafter="mtp+ngram",
        draft_tokens=draft_tokens,
        max_batch=2 * batch,
        max_model_len=LONGEST,
    )
    if packed:
        return build_engine(config)
    with mock.patch.object(native.NativeRunner, "packs", return_value=False):
        return build_engine(config)


def compare(batch: int, args: argparse.Namespace) -> str:
    engine, other = (load(batch, args.draft_tokens, packed) for packed in (True, False))
    assert engine.state.cache.packed
    assert not other.state.cache.packed
    bounds = workloads.Bounds(
        engine.state.target.vocab_size, LONGEST - TOKENS - 1, engine.tokenizer.special_ids
    )
    setting = runner.Setting("mtp+ngram" if args.draft_tokens else "none", args.draft_tokens)
    cell = runner.Cell(args.workload, batch, 0.0)
    bench = runner.Bench(
        engine,
        other,
        lambda name, count: workloads.prompts(name, engine.tokenizer, bounds, count),
        (cell,),
        (setting,),
        TOKENS,
        args.rounds,
        least=args.seconds,
    )
    with mock.patch.object(runner, "NONE", setting):  # what the other engine writes with
        runs = [runner.run_beside(bench, cell, setting, number) for number in range(args.rounds)]
    ratio = spread([run.ratio for run, _ in runs])
    plain = spread([beside.speed for _, beside in runs]).median
    said = f"x{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
    return f"{batch:3} texts  float32 {plain:7.0f} tokens/s  packed {said}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--workload", choices=sorted(workloads.WORKLOADS), default="code")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--draft-tokens", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1.0, help="that a round lasts at least")
    args = parser.parse_args()
    if min(args.rounds, *args.batch) < 1 or not 0 <= args.draft_tokens <= 16 or args.seconds < 0:
        parser.error("rounds and batch are 1 or more, draft-tokens 0 to 16, seconds 0 or more")
    if not (native.available() and native.bf16_dot()):
        parser.error("this CPU does not multiply pairs of bfloat16 (AVX512-BF16)")
    for batch in args.batch:
        print(compare(batch, args), flush=True)


if __name__ == "__main__":
    main()
