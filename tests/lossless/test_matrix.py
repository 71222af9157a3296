"""Nothing is switched off: each drafter under everything that a request can ask for has the bits of plain decoding."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import matrix
from matrix import CONDITIONS, DRAFTERS, REASONS, Counted, Zoo
from paceline.ops import native
from planted import INSIDE, keep_a_rejected_token

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
    page = (Path(__file__).parents[2] / "docs" / "matrix.md").read_text(encoding="utf-8")
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
