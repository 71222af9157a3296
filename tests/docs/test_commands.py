"""Every command that README and docs show has the options that they show: an option that was renamed is found here."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from paceline.cli import COMMANDS, group

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands(text: str) -> Iterator[str]:
    """Lines of code blocks and pieces of inline code that call paceline."""
    for block in re.findall(r"```[^\n]*\n(.*?)```", text, re.DOTALL):
        for line in re.sub(r"\\\n\s*", " ", block).split("\n"):
            if match := re.search(r"(?:^|[|;&$]\s*|\s)(paceline [a-z][^|;&]*)", line.split("  #")[0]):
                yield match.group(1).strip()
    yield from (piece for piece in re.findall(r"`(paceline [^`]+)`", text) if "…" not in piece)


@cache
def options_of(name: str) -> set[str]:
    command = group.get_command(click.Context(group), name)
    assert command is not None
    return {name for p in command.params for name in (*p.opts, *p.secondary_opts)} | {"-h", "--help"}


def shown() -> list[tuple[str, str]]:
    return [(page.name, line) for page in PAGES for line in commands(page.read_text(encoding="utf-8"))]


def test_there_are_commands_to_look_at() -> None:
    assert len(shown()) > 100


@pytest.mark.parametrize("page", sorted({page for page, _ in shown()}))
def test_commands_have_the_options_that_are_shown(page: str) -> None:
    wrong = []
    for name, line in shown():
        words = shlex.split(line.replace("'", "").replace('"', "")) if name == page else []
        if not words or words[1] not in COMMANDS:
            continue
        known = options_of(words[1])
        wrong += [
            f"{line}: {w}" for w in words[2:] if re.match(r"--?[a-z]", w) and w.split("=")[0] not in known
        ]
    assert not wrong
