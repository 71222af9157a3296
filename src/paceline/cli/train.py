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
from paceline.errors import UsageError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from paceline.train.job import Job
    from paceline.train.loop import Hooks

INTERRUPTED = 130
TRAINING = (
    "objective", "weights", "draft_tokens", "steps", "batch", "accumulate", "length", "anchors", "lr", "eval_every",
    "eval_windows", "patience", "save_every", "seed",
)  # fmt: skip


@click.command()
@apply(TARGET)
@click.option(
    "--data",
    multiple=True,
    required=True,
    metavar="PATH",
    help="JSONL of chats or texts, plain files, or folders of them.",
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
    help="Drafter to start from: a folder, a hub id, demo, or scratch.",
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
    help="ce, kl, rkl, tv, lk, hybrid or ce-tv; see docs/training.md.",
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
    default=4,
    show_default=True,
    help="Draft steps that are unrolled.",
)
@click.option("--steps", type=int, default=1000, show_default=True, help="Updates.")
@click.option("--batch", type=int, default=8, show_default=True, help="Windows held in memory at once.")
@click.option("--accumulate", type=int, default=1, show_default=True, help="Batches per update.")
@click.option(
    "--length", type=int, default=512, show_default=True, help="Tokens per window; longer records are cut."
)
@click.option(
    "--anchors",
    type=int,
    default=128,
    show_default=True,
    help="Draft rounds per window; 0 = from every token.",
)
@click.option("--lr", type=float, default=1e-3, show_default=True, help="Highest learning rate.")
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
    "--head",
    type=click.Choice(["keep", "dense", "centroid"]),
    default="keep",
    show_default=True,
    help="Of the finished drafter.",
)
@click.option("--clusters", type=int, default=0, help="Of a centroid head; 0 = vocabulary / 128.")
@click.option(
    "--recall",
    type=float,
    default=0.99,
    show_default=True,
    help="Of a centroid head: chooses how many clusters are looked at.",
)
@click.option(
    "--compare-prompts",
    type=int,
    default=24,
    show_default=True,
    help="Held-out prompts for the comparison with --init.",
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
    help="Print memory, time per update on this machine and the plan; write nothing.",
)
@click.pass_context
def command(
    ctx: click.Context, /, target: str | None, named: str | None, dry_run: bool, threads: int | None, **values: Any,
) -> None:  # fmt: skip
    """Train or adapt an MTP drafter for TARGET, a Gemma 4 in Hugging Face layout.

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

    with showing(job) as hooks:
        outcome = run_job(job, hooks, _say)
    if outcome is None:
        click.echo("saved: run the same command again to go on", err=True)
        ctx.exit(INTERRUPTED)
    for line in outcome.lines:
        click.echo(line)


def _say(line: str) -> None:
    click.echo(line, err=True)


def make_job(target: str, values: dict[str, Any]) -> Job:
    """The job of a command's options. Raises UsageError and LoadError."""
    from paceline.assembly import pick_device
    from paceline.models.hub import resolve
    from paceline.train.distil import Recipe
    from paceline.train.heads import HeadOptions
    from paceline.train.job import Job
    from paceline.train.options import TrainOptions

    options = TrainOptions(**{name: values[name] for name in TRAINING})
    init = values["init"] if values["init"] == "scratch" else resolve(values["init"], "assistant")
    for name in ("compare_prompts", "compare_tokens"):
        if values[name] < 0:
            raise UsageError(f"{name}={values[name]} is not possible: give a whole number from 0")
    return Job(
        target=resolve(target, "target"),
        data=tuple(Path(path) for path in values["data"]),
        out=Path(values["out"]),
        recipe=Recipe(options, init, HeadOptions(values["head"], values["clusters"], values["recall"])),
        device=str(pick_device(values["device"])),
        regenerate=values["temperature"] if values["regenerate"] else None,
        compare_prompts=values["compare_prompts"],
        compare_tokens=max(2, values["compare_tokens"]),
        keep=values["keep"],
        command="paceline " + shlex.join(sys.argv[1:]),
    )


@contextmanager
def showing(job: Job) -> Iterator[Hooks]:
    """A progress bar, and evaluations as lines above it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from paceline.train.loop import Hooks

    asked: list[int] = []
    done, left = MofNCompleteColumn(), TimeRemainingColumn()
    columns = (TextColumn("training"), BarColumn(), done, left, TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=job.options.steps)
        yield Hooks(
            _reporter(bar, task), lambda: bool(asked), lambda: _interruptible(asked), bar.console.print
        )


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


def _reporter(bar: Progress, task: TaskID) -> Callable[[dict[str, Any]], None]:
    def report(entry: dict[str, Any]) -> None:
        held = entry.get("held_out")
        if held is None:
            bar.update(task, completed=entry["step"], description=f"loss {entry['loss']:.4f}")
            return
        positions = " ".join(f"{x:.3f}" for x in held["greedy"])
        bar.console.print(
            f"step {entry['step']:>6}  agreement {positions}  tokens per step {held['greedy_tokens']:.3f} (T=0) "
            f"{held['sampled_tokens']:.3f} (T=1)",
            highlight=False,
            soft_wrap=True,
        )

    return report
