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

    models = found_here()
    if as_json:
        click.echo(json.dumps([_record(model) for model in models], indent=2))
        return
    place, columns = place_here(), shutil.get_terminal_size().columns
    here = local_entries(models, place)
    others = [model for model in models if model.target not in {entry.target for entry in here}]
    known = well_known(place, [model.name for model in models])
    fitting = [entry for entry in known if entry.context is not None]
    click.echo("\n".join(lines([*here, *fitting], columns)))
    if others:
        click.echo("\nbeside them:")
        width = max(len(model.name) for model in others) + 2
        click.echo(
            "\n".join(f"{model.name:{width}}{sized(model.size):>10}  {_what(model)}" for model in others)
        )
    if (large := too_large([*here, *known], place.free)) is not None:
        click.echo(f"\n{large}")
    click.echo(
        "\nMemory is that of the weights; `paceline info MODEL` has the context that fits beside them."
    )
    click.echo(f"hub cache: {hub_cache()}\nmeasurements and history: {profile_dir()}")


def _record(model: Cached) -> dict[str, object]:
    """What is known of a model, without what was read to know it."""
    return {
        "name": model.name, "size": model.size, "role": model.role, "model_type": model.model_type,
        "path": str(model.path),
        "why": model.why,
    }  # fmt: skip


def _what(model: Cached) -> str:
    return f"{model.role}, {model.model_type}" if model.why is None else f"cannot be used: {model.why}"
