"""The adaptation recipe's made-up domain: the same every time, and held-out texts that training does not hold."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "adapt" / "domain.py"


def test_the_domains_are_reproducible_and_disjoint(tmp_path: Path) -> None:
    main = runpy.run_path(str(RECIPE))["main"]
    for name in ("a", "b"):
        main(tmp_path / name, train=12, held=4)
    read = {
        p.name: [json.loads(line)["text"] for line in p.read_text().splitlines()]
        for p in (tmp_path / "a").iterdir()
    }
    assert {name: len(texts) for name, texts in read.items()} == {
        "new.jsonl": 12, "new-held.jsonl": 4, "old.jsonl": 12, "old-held.jsonl": 4,
    }  # fmt: skip
    for path in (tmp_path / "a").iterdir():
        assert path.read_text() == (tmp_path / "b" / path.name).read_text()
    assert not set(read["new.jsonl"]) & set(read["new-held.jsonl"])
    assert not set(read["old.jsonl"]) & set(read["old-held.jsonl"])
    assert all("INSERT INTO readings" in text for text in read["new.jsonl"])
