"""`paceline train` as one call: files in, a folder out, and the old drafter kept if the new one is not better."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from paceline import __version__
from paceline.errors import UsageError
from paceline.llm import LLM
from paceline.train.capture import load_teacher
from paceline.train.card import CURVES_FILE, Story, curves, write_card
from paceline.train.checkpoint import write_atomic
from paceline.train.compare import Comparison, compare, mean_tokens, open_engine, prompts_of
from paceline.train.data import DataReport, encode_records, read_records
from paceline.train.distil import RUN_FOLDER, Distilled, Recipe, Start, carry_out, prepare
from paceline.train.encoding import TargetEncoder
from paceline.train.export import Exported, export, publish
from paceline.train.loop import Hooks, Run
from paceline.train.options import TrainOptions
from paceline.train.regenerate import regenerate
from paceline.train.windows import Text, Windows, pack, split

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Job:
    """What was asked for. Paths are folders that exist."""

    target: Path
    data: tuple[Path, ...]
    out: Path
    recipe: Recipe
    device: str = "cpu"
    regenerate: float | None = None  # temperature of the answers, None = train on the data as it is
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
    lines: list[str] = field(default_factory=list)  # what to tell


def load_data(job: Job, say: Say) -> Data:
    """Read, encode, let the target write the answers if asked, hold out, pack. Raises UsageError."""
    report = DataReport()
    records = read_records(job.data, report)
    texts = encode_records(records, TargetEncoder(job.target), job.options.length, report)
    say(f"data: {report.line()}")
    if job.regenerate is not None:
        texts = _regenerated(job, texts, say)
    train, held = split(len(texts), job.options.held_share, job.options.seed)
    held_texts = [texts[i] for i in held]
    packed = pack((texts[i] for i in train), job.options.length), pack(held_texts, job.options.length)
    say(
        f"{packed[0].filled} tokens to train on, {packed[1].filled} held out, in windows of {job.options.length}"
    )
    return Data(*packed, held_texts, report)


def _regenerated(job: Job, texts: Seq[Text], say: Say) -> list[Text]:
    """Answers by the target itself, kept in the run folder so that a resumed run has the very same data."""
    asked = repr(
        (str(job.target), job.regenerate, job.options.length, [(list(t.tokens), t.counted) for t in texts])
    )
    mark = hashlib.sha256(asked.encode()).hexdigest()[:16]
    path = job.out / RUN_FOLDER / "regenerated.json"
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["mark"] == mark:
            return [Text(t, tuple((a, b) for a, b in spans)) for t, spans in found["texts"]]
    old = str(job.old) if job.old else "none"
    longest = job.options.length + 1
    llm = LLM(str(job.target), drafter=old, device=job.device, draft_tokens="auto", max_model_len=longest)
    assert job.regenerate is not None, "only called when asked"
    out = regenerate(
        texts,
        llm,
        job.options.length,
        job.regenerate,
        lambda done, of: say(f"the target wrote {done} of {of} answers"),
    )
    kept = json.dumps({"mark": mark, "texts": [(list(t.tokens), t.counted) for t in out]})
    write_atomic(path, lambda p: _write(p, kept), "nothing was trained yet")
    return out


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def make_run(job: Job, data: Data) -> tuple[Run, Start]:
    """Load target and drafter, ready to train. Raises LoadError and PairError."""
    teacher = load_teacher(job.target, job.device)
    start = prepare(job.target, teacher, job.recipe.init, job.options.seed)
    return Run(start.module, teacher, (data.train, data.held), job.options, job.out / RUN_FOLDER), start


def run_job(job: Job, hooks: Hooks, say: Say) -> Outcome | None:
    """Everything; None if it was interrupted (the same call goes on). Raises errors of errors.py."""
    _check_out(job)
    data = load_data(job, say)
    run, start = make_run(job, data)
    done = carry_out(run, start, job.recipe.head, hooks)
    if done is None:
        return None
    candidate = job.out / RUN_FOLDER / "candidate"
    exported = Exported(start.config, job.options.draft_tokens, start.dtype, job.target)
    exported.calibration = done.calibration.as_json() if done.calibration else None
    export(done.module, candidate, exported)
    del run, start
    comparison = _compare(job, candidate, data.held_texts, say)
    return _settle(job, Outcome(done, comparison, "new", job.out), candidate, data.report)


def _check_out(job: Job) -> None:
    if job.old is not None and job.old.resolve() == job.out.resolve():
        raise UsageError("--out is the folder of --init: give another one, so that the old drafter stays")
    if job.out.exists() and not job.out.is_dir():
        raise UsageError(f"--out {job.out} is a file: give a folder")
    if (job.out / "config.json").exists() and not (job.out / RUN_FOLDER).exists():
        raise UsageError(f"--out {job.out} already holds a model: give a new folder")


def _compare(job: Job, candidate: Path, texts: Seq[Text], say: Say) -> Comparison | None:
    """Old against new in the engine, on prompts that training never saw."""
    prompts = prompts_of(texts, job.compare_prompts)
    if not prompts:
        return None
    drafters = {"new": candidate} | ({"old": job.old} if job.old is not None else {})
    say(f"comparing in the engine: {', '.join(drafters)} on {len(prompts)} held-out prompts")
    engine = open_engine(job.target, drafters, job.options.draft_tokens, job.device)
    return compare(engine, list(drafters), prompts, job.compare_tokens)


def _settle(job: Job, outcome: Outcome, candidate: Path, report: DataReport) -> Outcome:
    """Decide which drafter stays and put the new one where it belongs: into `out`, or into out/rejected."""
    lines = outcome.lines
    if outcome.comparison is not None:
        means = {name: mean_tokens(scores) for name, scores in outcome.comparison.items()}
        lines += [f"{name}: {tokens:.3f} tokens per target step" for name, tokens in means.items()]
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
        lines.append(f"the drafter is in {outcome.folder}: use it with --drafter {outcome.folder}")
    return outcome


def _card(job: Job, outcome: Outcome, report: DataReport) -> dict[str, str]:
    """Model card, curves and the numbers behind them."""
    done = outcome.distilled
    calibration = done.calibration.as_json() if done.calibration else None
    init = "scratch" if job.old is None else job.old.name
    story = Story(
        target=job.target.name, init=init, command=job.command, options=job.options, result=done.run,
        before=done.before, after=done.after, data=report.files, data_line=report.line(),
        comparison=outcome.comparison, head=done.head, calibration=calibration, version=__version__,
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
