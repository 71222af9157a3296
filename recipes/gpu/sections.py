"""The sections of measure.py, and how each is run: within its time, and noted where it fails."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import beside
import click
import exact
import speed
import torch
from journal import Journal
from subjects import Place, Wanted, free

from paceline.errors import UsageError
from paceline.provenance import provenance

AGAIN = 75  # the exit code that asks for a fresh process
DEAD = ("CUDA error", "illegal memory access", "device-side assert", "unspecified launch failure")
SLACK = 3.0  # times its usual seconds after which a section is given up


class Section(NamedTuple):
    seconds: float  # on an H100, about
    run: Callable[[Place, Journal], None]


def _shape(name: str, batches: tuple[int, ...] = (), **how: Any) -> Callable[[Place, Journal], None]:
    wanted = Wanted(name, batch=2 * max(batches, default=1), cache=(8 if batches else 2) << 30, **how)
    return lambda place, journal: speed.shape(place, journal, wanted, batches)


SECTIONS: dict[str, Section] = {
    "bandwidth": Section(3, speed.bandwidth),
    "31b": Section(30, _shape("31b", (8, 16))),
    "bits": Section(15, exact.invariance),
    "e2b": Section(12, _shape("e2b")),
    "check": Section(35, exact.check_demo),
    "demo": Section(20, exact.demo_texts),
    "texts": Section(25, exact.random_texts),
    "31b-int4": Section(12, _shape("31b", kind="int4")),
    "31b-int8": Section(12, _shape("31b", kind="int8")),
    "26b": Section(15, _shape("26b")),
    "12b": Section(12, _shape("12b")),
    "e4b": Section(12, _shape("e4b")),
    "tax": Section(5, speed.tax),
    "linears": Section(12, speed.linears),
    "hf-e2b": Section(15, partial(beside.transformers, name="e2b")),
    "hf-31b": Section(20, partial(beside.transformers, name="31b")),
}


@click.command()
@click.option(
    "--budget", default=240.0, show_default=True, help="Seconds in all, that of loading Python apart."
)
@click.option("--only", default=",".join(SECTIONS), help="Sections, separated by commas. Default: all.")
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), help="Write all rows as JSON, after each."
)
@click.option("--device", help="Default: cuda; with --dry cpu.")
@click.option("--dry", is_flag=True, help="Tiny models, few tokens: to see that it runs.")
@click.option(
    "--list", "listed", is_flag=True, help="Name the sections with the seconds that each takes, and end."
)
@click.option("--resume", is_flag=True, hidden=True, help="Go on with --out, after a fault.")
@click.option("--worker", is_flag=True, hidden=True, expose_value=False, help="Measure in this process.")
def main(
    budget: float, only: str, out: Path | None, device: str | None, dry: bool, listed: bool, resume: bool
) -> None:
    """Measure this GPU, as far as the time allows."""
    if listed:
        click.echo("\n".join(f"{name:12} {section.seconds:3.0f} s" for name, section in SECTIONS.items()))
        return
    names = only.split(",")
    if unknown := [name for name in names if name not in SECTIONS]:
        raise click.UsageError(f"section {unknown[0]!r} is unknown: use {', '.join(SECTIONS)}")
    place = Place(device or ("cpu" if dry else "cuda"), dry)
    try:
        used = place.torch
    except UsageError as error:
        raise click.ClickException(str(error)) from error
    if resume and out is not None:
        journal = Journal.resumed(out)
    else:
        journal = Journal(out, _facts(place), budget)
        click.echo(f"{journal.facts['gpu'] or journal.facts['processor']}, {used}, torch {torch.__version__}")
    for name in names:
        if name not in journal.done:
            _section(place, journal, name)
    journal.facts["ended"] = "done"
    journal.write()


def _facts(place: Place) -> dict[str, Any]:
    facts = provenance("measure.py " + " ".join(sys.argv[1:])) | {"dry": place.dry}
    if place.torch.type == "cuda":
        properties = torch.cuda.get_device_properties(place.torch)
        facts |= {
            "gpu": properties.name, "gpu_memory": properties.total_memory, "cuda": torch.version.cuda,
            "capability": f"{properties.major}.{properties.minor}", "processors": properties.multi_processor_count,
        }  # fmt: skip
    return facts


def _section(place: Place, journal: Journal, name: str) -> None:
    section = SECTIONS[name]
    journal.section = name
    if not place.dry and journal.left < section.seconds:
        journal.add(f"{name} left out", f"{section.seconds:.0f} s, {journal.left:.0f} are left", skipped=True)
        return
    limit = threading.Timer(
        min(SLACK * section.seconds + 30, max(journal.left, 1)), _give_up, [journal, name]
    )
    limit.daemon = True
    if not place.dry:
        limit.start()
    try:
        section.run(place, journal)
    except Exception as error:  # noqa: BLE001  the other sections are worth having
        traceback.print_exc()
        words = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
        journal.add(f"{name} FAILED", words, error=traceback.format_exc()[-4000:])
        if any(sign in str(error) for sign in DEAD):
            _afresh(journal)
    finally:
        limit.cancel()
    free()


def _give_up(journal: Journal, name: str) -> None:
    journal.add(f"{name} given up", "it took far longer than it should", error="timeout")
    _afresh(journal)


def _afresh(journal: Journal) -> None:
    """End, so that a fresh process goes on: of this one, nothing on the GPU can be used any more."""
    goes_on = journal.path is not None and journal.left >= 10
    if not goes_on:
        click.echo(
            "the rest is left out" + (": give --out to go on after a fault" if journal.path is None else "")
        )
    sys.stdout.flush()
    os._exit(AGAIN if goes_on else 1)
