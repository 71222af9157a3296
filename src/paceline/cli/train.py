"""`paceline train`: a drafter for your own target."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.options import TARGET, apply, one_target
from paceline.core import MAX_DRAFT_TOKENS
from paceline.drafter_kinds import TRAININGS, trained_with, usual_training
from paceline.errors import UsageError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from paceline.train.job import Job
    from paceline.train.loop import Hooks
    from paceline.train.methods import Method

INTERRUPTED = 130
OF_METHOD = {name: training.options for name, training in TRAININGS.items()}  # None where nothing is said
TRAINING = (
    "objective", "weights", "draft_tokens", "steps", "batch", "accumulate", "length", "anchors", "optimizer", "lr",
    "eval_every", "eval_windows", "patience", "save_every", "seed",
)  # fmt: skip


@click.command()
@apply(TARGET)
@click.option(
    "--method",
    type=click.Choice([*OF_METHOD]),
    help=f"Kind of drafter.  [default: {usual_training('gemma4')} for Gemma 4, {usual_training('')} for all others]",
)
@click.option(
    "--data", multiple=True, metavar="PATH", help="JSONL of chats or texts, plain files, or folders of them."
)
@click.option(
    "--self-prompts",
    type=click.IntRange(min=1),
    metavar="N",
    help="Let the target write N texts itself, questions and answers: no --data is needed.",
)
@click.option(
    "--out",
    required=True,
    metavar="DIR",
    help="Folder for the drafter. An interrupted run in it is continued.",
)
@click.option(
    "--init",
    default="scratch",
    show_default=True,
    metavar="ASSISTANT",
    help="Drafter of this method to start from: a folder, a hub id, demo, or scratch.",
)
@click.option(
    "--regenerate",
    is_flag=True,
    help="Let the target write the answers first: this is what acceptance is measured against.",
)
@click.option("--temperature", type=float, default=0.7, show_default=True, help="Of the regenerated answers.")
@click.option(
    "--objective",
    default="hybrid",
    show_default=True,
    help="ce, kl, rkl, tv, lk, hybrid, ce-tv or shaped; see docs/training.md.",
)
@click.option(
    "--weights",
    type=click.Choice(["even", "decay", "credit"]),
    default="decay",
    show_default=True,
    help="Of the draft positions.",
)
@click.option(
    "--draft-tokens",
    type=click.IntRange(1, MAX_DRAFT_TOKENS),
    help="Draft steps that are unrolled.  [default: 3; gemma-assistant: 4]",
)
@click.option("--steps", type=int, default=1000, show_default=True, help="Updates.")
@click.option("--batch", type=int, help="Windows held in memory at once.  [default: 4; gemma-assistant: 8]")
@click.option("--accumulate", type=int, default=1, show_default=True, help="Batches per update.")
@click.option(
    "--length", type=int, default=512, show_default=True, help="Tokens per window; longer records are cut."
)
@click.option(
    "--anchors",
    type=int,
    help="Draft rounds per window; 0 = from every token.  [default: 0; gemma-assistant: 128]",
)
@click.option(
    "--optimizer",
    type=click.Choice(["adamw", "muon"]),
    help="Of the matrices; all others have adamw.  [default: muon; gemma-assistant: adamw]",
)
@click.option("--lr", type=float, help="Highest learning rate.  [default: 0.02; gemma-assistant: 0.001]")
@click.option(
    "--eval-every", type=int, default=100, show_default=True, help="Updates between held-out evaluations."
)
@click.option(
    "--eval-windows", type=int, default=32, show_default=True, help="Held-out windows that are looked at."
)
@click.option(
    "--patience", type=int, default=0, help="Stop after so many evaluations without progress; 0 = never."
)
@click.option("--save-every", type=int, default=100, show_default=True, help="Updates between checkpoints.")
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Of data order, anchors and fresh weights."
)
@click.option(
    "--draft-vocabulary",
    type=click.IntRange(min=2),
    metavar="N",
    help=f"{trained_with('draft_vocabulary')}: draft only the N tokens that the target writes most often.  "
    "[default: 8192, or all]",
)
@click.option(
    "--taps",
    metavar="N,N,N",
    help=f"{trained_with('taps')}: layers after which it reads.  [default: 2, the middle and the last but 3]",
)
@click.option(
    "--flags",
    metavar="NAME,NAME",
    help=f"{trained_with('flags')}: norm_before_residual, norm_before_fc, fc_norm, norm_output.  "
    "[default: norm_before_residual,fc_norm]",
)
@click.option(
    "--shared-head",
    is_flag=True,
    default=None,
    help=f"{trained_with('shared_head')}: use the target's own head as it is; the file is smaller, only paceline reads "
    "it.",
)
@click.option(
    "--layers", type=click.IntRange(1, 16), help=f"{trained_with('layers')}: layers of a block.  [default: 2]"
)
@click.option(
    "--head",
    type=click.Choice(["keep", "dense", "centroid"]),
    help="gemma-assistant: of the finished drafter.  [default: keep]",
)
@click.option(
    "--clusters", type=int, help="gemma-assistant: of a centroid head.  [default: vocabulary / 128]"
)
@click.option(
    "--recall",
    type=float,
    help="gemma-assistant: of a centroid head, chooses how many clusters are looked at.  [default: 0.99]",
)
@click.option(
    "--compare-prompts",
    type=int,
    default=24,
    show_default=True,
    help="Held-out prompts for the comparison with --init, or with doing without.",
)
@click.option(
    "--compare-tokens", type=int, default=64, show_default=True, help="Tokens written for each of them."
)
@click.option(
    "--keep",
    type=click.Choice(["better", "new"]),
    default="better",
    show_default=True,
    help="new: take the trained drafter even if it is not better.",
)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:N or mps.")
@click.option("--threads", type=click.IntRange(1, 256), help="CPU threads; default: one per core.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print memory, the time of each phase on this machine and the plan; write nothing.",
)
@click.pass_context
def command(
    ctx: click.Context, /, target: str | None, named: str | None, dry_run: bool, threads: int | None, **values: Any,
) -> None:  # fmt: skip
    """Train or adapt a drafter for TARGET, a model of any family, also a GGUF file.

    The target is frozen. Ctrl-C saves; the same command goes on where it stopped. If --init is given and the result is
    not better in the engine, the old drafter is kept.
    """
    target = one_target(target, named, None)
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    job = make_job(target, values)
    if dry_run:
        from paceline.train.dryrun import dry_run as measure

        for line in measure(job, _say):
            click.echo(line)
        return
    from paceline.train.job import run_job

    try:
        with showing(job) as hooks:
            outcome = run_job(job, hooks)
    except KeyboardInterrupt:
        outcome = None
    if outcome is None:
        click.echo("saved: run the same command again to go on", err=True)
        ctx.exit(INTERRUPTED)
    for line in outcome.lines:
        click.echo(line)


def _say(line: str) -> None:
    click.echo(line, err=True)


def make_job(target: str, values: dict[str, Any]) -> Job:
    """The job of a command's options. Raises UsageError and LoadError."""
    from paceline.hub.resolve import resolve
    from paceline.ops.runners import pick_device
    from paceline.train.distil import Recipe
    from paceline.train.job import Job
    from paceline.train.methods import method_for
    from paceline.train.options import TrainOptions

    if not values["data"] and not values["self_prompts"]:
        raise UsageError("there is nothing to train on: give --data PATH, or --self-prompts N")
    if values["regenerate"] and not values["data"]:
        raise UsageError("--regenerate is for --data: --self-prompts are answered by the target anyway")
    for name in ("compare_prompts", "compare_tokens"):
        if values[name] < 0:
            raise UsageError(f"{name}={values[name]} is not possible: give a whole number from 0")
    folder = resolve(target, "target")
    method = make_method(values["method"] or method_for(folder), values)
    given = {name: values[name] for name in TRAINING if values[name] is not None}
    options = TrainOptions(**{**method.defaults, **given})
    init = values["init"] if values["init"] == "scratch" else resolve(values["init"], "assistant")
    return Job(
        target=folder,
        data=tuple(Path(path) for path in values["data"]),
        out=Path(values["out"]),
        recipe=Recipe(options, init, method),
        device=str(pick_device(values["device"])),
        regenerate=values["temperature"] if values["regenerate"] else None,
        self_prompts=values["self_prompts"] or 0,
        compare_prompts=values["compare_prompts"],
        compare_tokens=max(2, values["compare_tokens"]),
        keep=values["keep"],
        command="paceline " + shlex.join(sys.argv[1:]),
    )


