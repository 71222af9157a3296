"""What the engine raised in the middle of a check, and over what: a crash refutes, it is no traceback for the user."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from paceline.check.certificate import Crash
from paceline.errors import CapacityError, UsageError

Where = Mapping[str, str]  # drafter, batch, temperature, prompt: what was asked of the engine


class Broken(Exception):
    """Something raised over `where`; what it was is the cause."""

    def __init__(self, where: Where) -> None:
        super().__init__("the engine raised")
        self.where = where


@contextmanager
def over(where: Callable[[], Where]) -> Iterator[None]:
    """Say over what it happened if the body raises. A user's own error (UsageError) stays what it is."""
    try:
        yield
    except (UsageError, Broken):
        raise
    except Exception as error:  # whatever it is, it goes into the certificate
        raise Broken(where()) from error


def describe(error: Exception) -> Crash:
    """`error` as the certificate reports it; short of memory is nobody's bug."""
    cause = error.__cause__ if isinstance(error, Broken) and error.__cause__ is not None else error
    short = isinstance(cause, (CapacityError, MemoryError, torch.OutOfMemoryError))
    return Crash(
        error=f"{type(cause).__name__}: {cause}",
        place=_place(cause),
        where=dict(error.where) if isinstance(error, Broken) else {},
        kind="memory" if short else "bug",
        trace="".join(traceback.format_exception(cause)),
    )


def _place(error: BaseException) -> str:
    """The last line of ours on the way to the error."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        parts = Path(frame.filename).parts
        if "paceline" in parts:
            last = len(parts) - 1 - parts[::-1].index("paceline")
            return f"{'/'.join(parts[last:])}, line {frame.lineno}, {frame.name}"
    return ""
