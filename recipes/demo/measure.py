"""Measure the shipped pair with the engine, and compare its greedy text with transformers.

    python recipes/demo/measure.py [--prompts 60] [--new 128] [--parity 20] [--parity-new 200]

Everything in float32 on the CPU, 4 drafted tokens, prompts from the package's heldout.jsonl.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from common import RecipeError, run_main, say

DEMO = Path(__file__).resolve().parents[2] / "src/paceline/demo"


def held_out(count: int) -> list[str]:
    """The first prompts of the package data."""
    path = DEMO / "heldout.jsonl"
    if not path.exists():
        raise RecipeError("heldout.jsonl is missing: run build.py first")
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line)["prompt"] for line in lines if line][:count]


def engine(drafter: str, steps: int) -> Any:
    """The engine on the shipped pair."""
    from paceline import LLM

    return LLM(str(DEMO / "target"), drafter=drafter, dtype="float32", draft_tokens=steps, device="cpu")


def acceptance(drafter: str, prompts: list[str], new: int) -> None:
    """Print mean tokens per target step and acceptance by position."""
    from paceline import SamplingParams

    source = {"mtp": str(DEMO / "assistant"), "model": str(DEMO / "draft")}.get(drafter, drafter)
    llm = engine(source, 4)
    for heat in (0.0, 0.8):
        params = SamplingParams(
            max_tokens=new, temperature=heat, seed=1, ignore_eos=True, verify="match", drafter=drafter
        )
        stats = [llm.generate(prompt, params)[0].stats for prompt in prompts]
        steps, emitted = sum(s.steps for s in stats), sum(s.emitted for s in stats)
        drafted, accepted = [0] * 4, [0] * 4
        for s in stats:
            for k, (d, a) in enumerate(zip(s.drafted_by_position, s.accepted_by_position, strict=False)):
                drafted[k] += d
                accepted[k] += a
        by = ", ".join(f"{a / d:.3f}" if d else "-" for a, d in zip(accepted, drafted, strict=True))
        say(
            f"engine {drafter} T={heat:g}: {emitted / steps:.3f} tokens per step ({emitted}/{steps}), "
            f"accepted/drafted by position {by}"
        )


def parity(prompts: list[str], new: int) -> int:
    """Greedy text of transformers against the engine, without and with the drafter; returns the differences."""
    import torch
    from transformers import AutoTokenizer, Gemma4ForCausalLM

    from paceline import SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
    model = Gemma4ForCausalLM.from_pretrained(DEMO / "target", dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    params = SamplingParams(max_tokens=new, ignore_eos=True)
    plain, drafted = engine("none", 4), engine(str(DEMO / "assistant"), 4)
    different = 0
    for number, prompt in enumerate(prompts, 1):
        ids = tokenizer(prompt, return_tensors="pt")
        row = model.generate(**ids, max_new_tokens=new, do_sample=False)[0]
        wanted = row[ids["input_ids"].shape[1] :].tolist()
        same = [list(llm.generate(prompt, params)[0].token_ids) == wanted for llm in (plain, drafted)]
        different += not all(same)
        if not all(same) or number == len(prompts):
            say(f"parity: prompt {number}: plain {same[0]}, drafted {same[1]}; {different} differ so far")
    return different


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--parity", type=int, default=20)
    parser.add_argument("--parity-new", type=int, default=200)
    args = parser.parse_args()
    different = parity(held_out(args.parity), args.parity_new) if args.parity else 0
    for drafter in ("mtp", "model", "ngram") if args.prompts else ():
        acceptance(drafter, held_out(args.prompts), args.new)
    return 1 if different else 0


if __name__ == "__main__":
    run_main(main)
