"""Where `auto` loses time: the recipe adds up to what it says the speed is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "policy" / "where.py"


def where(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RECIPE), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_what_steps_did_is_told_by_what_they_took() -> None:
    done = where("--workload", "json", "--batch", "2", "--rounds", "1", "--seconds", "1.5")
    assert done.returncode == 0, done.stderr[-2000:]
    first, _, *rows = done.stdout.splitlines()
    assert float(first.split(": ")[1]) > 0.1
    assert {"drafts are checked", "a text ends"} <= {re.split("  +", row)[0] for row in rows}
    for row in rows:
        *_, steps, milliseconds, tokens, lost = row.split()
        assert int(steps) >= 1
        assert float(milliseconds) > 0
        assert float(tokens) >= 1
        assert -1600 < float(lost.rstrip("%")) < 100  # sixteen tokens a step gain no more


@pytest.mark.parametrize("option", ["--batch", "--rounds", "--seconds"])
def test_nothing_to_measure_is_refused(option: str) -> None:
    done = where(option, "-1")
    assert done.returncode == 2
    assert "1 or more" in done.stderr
