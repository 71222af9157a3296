"""The manual is plain English: short sentences, links that lead somewhere, figures whose commands exist."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
PAGES = [p for p in sorted((ROOT / "docs").rglob("*.md")) if p.parent.name != "benchmarks"]
MANUAL = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
LONGEST, MEDIAN = 40, 20  # words


def sentences(text: str) -> list[list[str]]:
    """The words of each sentence of prose: code, tables, headings and pictures are left out."""
    text = re.sub(r"```.*?```", "\n\n", text, flags=re.S)
    kept = [line for line in text.split("\n") if not line.lstrip().startswith(("|", "#", "!", ">", ":::"))]
    parts = re.split(r"(?<=[.!?:])\s+|\n\s*(?:[-*]|\d+\.) |\n\n", "\n".join(kept))
    return [words for part in parts if len(words := part.split()) > 2]


def test_sentences_are_short() -> None:
    wrong = {}
    for path in MANUAL:
        found = sentences(path.read_text(encoding="utf-8"))
        long = [" ".join(words[:10]) for words in found if len(words) > LONGEST]
        typical = median([len(words) for words in found]) if found else 0  # some are all tables
        if long or typical > MEDIAN:
            wrong[path.name] = typical, long
    assert not wrong, f"over {LONGEST} words, or over {MEDIAN} in the median"


def test_links_lead_somewhere() -> None:
    for path in MANUAL:
        check_links(path)


def check_links(path: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        place, _, anchor = link.partition("#")
        target = (path.parent / place).resolve() if place else path
        assert target.exists(), f"{path.name} links to {link}"
        if anchor and target.suffix == ".md":
            names = {
                re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower()).replace(" ", "-")
                for line in target.read_text(encoding="utf-8").splitlines() if line.startswith("#")
            }  # fmt: skip
            assert anchor in names, f"{path.name} links to {link}"


def test_figures_come_from_scripts_that_are_here() -> None:
    for path in MANUAL:
        text = path.read_text(encoding="utf-8")
        assert "not in the repository" not in text, path.name
        for script in re.findall(r"\b((?:recipes|scripts|examples|tests|docs)/[\w./-]+\.(?:py|sh))", text):
            assert (ROOT / script).exists(), f"{path.name} names {script}"


def test_figures_of_commits_stand_on_one_page() -> None:
    """Users read what holds now. What an earlier commit took is for those who work on it."""
    for path in (ROOT / "docs").glob("*.md"):
        hashes = re.findall(
            r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{7}\b", path.read_text(encoding="utf-8")
        )
        assert not hashes, f"{path.name}: {hashes} belong in docs/internals/measurements.md"


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")]
    assert not [page for page in pages if f": {page}\n" not in nav]
