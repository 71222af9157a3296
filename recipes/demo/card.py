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
    config, drafter = read_json(out / "target/config.json"), read_json(out / "assistant/config.json")
    small = read_json(out / "draft/config.json")
    state = torch.load(work / "distil/drafter.pt", weights_only=False)
    curve, s_curve = report["curve"], report["draft_curve"]
    return (
        (HERE / "card_template.md")
        .read_text(encoding="utf-8")
        .format(
            parts=parts,
            millions=millions,
            cores=cores,
            layers=config["num_hidden_layers"],
            window=config["sliding_window"],
            shared=config["num_kv_shared_layers"],
            vocab=config["vocab_size"],
            hidden=config["hidden_size"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            global_head_dim=config["global_head_dim"],
            context=config["max_position_embeddings"],
            d_layers=drafter["text_config"]["num_hidden_layers"],
            d_hidden=drafter["text_config"]["hidden_size"],
            centroids=drafter["num_centroids"],
            top_k=drafter["centroid_intermediate_top_k"],
            searched=config["vocab_size"]
            // drafter["num_centroids"]
            * drafter["centroid_intermediate_top_k"],
            s_hidden=small["hidden_size"],
            s_layers=small["num_hidden_layers"],
            seen=curve[-1][1] / 1e6,
            minutes=curve[-1][0],
            d_minutes=state["elapsed"] / 60,
            d_steps=state["count"],
            d_batch=report["drafter_batch"],
            s_seen=s_curve[-1][1] / 1e6,
            bpb=curve[-1][2],
            s_bpb=s_curve[-1][2],
            curve_last="48 windows of 1,024 tokens, spread evenly",
            prompts=report["prompts"],
            shortest=report["shortest"],
            longest=report["longest"],
            new=report["new"],
            acceptance=acceptance_rows(report),
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
