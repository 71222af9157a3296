"""recipes/pictures/identity.py: trees and DFlash on tiny models."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "pictures" / "identity.py"


@pytest.mark.parametrize(("kind", "drafter"), [("unified12b", "trees"), ("dense31b", "dflash")])
def test_identity(kind: str, drafter: str) -> None:
    found = runpy.run_path(str(RECIPE))["compared"](kind, drafter, 100)
    assert found["outcome"] == "holds", found["divergence"]
    assert found["counts"]["tokens drafted"] > 100
    assert found["counts"]["tokens compared"] > 100
