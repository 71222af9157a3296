"""Which texts differ from plain decoding, and who is right: a reference in float64 decides at the first other token.

    python recipes/engines/judge.py [--work FOLDER]

For each cell: is plain decoding itself deterministic (asked twice)? Which drafted texts differ from it? At the
first differing token the reference, transformers in float64 on the same weights, reads the common text. The *gap*
is how far, in nats, the lesser of the two tokens lies below the reference's best. Rounding may turn over what lies
close together. So an engine's own *reach* is measured: how far below the reference's best its plain texts ever go.
A gap within twice the reach (and at least 0.05 nats) is a near-tie, one beyond it a plain error. Greedy cells only.
Sampled texts are compared where an engine keeps seeds; their differences have no gap.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from draft import Files, prepare
from engines import PLAIN
from questions import questions
from run import CONTEXT, DEFAULT_WORK, Cell

from paceline import LLM

LEAST_REACH = 0.05  # nats
REACH_TEXTS = 12  # plain texts of an engine that its reach is taken from


@dataclass(frozen=True)
class Results:
    """One file of results."""

    cell: Cell
    header: dict[str, Any]
    texts: dict[str, list[int]]
    seconds: float

    @property
    def key(self) -> tuple[str, str, float]:
        return self.cell.engine, self.cell.model, self.cell.temperature

    @property
    def is_baseline(self) -> bool:
        """Plain decoding, one request at a time, asked first: what all others are compared with."""
        return self.cell.mode == PLAIN and self.cell.parallel == 1 and not self.cell.repeat


def read(path: Path) -> Results:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    answers = [line for line in lines[1:] if "id" in line]
    texts = {line["id"]: line["tokens"] for line in answers}
    return Results(Cell(**lines[0]["cell"]), lines[0], texts, sum(line["seconds"] for line in answers))


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two texts part; the end of one text is a token of its own. None: they are equal."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return None if len(one) == len(other) else min(len(one), len(other))


class Reference:
    """transformers in float64, on the weights of a model's folder."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._prompts: dict[str, list[int]] = {}

    @cached_property
    def model(self) -> Any:
        import transformers

        return transformers.AutoModelForCausalLM.from_pretrained(
            self._files.folder, dtype=torch.float64
        ).eval()

    @cached_property
    def prompts(self) -> dict[str, list[int]]:
        llm = LLM(str(self._files.gguf), drafter="none", native=False)
        return {a.id: [*llm.render([{"role": "user", "content": a.text}])[0]] for a in questions(1000)}

    def words(self, ids: Sequence[int]) -> str:
        return LLM(str(self._files.gguf), drafter="none", native=False).tokenizer.decode(list(ids))

    @torch.inference_mode()
    def gaps(self, question: str, text: Sequence[int]) -> list[float]:
        """Nats of each token of `text` below the reference's best at its place."""
        prompt = self.prompts[question]
        logits = self.model(torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(text)[:, None])[:, 0]
        gaps: list[float] = (logits.amax(1) - chosen).tolist()
        return gaps

    @torch.inference_mode()
    def gap(self, question: str, common: Sequence[int], pair: Sequence[int]) -> float:
        """How far the lesser of two tokens lies below the best, behind the common text."""
        logits = self.model(torch.tensor([[*self.prompts[question], *common]])).logits[0, -1]
        return float(logits.max() - logits[list(pair)].min())


def differences(plain: Results, drafted: Results) -> Iterator[tuple[str, int]]:
    for name, text in drafted.texts.items():
        if name in plain.texts and (at := first_difference(plain.texts[name], text)) is not None:
            yield name, at


def judge(plain: Results, drafted: Results, reference: Reference, reach: float) -> dict[str, Any]:
    """One row of the table, with its worst example."""
    found = []
    for name, at in differences(plain, drafted):
        pair = [text[at] for text in (plain.texts[name], drafted.texts[name]) if at < len(text)]
        gap = (
            reference.gap(name, plain.texts[name][:at], pair)
            if plain.cell.temperature == 0 and len(pair) == 2
            else None
        )
        found.append({"question": name, "at": at, "gap": gap})
    worst = max(found, key=lambda d: d["gap"] if d["gap"] is not None else -1, default=None)
    if worst is not None:
        at, name = worst["at"], worst["question"]
        worst = worst | {
            "plain": reference.words(plain.texts[name][max(0, at - 8) : at + 8]),
            "drafted": reference.words(drafted.texts[name][max(0, at - 8) : at + 8]),
        }
    limit = max(LEAST_REACH, 2 * reach)
    return {
        **drafted.header["cell"],
        "version": drafted.header["version"],
        "asked": len(drafted.texts),
        "tokens": sum(map(len, drafted.texts.values())),
        "seconds": drafted.seconds,
        "plain_seconds": plain.seconds * len(drafted.texts) / max(1, len(plain.texts)),
        "differing": len(found),
        "near_ties": sum(d["gap"] is not None and d["gap"] <= limit for d in found),
        "errors": sum(d["gap"] is not None and d["gap"] > limit for d in found),
        "without_gap": sum(d["gap"] is None for d in found),
        "reach": reach,
        "worst": worst,
    }


def reach_of(plain: Results, reference: Reference) -> float:
    """How far below the reference's best the engine's own plain, greedy texts go."""
    texts = list(plain.texts.items())[:REACH_TEXTS]
    return max((max(reference.gaps(name, text)) for name, text in texts if text), default=0.0)


def rows(work: Path) -> Iterator[dict[str, Any]]:
    paths = sorted((work / "results").glob("*.jsonl"))
    failed = [json.loads(p.read_text(encoding="utf-8").split("\n", 1)[0]) for p in paths]
    yield from ({**f["cell"], "failed": f["failed"]} for f in failed if "failed" in f)
    there = [read(p) for p, f in zip(paths, failed, strict=True) if "failed" not in f]
    for model in sorted({r.cell.model for r in there}):
        files = prepare(model, work)
        assert files is not None, f"{model} has results and no files: run `run.py ask` again"
        reference = Reference(files)
        own = [r for r in there if r.cell.model == model]
        plains = {r.key: r for r in own if r.is_baseline}
        reaches = {key: reach_of(r, reference) for key, r in plains.items() if not r.cell.temperature}
        for drafted in (r for r in own if r.key in plains and not r.is_baseline):
            print(drafted.cell.file_name, flush=True)
            yield judge(plains[drafted.key], drafted, reference, reaches.get(drafted.key, 0.0))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK)
    given = parser.parse_args()
    judged = {"context": CONTEXT, "rows": list(rows(given.work))}
    (given.work / "judged.json").write_text(json.dumps(judged, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
