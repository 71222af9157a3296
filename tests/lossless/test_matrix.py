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
CONSTRAINED = {"tools", "schema after thinking", "thinking budget"}
TOKENS = 60  # of a cell at least, and a text of each part; scripts/matrix.py compares more


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
        parts = CONDITIONS[condition].parts
        counted = matrix.cell(zoo, drafter, condition, max(TOKENS, len(parts) * matrix.LENGTH))
        assert counted.tokens >= TOKENS
        assert set(counted.parts) == set(parts)
        assert counted.drafted > 0 or (condition == "pictures" and drafter in matrix.SIGHTLESS), condition
        total.drafted += counted.drafted
        total.accepted += counted.accepted
    assert 0 < total.accepted < total.drafted


def test_the_page_has_every_cell() -> None:
    whole((ROOT / "docs" / "matrix.md").read_text(encoding="utf-8"))


def test_the_script_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "matrix.py"))
    asked: list[tuple[str, str]] = []

    def cell(zoo: Zoo, drafter: str, condition: str, tokens: int, first: int) -> Counted:
        if len(asked) == 20:
            raise KeyboardInterrupt
        asked.append((drafter, condition))
        assert first == 40 * asked[:-1].count(asked[-1]) + (40 if (drafter, condition) in before else 0)
        return Counted(tokens + len(asked), 9, 4, 40, dict.fromkeys(CONDITIONS[condition].parts, 10))

    monkeypatch.setattr(matrix, "cell", cell)
    state, before, wanted = tmp_path / "state.jsonl", list[tuple[str, str]](), script["Wanted"](1000, 3000)
    with pytest.raises(KeyboardInterrupt):
        script["counted"](state, wanted)
    before = list(asked)
    asked[:] = [("none", "none")] * 21  # never stopped again
    counts = script["counted"](state, wanted)
    once, deep = list(matrix.cells()), [(d, c) for d, c in matrix.cells() if c in script["DEEP"]]
    assert before == once[:20]
    rounds = (
        [cell for cell in once if cell not in before or cell in deep],
        deep,
        [c for c in deep if c not in before],
    )
    assert asked[21:] == [cell for one in rounds for cell in one]  # those that want more, a portion of each
    assert list(counts) == once
    assert script["read"](state) == counts
    assert counts[before[0]].tokens == 1001
    assert all(counts[cell].texts == 120 and counts[cell].parts for cell in deep)
    page = script["page"](counts, wanted, "two cores")
    whole(page)
    assert "it was stopped there" not in page
    assert script["counted"](state, script["Wanted"](1000, 9000), end=0.0) == counts  # no time left
    assert "the least cell has 3," in script["page"](counts, script["Wanted"](1000, 9000), "two cores")


def whole(page: str) -> None:
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"
    ]
    tables = [i for i, line in enumerate(lines) if line == ["under", *DRAFTERS]]
    assert len(tables) == 2
    for first in tables:
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
