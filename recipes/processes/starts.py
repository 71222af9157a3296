"""Starts many processes over small random models of all families, and compares the bits that they compute.

    nice -n 19 python recipes/processes/starts.py --starts 1000 [--only gemma4-dense qwen3] [--plain] [--out starts.json]

The processes of a model go through the circumstances of `paceline check --processes`: threads, profiles, a busy
neighbour, pictures first, preemption, a killed one, a stopped one. `--plain` has plain torch instead of the native
kernels. A model's processes are not started again once they stand in `--out`. Exits with 1 if one of them computed other
bits. Needs the extra `dev`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tiny

from paceline.check import processes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--starts", type=int, default=1000, help="of all models together")
    parser.add_argument("--only", nargs="+", choices=tiny.names(), default=tiny.names(), metavar="NAME")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("starts.json"))
    args = parser.parse_args()
    done: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    each = max(2, -(-args.starts // len(args.only)))
    for at, name in enumerate(args.only):
        key = f"{name}{' plain' if args.plain else ''} {each}"
        if key not in done:
            done[key] = started(name, each, args.plain, at)
            args.out.write_text(json.dumps(done, indent=1) + "\n")
        print(f"{key}: {done[key]['outcome']}, {done[key]['words']} {done[key]['counts']}", flush=True)
    total = sum(one["counts"]["processes"] for one in done.values())
    wrong = [key for key, one in done.items() if one["outcome"] != "holds"]
    print(f"{total} processes, {len(wrong)} models with other bits {' '.join(wrong)}")
    return int(bool(wrong))


def started(name: str, count: int, plain: bool, begin: int) -> dict[str, Any]:
    seen = processes.Starts()
    with tempfile.TemporaryDirectory() as scratch:
        order = tiny.build(name, Path(scratch))
        if plain:
            options = {key: value for key, value in order.options.items() if key != "activations"}
            order = replace(order, options={**options, "native": False})
        processes.compare(order, count, seen, begin=begin)
    found = processes.finding(seen)
    return {"outcome": found.outcome, "words": found.words, "counts": dict(found.counts), **found.covered,
            "arithmetic": seen.arithmetic, "where": seen.different}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
