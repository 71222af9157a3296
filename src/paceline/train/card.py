"""The model card of a trained drafter, written from the run."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.train.compare import Comparison
from paceline.train.loop import RunResult
from paceline.train.methods.base import CardText
from paceline.train.options import TrainOptions
from paceline.train.plot import line_chart
from paceline.train.rounds import Acceptance

CURVES_FILE = "curves.svg"


@dataclass(slots=True)
class Story:
    """What the card says."""

    card_text: CardText
    target: str
    init: str
    command: str
    options: TrainOptions
    result: RunResult
    before: Acceptance
    after: Acceptance
    data: Mapping[str, str] = field(default_factory=dict)  # file -> fingerprint
    data_line: str = ""
    comparison: Comparison | None = None
    note: str = ""  # of the method, on what was made
    calibration: Mapping[str, Any] | None = None
    version: str = ""


def versions(version: str) -> str:
    return f"paceline {version}, torch {torch.__version__}, Python {platform.python_version()}"


def curves(history: Seq[Mapping[str, Any]]) -> str:
    """Held-out acceptance by position over the steps, as SVG."""
    seen = [(entry["step"], entry["held_out"]) for entry in history if "held_out" in entry]
    steps = len(seen[0][1]["greedy"]) if seen else 0
    series = {f"position {i + 1}": [(step, held["greedy"][i]) for step, held in seen] for i in range(steps)}
    series["position 1, T=1"] = [(step, held["sampled"][0]) for step, held in seen if held["sampled"]]
    return line_chart("Held-out acceptance by draft position", "training step", series)


def write_card(story: Story) -> str:
    """README.md of the drafter's folder."""
    parts = [
        _front(story),
        f"# {story.card_text.title} for {story.target}",
        "Made with `paceline train`. It drafts tokens that the target checks: it can change the speed of a text, never "
        f"the text. {story.card_text.loads}",
        f"## Acceptance\n\n{_held_out(story)}",
        *_real(story),
        f"![acceptance by position]({CURVES_FILE})",
        f"## How it was made\n\n```\n{story.command}\n```\n\n{_how(story)}",
        f"## Data\n\n{story.data_line}\n\n{_table(('file', 'sha256'), list(story.data.items()))}",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front(story: Story) -> str:
    return f"---\nbase_model: {story.target}\ntags: [{story.card_text.tags}]\n---"


def _table(head: Seq[str], rows: Seq[Seq[object]]) -> str:
    if not rows:
        return ""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _held_out(story: Story) -> str:
    """Teacher-forced acceptance before and after."""
    rows = []
    for name, seen in (("before", story.before), ("after", story.after)):
        by_position = " ".join(f"{x:.3f}" for x in seen.greedy)
        sampled = " ".join(f"{x:.3f}" for x in seen.sampled)
        rows.append((name, by_position, sampled, f"{seen.greedy_tokens:.3f}", f"{seen.sampled_tokens:.3f}"))
    head = ("", "agreement by position", "1 - TV by position", "tokens per step, T=0", "T=1")
    return f"On held-out text, teacher-forced, {story.after.rounds} rounds:\n\n{_table(head, rows)}"


def _real(story: Story) -> list[str]:
    """The comparison in the engine, if there was one."""
    if story.comparison is None:
        return []
    rows = [
        (
            name,
            f"{temperature:g}",
            f"{s.tokens_per_step:.3f}",
            " ".join(f"{a:.3f}" for a in s.acceptance()),
            len(s.by_prompt),
        )
        for name, scores in story.comparison.items()
        for temperature, s in scores.items()
    ]
    head = ("drafter", "temperature", "tokens per target step", "acceptance by position", "texts")
    return [f"In the engine, same prompts and seeds, taking turns:\n\n{_table(head, rows)}"]


def _how(story: Story) -> str:
    options, result = story.options, story.result
    lines = [
        f"- started from: {story.init}",
        f"- objective `{options.objective}`, position weights `{options.weights}`, "
        f"{options.draft_tokens} draft steps unrolled",
        f"- {result.state.step} updates of {options.batch * options.accumulate} windows of {options.length} tokens, "
        f"{options.optimizer}, learning rate {options.lr:g}, seed {options.seed}; the best evaluation was at step "
        f"{result.state.best_step} ({result.stopped})",
        f"- {versions(story.version)}",
    ]
    if story.note:
        lines.append(f"- {story.note}")
    if story.calibration is not None:
        error = story.calibration["calibration_error"]
        lines.append(
            f"- confidence: held-out calibration error {error['raw']:.4f} as it is, {error['fitted']:.4f} as fitted"
        )
    return "\n".join(lines)
