"""What a training run would take on this machine: measured on its own first batches, nothing written."""

from __future__ import annotations

import dataclasses
import resource
import sys
import time

import torch

from paceline.train.job import Job, Say, load_data, make_run
from paceline.train.loop import observe_held

MEASURED = 2  # updates after one to warm up


def dry_run(job: Job, say: Say) -> list[str]:
    """The plan, line by line. Raises what the run itself would raise, out of memory included."""
    data = load_data(dataclasses.replace(job, regenerate=None), say)
    run, start = make_run(job, data)
    clusters = job.recipe.head.wanted(start.module.shape)
    options = job.options
    run.backward(0)
    began = time.perf_counter()
    for index in range(1, 1 + MEASURED):
        run.backward(index)
    step = (time.perf_counter() - began) / MEASURED * options.accumulate
    began = time.perf_counter()
    observe_held(run.module, run.teacher, run.held, dataclasses.replace(options, eval_windows=options.batch))
    shown = min(options.eval_windows, len(data.held))
    evaluation = (time.perf_counter() - began) * max(1, shown / options.batch)
    total = options.steps * step + (options.steps // options.eval_every + 3) * evaluation
    parameters = sum(p.numel() for _, p in run.module.trainable())
    seen = options.steps * options.batch * options.accumulate
    answers = (
        "the corpus"
        if job.regenerate is None
        else f"the target at temperature {job.regenerate:g} (written first)"
    )
    return [
        f"device        {run.teacher.device}",
        f"drafter       {parameters / 1e6:.2f} M parameters, {'scratch' if start.scratch else 'from --init'}, "
        f"head {f'of {clusters} clusters' if clusters else 'dense'}",
        f"data          {len(data.train)} windows of {options.length} tokens, answers by {answers}",
        f"plan          {options.steps} updates of {options.batch} x {options.accumulate} windows, "
        f"{seen / len(data.train):.1f} epochs, objective {options.objective}, {options.draft_tokens} draft steps",
        f"memory        {_mib(16 * parameters)} for weights, gradients and moments, {_peak(run.teacher.device)}",
        f"time          {step:.2f} s per update, {evaluation:.1f} s per evaluation, about {_span(total)} in all",
        f"disk          {_mib(16 * parameters)} for the checkpoint in {job.out / 'run'}",
    ]


def _mib(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"


def _peak(device: torch.device) -> str:
    """Highest memory use so far; of the GPU where there is one."""
    if device.type == "cuda":
        return f"{_mib(torch.cuda.max_memory_allocated(device))} at most on the GPU"
    unit = 1 if sys.platform == "darwin" else 1024
    return f"{_mib(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)} at most in all"


def _span(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
