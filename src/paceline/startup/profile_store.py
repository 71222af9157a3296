"""What start-up has measured, kept for the next start: one small JSON file per target, drafter and settings.

A file is used only where it was made: same machine, same weights, same versions, same layout of the file. Otherwise it is
measured again, in silence.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from paceline.control.cost_model import CostTable, DraftCost, table_of
from paceline.errors import LoadError
from paceline.files import read_json
from paceline.startup.calibration_file import Known, known_of

VERSION = 8

Key = Mapping[str, str]  # what a profile is valid for, by aspect


@dataclass(frozen=True, slots=True)
class Kept:
    table: CostTable
    known: Known | None = None  # of the network drafter, from texts that were written with it,
    drafts: int = 0  # and so many drafts


def machine(device: torch.device) -> str:
    """The processor that computes, in one line."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return f"{platform.machine()}, {next(names, platform.processor())}, {os.cpu_count()} CPUs"


def place(folder: Path, target: Path, settings: Seq[str]) -> Path:
    """The file of a target with `settings` (drafter, device, arithmetic, ...) in the folder of profiles."""
    mark = hashlib.sha256("\n".join([str(target.resolve()), *settings]).encode()).hexdigest()[:12]
    return folder / f"{target.resolve().name}-{mark}.json"


def save(stored: Kept, key: Key, path: Path) -> str:
    """Write atomically. "" or why it could not be kept; then it is only measured again."""
    value = {
        "version": VERSION, "key": dict(key), "rows": stored.table.rows, "seconds": stored.table.seconds,
        "drafts": {name: list(cost) for name, cost in stored.table.drafts.items()},
        "trusted": stored.table.trusted, "drafted": stored.drafts,
        "known": stored.known.to_json() if stored.known is not None else None,
    }  # fmt: skip
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8"
        ) as out:
            temporary = out.name
            json.dump(value, out)
        os.replace(temporary, path)
    except OSError as problem:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        return f"{path.parent} cannot be written ({problem.strerror or problem})"
    return ""


def load(path: Path, key: Key) -> Kept | None:
    """What is kept for `key`; None without a file, or if it is none of ours, damaged, or made elsewhere."""
    try:
        raw = read_json(path)
        if raw is None or raw.get("version") != VERSION:
            return None
        theirs = {str(aspect): str(value) for aspect, value in dict(raw["key"]).items()}
        if any(theirs.get(aspect) != value for aspect, value in key.items()):
            return None
        rows = [int(n) for n in raw["rows"]]
        seconds = [float(s) for s in raw["seconds"]]
        drafts = {str(name): DraftCost(*map(float, cost)) for name, cost in dict(raw["drafts"]).items()}
        known = known_of(raw["known"]) if raw.get("known") is not None else None
        table = replace(table_of(rows, seconds, drafts), trusted=bool(raw["trusted"]))
        return Kept(table, known, int(raw["drafted"]))
    except (OSError, ValueError, KeyError, TypeError, LoadError):
        return None


def newest(folder: Path, target: Path, key: Key) -> tuple[Path, Kept] | None:
    """The profile of a target that was written last among those of `key`, which may leave aspects out."""
    written: list[tuple[float, Path]] = []
    for path in folder.expanduser().glob(f"{target.resolve().name}-*.json"):
        with suppress(OSError):
            written.append((path.stat().st_mtime, path))
    for _, path in sorted(written, reverse=True):
        stored = load(path, key)
        if stored is not None:
            return path, stored
    return None
