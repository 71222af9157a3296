"""The judgement of a drafter as it will run, on held-out windows."""

from __future__ import annotations

from collections.abc import Callable

from paceline.train.calibration import Calibration, calibrate
from paceline.train.loop import Run, observe_held
from paceline.train.parallel import DraftModule
from paceline.train.rounds import Acceptance, summarise


def judge(
    run: Run, module: DraftModule, phase: Callable[[int, int], None]
) -> tuple[Acceptance, Calibration | None]:
    """Held-out acceptance, and what the drafter's confidence is worth."""
    seen = observe_held(module, run.teacher, run.held, run.options, phase, running=True)
    return summarise(seen), calibrate(seen)