def make_method(name: str, values: dict[str, Any]) -> Method:
    """The method with its options. Raises UsageError for an option of another one."""
    from paceline.train.methods import METHODS

    every = dict.fromkeys(option for options in OF_METHOD.values() for option in options)
    for option in every:
        owners = [method for method, options in OF_METHOD.items() if option in options]
        if values[option] is not None and name not in owners:
            raise UsageError(
                f"--{option.replace('_', '-')} is of --method {' and '.join(owners)}, and this is {name}: leave it out"
            )
    given = {option: values[option] for option in OF_METHOD[name] if values[option] is not None}
    method: Method = METHODS[name].of(given, values["draft_tokens"])
    return method


@contextmanager
def showing(job: Job) -> Iterator[Hooks]:
    """A bar for each phase, and evaluations as lines above them; lines alone where nobody looks at a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from paceline.train.loop import Hooks

    asked: list[int] = []
    done, left = MofNCompleteColumn(), TimeRemainingColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), done, left, TextColumn("{task.fields[note]}"))
    with Progress(*columns, console=Console(stderr=True)) as bar:
        show = _phases(bar)

        def say(line: str) -> None:
            bar.console.print(line, highlight=False, soft_wrap=True, markup=False)

        yield Hooks(
            _reporter(show, say, job.options.steps),
            lambda: bool(asked),
            lambda: _interruptible(asked),
            say,
            show,
        )


def _phases(bar: Progress) -> Callable[..., None]:
    """What shows how far a phase is: its bar, or a line for each tenth."""
    tasks: dict[str, TaskID] = {}
    tenths: dict[str, int] = {}

    def show(name: str, done: int, of: int, note: str = "") -> None:
        if bar.console.is_terminal:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=of, note="")
            bar.update(tasks[name], completed=done, total=of, note=note)
        elif tenths.get(name) != done * 10 // of:
            tenths[name] = done * 10 // of
            line = f"{name}: {done} of {of} {note}".rstrip()
            bar.console.print(line, highlight=False, soft_wrap=True, markup=False)

    return show


@contextmanager
def _interruptible(asked: list[int]) -> Iterator[None]:
    """Ctrl-C as a wish, noted in `asked`, instead of an exception; the second one is an exception."""

    def ask(number: int, frame: object) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        _say("stopping after this update; Ctrl-C again to stop at once")

    old = signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old)


def _reporter(
    show: Callable[..., None], say: Callable[[str], None], steps: int
) -> Callable[[dict[str, Any]], None]:
    def report(entry: dict[str, Any]) -> None:
        held = entry.get("held_out")
        if held is None:
            show("training", entry["step"], steps, f"loss {entry['loss']:.4f}")
            return
        positions = " ".join(f"{x:.3f}" for x in held["greedy"])
        say(
            f"step {entry['step']:>6}  agreement {positions}  tokens per step {held['greedy_tokens']:.3f} (T=0) "
            f"{held['sampled_tokens']:.3f} (T=1)"
        )

    return report
