"""The rules of verification and trees of drafts on SmolLM2 at the temperatures that people use: tokens a step.

python recipes/smollm2/temperatures.py [--drafter DIR] [--prompts 60] [--tokens 128] [--rules match reject]

It counts tokens and measures no time, so the machine need not be quiet. Each row says what share of the tokens drafted at
a position was kept. Under `match` the texts must be those without a drafter; under `reject` and `block` they are other
draws from the same distribution.
"""

from __future__ import annotations

import argparse

from evaluate import PROMPTS, summary

from paceline import LLM
from paceline.core import SamplingParams

RULES = ("match", "reject", "block")


def main() -> None:
    said = argparse.ArgumentParser()
    said.add_argument("--drafter", default="auto")
    said.add_argument("--prompts", type=int, default=60)
    said.add_argument("--tokens", type=int, default=128)
    said.add_argument("--drafted", type=int, default=3)
    said.add_argument("--tree", default="3x3", help="as many rows as --drafted allows are filled from it")
    said.add_argument("--temperatures", type=float, nargs="+", default=[0.6, 0.8, 1.0])
    said.add_argument("--top-p", type=float, default=0.95)
    said.add_argument("--rules", nargs="+", choices=[*RULES, "tree"], default=[*RULES, "tree"])
    said.add_argument(
        "--unchecked", action="store_true", help="do not compare texts with those without a drafter"
    )
    said.add_argument("--threads", type=int, default=None)
    args = said.parse_args()
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()[: args.prompts]
    chats = [[{"role": "user", "content": line.replace("\\n", "\n")}] for line in lines]
    for tree, rules in (
        (None, [rule for rule in RULES if rule in args.rules]),
        (args.tree, ["match"] if "tree" in args.rules else []),
    ):
        if not rules:
            continue
        options = {"drafter": args.drafter, "max_model_len": 512, "threads": args.threads, "draft_tree": tree}
        with LLM("smollm2", draft_tokens=args.drafted, profile_dir="none", **options) as llm:
            network = str(llm.info["drafter"]).partition("+")[0]
            for temperature in args.temperatures:
                for rule in rules:
                    texts, line = write(llm, chats, (temperature, args), (network, rule))
                    print(
                        f"T={temperature:g} top_p={args.top_p:g} {rule}{f' tree {tree}' if tree else ''}: {line}",
                        flush=True,
                    )
                    if rule == "match" and not args.unchecked:
                        plain, _ = write(llm, chats, (temperature, args), ("none", rule))
                        assert texts == plain, "two drafters gave two texts: run `paceline check smollm2`"


def write(
    llm: LLM, chats: list[list[dict[str, str]]], how: tuple[float, argparse.Namespace], by: tuple[str, str]
) -> tuple[list[list[int]], str]:
    """The texts of all chats, and how many tokens a step they took. by: (drafter, rule)."""
    temperature, args = how
    each = [
        SamplingParams(max_tokens=args.tokens, temperature=temperature, top_p=args.top_p, seed=i, drafter=by[0],
                       verify=by[1])
        for i in range(len(chats))
    ]  # fmt: skip
    done = llm.chat(chats, each)
    return [one.token_ids for one in done], summary([one.stats for one in done])


if __name__ == "__main__":
    main()
