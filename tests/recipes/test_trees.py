"""The recipe of trees beside chains in its smallest setting, and its answer to bad input."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "compare" / "trees.py"


def compare(monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", [str(RECIPE), *options])
    runpy.run_path(str(RECIPE), run_name="__main__")


def test_chains_and_trees_have_their_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compare(monkeypatch, "--rows", "4", "--texts", "1", "--tokens", "8")
    lines = [line for line in capsys.readouterr().out.splitlines() if "rows" in line]
    assert {line.split("rows")[1].split()[0] for line in lines} == {"chain", "tree"}
    assert all(float(line.split()[-1]) >= 1 for line in lines)


def test_rows_that_hold_no_tree_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        compare(monkeypatch, "--rows", "2")
    assert ended.value.code == 2
    assert "3 to 17" in capsys.readouterr().err
