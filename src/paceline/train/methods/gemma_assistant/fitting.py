"""The head that a trained assistant will run with: its centroids are fitted to the states that it has now."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from paceline.train.loop import Phase, Run
from paceline.train.methods.gemma_assistant.files import set_head
from paceline.train.methods.gemma_assistant.heads import CentroidHead, HeadOptions, build_head
from paceline.train.methods.gemma_assistant.learning import AssistantModule
from paceline.train.parallel import choose_anchors
from paceline.train.rounds import draft_all
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


def rebuild_head(run: Run, options: HeadOptions, phase: Phase) -> tuple[AssistantModule, CentroidHead | None]:
    """The trained drafter with the head that was asked for: its centroids fit the states that it has now."""
    module = run.module
    assert isinstance(module, AssistantModule)
    clusters = options.wanted(module.config)
    if not clusters:
        return set_head(module, None), None
    held = list(drafter_states(run, run.held, max(1, min(8, len(run.held) // run.options.batch))))
    fit = _counted(drafter_states(run, run.train, options.batches), options.batches, phase)
    head = build_head(module.head, fit, held, clusters, options.recall)
    return set_head(module, head), head


def _counted(batches: Iterator[torch.Tensor], count: int, phase: Phase) -> Iterator[torch.Tensor]:
    """The same batches; reports how far it is."""
    for index, batch in enumerate(batches):
        phase("fitting the head", index, count)
        yield batch
    phase("fitting the head", count, count)
