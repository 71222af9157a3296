"""What was compiled when the package was installed, for what works without it, too."""

from __future__ import annotations

import importlib
import importlib.util
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


def why_interpreted() -> str | None:
    """Why the controller decides as Python, which takes nearly twice as long; None: it was translated to C."""
    spec = importlib.util.find_spec("paceline.engine.controller")
    if spec is not None and not str(spec.origin).endswith(".py"):
        return None
    return "as Python, so fewer drafts pay: reinstall paceline with a C compiler present"
