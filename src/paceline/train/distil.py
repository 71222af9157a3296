"""One call from token windows to a drafter folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from paceline.train.calibration import Calibration, calibrate
from paceline.train.checkpoint import write_atomic
from paceline.train.export import export
from paceline.train.loop import Hooks, Report, Run, RunResult, observe_held
from paceline.train.methods import GemmaAssistant, Method
from paceline.train.methods.base import Exported, Init
from paceline.train.options import TrainOptions
from paceline.train.parallel import DraftModule
from paceline.train.rounds import Acceptance, summarise
from paceline.train.windows import Windows

RUN_FOLDER = "run"


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train."""

    options: TrainOptions
    init: Init = "scratch"
    method: Method = field(default_factory=GemmaAssistant)


@dataclass(slots=True)
class Distilled:
    run: RunResult
    before: Acceptance  # held out, before the first step
    after: Acceptance  # of the finished drafter, both with the head that they run with
    module: DraftModule
    note: str  # of the method, on what was made
    calibration: Calibration | None


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
    teacher = recipe.method.teacher(Path(target), "cpu")
    start = recipe.method.start(teacher, train, recipe.init, recipe.options.seed)
    run = Run(start.module, teacher, train, held, recipe.options, Path(out) / RUN_FOLDER)
    done = carry_out(run, recipe.method, Hooks(report=report or (lambda entry: None)))
    assert done is not None, "nobody asks this run to stop"
    exported = Exported(start.config, recipe.options.draft_tokens, start.dtype, Path(target))
    exported.calibration = done.calibration.as_json() if done.calibration else None
    export(recipe.method, done.module, Path(out), exported)
    return done


def carry_out(run: Run, method: Method, hooks: Hooks) -> Distilled | None:
    """Train `run` to its end, make of it what will run, and judge the drafter before and after on the held-out windows.

    None if it was asked to stop before the end.
    """
    method.describe(run.module)  # refuses what cannot be before the work, not after it
    before = None
    if run.module.runs_otherwise:
        before, _ = judge(run, run.module, partial(hooks.phase, "judging the drafter as it is"))
    with hooks.guard():
        result = run.go(hooks)
    write_history(run.folder, result)
    if result.stopped == "interrupted":
        return None
    before = before or Acceptance(**next(e["held_out"] for e in result.state.history if "held_out" in e))
    module, note = method.finish(run, hooks)
    after, calibration = judge(run, module, partial(hooks.phase, "judging the finished drafter"))
    return Distilled(result, before, after, module, note, calibration)


def write_history(folder: Path, result: RunResult) -> None:
    """history.jsonl beside the checkpoint: one line per step or evaluation."""
    lines = "".join(json.dumps(entry) + "\n" for entry in result.state.history)
    write_atomic(folder / "history.jsonl", lambda path: _write(path, lines), "the checkpoint is untouched")


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def judge(
    run: Run, module: DraftModule, phase: Callable[[int, int], None]
) -> tuple[Acceptance, Calibration | None]:
    """Held-out acceptance, and what the drafter's confidence is worth."""
    seen = observe_held(module, run.teacher, run.held, run.options, phase, running=True)
    return summarise(seen), calibrate(seen)
