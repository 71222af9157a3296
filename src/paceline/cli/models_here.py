"""The table of models that `paceline` alone and `paceline list` show: what is here, and what could be fetched."""

from __future__ import annotations

import os
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import sized

if TYPE_CHECKING:
    from paceline.forecast.catalogue import Entry, Place
    from paceline.hub.cache import Cached
    from paceline.hub.stores import Store

NARROW = 64  # columns below which what drafts is left out


def found_here() -> list[Cached]:
    """Bundled models, those of the hub's cache, and those that other programs have downloaded."""
    from paceline.hub.cache import cached, hub_cache, in_other_stores
    from paceline.hub.stores import stored_in

    others = [stored for store in stores() for stored in stored_in(store)]
    return cached(hub_cache()) + in_other_stores(others)


def stores() -> list[Store]:
    """Where other programs keep models: the usual folders, or those that their own variables name."""
    from paceline.hub.stores import Store, usual_stores

    moved = {
        "Ollama": os.environ.get("OLLAMA_MODELS"),
        "llama.cpp": os.environ.get("LLAMA_CACHE"),
    }
    usual = [store for store in usual_stores(Path.home()) if not moved.get(store.program)]
    return usual + [Store(name, Path(folder)) for name, folder in moved.items() if folder]  # type: ignore[arg-type]


def place_here() -> Place:
    """This machine as models see it."""
    from paceline.capacity import free_memory
    from paceline.config import EngineConfig
    from paceline.forecast.catalogue import Place
    from paceline.ops.runners import pick_device, pick_runner

    device = pick_device("auto")
    return Place(device, pick_runner(EngineConfig(), device)[0], free_memory(device))


def offline() -> bool:
    """Whether somebody has said that the hub is not to be asked."""
    return any(
        os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


def local_entries(models: Seq[Cached], place: Place) -> list[Entry]:
    from paceline.forecast.catalogue import local
    from paceline.hub.cache import hub_cache

    return local(models, place, [hub_cache()])


def lines(entries: Seq[Entry], columns: int) -> list[str]:
    """A line for each model under the names of the columns, in the first: its name, the memory that it takes, where it
    is, and in a wide terminal what drafts for it."""
    wide = columns >= NARROW
    names = [_fitted(entry.name, max(10, columns - (54 if wide else 17))) for entry in entries]
    width = max(map(len, ["model", *names]))
    if not wide:
        rows = [f"{'model':{width}} memory"]
        for entry, name in zip(entries, names, strict=True):
            where = f"get {_brief(entry.download)}" if entry.download else "here"
            rows.append(f"{name:{width}} {_brief(entry.memory):>6}  {where}"[:columns])
        return rows
    rows = [f"{'model':{width}} {'memory':>9}  {'':9}{'where':15}drafter"]
    for entry, name in zip(entries, names, strict=True):
        where = f"get {_short(entry.download)}" if entry.download else "here"
        as_kept = f"as {entry.quantize}" if entry.quantize else ""
        rows.append(
            f"{name:{width}} {_short(entry.memory):>9}  {as_kept:9}{where:15}{entry.drafts}"[:columns]
        )
    return rows


def too_large(entries: Seq[Entry], free: int) -> str | None:
    """A line on the models that do not fit; None where all do."""
    large = [entry for entry in entries if entry.context is None]
    if not large:
        return None
    least = min(large, key=lambda entry: entry.memory)
    fact = f"{len(large)} larger models do not fit, {least.name} takes {_short(least.memory)}"
    return f"{sized(free)} of memory free: {fact}"


def _short(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size > 2**26 else f"{size / 2**20:.0f} MiB"


def _brief(size: int) -> str:
    return _short(size).replace(" GiB", "G").replace(" MiB", "M")


def _fitted(name: str, most: int) -> str:
    """A name in so many columns: without its owner, then without its end."""
    if len(name) > most:
        name = name.rpartition("/")[2]
    return name if len(name) <= most else name[: most - 1] + "…"
