"""`paceline train` as one call: files in, a folder out, and the old drafter kept if the new one is not better."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from paceline import __version__
from paceline.errors import UsageError
from paceline.llm import LLM
from paceline.train.card import CURVES_FILE, Story, curves, write_card
from paceline.train.compare import BASELINES, Comparison, compare, mean_tokens, open_engine, prompts_of, rate
from paceline.train.data import DataReport, encode_records, read_records
from paceline.train.distil import RUN_FOLDER, Distilled, Recipe, carry_out
from paceline.train.encoding import TargetEncoder
from paceline.train.export import export, publish
from paceline.train.loop import Hooks, Run
from paceline.train.methods.base import Exported, Start
from paceline.train.options import TrainOptions
from paceline.train.selfwritten import OwnTexts, regenerate
from paceline.train.windows import Text, Windows, pack, split
from paceline.train.written import GROUP, Done, Write, Writer, write_all


@dataclass(frozen=True, slots=True)
class Job:
    """What was asked for. Paths are folders that exist."""

    target: Path
    data: tuple[Path, ...]
    out: Path
    recipe: Recipe
    device: str = "cpu"
    regenerate: float | None = None  # temperature of the answers, None = train on the data as it is
    self_prompts: int = 0  # texts that the target writes itself, questions included
    compare_prompts: int = 24  # 0 = no comparison
    compare_tokens: int = 64
    keep: Literal["better", "new"] = "better"
    command: str = "paceline train"

    @property
    def options(self) -> TrainOptions:
        return self.recipe.options

    @property
    def old(self) -> Path | None:
        """The drafter to beat."""
        init = self.recipe.init
        return None if init == "scratch" or not isinstance(init, (str, Path)) else Path(init)


@dataclass(slots=True)
class Data:
    """Encoded and packed, with a held-out part that training never sees."""

    train: Windows
    held: Windows
    held_texts: list[Text]
    report: DataReport


@dataclass(slots=True)
class Outcome:
    distilled: Distilled
    comparison: Comparison | None
    kept: Literal["new", "old"]
    folder: Path  # where the trained drafter lies
    lines: list[str] = field(default_factory=list)  # what to report


def load_data(job: Job, hooks: Hooks) -> Data:
    """Read, encode, let the target write what is asked of it, hold out, pack. Raises UsageError."""
    report, encoder, length = DataReport(), TargetEncoder(job.target), job.options.length
    texts: list[Text] = []
    if job.data:
        texts = encode_records(read_records(job.data, report), encoder, length, report)
        if job.regenerate is not None:
            texts = _regenerated(job, texts, hooks)
    if job.self_prompts:
        own = _written_by_itself(job, OwnTexts.of(encoder, length, job.options.seed), hooks)
        texts, report.own = texts + own, len(own)
    hooks.say(f"data: {report.line()}")
    train, held = split(len(texts), job.options.held_share, job.options.seed)
    held_texts = [texts[i] for i in held]
    packed = pack((texts[i] for i in train), length), pack(held_texts, length)
    hooks.say(f"{packed[0].filled} tokens to train on, {packed[1].filled} held out, in windows of {length}")
    return Data(*packed, held_texts, report)


def _regenerated(job: Job, texts: Seq[Text], hooks: Hooks) -> list[Text]:
    def write(writer: Writer, numbers: Seq[int], done: Done) -> list[Text]:
        assert job.regenerate is not None, "only called when asked"
        return regenerate(texts, writer, job.options.length, job.regenerate, numbers, done)

    asked = job.regenerate, [(list(t.tokens), t.counted) for t in texts]
    return _kept(job, "answers", asked, len(texts), write, hooks)


def _written_by_itself(job: Job, own: OwnTexts, hooks: Hooks) -> list[Text]:
    asked = own.before, own.after, own.seed
    return _kept(job, "texts", asked, job.self_prompts, own.write, hooks)


def _kept(job: Job, what: str, asked: object, count: int, write: Write, hooks: Hooks) -> list[Text]:
    """Texts by the target, kept in the run folder so that a resumed run has the very same data."""
    mark = repr((str(job.target), job.options.length, count, asked))
    out = write_all(
        job.out / RUN_FOLDER / f"{what}.jsonl", hashlib.sha256(mark.encode()).hexdigest()[:16], count, write,
        lambda: open_writer(job), partial(hooks.phase, f"writing {what}"),
    )  # fmt: skip
    if not out:
        raise UsageError(
            f"the target wrote nothing to any of {count} prompts: check the data, or train on texts as they are"
        )
    return out


def open_writer(job: Job) -> AbstractContextManager[LLM]:
    """The target with its old drafter, if it has one, for texts of a window's length, many side by side."""
    old = job.old
    return LLM(
        str(job.target), drafter=str(old or "none"), device=job.device, draft_tokens="auto" if old else 0,
        max_model_len=job.options.length + 1, max_batch=GROUP, threads=torch.get_num_threads(),
    )  # fmt: skip


def make_run(job: Job, train: Windows, held: Windows) -> tuple[Run, Start]:
    """Load target and drafter, ready to train. Raises LoadError and PairError."""
    teacher = job.recipe.method.teacher(job.target, job.device)
    start = job.recipe.method.start(teacher, train, job.recipe.init, job.options.seed)
    return Run(start.module, teacher, train, held, job.options, job.out / RUN_FOLDER), start


