"""`paceline list`: the models that are here already, and well-known ones that fit."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import click

from paceline.cli.options import profile_dir
from paceline.errors import sized

if TYPE_CHECKING:
    from paceline.hub.cache import Cached


@click.command()
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print a JSON list of what is here: name, size in bytes, role, path.",
)
def command(as_json: bool) -> None:
    """List the models that need no download, and well-known ones that would fit into the memory that is free.

    Bundled models, the cache of the Hugging Face hub, and what Ollama, LM Studio and llama.cpp have downloaded. The hub's
    cache is shared with transformers and others; what paceline cannot run is listed, too, with the reason.
    """
    from paceline.cli.models_here import found_here, lines, local_entries, place_here, too_large
    from paceline.forecast.catalogue import well_known
    from paceline.hub.cache import hub_cache

    found = found_here()
    if as_json:
        click.echo(json.dumps([_record(one) for one in found], indent=2))
        return
    place, columns = place_here(), shutil.get_terminal_size().columns
    here = local_entries(found, place)
    others = [one for one in found if one.target not in {entry.target for entry in here}]
    known = well_known(place, [one.name for one in found])
    fitting = [entry for entry in known if entry.context is not None]
    click.echo("\n".join(lines([*here, *fitting], columns)))
    if others:
        click.echo("\nbeside them:")
        width = max(len(one.name) for one in others) + 2
        click.echo("\n".join(f"{one.name:{width}}{sized(one.size):>10}  {_what(one)}" for one in others))
    if (large := too_large([*here, *known], place.free)) is not None:
        click.echo(f"\n{large}")
    click.echo(
        "\nMemory is that of the weights; `paceline info MODEL` has the context that fits beside them."
    )
    click.echo(f"hub cache: {hub_cache()}\nmeasurements and history: {profile_dir()}")


def _record(one: Cached) -> dict[str, object]:
    """What is known of a model, without what was read to know it."""
    return {
        "name": one.name, "size": one.size, "role": one.role, "model_type": one.model_type, "path": str(one.path),
        "why": one.why,
    }  # fmt: skip


def _what(one: Cached) -> str:
    return f"{one.role}, {one.model_type}" if one.why is None else f"cannot be used: {one.why}"
