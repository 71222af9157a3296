"""`paceline` alone, in a terminal: which model to talk to. It is fetched if need be, and one talks."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import click

from paceline.cli.options import OFFERED
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.forecast.catalogue import Entry

FRAME = 10  # columns around a row
MOST = 9  # models that are offered: a digit picks each


def interactive() -> bool:
    """Whether there is somebody to ask."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def start(ctx: click.Context) -> None:
    """Ask until a model is chosen that can be had, then talk."""
    from paceline.cli.models_here import found_here, local_entries, offline, place_here, too_large
    from paceline.forecast.catalogue import well_known

    click.echo("looking for models and at the memory of this machine", err=True)
    place, models = place_here(), found_here()
    here = [entry for entry in local_entries(models, place) if entry.context is not None]
    known = [] if offline() else well_known(place, [model.name for model in models])
    large = too_large(known, place.free)
    while True:
        entries = offered(here, known)
        chosen = pick(entries, default=_first(entries), below=large)
        if chosen is None:
            return
        if chosen.download and not _fetched(chosen):
            known = []  # the network is not there: what is here remains
            continue
        talk(ctx, chosen)
        return


def offered(here: Seq[Entry], known: Seq[Entry]) -> list[Entry]:
    """What is here, then the largest well-known models that fit, as many as digits pick; by memory in each part."""
    fitting = [entry for entry in known if entry.context is not None]
    room = max(MOST - len(here), min(4, len(fitting)))
    return [*here[: MOST - min(room, len(fitting))], *fitting[len(fitting) - min(room, len(fitting)) :]]


def _first(entries: Seq[Entry]) -> int:
    """The model that is suggested: the first that is here and is more than the demo."""
    return next((i for i, entry in enumerate(entries) if entry.target != "demo" and not entry.download), 0)


def pick(entries: Seq[Entry], default: int, below: str | None) -> Entry | None:
    """The model that is chosen; None for leaving. Arrow keys or a digit, then Enter."""
    from paceline.cli.models_here import lines

    columns = os.get_terminal_size(sys.stdout.fileno()).columns if interactive() else 80  # COLUMNS may be old
    title, *rows = lines(entries, columns - FRAME)
    asked = f"A number or arrow keys, then Enter:\n{'':{FRAME - 2}}{title}"
    if below is not None:
        click.echo(below, err=True)
    if os.environ.get("TERM", "dumb") in ("dumb", "unknown", ""):
        index = _typed(rows, asked, default)
    else:
        index = _moved(rows, asked, default)
    return None if index is None else entries[index]


def _moved(rows: Seq[str], asked: str, default: int) -> int | None:
    from prompt_toolkit.shortcuts import choice
    from prompt_toolkit.styles import Style

    bold = Style([("selected-option", "bold")])  # no colours, so that NO_COLOR needs no case of its own
    try:
        return choice(asked, options=list(enumerate(rows)), default=default, style=bold)
    except (KeyboardInterrupt, EOFError):
        return None


def _typed(rows: Seq[str], asked: str, default: int) -> int | None:
    """The same where the cursor cannot be moved: a number, or Enter alone for what is suggested."""
    click.echo(asked)
    for i, row in enumerate(rows):
        click.echo(f"{'>' if i == default else ' '} {i + 1:2}. {row}")
    while True:
        try:
            typed = input(f"number [{default + 1}]: ").strip()
        except (EOFError, KeyboardInterrupt):
            return None
        if not typed:
            return default
        if typed.isdecimal() and 0 < int(typed) <= len(rows):
            return int(typed) - 1
        click.echo(f"a number from 1 to {len(rows)}, or Ctrl-D to leave")


def _fetched(entry: Entry) -> bool:
    """Download a model and its drafter. What has arrived stays if it is interrupted, and the next time goes on there."""
    from paceline.cli.pull import fetch

    try:
        fetch(entry.target, drafter=True, media=False)
        if entry.given is not None:
            fetch(entry.given, drafter=False, media=False)
    except PacelineError as error:
        click.echo(f"paceline: {error}", err=True)
        return False
    except KeyboardInterrupt:
        click.echo("\nwhat has arrived is kept: choose it again to go on there", err=True)
        raise
    return True


def talk(ctx: click.Context, entry: Entry) -> None:
    """The conversation of `paceline run`, with a first question to begin with."""
    from paceline.cli.run import command

    click.echo(f"the same as: paceline run {' '.join(entry.words)}", err=True)
    with command.make_context("run", list(entry.words), parent=ctx) as run:
        run.meta[OFFERED] = True
        command.invoke(run)
