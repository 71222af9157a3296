"""Makes the folders that people have: the bundled pair as a base, whose files are replaced, left out or damaged."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from paceline.hub.resolve import bundled

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 10246621918\n"
PAGE = "<!DOCTYPE html>\n<html class=''><head><title>Log in</title></head></html>\n"


def model(folder: Path, role: Any = "target") -> Path:
    """A whole model folder: small files are copied, weights are linked."""
    folder.mkdir(parents=True)
    for path in bundled(role).iterdir():
        if path.suffix == ".safetensors":
            (folder / path.name).symlink_to(path)
        elif path.is_file():
            shutil.copyfile(path, folder / path.name)
    return folder


def write(path: Path, content: object) -> Path:
    """Text, bytes or, for anything else, JSON; a link that stands there is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink() or path.exists():
        path.unlink()
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def edit(path: Path, **changes: Any) -> None:
    """Change fields of a JSON file; `...` removes one; of a nested config the language model's where it has them."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    for name, value in changes.items():
        text = raw.get("text_config")
        place = text if isinstance(text, dict) and name in text else raw
        if value is ...:
            place.pop(name, None)
        else:
            place[name] = value
    write(path, raw)


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)
