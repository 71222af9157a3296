"""What was compiled when the package was installed, for what works without it, too."""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType


@cache
def extension(having: str) -> ModuleType | None:
    """The extension, if this installation has one that knows that name: it may have been built before it did."""
    try:
        module = importlib.import_module("paceline._native")
    except ImportError:
        return None
    return module if having in module.__dict__ else None
