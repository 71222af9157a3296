"""What a training run would take on this machine: each phase measured on a piece of it, nothing written."""

from __future__ import annotations

import dataclasses
import resource
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from paceline.core import SamplingParams
from paceline.errors import sized
from paceline.llm import LLM
from paceline.train.compare import BASELINES, TEMPERATURES
from paceline.train.encoding import TargetEncoder
from paceline.train.job import Job, load_data, make_run, open_writer
from paceline.train.loop import Hooks, Run, observe_held
from paceline.train.selfwritten import ANSWER, QUESTION
from paceline.train.windows import Windows
from paceline.train.written import GROUP

MEASURED = 2  # updates after one to warm up
OWN = (QUESTION + ANSWER) * 2 // 3  # tokens of a text by the target itself, about
MOST_EPOCHS = 20  # beyond it a drafter learns the texts, not the target
SHORT = 12  # tokens that are written to measure


def dry_run(job: Job, say: Callable[[str], None]) -> list[str]:
    """The plan, line by line. Raises what the run itself would raise, out of memory included."""
    options, method = job.options, job.recipe.method
    method.check(job.target)
    writing, comparing, train, held = _texts(job, say)
    run, start = make_run(job, train, held)
    what = method.describe(start.module)
    step, evaluation = _updates(run)
    training, last = options.steps * step, method.last_batches(run.module) * step / options.accumulate
    judging = (options.steps // options.eval_every + (3 if run.module.runs_otherwise else 2)) * evaluation
    parameters = sum(p.numel() for _, p in run.module.trainable())
    seen = options.steps * options.batch * options.accumulate
    return [
        f"device        {run.teacher.device}",
        f"drafter       {method.name}, {parameters / 1e6:.2f} M parameters, "
        f"{'scratch' if start.scratch else 'from --init'}, {what}",
        f"data          {len(train)} windows of {options.length} tokens, answers by {_author(job)}",
        f"plan          {options.steps} updates of {options.batch} x {options.accumulate} windows, "
        f"{seen / len(train):.1f} epochs, objective {options.objective}, {options.draft_tokens} draft steps",
        f"memory        {_mib(16 * parameters)} for weights, gradients and moments, {_peak(run.teacher.device)}",
        f"time          writing {_span(writing)}, {step:.2f} s per update ({_span(training)}), {evaluation:.1f} s per "
        f"evaluation ({_span(judging)}), {f'fitting the head {_span(last)}, ' if last else ''}comparing "
        f"{_span(comparing)}",
        f"              about {_span(writing + training + judging + last + comparing)} in all",
        f"disk          {_mib(16 * parameters)} for the checkpoint in {job.out / 'run'}",
        *too_often(seen / len(train), len(train)),
    ]


def too_often(epochs: float, windows: int) -> list[str]:
    """A line of warning where each window would be seen so often that the drafter learns it by heart."""
    if epochs <= MOST_EPOCHS:
        return []
    return [
        f"warning       each of the {windows} windows would be seen {epochs:.0f} times: the drafter learns them by "
        "heart. Give more texts (--self-prompts, --data), or fewer --steps"
    ]


def _author(job: Job) -> str:
    parts = ["the corpus"] if job.data and job.regenerate is None else []
    if job.regenerate is not None:
        parts.append(f"the target at temperature {job.regenerate:g} (written first)")
    if job.self_prompts:
        parts.append(f"the target to {job.self_prompts} questions of its own (written first)")
    return " and ".join(parts)


def _texts(job: Job, say: Callable[[str], None]) -> tuple[float, float, Windows, Windows]:
    """(seconds to write, seconds to compare, windows to train on, windows held out), of which some may be made up."""
    length, written = job.options.length, job.self_prompts * min(OWN, job.options.length)
    train = held = None
    if job.data:
        data = load_data(dataclasses.replace(job, regenerate=None, self_prompts=0), Hooks(say=say))
        train, held = data.train, data.held
        written += 0 if job.regenerate is None else (train.filled + held.filled) * 3 // 4
    if job.self_prompts:
        vocab = TargetEncoder(job.target).tokenizer.vocab_size
        count = -(-written // length)
        made_up = Windows.of_array(np.random.default_rng(0).integers(0, vocab, (max(2, count), length)))
        train = made_up.take(range(1, len(made_up))) if train is None else train
        held = made_up.take(range(max(1, round(count * job.options.held_share)))) if held is None else held
    assert train is not None, "there is data, or the target writes some"
    assert held is not None, "likewise"
    prompts = min(job.compare_prompts, max(1, round(len(train) * job.options.held_share)))
    compared = prompts * job.compare_tokens * len(TEMPERATURES) * (2 if job.old else 1 + len(BASELINES))
    with open_writer(job) as llm:
        many, one = (_seconds_per_token(llm, texts) for texts in (GROUP, 1))
    return written * many, compared * one, train, held


def _seconds_per_token(llm: LLM, texts: int) -> float:
    """Of writing that many texts side by side."""
    params = SamplingParams(max_tokens=SHORT, ignore_eos=True, seed=0)
    began = time.perf_counter()
    llm.generate([[llm.tokenizer.bos_id or 0]] * texts, params)
    return (time.perf_counter() - began) / (texts * SHORT)


def _updates(run: Run) -> tuple[float, float]:
    """Seconds of an update and of an evaluation."""
    options = run.options
    run.backward(0)
    began = time.perf_counter()
    for index in range(1, 1 + MEASURED):
        run.backward(index)
    step = (time.perf_counter() - began) / MEASURED * options.accumulate
    began = time.perf_counter()
    few = dataclasses.replace(options, eval_windows=options.batch)
    observe_held(run.module, run.teacher, run.held, few, lambda done, of: None)
    shown = min(options.eval_windows, len(run.held)) / min(options.batch, len(run.held))
    return step, (time.perf_counter() - began) * max(1.0, shown)


def _mib(count: int) -> str:
    return sized(count)


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
