"""`paceline pull`: download a model before it is needed."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.errors import LoadError

if TYPE_CHECKING:
    from paceline.hub.names import HubName
    from paceline.hub.resolve import Role


@click.command()
@click.argument("name")
@click.option("--drafter/--no-drafter", default=True, show_default=True,
              help="Fetch the assistant that was published for the model, too, if there is one.")  # fmt: skip
@click.option("--media/--no-media", default=True, show_default=True,
              help="Fetch the mmproj file of a GGUF model, too: what sees and hears.")  # fmt: skip
def command(name: str, drafter: bool, media: bool) -> None:
    """Download NAME (org/name[@revision] of the Hugging Face hub), and the drafter that was published for it.

    Of a repository of GGUF files one model is fetched: org/name:Q4_K_M, without a tag its Q4_K_M.

    Configs and headers are looked at first, so a model that paceline cannot run is refused before any weight is fetched.
    `hf auth login` is needed for gated models.
    """
    if not fetch(name, drafter=drafter, media=media):
        click.echo(f"{name} is on this machine: paceline run {name}")
        return
    click.echo(f"next: paceline run {name}")


def fetch(name: str, *, drafter: bool, media: bool) -> bool:
    """Download a model, what was published to draft for it, and what sees and hears; False for one that is a file or a
    folder here. A download that was interrupted goes on where it stopped. Raises LoadError."""
    from paceline.hub.outline import as_named
    from paceline.hub.resolve import locate, look_at
    from paceline.models.inspection import check

    hub = locate(name, "target")
    if isinstance(hub, Path):
        return False
    with tempfile.TemporaryDirectory() as scratch:
        try:
            check(look_at(name, "target", Path(scratch)))
        except LoadError as error:
            raise type(error)(as_named(str(error), Path(scratch))) from error
    folder = _checked(name, "target")
    click.echo(f"{name} is in {folder}")
    made = _published(folder, hub) if drafter else None
    if made is not None:
        try:
            click.echo(f"its drafter {made} is in {_checked(made, 'assistant')}")
        except LoadError as error:
            raise LoadError(f"{name} is here, its drafter is not: {error}") from error
    towers = _towers(folder, hub) if media else None
    if towers is not None:
        try:
            click.echo(f"its towers {towers} are in {_checked(towers, 'assistant')}")
        except LoadError as error:
            raise LoadError(f"{name} is here, what sees and hears is not: {error}") from error
    return True


def _checked(name: str, role: Role) -> Path:
    """A model of the hub, downloaded and held against the hashes that the hub says."""
    from paceline.hub.repository import check_hashes
    from paceline.hub.resolve import resolve

    folder = resolve(name, role)
    if count := check_hashes(folder):
        click.echo(f"{name}: SHA-256 of {count} weight files as the hub says")
    return folder


def _towers(folder: Path, hub: HubName) -> str | None:
    """The mmproj file beside a GGUF model that has one."""
    from paceline.checkpoints.gguf.reader import is_gguf
    from paceline.hub.gguf import towers_of
    from paceline.models.config import read_config

    if not is_gguf(folder) or not str(read_config(folder).get("model_type")).startswith("gemma4"):
        return None
    return towers_of(hub)


def _published(folder: Path, hub: HubName) -> str | None:
    """The hub id of the assistant that was made for a target, or of its file beside a GGUF file; None for a model that
    has or is one."""
    from paceline.checkpoints.card import fitting_assistant
    from paceline.checkpoints.gguf.reader import is_gguf
    from paceline.drafter_kinds import ASSISTANT_TYPES
    from paceline.hub.gguf import drafter_of
    from paceline.models.config import read_config

    raw = read_config(folder)
    kind = str(raw.get("model_type"))
    if not kind.startswith("gemma4") or kind in ASSISTANT_TYPES:
        return None
    return (drafter_of(hub) if is_gguf(folder) else None) or fitting_assistant(folder, raw)
