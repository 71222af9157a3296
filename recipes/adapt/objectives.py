"""Which objective trains the best drafter? Same start, same batches, equal steps, three seeds, judged in the engine.

    python objectives.py WORK --target demo/target [--config assistant-config.json] [--steps 160] [--seeds 3]

One file per run in WORK/runs, so an interrupted experiment goes on; `table.md`, `curves.svg` and `results.json` are
written from whatever runs are there. The target's states are computed once per seed and shared by all objectives.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import domain
import torch

from paceline.train import GemmaAssistant, TargetTeacher, TrainOptions, Windows, pack
from paceline.train.compare import compare, open_engine, prompts_of
from paceline.train.data import DataReport, encode_records, read_records
from paceline.train.encoding import TargetEncoder
from paceline.train.export import export
from paceline.train.loop import Run
from paceline.train.methods.base import Exported
from paceline.train.methods.gemma_assistant.files import set_head
from paceline.train.parallel import Captured
from paceline.train.plot import line_chart

OBJECTIVES = ("ce", "kl", "tv", "lk", "hybrid", "ce-tv")


class RememberingTeacher(TargetTeacher):
    """Keeps what it has captured: every objective sees the same batches."""

    def __init__(self, teacher: TargetTeacher) -> None:
        super().__init__(teacher.target, kv=True)
        self._seen: dict[str, Captured] = {}

    def capture(self, windows: Windows) -> Captured:
        key = windows.fingerprint
        if key not in self._seen:
            self._seen[key] = super().capture(windows)
        return self._seen[key]

    def forget(self) -> None:
        self._seen.clear()


def windows_of(target: Path, path: Path, length: int) -> tuple[Windows, list[list[int]]]:
    """Packed texts of a file, and prompts from them."""
    report = DataReport()
    texts = encode_records(read_records([path], report), TargetEncoder(target), length, report)
    return pack(texts, length), prompts_of(texts, 1000, most=48)


def one_run(
    name: str, seed: int, teacher: RememberingTeacher, data: tuple[Windows, Windows], a: argparse.Namespace
) -> dict[str, Any]:
    """Train with one objective and seed, then write held-out texts in the engine."""
    torch.manual_seed(seed)
    options = TrainOptions(
        objective=name, weights=a.weights, steps=a.steps, batch=a.batch, length=a.length, anchors=a.anchors, lr=a.lr,
        seed=seed, draft_tokens=a.draft_tokens, eval_every=max(1, a.steps // 3), eval_windows=8, save_every=10**9,
    )  # fmt: skip
    init: Any = json.loads(a.config.read_text()) if a.config else "scratch"
    if isinstance(init, dict):
        init["use_ordered_embeddings"] = False  # a dense head: the objectives differ, not the clusters
    method = GemmaAssistant()
    start = method.start(teacher, data[0], a.assistant or init, seed)
    folder = a.work / "runs" / f"{name}-{seed}"
    run = Run(start.module, teacher, *data, options, folder)
    history = run.go().state.history
    start.config["use_ordered_embeddings"] = False
    export(
        method, set_head(start.module, None), folder, Exported(start.config, a.draft_tokens, torch.float32)
    )
    engine = open_engine(a.target, {name: folder}, a.draft_tokens, "cpu")
    scores = compare(engine, [name], a.held_prompts[: a.prompts], a.tokens)[name]
    (folder / "state.safetensors").unlink(missing_ok=True)
    return {
        "objective": name, "seed": seed,
        "engine": {f"{t:g}": s.tokens_per_step for t, s in scores.items()},
        "curve": [(e["step"], e["held_out"]) for e in history if "held_out" in e],
    }  # fmt: skip


def report(work: Path) -> str:
    """Table and plot of all runs that are there."""
    runs = [json.loads(p.read_text()) for p in sorted((work / "runs").glob("*/result.json"))]
    by_name: dict[str, list[dict[str, Any]]] = {}
    for found in runs:
        by_name.setdefault(found["objective"], []).append(found)
    lines = ["| objective | seeds | tokens per step, T=0 | T=1 | mean |", "| --- | --- | --- | --- | --- |"]
    rows = []
    for name, found in by_name.items():
        cells = {t: [r["engine"][t] for r in found] for t in ("0", "1")}
        mean = statistics.mean(cells["0"] + cells["1"])
        shown = " | ".join(f"{statistics.mean(v):.3f} ± {_spread(v):.3f}" for v in cells.values())
        rows.append((-mean, f"| {name} | {len(found)} | {shown} | {mean:.3f} |"))
    lines += [row for _, row in sorted(rows)]
    series = {name: _mean_curve(found) for name, found in by_name.items()}
    (work / "curves.svg").write_text(
        line_chart("Held-out tokens per step (mean of T=0 and 1)", "training step", series)
    )
    (work / "results.json").write_text(json.dumps(runs, indent=1) + "\n")
    text = "\n".join(lines) + "\n"
    (work / "table.md").write_text(text)
    return text


def _spread(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _mean_curve(found: list[Mapping[str, Any]]) -> list[tuple[float, float]]:
    points: dict[int, list[float]] = {}
    for one in found:
        for step, held in one["curve"]:
            points.setdefault(step, []).append((held["greedy_tokens"] + held["sampled_tokens"]) / 2)
    return [(float(step), statistics.mean(values)) for step, values in sorted(points.items())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument(
        "--config", type=Path, help="config.json of the assistant to make; default: what fits the target"
    )
    parser.add_argument("--assistant", type=Path, help="start from this one instead of from scratch")
    parser.add_argument("--objectives", nargs="+", default=list(OBJECTIVES))
    parser.add_argument("--weights", default="decay")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0, help="so that two processes can share the work")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--anchors", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=48)
    a = parser.parse_args()
    if not (a.work / "data" / "old-held.jsonl").exists():
        domain.main(a.work / "data", train=1500)
    train, _ = windows_of(a.target, a.work / "data" / "old.jsonl", a.length)
    held, a.held_prompts = windows_of(a.target, a.work / "data" / "old-held.jsonl", a.length)
    teacher = RememberingTeacher(GemmaAssistant().teacher(a.target))
    for seed in range(a.first_seed, a.seeds):
        teacher.forget()
        for name in a.objectives:
            path = a.work / "runs" / f"{name}-{seed}" / "result.json"
            if path.exists():
                continue
            found = one_run(name, seed, teacher, (train, held), a)
            path.write_text(json.dumps(found) + "\n")
            print(f"{name} seed {seed}: {found['engine']}", flush=True)
            print(report(a.work), flush=True)


if __name__ == "__main__":
    main()
