"""`paceline info`: what a model is and needs, without loading its weights."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.options import TARGET, apply, one_target

if TYPE_CHECKING:
    from paceline.config import EngineConfig
    from paceline.models.inspection import Inspection


@click.command()
@apply(TARGET)
@click.option("--drafter", default="auto", show_default=True, help="As for `paceline run`.")
@click.option("--adapter", multiple=True, metavar="DIR", help="As for `paceline run`.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(target: str | None, named: str | None, drafter: str, adapter: Any, as_json: bool) -> None:
    """Say what TARGET and its drafter are, their memory by part, and what is unsupported and why.

    Reads configs and file headers only; of a model on the hub no weights are downloaded.
    """
    import tempfile

    from paceline.config import EngineConfig
    from paceline.drafters.registry import check_kind

    with tempfile.TemporaryDirectory() as scratch:
        from paceline.errors import LoadError
        from paceline.models.outline import as_named

        try:
            _inform(
                EngineConfig(target=one_target(target, named), drafter=check_kind(drafter), adapter=adapter),
                as_json,
                Path(scratch),
            )
        except LoadError as error:
            raise type(error)(as_named(str(error), Path(scratch))) from error


def _inform(config: EngineConfig, as_json: bool, scratch: Path) -> None:
    from paceline.assembly import choose_drafter, find_adapter, pick_device, pick_runner
    from paceline.memory import why_not
    from paceline.models.hub import look_at
    from paceline.models.inspection import inspect
    from paceline.models.names import check_folder
    from paceline.models.outline import as_named
    from paceline.survey import describe_sampling, describe_text

    folder = check_folder(look_at(config.target, "target", scratch, True))
    kind, source, why = choose_drafter(config, folder, lambda name, role: look_at(name, role, scratch))
    device = pick_device("auto")
    runner, arithmetic = pick_runner(config, device)
    pages = why_not() or "huge pages are granted" if device.type == "cpu" else None
    found = [inspect(folder, itemsize=4 if device.type == "cpu" else 2, runner=runner)]
    if source is not None:
        found.append(inspect(source, target=folder if kind.startswith(("mtp", "eagle3")) else None))
    text, troubles = describe_text(folder)
    sampling, wrong = describe_sampling(folder)
    text, troubles = text | sampling, troubles + wrong
    find_adapter(config, folder, lambda line: text.update(adapter=line.removeprefix("adapter ")))
    if as_json:
        facts: dict[str, Any] = {
            "drafter": kind,
            "reason": why,
            "device": str(device),
            "arithmetic": arithmetic,
            "pages": pages,
            **text,
        }
        facts["models"] = [asdict(one) | {"path": str(one.path)} for one in found]
        click.echo(as_named(json.dumps(facts, indent=2), scratch))
    else:
        for one in found:
            click.echo(as_named(_describe(one), scratch))
        for part, what in text.items():
            click.echo(f"{part:12} {what}")
        click.echo(as_named(f"drafter      {kind}: {why}", scratch))
        click.echo(f"device       {device}, {arithmetic}")
        if pages is not None:
            click.echo(f"pages        {pages}")
    troubles = [trouble for one in found for trouble in one.unsupported] + troubles
    if troubles:
        from paceline.errors import LoadError

        raise LoadError(troubles[0])


def _describe(one: Inspection) -> str:
    lines = [f"{one.role:12} {one.path}", f"  type       {one.model_type}"]
    if one.layers:
        lines.append(f"  layers     {one.layers}; vocabulary {one.vocab_size:,}; context {one.max_len:,}")
    if one.parameters:
        stored = ", ".join(f"{name} x{n}" for name, n in one.dtypes.items())
        lines.append(
            f"  weights    {sized(one.weight_bytes)}: {one.parameters / 1e6:.2f} M parameters ({stored})"
        )
        lines += [f"    {part:24} {sized(size):>10}" for part, size in one.weights.items()]
    for kind, size in one.kv_per_token.items():
        reach = one.windows.get(kind)
        lines.append(
            f"  K/V        {sized(size)} per token, {kind.replace('_', ' ')}"
            + (f", last {reach} kept" if reach else "")
        )
    lines += [f"  not loaded {part}: {sized(size)}" for part, size in one.skipped.items()]
    lines += [f"  UNSUPPORTED {why}" for why in one.unsupported]
    return "\n".join(lines)


def sized(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
