"""The simulation of the policy runs and compares what it should."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "policy" / "simulate.py"


def simulate(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, RECIPE, *args], capture_output=True, text=True, timeout=300, check=False
    )


def test_it_compares_with_the_best_fixed_length_and_with_none() -> None:
    done = simulate("--seeds", "4", "--tokens", "200", "--steps", "5", "150")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()[1:]
    assert [line.split()[:3:2] for line in lines] == [
        [ms, fit] for ms in ("5", "150") for fit in ("fits", "mixed", "does")
    ]
    for line in lines:
        over, none, worst = map(float, line.split()[-3:])
        assert 0.3 < over < 1.5
        assert worst <= none < 3


def test_bad_options_are_refused() -> None:
    done = simulate("--tokens", "0")
    assert done.returncode == 2
    assert "at least one token" in done.stderr
