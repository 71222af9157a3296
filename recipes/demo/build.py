"""Build the `demo` pair from nothing: corpus, tokenizer, target, drafter, draft model, evaluation, export.

    python recipes/demo/build.py --work DIR [--minutes 110] [--out src/paceline/demo] [--smoke]

Run the same command again after an interruption: finished stages are kept,
training goes on from its checkpoint.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from calibrate import calibrate
from common import RecipeError, need_space, read_json, run_main, say, write_json
from corpus import gather
from distil import DistilPlan, DrafterRun, centroid_head, distil_draft, load_target
from drafter import DrafterShape
from evaluate import acceptance, excerpts, heldout_prompts, samples, write_heldout
from export import check_export, export_drafter, export_text, folder_sizes
from model import Shape
from pretrain import Plan, bits_per_byte, pretrain
from tokenizer import encode_split, train_tokenizer

LIMIT = 64 << 20


@dataclass(frozen=True)
class Settings:
    """One size of the recipe."""

    smoke: bool = False
    minutes: float = 110.0
    target: Shape = field(default_factory=Shape)
    draft: Shape = field(
        default_factory=lambda: Shape(
            hidden=128, inner=384, layers=4, period=4, shared=0, head_dim=32, global_head_dim=64
        )
    )
    drafter: DrafterShape = field(default_factory=DrafterShape)
    phases: tuple[tuple[float, int, int], ...] = Plan.phases
    draft_phases: tuple[tuple[float, int, int], ...] = ((0.3, 16, 128), (0.9, 12, 256), (1.0, 4, 512))
    rows: int = 6
    length: int = 257
    own_rows: int = 48
    prompts: int = 60
    new: int = 128

    def share(self, part: float) -> float:
        """Minutes of a stage."""
        return self.minutes * part


def smoke_settings() -> Settings:
    """Everything at its smallest: about a minute on two cores, no network."""
    big = Shape(
        vocab=1024,
        hidden=64,
        inner=128,
        layers=6,
        period=3,
        shared=3,
        heads=2,
        kv_heads=1,
        head_dim=16,
        global_head_dim=32,
        window=32,
        context=256,
    )
    small = Shape(
        vocab=1024,
        hidden=32,
        inner=64,
        layers=2,
        period=2,
        shared=0,
        heads=2,
        kv_heads=1,
        head_dim=16,
        global_head_dim=32,
        window=32,
        context=256,
    )
    phases = ((0.8, 16, 64), (1.0, 2, 128))
    return Settings(
        smoke=True,
        minutes=0.5,
        target=big,
        draft=small,
        phases=phases,
        draft_phases=phases,
        drafter=DrafterShape(hidden=32, inner=64, layers=2, centroids=16, top_k=4),
        rows=4,
        length=33,
        own_rows=8,
        prompts=3,
        new=16,
    )


class Build:
    """The stages over one work folder."""

    def __init__(self, work: Path, settings: Settings) -> None:
        self.work, self.settings = work, settings
        need_space(work, 64 if settings.smoke else 2048)
        marker = work / "settings.json"
        wanted = {**asdict(settings), "phases": [list(p) for p in settings.phases]}
        wanted["draft_phases"] = [list(p) for p in settings.draft_phases]
        wanted["target"].pop("kinds"), wanted["draft"].pop("kinds")
        if marker.exists() and read_json(marker) != wanted:
            raise RecipeError(
                "the work folder is from another config; choose another --work or use its settings"
            )
        write_json(marker, wanted)

    def texts(self) -> None:
        """Corpus, tokenizer, token files."""
        s = self.settings
        index = gather(self.work, smoke=s.smoke)
        self.tokenizer = train_tokenizer(self.work, s.target.vocab, length=s.target.context)
        if self.tokenizer.get_vocab_size() != s.target.vocab:
            raise RecipeError(
                f"the tokenizer has {self.tokenizer.get_vocab_size()} entries, not {s.target.vocab}"
            )
        self.train = encode_split(self.work, "train", self.tokenizer)
        self.held = encode_split(self.work, "held", self.tokenizer)
        self.ratio = index["bytes"]["held"] / len(self.held)

    def models(self) -> None:
        """Target, small draft model (pretrained), drafter and draft model distilled."""
        s, held = self.settings, self.held
        plan = Plan(minutes=s.share(0.53), phases=s.phases)
        pretrain(self.work / "target", s.target, plan, self.train, held, self.ratio)
        small = Plan(minutes=s.share(0.15), phases=s.draft_phases, rates=(0.02, 0.004, 0.004), seed=2)
        pretrain(self.work / "draft", s.draft, small, self.train, held, self.ratio)
        target = self.work / "target/checkpoint.pt"
        distil = DistilPlan(minutes=s.share(0.22), rows=s.rows, length=s.length, own_rows=s.own_rows)
        run = DrafterRun(self.work / "distil", target, s.drafter, distil, self.train)
        if run.elapsed < distil.minutes * 60:
            run.train(distil.minutes - run.elapsed / 60)
        self.once("head.pt", lambda: centroid_head(run, s.share(0.02)))
        if not (self.work / "distil/draft.pt").exists():
            plan_draft = DistilPlan(
                minutes=s.share(0.08),
                rows=s.rows,
                length=s.length,
                own_rows=s.own_rows,
                rates=(0.006, 0.001, 0.002),
                seed=4,
            )
            distil_draft(
                self.work / "distil", target, plan_draft, self.train, self.work / "draft/checkpoint.pt"
            )

    def once(self, name: str, make: Callable[[], Any]) -> None:
        """Keep the result of a short stage in the distil folder."""
        path = self.work / "distil" / name
        if not path.exists():
            value = make()
            temporary = path.with_suffix(".tmp")
            torch.save(value, temporary)
            os.replace(temporary, path)

    def load(self) -> None:
        """The finished weights."""
        self.target, _, _ = load_target(self.work / "target/checkpoint.pt")
        state = torch.load(self.work / "distil/drafter.pt", weights_only=False)
        self.drafter = state["params"] | torch.load(self.work / "distil/head.pt", weights_only=False)
        self.draft, _, _ = load_target(self.work / "distil/draft.pt")

    def evaluate(self) -> None:
        """Acceptance on held-out prompts, with weights rounded as they are shipped."""
        s = self.settings
        prompts = heldout_prompts(self.work, self.tokenizer, s.prompts)
        write_heldout(self.work / "heldout.jsonl", prompts)
        write_heldout(self.work / "heldout_text.jsonl", excerpts(self.work))
        limit = s.target.context - s.new - 1
        ids = [torch.tensor(self.tokenizer.encode(p["prompt"]).ids[:limit]) for p in prompts]
        rounded = [
            {k: v.to(torch.bfloat16).float() if v.is_floating_point() else v for k, v in params.items()}
            for params in (self.target, self.drafter, self.draft)
        ]
        big, small, draft = (rounded[0], s.target), (rounded[1], s.drafter), (rounded[2], s.draft)
        report = acceptance(big, small, draft, ids, s.new)
        report |= {
            "prompts": len(ids),
            "shortest": min(map(len, ids)),
            "longest": max(map(len, ids)),
            "new": s.new,
            "drafter_batch": s.rows * (s.length - 1),
            "samples": samples(rounded[0], s.target, self.tokenizer, prompts, s.new),
        }
        report["bits_per_byte"] = {
            "target": bits_per_byte(rounded[0], s.target, self.held, self.ratio, rows=48),
            "draft": bits_per_byte(rounded[2], s.draft, self.held, self.ratio, rows=48),
        }
        report["curve"] = read_json(self.work / "target/curve.json")
        report["draft_curve"] = read_json(self.work / "draft/curve.json")
        write_json(self.work / "report.json", report)

    def export(self) -> Path:
        """Write the three folders into work/out and load them back."""
        s, out, words = self.settings, self.work / "out", self.work / "tokenizer"
        export_text(out / "target", self.target, s.target, words, {})
        export_text(
            out / "draft", self.draft, s.draft, words, {"num_assistant_tokens": s.drafter.steps}, capped=False
        )
        export_drafter(out / "assistant", self.drafter, s.drafter, s.target, words)
        gap = check_export(out / "target", self.target, s.target)
        for name in ("heldout.jsonl", "heldout_text.jsonl"):
            shutil.copyfile(self.work / name, out / name)
        if not s.smoke:  # a pair of a minute's training is worth no calibration
            calibrate(out, out / "heldout.jsonl", 96)
        weights = sum(size for name, size in folder_sizes(out).items() if name.endswith(".safetensors"))
        if weights > LIMIT:
            raise RecipeError(f"the weights take {weights >> 20} MiB, more than {LIMIT >> 20}")
        say(f"export: {weights / 1e6:.1f} MB of weights, transformers agrees within {gap:.1e}")
        return out


def publish(source: Path, out: Path, replace: bool) -> None:
    """Copy the finished folders to their place; an older pair is only replaced when asked for."""
    if (out / "target").exists() and not replace:
        raise RecipeError(f"{out} already has a pair; pass --replace to put the new one there")
    need_space(out, 64)
    for path in sorted(source.rglob("*")):
        if path.is_file():
            place = out / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            temporary = place.with_name(f".{place.name}.tmp")
            shutil.copyfile(path, temporary)
            os.replace(temporary, place)
    say(f"published to {out}")


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for corpus, checkpoints and results")
    parser.add_argument("--minutes", type=float, default=None, help="training time of all stages together")
    parser.add_argument(
        "--out", type=Path, default=None, help="where to publish (default: stays in WORK/out)"
    )
    parser.add_argument("--replace", action="store_true", help="let --out replace an older pair")
    parser.add_argument("--smoke", action="store_true", help="the smallest setting: a minute, no network")
    args = parser.parse_args()
    settings = smoke_settings() if args.smoke else Settings()
    if args.minutes is not None:
        if args.minutes <= 0:
            raise RecipeError("--minutes must be positive")
        settings = Settings(**{**settings.__dict__, "minutes": args.minutes})
    torch.manual_seed(0)
    build = Build(args.work, settings)
    for number, (name, stage) in enumerate(
        (
            ("corpus and tokenizer", build.texts),
            ("training", build.models),
            ("loading", build.load),
            ("evaluation", build.evaluate),
        ),
        1,
    ):
        say(f"stage {number} of 5: {name}")
        stage()
    say("stage 5 of 5: export")
    out = build.export()
    if args.out:
        publish(out, args.out, args.replace)
    return 0


if __name__ == "__main__":
    run_main(main)
