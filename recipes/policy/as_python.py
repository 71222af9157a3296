"""Import this first, and the engine runs as Python, not translated to C: its classes can be extended then."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType


class Sources(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        if package != "paceline.engine" or not path:
            return None
        return spec_from_file_location(fullname, Path(path[0]) / f"{name}.py")


sys.meta_path.insert(0, Sources())
