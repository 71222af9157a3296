"""The measurements of real pairs, on the bundled one: what they write down, go on from and report."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def run(monkeypatch: pytest.MonkeyPatch, recipe: str, *options: str) -> None:
    path = RECIPES / recipe
    monkeypatch.setattr(sys, "argv", [str(path), *options])
    monkeypatch.syspath_prepend(str(path.parent))
    runpy.run_path(str(path), run_name="__main__")


def test_ways_write_the_same_texts_and_a_run_goes_on_where_it_stopped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "speed.json"
    pair = (
        "real/speed.py",
        "demo",
        "model",
        "--out",
        str(out),
        "--tokens",
        "12",
        "--threads",
        "1",
        "--fixed",
        "2",
    )
    run(monkeypatch, *pair, "--questions", "0", "6", "--temperatures", "0")
    rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    assert [(row["kind"], row["question"]) for row in rows] == [("code", 0), ("talk", 6)]
    assert all(len(row["ids"]) == 12 for row in rows)
    assert rows[0]["plain"]["a_step"] == 1.0
    assert rows[0]["fixed 2"]["a_step"] >= 1.0
    run(monkeypatch, *pair, "--questions", "0", "6", "--temperatures", "0", "0.8", "--seconds", "0")
    assert json.loads(out.read_text())["rows"] == rows  # no time for another, and none is asked twice
    beside = tmp_path / "llama.json"
    theirs = [row | {"drafts": row["plain"], "equal": row["question"] == 0} for row in rows]
    beside.write_text(json.dumps({"rows": theirs}))
    capsys.readouterr()
    run(monkeypatch, "real/speed.py", "--report", str(out), "--beside", str(beside))
    said = capsys.readouterr().out
    assert "T=0 code auto:" in said
    assert "auto over the best fixed length" in said
    assert "1 of 2 of its drafted greedy texts differ" in said


def test_without_a_place_to_write_it_says_what_to_give(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "real/speed.py", "demo", "model")
    assert "--out" in capsys.readouterr().err


def test_a_trace_says_what_is_kept_at_each_position_and_replay_compares_with_fixed_lengths(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "traces.json"
    options = ("--tokens", "10", "--depth", "3", "--questions", "2", "--temperatures", "0", "--threads", "1")
    run(monkeypatch, "real/trace.py", "demo", "model", "--out", str(out), *options)
    traces = json.loads(out.read_text())
    assert [len(text["kept"]) for text in traces] == [10, 10]
    assert all(0 <= kept <= 3 for text in traces for kept in text["kept"])
    assert any(kept for text in traces for kept in text["kept"])
    assert all(len(c) == 3 for text in traces for c in text["confidence"])
    easy = [text | {"kept": [3] * 100, "confidence": [[0.95] * 3] * 100} for text in traces]
    out.write_text(json.dumps(easy))
    capsys.readouterr()
    run(monkeypatch, "policy/replay.py", str(out), "--seeds", "1", "--texts")
    said = capsys.readouterr().out
    assert said.count("over the best") == 2 + 1
    assert float(said.splitlines()[-1].split("over plain ")[1].split(",")[0]) > 1.3
