"""Two ranks of one thread against one process of two threads: tokens a second, plain and with the drafter.

    python recipes/cluster/tensor_parallel.py [--target demo] [--ranks 2] [--threads 2] [--turns 3] [--tokens 96]

Each turn loads both, one after the other; medians count. Needs a quiet machine with a core for each thread.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

from paceline import LLM

PROMPTS = ["def parse(self, text):\n    ", "The reason why leaves are green is that"]


def rate(target: str, ranks: int, threads: int, tokens: int) -> tuple[float, float]:
    """Tokens a second: (plain decoding, with the drafter)."""
    options = {"max_model_len": 512, "profile_dir": None}
    with LLM(target, tensor_parallel=ranks, threads=threads, **options) as llm:  # type: ignore[arg-type]
        out = []
        for drafter in ("none", None):
            llm.generate(PROMPTS[0], max_tokens=8, drafter=drafter)
            begin = time.perf_counter()
            done = [llm.generate(p, max_tokens=tokens, ignore_eos=True, drafter=drafter) for p in PROMPTS]
            out.append(sum(len(c.token_ids) for (c,) in done) / (time.perf_counter() - begin))
    return out[0], out[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="demo")
    for name, default in (("--ranks", 2), ("--threads", 2), ("--turns", 3), ("--tokens", 96)):
        parser.add_argument(name, type=int, default=default)
    given = parser.parse_args()
    seen: dict[int, list[tuple[float, float]]] = {1: [], given.ranks: []}
    for _ in range(given.turns):
        for ranks, rates in seen.items():
            rates.append(rate(given.target, ranks, given.threads, given.tokens))
    print(f"{given.target}, {given.threads} threads in all, medians of {given.turns} turns")
    base = [median(part) for part in zip(*seen[1], strict=True)]
    for ranks, rates in seen.items():
        plain, drafted = (median(part) for part in zip(*rates, strict=True))
        print(
            f"{ranks} rank{'s' * (ranks > 1)}: {plain:.1f} tokens/s plain ({plain / base[0]:.2f}), "
            f"{drafted:.1f} with the drafter ({drafted / base[1]:.2f})"
        )


if __name__ == "__main__":
    main()
