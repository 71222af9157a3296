"""The whole story: fine-tune a copy of a target, see its drafter lag behind, adapt the drafter, measure again.

    python adapt.py WORK --target demo/target --assistant demo/assistant [--minutes 4] [--steps 200]

Every stage leaves a file in WORK and is skipped when that file is there, so an interrupted run goes on. The adaptation
is the product's own command on data of both domains; `measured.json` and `table.md` hold the result.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import domain

from paceline.train.compare import compare, open_engine, prompts_of
from paceline.train.data import DataReport, encode_records, read_records
from paceline.train.encoding import TargetEncoder

HERE = Path(__file__).resolve().parent


def run(*command: str) -> None:
    """A command that must succeed."""
    print("$", " ".join(command), flush=True)
    subprocess.run(command, check=True)


def held_prompts(target: Path, path: Path, count: int) -> list[list[int]]:
    """Beginnings of held-out texts, 48 tokens each."""
    report = DataReport()
    texts = encode_records(read_records([path], report), TargetEncoder(target), 160, report)
    return prompts_of(texts, count, most=48)


def measure(target: Path, drafters: dict[str, Path], work: Path, a: argparse.Namespace) -> dict[str, Any]:
    """Tokens per step by drafter, domain and temperature."""
    engine = open_engine(target, drafters, a.draft_tokens, "cpu")
    out: dict[str, Any] = {name: {} for name in drafters}
    for place in ("new", "old"):
        prompts = held_prompts(target, work / "data" / f"{place}-held.jsonl", a.prompts)
        for name, scores in compare(engine, list(drafters), prompts, a.tokens).items():
            out[name][place] = {
                f"{t:g}": {
                    "tokens_per_step": s.tokens_per_step,
                    "acceptance": s.acceptance(),
                    "by_prompt": s.by_prompt,
                }
                for t, s in scores.items()
            }
    return out


def table(found: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        "| target | drafter | new domain, T=0 | T=1 | old domain, T=0 | T=1 |", "| --- | --- | --- | --- | --- | --- |"
    ]  # fmt: skip
    for target, drafters in found.items():
        for name, places in drafters.items():
            cells = [f"{places[p][t]['tokens_per_step']:.3f}" for p in ("new", "old") for t in ("0", "1")]
            lines.append(f"| {target} | {name} | {' | '.join(cells)} |")
    before, after = found["fine-tuned"]["stock"], found["fine-tuned"]["adapted"]
    lines.append("")
    for place in ("new", "old"):
        gains = [
            after[place][t]["tokens_per_step"] / before[place][t]["tokens_per_step"] - 1 for t in ("0", "1")
        ]
        lines.append(f"{place} domain, adapted against stock: T=0 {gains[0]:+.1%}, T=1 {gains[1]:+.1%}")
    return "\n".join(lines) + "\n"


def fine_tune(a: argparse.Namespace, out: Path) -> None:
    """A copy of the target that has learnt the new domain, in `out`."""
    data = str(a.work / "data" / "new.jsonl")
    script = str(HERE / "finetune.py")
    run(sys.executable, script, str(a.target), data, str(out), "--minutes", str(a.minutes))


def adapt(a: argparse.Namespace, target: Path, out: Path) -> None:
    """The product's own command: the stock drafter, fitted to `target` on data of both domains."""
    options: dict[str, object] = {
        "init": a.assistant, "out": out, "steps": a.steps, "batch": a.batch, "length": a.length,
        "anchors": a.anchors, "lr": a.lr, "draft-tokens": a.draft_tokens, "eval-every": 50, "save-every": 25,
        "eval-windows": 8, "compare-prompts": 0, "device": "cpu",
    }  # fmt: skip
    command = [sys.executable, "-c", "from paceline.cli import main; main()", "train", str(target)]
    for name in ("new", "old"):
        command += ["--data", str(a.work / "data" / f"{name}.jsonl")]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    run(*command, *(["--regenerate"] if a.regenerate else []))


def options() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--assistant", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=4.0, help="of fine-tuning")
    parser.add_argument("--steps", type=int, default=200, help="of adaptation")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=192)
    parser.add_argument("--anchors", type=int, default=48)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--regenerate", action="store_true")
    return parser.parse_args()


def main() -> None:
    a = options()
    tuned, out = a.work / "tuned", a.work / "adapted"
    if not (a.work / "data" / "old-held.jsonl").exists():
        domain.main(a.work / "data")
    if not (tuned / "config.json").exists():
        fine_tune(a, tuned)
    if not (out / "config.json").exists():
        adapt(a, tuned, out)
    found = {
        "stock": measure(a.target, {"stock": a.assistant}, a.work, a),
        "fine-tuned": measure(tuned, {"stock": a.assistant, "adapted": out}, a.work, a),
    }
    (a.work / "measured.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (a.work / "table.md").write_text(table(found), encoding="utf-8")
    print(table(found))


if __name__ == "__main__":
    main()
