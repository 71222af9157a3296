"""Measure what the drafter of a pair is worth and store it beside its weights: `paceline_calibration.json`.

    python recipes/demo/calibrate.py src/paceline/demo

The target writes from the held-out prompts through paceline itself, greedily and at temperature 0.8, and every draft
counts: acceptance by position, and how often a token of a given confidence is kept. (`paceline train` writes the same
file from held-out texts; a corpus is not what the target says, so its acceptance is a little lower.)
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from common import RecipeError, run_main, say, write_json

from paceline.control.acceptance import USUAL
from paceline.control.base import RowOutcome, StepOutcome
from paceline.control.confidence import BINS
from paceline.control.fixed import FixedPolicy
from paceline.core import SamplingParams
from paceline.llm import LLM
from paceline.startup.calibration_file import FILE_NAME, VERSION, Known

DRAFT, TEMPERATURE = 4, 0.8
ENOUGH = 24  # drafts
PRIOR = 4.0  # drafts that the usual acceptance of such a drafter counts for


class Recorder(FixedPolicy):
    """Drafts a fixed number and remembers what became of it."""

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.rows: list[RowOutcome] = []

    def observe(self, outcome: StepOutcome) -> None:
        self.rows += [row for row in outcome.rows if row.drafted]


def summarise(rows: list[RowOutcome]) -> Known | None:
    """Acceptance by position, drawn to the usual one as far as the evidence is thin, and confidence bins."""
    if len(rows) < ENOUGH:
        return None
    acceptance = []
    for j in range(DRAFT):
        tried = sum(row.drafted > j and row.accepted >= j for row in rows)
        kept = sum(row.accepted > j for row in rows)
        acceptance.append((kept + PRIOR * USUAL[j]) / (tried + PRIOR))
    calibrator = [[0.0, 0.0] for _ in range(BINS)]
    for row in rows:
        for j, value in enumerate(row.confidence[: row.accepted + 1]):
            if 0.0 <= value <= 1.0:
                counted = calibrator[min(int(value * BINS), BINS - 1)]
                counted[0] += j < row.accepted
                counted[1] += 1.0
    return Known(tuple(acceptance), tuple([(kept, tried) for kept, tried in calibrator]))


def measure(llm: LLM, prompts: list[list[int]], new: int, temperature: float) -> dict[str, Any]:
    """What became of all drafts of one temperature."""
    recorder = Recorder(DRAFT)
    llm.engine.state.policy = recorder
    for i, prompt in enumerate(prompts):
        llm.generate(prompt, SamplingParams(max_tokens=new, temperature=temperature, seed=i, drafter="mtp"))
    known, drafts = summarise(recorder.rows), len(recorder.rows)
    if known is None:
        raise RecipeError(f"only {drafts} drafts at temperature {temperature:g}: give more prompts")
    say(f"temperature {temperature:g}: {drafts} drafts, {known.acceptance[0]:.3f} of first tokens kept")
    return {
        "acceptance": [round(a, 5) for a in known.acceptance],
        "bins": [[round(kept, 3), round(tried, 3)] for kept, tried in known.bins],
        "drafts": drafts,
    }


def calibrate(pair: Path, prompts: Path, new: int) -> None:
    """Write the file of the pair in `pair` (folders target and assistant)."""
    llm = LLM(str(pair / "target"), drafter=str(pair / "assistant"), draft_tokens=DRAFT, threads=1)
    texts = [json.loads(line)["prompt"] for line in prompts.read_text(encoding="utf-8").splitlines()]
    longest = llm.info["max_model_len"] - new - 1
    ids = [llm.tokenizer.encode(text)[:longest] for text in texts]
    found = {
        "version": VERSION,
        **measure(llm, ids, new, 0.0),
        "sampled": measure(llm, ids, new, TEMPERATURE) | {"temperature": TEMPERATURE},
    }
    write_json(pair / "assistant" / FILE_NAME, found)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pair", type=Path, help="folder with target and assistant")
    parser.add_argument(
        "--prompts", type=Path, help="JSONL with `prompt`; default: heldout.jsonl of the pair"
    )
    parser.add_argument("--new", type=int, default=96, help="tokens of each text")
    args = parser.parse_args()
    calibrate(args.pair, args.prompts or args.pair / "heldout.jsonl", args.new)
    return 0


if __name__ == "__main__":
    run_main(main)
