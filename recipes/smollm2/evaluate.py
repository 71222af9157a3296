"""The drafter in the engine on the held-out prompts: tokens a step, kept by position, the same text as without it.

python recipes/smollm2/evaluate.py [--drafter DIR] [--prompts 60]
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

from paceline import LLM
from paceline.core import SamplingParams, Stats

PROMPTS = Path(__file__).with_name("heldout.txt")


def main() -> None:
    said = argparse.ArgumentParser()
    said.add_argument("--drafter", default="auto")
    said.add_argument("--prompts", type=int, default=60)
    said.add_argument("--tokens", type=int, default=128)
    said.add_argument("--drafted", type=int, default=3)
    said.add_argument("--threads", type=int, default=None)
    args = said.parse_args()
    lines = [line.replace("\\n", "\n") for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    chats = [[{"role": "user", "content": line}] for line in lines[: args.prompts]]
    with LLM(
        "smollm2", drafter=args.drafter, max_model_len=512, threads=args.threads, draft_tokens=args.drafted
    ) as llm:
        network = str(llm.info["drafter"]).partition("+")[0]
        for temperature in (0.0, 0.8):
            texts = {}
            for drafter in ("none", network):
                each = [SamplingParams(max_tokens=args.tokens, temperature=temperature, seed=i, drafter=drafter)
                        for i in range(len(chats))]  # fmt: skip
                done = llm.chat(chats, each)
                texts[drafter] = [one.token_ids for one in done]
                print(f"T={temperature:g} {drafter}: {summary([one.stats for one in done])}", flush=True)
            assert len({str(t) for t in texts.values()}) == 1, (
                "two drafters gave two texts: run `paceline check smollm2`"
            )


def summary(all_stats: list[Stats]) -> str:
    steps, emitted = sum(s.steps for s in all_stats), sum(s.emitted for s in all_stats)
    drafted, kept = [0] * 16, [0] * 16
    for s in all_stats:
        for j, (d, k) in enumerate(
            itertools.zip_longest(s.drafted_by_position, s.accepted_by_position, fillvalue=0)
        ):
            drafted[j], kept[j] = drafted[j] + d, kept[j] + k
    shares = [f"{k / d:.3f}" for d, k in zip(drafted, kept, strict=True) if d]
    return f"{emitted / steps:.3f} tokens a step ({emitted} in {steps}); kept of drafted by position {' '.join(shares)}"


if __name__ == "__main__":
    main()
