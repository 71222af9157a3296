"""What start-up has measured, kept for the next start: one small JSON file per target, drafter and settings.

A file is used only where it was made: same machine, same weights, same versions. Otherwise it is ignored with a line
that says why, and measured again.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from paceline.engine.calibration import Known, known_of
from paceline.engine.costs import Profile

VERSION = 4
SAMPLE = 64 * 1024  # bytes of a weights file that are looked at, at its beginning, middle and end

Key = Mapping[str, str]  # what a profile is valid for, by aspect


@dataclass(frozen=True, slots=True)
class Kept:
    profile: Profile
    known: Known | None = None  # of the network drafter, from its self-test


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


def fingerprint(folder: Path) -> str:
    """Tells two sets of weights apart without reading them whole: names, sizes, config and samples of the bytes."""
    seen = hashlib.sha256()
    # a GGUF model is its file
    files = [folder] if folder.is_file() else sorted([folder / "config.json", *folder.glob("*.safetensors")])
    for path in files:
        size = path.stat().st_size
        seen.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for start in sorted({0, size // 2, max(size - SAMPLE, 0)}):
                file.seek(start)
                seen.update(file.read(SAMPLE))
    return seen.hexdigest()[:16]


def place(folder: Path, target: Path, settings: Seq[str]) -> Path:
    """The file of a target with `settings` (drafter, device, arithmetic, ...) in the folder of profiles."""
    mark = hashlib.sha256("\n".join([str(target.resolve()), *settings]).encode()).hexdigest()[:12]
    return folder / f"{target.resolve().name}-{mark}.json"


def save(kept: Kept, key: Key, path: Path) -> str:
    """Write atomically. "" or why it could not be kept; then it is only measured again."""
    profile = kept.profile
    value = {
        "version": VERSION, "key": dict(key), "rows": profile.rows, "seconds": profile.seconds,
        "rounds": dict(profile.rounds), "chill": dict(profile.chill), "text": profile.text, "reach": profile.reach,
        "known": kept.known.to_json() if kept.known is not None else None,
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


def load(path: Path, key: Key) -> tuple[Kept | None, str]:
    """(what is kept for `key`, ""), (None, "") if there is no file, or (None, why the file is ignored)."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(raw, dict) or raw.get("version") != VERSION:
            raise ValueError("another format")
        theirs = {str(aspect): str(value) for aspect, value in dict(raw["key"]).items()}
        profile = _with_rounds(_profile(raw["rows"], raw["seconds"]), raw)
        known = known_of(raw["known"]) if raw.get("known") is not None else None
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as problem:
        return None, f"cost profile {path.name} is ignored ({_why(problem)}): measuring again"
    for aspect, value in key.items():
        other = theirs.get(aspect, "unknown")
        if other != value:
            return None, (
                f"cost profile {path.name} is ignored, its {aspect} is another ({other}; now {value}): "
                "measuring again"
            )
    return Kept(profile, known), ""


def _why(problem: Exception) -> str:
    return f"no {problem}" if isinstance(problem, KeyError) else f"{problem!s:.80}"


def _profile(rows: object, seconds: object) -> Profile:
    """Raises ValueError unless these are rungs of a staircase."""
    if not isinstance(rows, list) or not isinstance(seconds, list) or not rows or len(rows) != len(seconds):
        raise ValueError("not one time for each row count")
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in rows) or rows != sorted(
        set(rows)
    ):
        raise ValueError("row counts are not rising")
    if not all(_is_time(s) and s > 0 for s in seconds):
        raise ValueError("a time is not positive seconds")
    return Profile(tuple(rows), tuple(float(s) for s in seconds))


def _with_rounds(profile: Profile, raw: Mapping[str, Any]) -> Profile:
    """`profile` with what draft rounds cost. Raises ValueError for what are no times."""
    rounds, chill, text, reach = raw["rounds"], raw["chill"], raw["text"], raw["reach"]
    if not isinstance(rounds, dict) or not isinstance(chill, dict):
        raise ValueError("no prices by drafter")
    for kinds, count in ((rounds, 3), (chill, 2)):
        if not all(isinstance(price, list) and len(price) == count for price in kinds.values()):
            raise ValueError(f"the price of a draft round is not {count} times")
    if not isinstance(reach, list) or len(reach) != 3 or not all(map(_is_time, reach)):
        raise ValueError("the price of a context is not three numbers")
    if not all(_is_time(s) for price in [*rounds.values(), *chill.values(), [text]] for s in price):
        raise ValueError("a price is not seconds")
    return replace(
        profile,
        text=float(text),
        reach=(float(reach[0]), float(reach[1]), float(reach[2])),
        chill={str(kind): (float(a), float(b)) for kind, (a, b) in chill.items()},
        rounds={str(kind): (float(a), float(b), float(c)) for kind, (a, b, c) in rounds.items()},
    )  # fmt: skip


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 3600
