"""One call from token windows to a drafter folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.models.config import read_config
from paceline.train.calibration import Calibration
from paceline.train.capture import TargetTeacher, load_teacher
from paceline.train.checkpoint import write_atomic
from paceline.train.export import Exported, export, scratch_config
from paceline.train.finish import judge, rebuild_head
from paceline.train.heads import CentroidHead, HeadOptions
from paceline.train.loop import Hooks, Report, Run, RunResult
from paceline.train.options import TrainOptions
from paceline.train.parallel import DrafterModule
from paceline.train.rounds import Acceptance
from paceline.train.shape import check_pair, load_module, new_module, shape_of
from paceline.train.windows import Windows

RUN_FOLDER = "run"
Init = str | Path | Mapping[str, Any]


@dataclass(slots=True)
class Start:
    """A module to train, with what is needed to write it down again."""

    module: DrafterModule
    config: dict[str, Any]
    dtype: torch.dtype
    scratch: bool


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train."""

    options: TrainOptions
    init: Init = "scratch"
    head: HeadOptions = field(default_factory=HeadOptions)


@dataclass(slots=True)
class Distilled:
    run: RunResult
    before: Acceptance  # held out, before the first step
    after: Acceptance  # of the finished drafter, both with the head that they run with
    module: DrafterModule
    head: CentroidHead | None
    calibration: Calibration | None


def prepare(target: Path, teacher: TargetTeacher, init: Init, seed: int) -> Start:
    """The module to begin with: a folder's, a fresh one of a config.json, or a fresh one that fits the
    target.
    """
    if isinstance(init, Mapping) or init == "scratch":
        raw = read_config(target)
        config = dict(init) if isinstance(init, Mapping) else scratch_config(raw)
        start = Start(
            new_module(shape_of(config), seed, _dense_embedding(teacher)),
            config,
            _stored_dtype(teacher),
            True,
        )
    else:
        module, config, dtype = load_module(Path(init))
        start = Start(module, config, dtype, False)
    check_pair(
        start.module.shape, teacher.target.layout, teacher.target.hidden_size, teacher.target.vocab_size
    )
    start.module.to(teacher.device)
    return start


def _dense_embedding(teacher: TargetTeacher) -> torch.Tensor | None:
    table = teacher.target.embedding
    return table.data.float() if table.data.is_floating_point() else None


def _stored_dtype(teacher: TargetTeacher) -> torch.dtype:
    dtype = teacher.target.embedding.data.dtype
    return dtype if dtype.is_floating_point else torch.bfloat16


def distil(
    target: str | Path,
    train: Windows,
    held: Windows,
    out: str | Path,
    recipe: Recipe,
    report: Report | None = None,
) -> Distilled:
    """Train, export into `out` and say what changed. Resumes what out/run holds. Raises errors of
    errors.py.
    """
    teacher = load_teacher(Path(target))
    start = prepare(Path(target), teacher, recipe.init, recipe.options.seed)
    run = Run(start.module, teacher, (train, held), recipe.options, Path(out) / RUN_FOLDER)
    done = carry_out(run, start, recipe.head, Hooks(report=report or (lambda entry: None)))
    assert done is not None, "nobody asks this run to stop"
    exported = Exported(start.config, recipe.options.draft_tokens, start.dtype, Path(target))
    exported.calibration = done.calibration.as_json() if done.calibration else None
    export(done.module, Path(out), exported)
    return done


def carry_out(run: Run, start: Start, head: HeadOptions, hooks: Hooks) -> Distilled | None:
    """Train `run` to its end, rebuild the head, and judge the drafter before and after on the held-out windows.

    None if it was asked to stop before the end.
    """
    head.wanted(start.module.shape)  # refuses impossible clusters before the work, not after it
    hooks.phase(f"judging the drafter as it is on {len(run.held)} held-out windows")
    before, _ = judge(run, run.module)
    with hooks.guard():
        result = run.go(hooks)
    write_history(run.folder, result)
    if result.stopped == "interrupted":
        return None
    module, built = rebuild_head(run, head, hooks.phase)
    hooks.phase(f"judging the finished drafter on {len(run.held)} held-out windows")
    after, calibration = judge(run, module)
    return Distilled(result, before, after, module, built, calibration)


def write_history(folder: Path, result: RunResult) -> None:
    """history.jsonl beside the checkpoint: one line per step or evaluation."""
    lines = "".join(json.dumps(entry) + "\n" for entry in result.state.history)
    write_atomic(folder / "history.jsonl", lambda path: _write(path, lines), "the checkpoint is untouched")


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
