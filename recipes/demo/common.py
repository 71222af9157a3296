"""Shared pieces of the demo recipe: errors, atomic writes, small helpers."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


class RecipeError(Exception):
    """A problem to be reported in one line; nothing was overwritten."""


def say(text: str) -> None:
    """Print one progress line with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def need_space(folder: Path, mebibytes: int) -> None:
    """Refuse to start a stage that would fill the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free >> 20
    if free < mebibytes:
        raise RecipeError(f"no disk space: {free} MiB free under {folder.name}, {mebibytes} MiB needed")


def write_atomic(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` fill a temporary file next to `path`, then rename it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    except OSError as problem:
        raise RecipeError(f"cannot write {path.name}: {problem.strerror or problem}") from problem
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write text atomically."""
    write_atomic(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Read JSON, naming the file when it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise RecipeError(f"cannot read {path.name}: {problem}") from problem


def fingerprint(value: Any) -> str:
    """A short stable hash of a JSON-able value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def run_main(main: Callable[[], int]) -> None:
    """Run a command and turn a RecipeError into one line and exit code 2."""
    try:
        sys.exit(main())
    except RecipeError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted: run the same command again to go on", file=sys.stderr)
        sys.exit(130)
