"""The packed-cache recipe in its smallest setting, and its answers to bad input."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.ops import native

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "compare" / "packed_cache.py"
CAN = native.available() and native.bf16_dot()


def compare(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RECIPE), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.skipif(not CAN, reason="this CPU does not multiply pairs of bfloat16")
def test_both_kinds_are_held_against_each_other() -> None:
    done = compare("--rounds", "1", "--batch", "1", "2", "--seconds", "0.1", "--draft-tokens", "2")
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert [line.split("texts")[0].strip() for line in lines] == ["1", "2"]
    assert all("float32" in line and "packed x" in line for line in lines)


@pytest.mark.parametrize("option", ["--rounds"])
def test_nothing_to_measure_is_refused(option: str) -> None:
    done = compare(option, "0")
    assert done.returncode == 2
    assert "1 or more" in done.stderr


@pytest.mark.skipif(CAN, reason="this CPU multiplies pairs of bfloat16")
def test_a_cpu_without_such_products_is_told() -> None:
    assert "AVX512-BF16" in compare().stderr
