"""The policy of a fixed length, through `plan`."""

from __future__ import annotations

import pytest

from paceline.control.base import PlannedRow, PlanRow, Proposal
from paceline.control.fixed import FixedPolicy
from paceline.control.reasons import NoDraftReason


def planned(row: PlanRow, proposal: Proposal | None = None, k: int = 4) -> PlannedRow:
    (out,) = FixedPolicy(k).plan([row], [proposal]).rows
    return out


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (PlanRow(1, "auto", 9, "mtp", 8), PlannedRow("mtp", 4)),
        (PlanRow(1, 2, 9, "mtp", 8), PlannedRow("mtp", 2)),
        (PlanRow(1, "auto", 3, "mtp", 8), PlannedRow("mtp", 3)),
        (PlanRow(1, "auto", 9, "mtp", 1), PlannedRow("mtp", 1)),
        (PlanRow(1, 0, 9, "mtp", 8), PlannedRow(None, 0, NoDraftReason.DISABLED)),
        (PlanRow(1, "auto", 0, "mtp", 8), PlannedRow(None, 0, NoDraftReason.NO_ROOM)),
        (PlanRow(1, "auto", 9), PlannedRow(None, 0, NoDraftReason.NO_DRAFTER)),
    ],
)
def test_limit_is_the_smallest_of_wanted_room_and_drafter(row: PlanRow, expected: PlannedRow) -> None:
    assert planned(row) == expected


def test_ngram_goes_first_only_if_it_promises_more() -> None:
    row = PlanRow(1, "auto", 9, "mtp", 8)
    assert planned(row, Proposal((0.9,) * 6)) == PlannedRow("ngram", 4)
    assert planned(row, Proposal((0.2,) * 6)) == PlannedRow("mtp", 4)


def test_proposals_must_match_the_rows() -> None:
    with pytest.raises(ValueError, match="zip"):
        FixedPolicy(2).plan([PlanRow(1, "auto", 9)], [])


def test_negative_length_is_refused() -> None:
    with pytest.raises(ValueError, match="give 0 or more"):
        FixedPolicy(-1)
