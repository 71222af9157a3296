"""Write MODEL_CARD.md from a finished work folder: every number in it comes from a file there.

python recipes/demo/card.py --work DIR
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from common import HERE, read_json, run_main, write_text
from safetensors import safe_open


def weights_of(folder: Path) -> tuple[int, int]:
    """Trained parameters and bytes of a folder's weights."""
    count = size = 0
    for path in sorted(folder.glob("*.safetensors")):
        size += path.stat().st_size
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                if "layer_scalar" not in name and "ordering" not in name:
                    count += file.get_tensor(name).numel()
    return count, size


def acceptance_rows(report: dict[str, Any]) -> str:
    """The acceptance table."""
    rows = []
    for heat in ("T=0", "T=0.8"):
        for kind, found in report[heat].items():
            by = ", ".join("-" if a is None else f"{a:.2f}" for a in found["acceptance_by_position"])
            rows.append(f"| {heat} | {kind} | {found['tokens_per_step']:.2f} | {by} |")
    return "\n".join(rows)


def sample_blocks(report: dict[str, Any]) -> str:
    """Prompt tails and continuations as code blocks."""
    blocks = []
    for sample in report["samples"]:
        tail = sample["prompt"][-200:]
        blocks.append(
            f"`{sample['id']}`, the prompt ends with\n\n```python\n{tail}\n```\n\nand the model goes on\n\n"
            f"```python\n{sample['text']}\n```"
        )
    return "\n\n".join(blocks)


def engine_lines(work: Path) -> str:
    """What measure.py printed, kept in WORK/measure.log."""
    path = work / "measure.log"
    if not path.exists():
        return "(not measured)"
    lines = [line[9:] for line in path.read_text(encoding="utf-8").split("\n")]
    return "\n".join(line for line in lines if line.startswith(("engine", "parity")))


def part_rows(out: Path) -> tuple[str, float]:
    """The table of parts, and the target's size in millions."""
    rows, millions = [], 0.0
    for name, kind in (
        ("target", "Gemma 4 text"),
        ("assistant", "Gemma 4 assistant"),
        ("draft", "Gemma 4 text"),
    ):
        count, size = weights_of(out / name)
        millions = count / 1e6 if name == "target" else millions
        rows.append(f"| `{name}` | {kind} | {count:,} | {size / 1e6:.2f} MB |")
    return "\n".join(rows), millions


def fill(work: Path, cores: str) -> str:
    """The finished card."""
    out, report = work / "out", read_json(work / "report.json")
    parts, millions = part_rows(out)
    target, drafter, small = (
        read_json(out / name / "config.json") for name in ("target", "assistant", "draft")
    )
    state = torch.load(work / "distil/drafter.pt", weights_only=False)
    per_centroid = target["vocab_size"] // drafter["num_centroids"]
    return (
        (HERE / "card_template.md")
        .read_text(encoding="utf-8")
        .format(
            parts=parts,
            millions=millions,
            cores=cores,
            t=target,
            d=drafter,
            s=small,
            r=report,
            searched=per_centroid * drafter["centroid_intermediate_top_k"],
            seen=report["curve"][-1][1] / 1e6,
            minutes=report["curve"][-1][0],
            s_seen=report["draft_curve"][-1][1] / 1e6,
            s_bpb=report["draft_curve"][-1][2],
            d_minutes=state["elapsed"] / 60,
            d_steps=state["count"],
            acceptance=acceptance_rows(report),
            engine=engine_lines(work),
            samples=sample_blocks(report),
        )
    )


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--cores", default="two shared x86-64 cores", help="the machine, in words")
    args = parser.parse_args()
    write_text(HERE / "MODEL_CARD.md", fill(args.work, args.cores))
    return 0


if __name__ == "__main__":
    run_main(main)
