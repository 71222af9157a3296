"""`paceline list`: the models that are here already."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from paceline.cli.options import profile_dir
from paceline.errors import sized

if TYPE_CHECKING:
    from paceline.hub.cache import Cached


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list: name, size in bytes, role, path.")
def command(as_json: bool) -> None:
    """List the models that need no download: bundled ones, and those in the cache of the Hugging Face hub.

    The cache is shared with transformers and others; what paceline cannot run is listed, too, with the reason.
    """
    from paceline.hub.cache import cached, hub_cache

    found = cached(hub_cache())
    if as_json:
        click.echo(json.dumps([asdict(one) | {"path": str(one.path)} for one in found], indent=2))
        return
    width = max(len(one.name) for one in found) + 2
    for one in found:
        click.echo(f"{one.name:{width}}{sized(one.size):>10}  {_what(one)}")
    click.echo(f"\nhub cache: {hub_cache()}\nmeasurements and history: {profile_dir()}")


def _what(one: Cached) -> str:
    return f"{one.role}, {one.model_type}" if one.why is None else f"cannot be used: {one.why}"
