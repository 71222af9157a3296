"""GGUF models that other programs have downloaded: Ollama, LM Studio, llama.cpp. They are read where they lie."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.errors import PacelineError
from paceline.files import read_json
from paceline.hub.names import gguf_files, models_among

Program = Literal["Ollama", "LM Studio", "llama.cpp"]
MODEL = "application/vnd.ollama.image.model"
MOST = 64  # models of a store that are looked at
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class Store:
    """A program's folder of models."""

    program: Program
    folder: Path


@dataclass(frozen=True, slots=True)
class Stored:
    """`name`: what the program calls it."""

    program: Program
    name: str
    path: Path


def usual_stores(home: Path) -> list[Store]:
    """Where these programs keep models if nobody has moved them."""
    return [
        Store("Ollama", home / ".ollama" / "models"),
        Store("Ollama", Path("/usr/share/ollama/.ollama/models")),  # as a service of the system
        Store("LM Studio", home / ".lmstudio" / "models"),
        Store("LM Studio", home / ".cache" / "lm-studio" / "models"),
        Store("llama.cpp", home / ".cache" / "llama.cpp"),
        Store("llama.cpp", home / "Library" / "Caches" / "llama.cpp"),
    ]


def stored_in(store: Store) -> list[Stored]:
    """The models of a store by name; none where it cannot be read."""
    try:
        models = _of_ollama(store.folder) if store.program == "Ollama" else _files(store)
        return sorted(models, key=lambda model: model.name)[:MOST]
    except OSError:
        return []


def _of_ollama(folder: Path) -> Iterator[Stored]:
    """manifests/HOST/OWNER/NAME/TAG names the blob that holds a model."""
    for manifest in sorted(folder.glob("manifests/*/*/*/*"))[:MOST]:
        try:
            layers = (read_json(manifest) or {}).get("layers")
        except PacelineError:
            continue
        for layer in layers if isinstance(layers, list) else []:
            if not isinstance(layer, dict) or layer.get("mediaType") != MODEL:
                continue
            digest = _DIGEST.fullmatch(str(layer.get("digest")))
            blob = None if digest is None else folder / "blobs" / f"sha256-{digest[1]}"
            if blob is not None and blob.is_file():
                owner, name, tag = manifest.parts[-3:]
                yield Stored("Ollama", f"{'' if owner == 'library' else owner + '/'}{name}:{tag}", blob)


def _files(store: Store) -> Iterator[Stored]:
    """GGUF files, of LM Studio in folders owner/repository."""
    folders = [store.folder, *sorted(store.folder.glob("*/*/"))[:MOST]]
    for folder in folders:
        files = {path.name: path for path in gguf_files(folder)}
        yield from (Stored(store.program, Path(name).stem, files[name]) for name in models_among(files))
