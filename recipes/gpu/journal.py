"""The rows that were measured: printed as soon as they are known, and kept as JSON, so that a killed run leaves them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import click


class Journal:
    """Rows of `section`s in order, each a name and its values. `end`: time.time() at which no further one is begun."""

    def __init__(self, path: Path | None, facts: dict[str, Any], budget: float) -> None:
        self.path, self.facts, self.budget = path, facts, budget
        self.rows: list[dict[str, Any]] = []
        self.begun = time.time()
        self.section = ""

    @classmethod
    def resumed(cls, path: Path) -> Journal:
        """What an earlier process of the same run has left."""
        kept = json.loads(path.read_text(encoding="utf-8"))
        journal = cls(path, kept["facts"], kept["budget"])
        journal.rows, journal.begun = kept["rows"], kept["begun"]
        return journal

    @property
    def left(self) -> float:
        """Seconds of the budget."""
        return self.begun + self.budget - time.time()

    @property
    def done(self) -> set[str]:
        """Sections that have been begun."""
        return {row["section"] for row in self.rows}

    def value(self, name: str, field: str) -> Any:
        """What an earlier row said, or None."""
        return next((row[field] for row in self.rows if row["name"] == name and field in row), None)

    def add(self, name: str, words: str, **values: Any) -> None:
        """`words`: the values as a line for people."""
        taken = round(time.time() - self.begun, 1)
        self.rows.append({"section": self.section, "name": name, "said": words, "at": taken} | values)
        click.echo(f"{taken:6.1f} s  {name:28} {words}")
        self.write()

    def write(self) -> None:
        if self.path is None:
            return
        kept = {"facts": self.facts, "budget": self.budget, "begun": self.begun, "rows": self.rows}
        part = self.path.with_name(self.path.name + ".part")
        part.write_text(json.dumps(kept, indent=1, default=str) + "\n", encoding="utf-8")
        os.replace(part, self.path)
