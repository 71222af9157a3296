"""Reading the small text files of a model folder, which anyone may have written: bounded, and recognised.

A file that is not what its name says (a Git LFS pointer, a web page, a pipe) is named as what it is.
Weights are not read here, only fingerprinted.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.errors import LoadError

MOST_BYTES = 64 * 2**20  # of a config or template; a config has kilobytes
MOST_DIGITS = 40  # of a whole number; transformers writes 31 for "no limit"
LFS = b"version https://git-lfs.github.com/spec/"
SAMPLE = 64 * 1024  # bytes of a weights file that are looked at, at its beginning, middle and end
_PAGES = (b"<!doctype html", b"<html", b"<head")


def check_regular(path: Path) -> int | None:
    """Size in bytes of a file, None where there is none. LoadError for a pipe, a device, a folder or a link loop."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        if os.path.islink(path):
            raise LoadError(f"{path} is a link to a file that is gone: download it again") from error
        return None
    except (OSError, ValueError) as error:
        raise LoadError(f"cannot read {path} ({getattr(error, 'strerror', error)}): replace it") from error
    if not stat.S_ISREG(status.st_mode):
        what = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, socket or device"
        raise LoadError(f"{path} is {what}, not a file: put the model's own file there")
    return status.st_size


def check_content(path: Path, head: bytes) -> None:
    """Raise LoadError if a file that begins with `head` is a Git LFS pointer or a web page."""
    if head.startswith(LFS):
        raise LoadError(
            f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` there, or get the model with "
            "`hf download`"
        )
    if head.removeprefix(b"\xef\xbb\xbf").lstrip().lower().startswith(_PAGES):
        raise LoadError(
            f"{path} is a web page (a login or error page saved under this name): run `hf auth login`, then "
            "`hf download`"
        )


def unreadable(path: Path, error: OSError) -> str:
    """What an operating system's refusal to read a file means, and what to do."""
    advice = {
        errno.ENOMEM: "free memory, or take a smaller or quantized file",
        errno.EMFILE: "raise the limit of open files (ulimit -n)",
        errno.EIO: "the disk or network share fails: copy the file elsewhere",
    }
    return f"cannot read {path} ({error.strerror}): {advice.get(error.errno or 0, 'change its permissions')}"


def check_file(path: Path) -> None:
    """Raise LoadError if there is something at `path` that is not the file it is named as."""
    if check_regular(path) is not None:
        try:
            with path.open("rb") as file:
                check_content(path, file.read(256))
        except OSError as error:
            raise LoadError(unreadable(path, error)) from error


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes | None:
    """What is in a file of up to `most` bytes, None where there is none. Raises LoadError."""
    size = check_regular(path)
    if size is None:
        return None
    if size > most:
        raise LoadError(f"{path} has {size} bytes, too many for what it should be: download it again")
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)  # it may grow while it is read
    except OSError as error:
        raise LoadError(unreadable(path, error)) from error
    check_content(path, data[:256])
    return data


def read_text(path: Path, most: int = MOST_BYTES) -> str | None:
    """The text of a file, None where there is none; a byte order mark is no part of it. Raises LoadError."""
    data = read_bytes(path, most)
    if data is None:
        return None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise LoadError(f"{path} is not UTF-8 text ({error.reason}): download it again") from error


def parsed(text: str | bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """JSON as Python's own reader has it, without numbers that take minutes to multiply or cannot be written.

    `pairs` makes an object of its entries. Raises ValueError and RecursionError.
    """
    return json.loads(text, parse_int=_whole, object_pairs_hook=pairs)


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object of a JSON file, None where there is no file. Raises LoadError."""
    text = read_text(path)
    if text is None:
        return None
    try:
        value = parsed(text)
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path} is not readable JSON ({error}): download it again") from error
    if not isinstance(value, dict):
        raise LoadError(f"{path} does not hold a JSON object: download it again")
    return value


def fingerprint(folder: Path) -> str:
    """Distinguishes two sets of weights without reading them whole: names, sizes, config and samples of the bytes."""
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
