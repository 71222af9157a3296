"""Names of a package whose modules are imported when they are first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def attributes(package: str, **homes: str) -> Callable[[str], Any]:
    """A module's `__getattr__` (PEP 562) for names that other modules define: name -> module."""

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return get
