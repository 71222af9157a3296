"""`paceline rm`: free the disk of models that are not needed any more."""

from __future__ import annotations

import sys

import click

from paceline.errors import sized


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def command(names: tuple[str, ...], yes: bool) -> None:
    """Remove models from the cache of the Hugging Face hub, all their revisions. Files of your own are never touched.

    The cache is shared: what is removed here is gone for transformers and others as well.
    """
    from paceline.errors import UsageError
    from paceline.hub.cache import hub_cache, remove, where

    places = [where(name, hub_cache()) for name in names]  # all are checked before any is removed
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("there is no terminal to ask in: give --yes to remove without a question")
        click.confirm("remove " + ", ".join(map(str, places)) + "?", abort=True, err=True)
    for name in names:
        click.echo(f"{name} is removed: {sized(remove(name, hub_cache()))} are free again")
