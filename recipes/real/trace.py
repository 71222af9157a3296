"""What a draft model says at every position of what its target writes: the raw material of `recipes/policy/replay.py`.

    python recipes/real/trace.py TARGET DRAFTER --out traces.json [--tokens 128] [--depth 8] [--temperatures 0 0.8]

For each question the target writes its own text, one token a step, and at each position the drafter drafts `--depth`
tokens. Kept are, by position, how many of them the target would have kept, and the drafter's confidences.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from pair_questions import QUESTIONS

from paceline import LLM, SamplingParams
from paceline.control.fixed import FixedPolicy
from paceline.core import Draft
from paceline.drafters.base import DraftContext, Drafter
from paceline.engine.engine import Engine
from paceline.engine.forced import ForcedAcceptance


class Listener(Drafter):
    """Asks another drafter, and writes down what it says: position, tokens, confidences."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.heard = drafter, list[tuple[int, list[int], list[float]]]()
        self.name, self.max_tokens, self.needs_hidden = drafter.name, drafter.max_tokens, drafter.needs_hidden

    def draft(self, context: DraftContext) -> Draft:
        draft = self.drafter.draft(context)
        self.heard.append((len(context.sequences[0].tokens), draft.tokens[0], draft.confidence[0]))
        return draft

    def forget(self, sequence_id: int) -> None:
        self.drafter.forget(sequence_id)


def agreed(heard: tuple[int, list[int], list[float]], text: list[int]) -> tuple[int, int]:
    """(how many drafted tokens the target kept, how many there is an answer for)"""
    at, tokens, _ = heard
    known = min(len(tokens), len(text) - at)
    kept = 0
    while kept < known and tokens[kept] == text[at + kept]:
        kept += 1
    return kept, known


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("drafter")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--questions", type=int, default=len(QUESTIONS), help="ask the first ones only")
    args = parser.parse_args()
    traces: list[dict[str, Any]] = []
    with LLM(
        args.target, drafter=args.drafter, draft_tokens=args.depth, threads=args.threads, max_model_len=1024
    ) as llm:
        listener = Listener(llm.engine.parts.drafters["model"])
        never = ForcedAcceptance((0.0,))  # nothing is kept, so that every position is drafted at
        parts = replace(
            llm.engine.parts, drafters={"model": listener}, default_drafter="model", policy=FixedPolicy(args.depth),
            forced=never, draft_tokens=args.depth,
        )  # fmt: skip
        engine = Engine(parts)
        for temperature in args.temperatures:
            for i, (kind, question) in enumerate(QUESTIONS[: args.questions]):
                prompt, _ = llm.render([{"role": "user", "content": question}])
                sampling = {"temperature": temperature, "top_p": 0.95 if temperature else 1.0, "seed": i}
                params = SamplingParams(max_tokens=args.tokens + args.depth + 1, ignore_eos=True, **sampling)
                listener.heard = []
                done = engine.run({"text": (prompt, params)})["text"][0]
                text = [*prompt, *done.token_ids]
                steps = [(*agreed(one, text), [round(c, 3) for c in one[2]]) for one in listener.heard]
                steps = [step for step in steps if step[1] == args.depth][: args.tokens]
                traces.append(
                    {"temperature": temperature, "kind": kind, "question": i}
                    | {"kept": [step[0] for step in steps], "confidence": [step[2] for step in steps]}
                )
                args.out.write_text(json.dumps(traces))
                mean = sum(traces[-1]["kept"]) / len(steps)
                print(
                    f"T={temperature:g} {kind} {i}: {len(steps)} positions, {mean:.2f} of {args.depth} kept",
                    flush=True,
                )


if __name__ == "__main__":
    main()
