"""What a drafter that fits nothing costs: `draft_tokens="auto"` beside an engine over the same weights that never drafts.

    python recipes/policy/never_slower.py [--prompts 10] [--tokens 256] [--threads 2] [--drafters shuffled random]

`shuffled` is the bundled drafter of SmolLM2 with the rows of its matrices in another order, `random` an EAGLE-3 drafter
whose weights nobody trained, `own` the bundled one as it is. Both engines write the held-out questions of
recipes/smollm2/heldout.txt in turns of some tokens, so what the machine does to one it does to the other. The first two
steps of a turn are not counted: the caches hold what the other engine read. The texts must be equal.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from paceline import LLM
from paceline.core import SamplingParams
from paceline.engine.engine import Engine
from paceline.hub.resolve import SMOLLM2_DRAFTER
from paceline.memory import freeze_objects

PROMPTS = Path(__file__).parents[1] / "smollm2" / "heldout.txt"
TURN, COLD = 16, 2  # tokens of a turn, and its steps that are not counted
WARM_UP = "Name three colours."


def broken(kind: str, folder: Path) -> str:
    """A drafter as `kind` says, written below `folder`; the bundled one for `own`."""
    if kind == "own":
        return str(SMOLLM2_DRAFTER)
    where = folder / kind
    where.mkdir()
    (where / "config.json").write_bytes((SMOLLM2_DRAFTER / "config.json").read_bytes())
    chance = torch.Generator().manual_seed(1)
    tensors = load_file(SMOLLM2_DRAFTER / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() != 2:
            continue
        if kind == "shuffled":
            tensors[name] = tensor[torch.randperm(len(tensor), generator=chance)].contiguous()
        else:
            drawn = torch.randn(tensor.shape, generator=chance) * tensor.shape[1] ** -0.5
            tensors[name] = drawn.to(tensor.dtype)
    save_file(tensors, where / "model.safetensors")
    return str(where)


class Side:
    """One engine: its clock, and what it has written."""

    def __init__(self, engine: Engine, drafter: str) -> None:
        self.engine, self.drafter = engine, drafter
        self.ids: list[int] = []
        self.trace: list[tuple[int, float]] = []  # (tokens of the text, seconds) after each step that counts
        self.seconds = 0.0

    def begin(self, prompt: list[int], params: dict[str, object]) -> None:
        self.ids, self.trace, self.seconds = [], [], 0.0
        self.engine.add("text", prompt, SamplingParams(drafter=self.drafter, **params))  # type: ignore[arg-type]
        while not self.ids:
            self.step()

    def step(self) -> float:
        begin = time.perf_counter()
        deltas = self.engine.step()
        taken = time.perf_counter() - begin
        for delta in deltas:
            self.ids += delta.token_ids
        return taken

    def turn(self, until: int) -> tuple[int, float]:
        """(tokens that count, their seconds)"""
        steps, begin, seconds = 0, len(self.ids), 0.0
        while self.engine.has_work and len(self.ids) < until:
            taken = self.step()
            steps += 1
            if steps <= COLD:
                begin = len(self.ids)
            else:
                seconds += taken
        return len(self.ids) - begin, seconds


def question(sides: list[Side], prompt: list[int], params: dict[str, object], first: int) -> float:
    """Speed of the drafting side over the plain one's, over one text."""
    for side in sides:
        side.begin(prompt, params)
    tokens, seconds = [0, 0], [0.0, 0.0]
    most, number = int(str(params["max_tokens"])), first
    while any(side.engine.has_work for side in sides):
        until = min(min(len(side.ids) for side in sides) + TURN, most)
        for i in (0, 1) if number % 2 else (1, 0):
            got, took = sides[i].turn(until)
            tokens[i] += got
            seconds[i] += took
        number += 1
    if sides[0].ids != sides[1].ids:
        raise SystemExit("two drafters gave two texts: run `paceline check smollm2`")
    return (tokens[0] / seconds[0]) / (tokens[1] / seconds[1])


def main() -> None:
    said = argparse.ArgumentParser()
    said.add_argument("--prompts", type=int, default=10)
    said.add_argument("--tokens", type=int, default=256)
    said.add_argument("--threads", type=int, default=None)
    said.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    said.add_argument(
        "--drafters", nargs="+", choices=["shuffled", "random", "own"], default=["shuffled", "random"]
    )
    args = said.parse_args()
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()[: args.prompts]
    with tempfile.TemporaryDirectory() as folder:
        for kind in args.drafters:
            drafter = broken(kind, Path(folder))
            for temperature in args.temperatures:
                # made anew for each row of the table, so that each finds out for itself
                with LLM(
                    "smollm2", drafter=drafter, max_model_len=1024, threads=args.threads, profile_dir="none"
                ) as llm:
                    freeze_objects()  # as the commands do: a full collection takes a third of a text's time
                    report(llm, kind, lines, temperature, args.tokens)


def report(llm: LLM, kind: str, lines: list[str], temperature: float, tokens: int) -> None:
    engine = llm.engine
    sides = [Side(engine, str(llm.info["drafter"])), Side(engine.twin(), "none")]
    ratios = []
    for i, line in enumerate([WARM_UP, *lines]):
        prompt, _ = llm.render([{"role": "user", "content": line.replace("\\n", "\n")}])
        most = TURN if i == 0 else tokens
        params = {"max_tokens": most, "temperature": temperature, "seed": i, "ignore_eos": True}
        ratio = question(sides, prompt, params, i)
        ratios += [ratio] if i else []
    each = " ".join(f"{ratio:.3f}" for ratio in ratios)
    mean = statistics.harmonic_mean(ratios)
    print(
        f"{kind} T={temperature:g}: auto over plain {mean:.3f} in all, median {statistics.median(ratios):.3f}, "
        f"worst {min(ratios):.3f}; each: {each}",
        flush=True,
    )


if __name__ == "__main__":
    main()
