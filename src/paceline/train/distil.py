"""One call from token windows to a drafter folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.models.config import read_config
from paceline.train.calibration import Calibration, calibrate
from paceline.train.capture import TargetTeacher, load_teacher
from paceline.train.checkpoint import write_atomic
from paceline.train.export import Exported, export, scratch_config
from paceline.train.loop import Hooks, Report, Run, RunResult, observe_held
from paceline.train.options import TrainOptions
from paceline.train.parallel import DrafterModule
from paceline.train.rounds import Acceptance, summarise
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


@dataclass(slots=True)
class Distilled:
    run: RunResult
    before: Acceptance  # held out, before the first step
    after: Acceptance  # of what was exported
    calibration: Calibration | None
    start: Start


def prepare(target: Path, teacher: TargetTeacher, init: Init, seed: int) -> Start:
    """The module to begin with: a folder's, a fresh one of a config.json, or a fresh one that fits the
    target.
    """
    if isinstance(init, Mapping) or init == "scratch":
        raw = read_config(target)
        config = dict(init) if isinstance(init, Mapping) else scratch_config(raw.get("text_config", raw))
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
    target: str | Path, train: Windows, held: Windows, *, out: str | Path, options: TrainOptions,
    init: Init = "scratch", report: Report | None = None,
) -> Distilled:  # fmt: skip
    """Train, export into `out` and say what changed. Resumes what out/run holds. Raises errors of
    errors.py.
    """
    teacher = load_teacher(Path(target))
    start = prepare(Path(target), teacher, init, options.seed)
    run = Run(start.module, teacher, (train, held), options, Path(out) / RUN_FOLDER)
    result = run.go(Hooks(report=report or (lambda entry: None)))
    finished = finish(run, result, start)
    write_history(Path(out) / RUN_FOLDER, result)
    calibration = finished.calibration.as_json() if finished.calibration else None
    export(
        start.module,
        Path(out),
        Exported(start.config, options.draft_tokens, start.dtype, Path(target), calibration),
    )
    return finished


def finish(run: Run, result: RunResult, start: Start) -> Distilled:
    """Judge the trained module on the held-out windows."""
    seen = observe_held(run.module, run.teacher, run.held, run.options)
    first = next(entry["held_out"] for entry in result.state.history if "held_out" in entry)
    return Distilled(result, Acceptance(**first), summarise(seen), calibrate(seen), start)


def write_history(folder: Path, result: RunResult) -> None:
    """history.jsonl beside the checkpoint: one line per step or evaluation."""
    lines = "".join(json.dumps(entry) + "\n" for entry in result.state.history)
    write_atomic(folder / "history.jsonl", lambda path: _write(path, lines), "the checkpoint is untouched")


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
