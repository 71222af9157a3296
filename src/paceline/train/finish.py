"""What follows the last training step: the head it will run with, its confidence, and the held-out
judgement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from paceline.train.calibration import Calibration, calibrate
from paceline.train.export import set_head
from paceline.train.heads import CentroidHead, HeadOptions, build_head
from paceline.train.loop import Run, observe_held
from paceline.train.parallel import DrafterModule, choose_anchors
from paceline.train.rounds import Acceptance, draft_all, summarise
from paceline.train.windows import Windows, batch_rows, step_generator

STATES_PER_BATCH = 1024


def drafter_states(run: Run, windows: Windows, batches: int) -> Iterator[torch.Tensor]:
    """Batches [n, hidden] of the states that the drafter scores, over `windows` again and again."""
    options = run.options
    for index in range(batches):
        rows = batch_rows(len(windows), min(options.batch, len(windows)), options.seed, index)
        captured = run.teacher.capture(windows.take(rows))
        generator = step_generator(options.seed, index)
        anchors = choose_anchors(captured, options.draft_tokens, options.anchors or 128, generator)
        with torch.no_grad():
            states = draft_all(run.module, captured, run.teacher.logits, anchors, options.draft_tokens).states
        yield states[torch.randperm(len(states), generator=generator)[:STATES_PER_BATCH].to(states.device)]


def rebuild_head(
    run: Run, options: HeadOptions, say: Callable[[str], None]
) -> tuple[DrafterModule, CentroidHead | None]:
    """The trained drafter with the head that was asked for: its centroids fit the states that it has now."""
    clusters = options.wanted(run.module.shape)
    if not clusters:
        return set_head(run.module, None), None
    held = list(drafter_states(run, run.held, max(1, min(8, len(run.held) // run.options.batch))))
    fit = _counted(drafter_states(run, run.train, options.batches), options.batches, say)
    head = build_head(run.module.head, fit, held, clusters, options.recall)
    return set_head(run.module, head), head


def _counted(
    batches: Iterator[torch.Tensor], count: int, say: Callable[[str], None]
) -> Iterator[torch.Tensor]:
    """The same batches; says at every tenth of them how far it is."""
    for index, batch in enumerate(batches):
        if index * 10 // count != (index - 1) * 10 // count:
            say(f"fitting the head to the trained drafter: {index} of {count} batches")
        yield batch


def judge(run: Run, module: DrafterModule) -> tuple[Acceptance, Calibration | None]:
    """Held-out acceptance of a drafter as it will run, and what its confidence is worth."""
    seen = observe_held(module, run.teacher, run.held, run.options, running=True)
    return summarise(seen), calibrate(seen)
