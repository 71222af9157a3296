"""`paceline convert`: a model as GGUF, or a GGUF model or one in Meta's layout as a folder in Hugging Face layout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.cli.options import TARGET, apply, one_target
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.checkpoints.gguf.projector import Projector
    from paceline.convert.output import Report

FLOATS = ("f32", "bf16", "f16")
MIXTURES = ("q6_k", "q5_k_m", "q5_k_s", "q4_k_m", "q4_k_s", "q3_k_l", "q3_k_m", "q3_k_s", "q2_k")
KINDS = (*FLOATS, "q8_0", *MIXTURES, "q5_1", "q5_0", "q4_1", "q4_0")


@click.command()
@apply(TARGET)
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    help="FILE.gguf to write from a folder, or the folder to write from a GGUF file or from Meta's layout.",
)
@click.option(
    "--to",
    "kind",
    type=click.Choice(KINDS),
    help="Kind of the stored weights.  [default: as stored; for a folder from a GGUF file bf16]",
)
@click.option(
    "--drafter",
    default="none",
    show_default=True,
    metavar="NAME",
    help="Convert this drafter, too, into a file beside it; auto: the target's own assistant.",
)
@click.option("--force", is_flag=True, help="Replace what is there.")
def command(
    target: str | None, named: str | None, out: Path, kind: str | None, drafter: str, force: bool
) -> None:
    """Convert TARGET (a folder, a hub id, `demo`, `smollm2` or a GGUF file) to the format that --out names.

    A folder becomes one GGUF file, which llama.cpp loads, with an mmproj file beside it for what sees and hears. A GGUF
    file, or a folder in Meta's layout (consolidated.pth and params.json), becomes a folder in Hugging Face layout.
    """
    from paceline.checkpoints.gguf.reader import is_gguf
    from paceline.convert.from_meta import in_metas_layout
    from paceline.hub.resolve import resolve

    asked = one_target(target, named, None)
    source = resolve(asked, "target")
    if is_gguf(source) or in_metas_layout(source):
        _to_folder(source, out, kind, drafter, force)
    elif out.suffix != ".gguf":
        raise UsageError(
            f"-o {out}: {asked} is a folder, which is converted to GGUF: give a name that ends in .gguf"
        )
    else:
        _to_gguf(source, asked, out, kind, drafter, force)


def _to_folder(source: Path, out: Path, kind: str | None, drafter: str, force: bool) -> None:
    from paceline.convert.from_meta import convert_meta
    from paceline.convert.to_folder import write_folder

    metas = source.is_dir()
    if out.suffix == ".gguf":
        what = "in Meta's layout" if metas else "a GGUF file already"
        raise UsageError(f"{source} is {what}, which is converted to a folder: give a folder with -o")
    if kind not in (None, *FLOATS):
        raise UsageError(
            f"--to {kind}: a folder holds {', '.join(FLOATS)}; `paceline quantize` writes int8 and int4"
        )
    if drafter != "none":
        raise UsageError(
            "--drafter goes with a target in Hugging Face layout: convert the drafter's file by itself"
        )
    notes: list[str] = []
    with progress(out.name) as report:
        if metas:
            size, notes = convert_meta(source, out, kind, force=force, report=report)
        else:
            towers = _towers(source)
            size = write_folder(source, out, kind or "bf16", towers=towers, force=force, report=report)
    click.echo(f"{out}: {size / 1e6:.1f} MB")
    for note in notes:
        click.echo(f"note: {out.name}: {note}", err=True)


def _towers(source: Path) -> Projector | None:
    """The mmproj file beside a GGUF model. Raises UsageError where several fit."""
    from paceline.media.beside import projector_of
    from paceline.models.config import parse_target, read_config

    projector = projector_of(source, None, parse_target(read_config(source)).hidden_size)
    if isinstance(projector, str):
        raise UsageError(projector.replace("name one with --mmproj", "leave one beside the model"))
    if projector is not None:
        click.echo(f"towers: {projector.path.name}", err=True)
    return projector


def _to_gguf(source: Path, target: str, out: Path, kind: str | None, drafter: str, force: bool) -> None:
    from paceline.assembly import choose_drafter
    from paceline.config import EngineConfig
    from paceline.convert.output import check_free
    from paceline.convert.projector import write_projector
    from paceline.convert.to_gguf import write_gguf
    from paceline.drafter_kinds import file_word

    models = [(source, out)]
    if drafter != "none":
        drafter_kind, path, why = choose_drafter(EngineConfig(target=target, drafter=drafter), source)
        if path is None:
            raise UsageError(
                f"--drafter {drafter}: there is no model to convert ({why}): name a folder or a hub id"
            )
        models.append((path, out.with_name(f"{out.stem}-{file_word(drafter_kind.partition('+')[0])}.gguf")))
    for _, to in models:
        check_free(to, force)
    for path, to in models:
        with progress(to.name) as report:
            written = write_gguf(path, to, kind, source, force=force, report=report)
        click.echo(f"{to}: {written.nbytes / 1e6:.1f} MB")
        for note in written.notes:
            click.echo(f"note: {to.name}: {note}", err=True)
    towers = out.with_name(f"mmproj-{out.name}")
    size = write_projector(source, towers, kind, force=force)
    if size is not None:
        click.echo(f"{towers}: {size / 1e6:.1f} MB")


@contextmanager
def progress(name: str) -> Iterator[Report]:
    """A bar on standard error while a file is written; nothing is left of it."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task(name, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)
