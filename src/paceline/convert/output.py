"""What is written appears whole or not at all, and replaces nothing unasked."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.errors import CapacityError, UsageError

Report = Callable[[int, int], None]  # bytes done, bytes in all


def check_free(out: Path, force: bool) -> None:
    """Raise UsageError unless `out` can be written, or replaced by force: a file, or a folder that holds a model."""
    if not out.parent.is_dir():
        raise UsageError(f"{out.parent} is no folder: make it first, or name another place with -o")
    if not os.path.lexists(out) or (out.is_dir() and not any(out.iterdir())):
        return
    if not force:
        raise UsageError(f"{out} exists already: name another with -o, or give --force to replace it")
    if out.is_dir() and not (out / "config.json").exists():
        raise UsageError(
            f"{out} is a folder that holds no model, so it is not replaced: name another with -o"
        )


def check_space(out: Path, size: int) -> None:
    """Raise CapacityError where fewer than `size` bytes are free."""
    free = shutil.disk_usage(out.parent).free
    if size > free:
        raise CapacityError(
            f"{out} takes {size / 1e9:.2f} GB, of which {free / 1e9:.2f} GB are free: free space or name another "
            "place with -o"
        )


@contextmanager
def whole(out: Path) -> Iterator[Path]:
    """A path beside `out` to write a file or folder to; it takes the place of `out` at the end, or is removed.

    Raises CapacityError where it cannot be written.
    """
    part, old = (out.with_name(f".{out.name}.{word}-{os.getpid()}") for word in ("part", "old"))
    try:
        yield part
        if out.is_dir() and not out.is_symlink():
            out.rename(old)
        part.replace(out)
    except OSError as error:
        reason = error.strerror or error
        raise CapacityError(
            f"cannot write {out} ({reason}): free space or name another place with -o"
        ) from error
    finally:
        for left in (part, old):
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)
