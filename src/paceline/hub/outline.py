"""What a hub repository holds, without its weights: configs, and the headers of its safetensors by ranged requests.

An outline is a folder like the repository's snapshot, in which each weight file has its header and its size, but nothing
is stored behind the header. So whatever reads configs and headers reads an outline as it reads a model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

from paceline.checkpoints.foreign import drafter_kind
from paceline.checkpoints.gguf.reader import is_gguf
from paceline.checkpoints.loading import read_entries
from paceline.drafter_kinds import ASSISTANT_TYPES
from paceline.errors import LoadError
from paceline.hub.gguf import choose, outline_gguf
from paceline.hub.names import CACHE_PREFIX, HubName, models_among
from paceline.hub.repository import downloaded, files_in, listing, readable_errors
from paceline.models.config import parse_target, read_config
from paceline.models.drafters.networks import PARSERS
from paceline.models.families import spec_of
from paceline.models.families.gemma4.config import parse_assistant

CONFIGS = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "hf_quant_config.json",
    "README.md",
)
TEXT = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json", "processor_config.json",
)  # fmt: skip


def outline(hub: HubName, scratch: Path, with_text: bool = False) -> Path:
    """The folder of a repository's outline under `scratch`, or its snapshot where that is downloaded whole; of a GGUF
    model the file in it.

    The config is looked at before the headers are asked for. `with_text`: tokenizer and template, too, which come last.
    Raises LoadError for a repository that cannot be read, and ConfigError for a config that cannot be run.
    """
    with readable_errors(hub.id):
        ready = _downloaded(hub)
        if ready is not None:
            return ready
        commit, names = listing(hub)
        place = scratch / f"{CACHE_PREFIX}{hub.id.replace('/', '--')}" / "snapshots" / commit
        place.mkdir(parents=True, exist_ok=True)
        if holds_gguf(hub, names):
            tag = PurePosixPath(choose(hub, names)[0]).name
            return _downloaded(replace(hub, tag=tag)) or outline_gguf(hub, names, place)
        for name in names:
            if "/" not in name and not name.endswith((".json", ".jinja", ".md", ".safetensors")):
                (place / name).touch()  # says what kind of repository it is
        _fetch(hub, [n for n in CONFIGS if n in names], place)
        _check_config(place)
        _write_headers(hub, place)
        if with_text:
            _fetch(hub, [n for n in TEXT if n in names], place)
    return place


def plan(raw: Mapping[str, Any], place: Path) -> Path:
    """`place` made a folder of a checkpoint in bfloat16 that has the config `raw`: its headers, no weights."""
    config = parse_target(raw)
    tensors, at = {}, 0
    for name, shape in spec_of(config.model_type).shapes(config).items():
        size = 2 * prod(shape)
        tensors[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(dict(raw)), encoding="utf-8")
    _write_hollow(place / "model.safetensors", tensors, at)
    return place


def as_named(text: str, scratch: Path) -> str:
    """`text` with the hub's name in the place of an outline's folder, `org/name:FILE` in that of a GGUF file in it."""
    pattern = re.escape(str(scratch)) + rf"/{CACHE_PREFIX}([\w.-]+)/snapshots/[\w.-]+(?:/([\w.-]+\.gguf))?"

    def named(match: re.Match[str]) -> str:
        name = match[1].replace("--", "/")
        return name if match[2] is None else f"{name}:{match[2]}"

    return re.sub(pattern, named, text, flags=re.IGNORECASE)


def holds_gguf(hub: HubName, names: Iterable[str]) -> bool:
    """Whether a model of these files is one in GGUF: by its tag, or because there are no safetensors."""
    names = list(names)
    return hub.tag is not None or (
        bool(models_among(names)) and not any(name.endswith(".safetensors") for name in names)
    )


def _downloaded(hub: HubName) -> Path | None:
    """The snapshot in the hub cache, or the GGUF file in it that a tag means, if config and all weights are there."""
    folder = downloaded(hub)
    if folder is None:
        return None
    try:
        names = [file.relative_to(folder).as_posix() for file in files_in(folder)]
        place = folder if hub.tag is None else folder / choose(hub, names)[0]
        read_entries(place)
    except LoadError:
        return None
    return place if is_gguf(place) or (folder / "config.json").is_file() else None


def _fetch(hub: HubName, names: list[str], place: Path) -> None:
    """Put small files of the repository into `place`, through the hub cache."""
    from huggingface_hub import hf_hub_download

    for name in names:
        stored = Path(hf_hub_download(hub.id, name, revision=hub.revision))
        (place / name).unlink(missing_ok=True)
        (place / name).symlink_to(stored.resolve())


def _check_config(place: Path) -> None:
    raw = read_config(place)
    if raw.get("model_type") in ASSISTANT_TYPES:
        parse_assistant(raw)
    else:
        PARSERS[drafter_kind(raw)](raw)


def _write_headers(hub: HubName, place: Path) -> None:
    """One file for each of the repository's safetensors: its header, and a hole as large as its data."""
    from huggingface_hub import HfApi, errors
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    quiet = are_progress_bars_disabled()
    disable_progress_bars()  # a bar for a few headers is noise
    try:
        metadata = HfApi().get_safetensors_metadata(hub.id, revision=hub.revision)
    except errors.NotASafetensorsRepoError:
        return
    finally:
        if not quiet:
            enable_progress_bars()
    if metadata.sharded:
        index = {"weight_map": dict(metadata.weight_map)}
        (place / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    for name, file in metadata.files_metadata.items():
        _write_header(place / Path(name).name, file.tensors)


def _write_header(path: Path, tensors: Mapping[str, Any]) -> None:
    header = {
        name: {
            "dtype": str(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": list(tensor.data_offsets),
        }
        for name, tensor in tensors.items()
    }
    _write_hollow(path, header, max((tensor.data_offsets[1] for tensor in tensors.values()), default=0))


def _write_hollow(path: Path, header: Mapping[str, Any], size: int) -> None:
    """A safetensors file of a header and a hole of `size` bytes."""
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)