def run_job(job: Job, hooks: Hooks) -> Outcome | None:
    """Everything; None if it was interrupted (the same call goes on). Raises errors of errors.py."""
    _check_out(job)
    job.recipe.method.check(job.target)
    data = load_data(job, hooks)
    run, start = make_run(job, data.train, data.held)
    hooks.say(f"drafter: {job.recipe.method.describe(start.module)}")
    done = carry_out(run, job.recipe.method, hooks)
    if done is None:
        return None
    candidate = job.out / RUN_FOLDER / "candidate"
    exported = Exported(start.config, job.options.draft_tokens, start.dtype, job.target)
    exported.calibration = done.calibration.as_json() if done.calibration else None
    export(job.recipe.method, done.module, candidate, exported)
    del run, start
    comparison = _compare(job, candidate, data.held_texts, hooks)
    return _settle(job, Outcome(done, comparison, "new", job.out), candidate, data.report)


def _check_out(job: Job) -> None:
    if job.old is not None and job.old.resolve() == job.out.resolve():
        raise UsageError("--out is the folder of --init: give another one, so that the old drafter stays")
    if job.out.exists() and not job.out.is_dir():
        raise UsageError(f"--out {job.out} is a file: give a folder")
    if (job.out / "config.json").exists() and not (job.out / RUN_FOLDER).exists():
        raise UsageError(f"--out {job.out} already holds a model: give a new folder")


def _compare(job: Job, candidate: Path, texts: Seq[Text], hooks: Hooks) -> Comparison | None:
    """New against old in the engine, or against doing without, on prompts that training never saw."""
    prompts = prompts_of(texts, job.compare_prompts)
    if not prompts:
        return None
    folders = {"new": candidate} | ({"old": job.old} if job.old is not None else {})
    names = [*folders, *(() if job.old else BASELINES)]
    engine = open_engine(job.target, folders, job.options.draft_tokens, job.device)
    phase = partial(hooks.phase, f"comparing {', '.join(names)}")
    return compare(engine, names, prompts, job.compare_tokens, phase=phase)


def _settle(job: Job, outcome: Outcome, candidate: Path, report: DataReport) -> Outcome:
    """Decide which drafter stays and put the new one where it belongs: into `out`, or into out/rejected."""
    lines = outcome.lines
    if outcome.comparison is not None:
        lines += _gains(outcome.comparison, job.options.draft_tokens)
        means = {name: mean_tokens(scores) for name, scores in outcome.comparison.items()}
        if "old" in means and means["new"] <= means["old"] and job.keep == "better":
            outcome.kept, outcome.folder = "old", job.out / "rejected"
    card = _card(job, outcome, report)
    publish(candidate, outcome.folder, card)
    if outcome.kept == "old":
        lines.append(
            f"the old drafter is at least as good and is kept: go on using {job.old}; the new one lies in "
            f"{outcome.folder} (--keep new takes it anyway)"
        )
    else:
        lines.append(
            f"the drafter is in {outcome.folder}: `paceline run TARGET --drafter {outcome.folder}` uses it"
        )
    return outcome


def _gains(comparison: Comparison, drafted: int) -> list[str]:
    """What was measured, and what the new drafter gains over the others."""
    rows = {name: (mean_tokens(scores), rate(scores)) for name, scores in comparison.items()}
    lines = [
        f"{name}: {t:.3f} tokens per target step, {r:.1f} tokens a second" for name, (t, r) in rows.items()
    ]
    other = "old" if "old" in rows else "none"
    (new, fast), (before, slow) = rows["new"], rows.get(other, (0.0, 0.0))
    if before and slow:
        lines.append(
            f"gained over {'the old drafter' if other == 'old' else 'plain decoding'}: {new - before:+.3f} tokens per "
            f"target step, {fast / slow:.2f} times the speed with always {drafted} tokens drafted"
        )
    if "ngram" in rows and rows["ngram"][0] > new:
        lines.append("the n-gram drafter alone guesses more: train on more texts, for more --steps")
    return lines


def _card(job: Job, outcome: Outcome, report: DataReport) -> dict[str, str]:
    """Model card, curves and the numbers behind them."""
    done = outcome.distilled
    calibration = done.calibration.as_json() if done.calibration else None
    init = "scratch" if job.old is None else job.old.name
    story = Story(
        target=job.target.name, init=init, command=job.command, options=job.options, result=done.run,
        before=done.before, after=done.after, data=report.files, data_line=report.line(),
        comparison=outcome.comparison, note=done.note, calibration=calibration, version=__version__,
        card_text=job.recipe.method.card_text,
    )  # fmt: skip
    return {
        "README.md": write_card(story),
        CURVES_FILE: curves(done.run.state.history),
        "training.json": _numbers(story),
    }


def _numbers(story: Story) -> str:
    scores: dict[str, Any] = {
        name: {
            f"{t:g}": dataclasses.asdict(s) | {"tokens_per_step": s.tokens_per_step} for t, s in by.items()
        }
        for name, by in (story.comparison or {}).items()
    }
    value = {
        "options": dataclasses.asdict(story.options), "before": dataclasses.asdict(story.before),
        "after": dataclasses.asdict(story.after), "engine": scores, "best_step": story.result.state.best_step,
        "stopped": story.result.stopped, "command": story.command,
    }  # fmt: skip
    return json.dumps(value, indent=1) + "\n"
