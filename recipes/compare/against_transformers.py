"""Plain and MTP decoding of the bundled pair against transformers' `generate()`: one text, greedy, interleaved.

    python recipes/compare/against_transformers.py [--rounds 5] [--prompts 4] [--tokens 128]

Both run float32 arithmetic on the same weights and threads. Prints tokens/s (medians of rounds) and ratios, checks
that all texts are equal, and exits with 1 if they are not. Needs transformers 5.22.x.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from importlib import resources

import torch
import transformers
from transformers import AutoModelForCausalLM

from paceline import LLM, SamplingParams
from paceline.provenance import provenance


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    demo = resources.files("paceline") / "demo"
    lines = (demo / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[: args.prompts]
    ours = LLM("demo", drafter="mtp", draft_tokens=4, max_model_len=1024, activations="float32")  # as theirs
    theirs = AutoModelForCausalLM.from_pretrained(str(demo / "target"), dtype=torch.float32)
    prompts = [ours.tokenizer.encode(json.loads(line)["prompt"]) for line in lines]
    params = {"max_tokens": args.tokens, "ignore_eos": True}
    plain, mtp = SamplingParams(**params, drafter="none"), SamplingParams(**params, drafter="mtp")

    def generate(ids: list[int]) -> list[int]:
        out = theirs.generate(
            torch.tensor([ids]), max_new_tokens=args.tokens, min_new_tokens=args.tokens, do_sample=False
        )
        return out[0, len(ids) :].tolist()  # type: ignore[no-any-return]

    ways = {
        "transformers": generate,
        "paceline none": lambda ids: ours.generate([ids], plain)[0].token_ids,
        "paceline mtp": lambda ids: ours.generate([ids], mtp)[0].token_ids,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    texts: dict[str, list[list[int]]] = {}
    for turn in range(args.rounds + 1):  # the first round warms up
        for name, way in ways.items():
            begin = time.perf_counter()
            texts[name] = [way(ids) for ids in prompts]
            if turn:
                seconds[name].append(time.perf_counter() - begin)
    total = args.tokens * args.prompts
    base = statistics.median(seconds["transformers"])
    for name, taken in seconds.items():
        middle = statistics.median(taken)
        print(f"{name:14} {total / middle:8.1f} tokens/s   {base / middle:6.2f} times transformers")
    same = texts["transformers"] == texts["paceline none"] == texts["paceline mtp"]
    print(f"texts equal: {same} ({len(prompts)} prompts of {args.tokens} tokens)")
    print(
        json.dumps(provenance(" ".join(sys.argv)) | {"transformers": transformers.__version__}, default=str)
    )
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
