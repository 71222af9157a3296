"""recipes/gpu/measure.py: all of its code on the CPU with tiny models, and what it does when time or the GPU runs out."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "gpu"


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(RECIPE))
    import exact
    import forwards
    import journal
    import measure
    import sections
    import subjects

    return SimpleNamespace(
        measure=measure, sections=sections, journal=journal, exact=exact, subjects=subjects, forwards=forwards
    )


def run(recipe: SimpleNamespace, *words: str) -> str:
    result = CliRunner().invoke(recipe.sections.main, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_rows_of_shapes(recipe: SimpleNamespace, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    said = run(recipe, "--dry", "--only", "bandwidth,26b,e2b,31b-int4,tax,linears", "--out", str(out))
    kept = json.loads(out.read_text())
    rows = {row["name"]: row for row in kept["rows"]}
    assert not [name for name in rows if "FAILED" in name], said
    assert all(name in said for name in rows)
    for name in ("26b", "e2b", "31b-int4"):
        one, five, nine = (rows[f"{name} {n} rows"] for n in (1, 5, 9))
        assert one["share"] == pytest.approx(one["floor_ms"] / one["ms"])
        assert five["over_one"] == pytest.approx(five["ms"] / one["ms"])
        assert nine["floor_ms"] == one["floor_ms"] > 0
        drafts = rows[f"{name} drafts, batch 1"]
        assert 1 < drafts["tokens_a_step"] <= 5
        assert drafts["plain"] > 0
    assert len([name for name in rows if name.startswith("linear ")]) == 12
    assert rows["26b drafts, batch 1"]["acceptance"][0] == 0.844
    assert kept["facts"]["ended"] == "done"
    assert kept["facts"]["dry"] is True


def test_launches_are_counted(recipe: SimpleNamespace) -> None:
    names = ["Memcpy HtoD", "linear_kernel", "linear_kernel", "Memset", "Memcpy DtoH (Device -> Pinned)"]
    assert recipe.forwards.counted(names) == (2, 1)
    assert recipe.forwards.counted([]) is None
    assert recipe.forwards.launches(lambda: None, torch.device("cpu")) is None


def test_bits_and_texts(recipe: SimpleNamespace, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    run(recipe, "--dry", "--only", "bits,texts", "--out", str(out))
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    texts = rows["texts, 31b-shaped"]
    assert texts["equal"], texts
    assert texts["tokens"] > 2000
    assert texts["accepted"] > 200  # or nothing was tried
    assert texts["drafted"] > texts["accepted"]
    assert rows["bits of rows"]["rows"] > 100


def test_a_drafter_that_changes_texts_is_named(
    recipe: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.engine import verify

    right = verify.verify_match
    monkeypatch.setattr(verify, "verify_match", lambda own, tokens, *tree:
                        right([t ^ 1 for t in own] if tokens else own, tokens, *tree))  # fmt: skip
    journal = recipe.journal.Journal(None, {}, 100)
    recipe.exact.random_texts(recipe.subjects.Place("cpu", dry=True), journal)
    (row,) = journal.rows
    assert not row["equal"]
    assert row["wrong"].startswith(("mtp 1", "ngram 1", "replay 1"))
    assert "DIFFERENT" in row["said"]


def test_what_was_not_compared_is_not_equal(recipe: SimpleNamespace) -> None:
    journal = recipe.journal.Journal(None, {}, -100)
    recipe.exact.random_texts(recipe.subjects.Place("cpu", dry=True), journal)
    (row,) = journal.rows
    assert row["tokens"] == 0
    assert not row["equal"]
    assert row["said"].startswith("nothing was compared")


def test_budget_faults_and_resuming(
    recipe: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(place: object, journal: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    ends: list[int] = []

    def leave(code: int) -> None:
        ends.append(code)
        raise SystemExit(0)

    section = recipe.sections.Section
    monkeypatch.setitem(recipe.sections.SECTIONS, "e2b", section(5, broken))
    monkeypatch.setattr(os, "_exit", leave)
    out = tmp_path / "rows.json"
    only = ["--dry", "--only", "e2b,bandwidth", "--out", str(out)]
    run(recipe, *only)
    assert ends == [recipe.measure.AGAIN] == [recipe.sections.AGAIN]
    first = json.loads(out.read_text())
    assert [row["name"] for row in first["rows"]] == ["e2b FAILED"]
    assert "illegal memory access" in first["rows"][0]["said"]
    run(recipe, *only, "--resume")  # as that process does
    assert [row["section"] for row in json.loads(out.read_text())["rows"]] == ["e2b", "bandwidth"]
    journal = recipe.journal.Journal(None, {}, 1)
    recipe.sections._section(SimpleNamespace(dry=False), journal, "31b")
    assert journal.rows[0]["skipped"]
    assert "31b" in run(recipe, "--list")
    result = CliRunner().invoke(recipe.sections.main, ["--only", "32b"])
    assert "use bandwidth" in result.output
    assert result.exit_code == 2


def test_a_fresh_process_goes_on_after_a_fault(
    recipe: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes, calls = [recipe.measure.AGAIN, recipe.measure.AGAIN, 3], []
    monkeypatch.setattr(sys, "argv", ["measure.py", "--out", "x.json"])
    monkeypatch.setattr("subprocess.call", lambda words: calls.append(words[1:]) or codes[len(calls) - 1])
    assert recipe.measure.supervise() == 3
    first = ["measure.py", "--out", "x.json", "--worker"]
    assert calls == [first, [*first, "--resume"], [*first, "--resume"]]
