"""The huge-pages recipe in its smallest setting, and its answers to bad input."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline import memory
from paceline.ops import native

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "compare" / "huge_pages.py"
CAN = memory.why_not() is None and native.why_not() is None


def compare(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RECIPE), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.skipif(not CAN, reason="no huge pages or no native kernels here")
@pytest.mark.parametrize("texts", ["1", "2"])
def test_every_kind_is_held_against_ordinary_pages(texts: str) -> None:
    done = compare("--rounds", "1", "--context", "20", "--rows", "1", "3", "--texts", texts)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert [line.split("rows")[0].strip() for line in lines] == (
        ["1 x 1", "1 x 3"] if texts == "1" else ["2 x 1"]
    )
    assert all("ordinary 1.000" in line and "huge again" in line for line in lines)


@pytest.mark.parametrize("option", ["--rounds", "--texts"])
def test_nothing_to_measure_is_refused(option: str) -> None:
    done = compare(option, "0")
    assert done.returncode == 2
    assert "1 or more" in done.stderr
