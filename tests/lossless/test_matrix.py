"""Nothing is switched off: each drafter under everything that a request can ask for has the bits of plain decoding."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import matrix
from matrix import CONDITIONS, DRAFTERS, REASONS, Counted, Zoo
from paceline.ops import native
from planted import INSIDE, keep_a_rejected_token

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.why_not()))
CONSTRAINED = {"tools", "schema after thinking"}
TOKENS = 60  # of a cell at least; scripts/matrix.py compares more


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zoo]:
    with Zoo(tmp_path_factory.mktemp("matrix")) as made:
        yield made


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_drafter_changes_nothing_under_any_condition(zoo: Zoo, drafter: str) -> None:
    total = Counted()
    for condition in CONDITIONS:
        if (drafter, condition) in REASONS or (condition in CONSTRAINED and find_spec("llguidance") is None):
            continue
        counted = matrix.cell(zoo, drafter, condition, TOKENS)
        assert counted.tokens >= TOKENS
        assert counted.drafted > 0 or (condition == "pictures" and drafter in matrix.SIGHTLESS), condition
        total.drafted += counted.drafted
        total.accepted += counted.accepted
    assert 0 < total.accepted < total.drafted


def test_the_page_has_every_cell() -> None:
    whole((ROOT / "docs" / "matrix.md").read_text(encoding="utf-8"))


def test_the_script_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "matrix.py"))
    asked: list[tuple[str, str]] = []

    def cell(zoo: Zoo, drafter: str, condition: str, tokens: int) -> Counted:
        if len(asked) == 20:
            raise KeyboardInterrupt
        asked.append((drafter, condition))
        return Counted(tokens + len(asked), 9, 4)

    monkeypatch.setattr(matrix, "cell", cell)
    state = tmp_path / "state.jsonl"
    with pytest.raises(KeyboardInterrupt):
        script["counted"](state, 1000)
    first = list(asked)
    asked.clear()
    monkeypatch.setattr(matrix, "cell", lambda *one: asked.append(one[1:3]) or Counted(1000, 9, 4))
    counts = script["counted"](state, 1000)
    assert [*first, *asked] == list(matrix.cells()) == list(counts)
    assert counts[first[0]].tokens == 1001
    whole(script["page"](counts, 1000, "two cores"))


def whole(page: str) -> None:
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"
    ]
    tables = [i for i, line in enumerate(lines) if line[0] == "under"]
    assert len(tables) == 2
    for first in tables:
        assert lines[first][1:] == list(DRAFTERS)
        rows = {line[0]: line[1:] for line in lines[first + 2 : first + 2 + len(CONDITIONS)]}
        assert list(rows) == list(CONDITIONS)
        assert all(cell for row in rows.values() for cell in row)
    for (drafter, condition), why in REASONS.items():
        assert f"{drafter} under {condition}: {why}" in page.replace("\n  ", " ")


def test_a_planted_bug_is_a_difference(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_a_rejected_token(monkeypatch)
    with pytest.raises(matrix.Differs, match="EAGLE-3 under min-p"):
        matrix.cell(zoo, "EAGLE-3", "min-p", TOKENS)
    monkeypatch.undo()
    INSIDE["presence and frequency only at the first position"](monkeypatch)
    with pytest.raises(matrix.Differs, match="draft model under penalties"):
        matrix.cell(zoo, "draft model", "penalties", 4 * TOKENS)
