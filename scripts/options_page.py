"""Writes docs/options.md from the table of options: `python scripts/options_page.py`. A test holds the page to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from paceline.config import EngineConfig
from paceline.core import SamplingParams
from paceline.options import (
    COMMANDS,
    GROUPS,
    INFINITE,
    Choice,
    Flag,
    Length,
    Number,
    Option,
    Other,
    Several,
    Size,
    Whole,
    rows_of,
)

PAGE = Path(__file__).resolve().parents[1] / "docs" / "options.md"
HEAD = """# Options

Each option is declared once, in `src/paceline/config.py` (the engine) or `src/paceline/core.py` (sampling). So it has
the same name, values and default wherever it can be given:

- in commands, as `--max-batch 4`: `run`, `generate` and `serve` have all of the engine's, `check` and `bench` all but
  those that they go through themselves;
- in the environment, as `PACELINE_MAX_BATCH=4`, for each of these commands;
- in the file of `--config` or `PACELINE_CONFIG`, as `max_batch = 4` in `[engine]` or `[sampling]`;
  `deploy/paceline.toml` is one;
- in Python, as `LLM("demo", max_batch=4)` or `SamplingParams(temperature=0.7)`;
- in a request over HTTP, for sampling; `drafter`, `draft_tokens`, `verify` and `typical_*` inside of `speculation`.

A flag wins over the environment, the environment over the file. A request wins over all of them.

This page is written by `scripts/options_page.py`. A name of another engine is answered with ours.
"""


def values(row: Option) -> str:
    kind = row.kind
    if isinstance(kind, Choice):
        return ", ".join(f"`{name}`" for name in kind.names)
    if isinstance(kind, Whole):
        low = "-2^63" if kind.low == -(2**63) else str(kind.low)
        high = {2**62: "", INFINITE: "", 2**64 - 1: " to 2^64 - 1"}.get(kind.high, f" to {kind.high}")
        return f"{low}{high}" if high else f"from {low}"
    if isinstance(kind, Number):
        return f"{kind.low:g} to {kind.high:g}"
    if isinstance(kind, Length):
        return f"0 to {kind.high}, `auto`"
    if isinstance(kind, Several | Other):
        return kind.wanted().removeprefix("give ")
    return "on, off" if isinstance(kind, Flag) else "bytes, or 2G" if isinstance(kind, Size) else "text"


def default(row: Option) -> str:
    if row.look.default is not None:
        return row.look.default
    if isinstance(row.kind, Flag):
        return "on" if row.default else "off"
    return "-" if row.default in (None, ()) or callable(row.default) else f"`{row.default}`"


def tables() -> Iterator[str]:
    rows = [(table, row) for table in (EngineConfig, SamplingParams) for row in rows_of(table)]
    for group in GROUPS:
        yield f"\n## {group}\n\n| option | values | default | what it does | elsewhere |\n|---|---|---|---|---|"
        for table, row in rows:
            if row.group != group or (
                table is SamplingParams and row.name in ("drafter", "draft_tokens", "verify")
            ):
                continue  # these three are the engine's, and may be said of a request, too
            here = f"`{row.flag}`" if row.doors & COMMANDS else f"`{row.name}`"
            others = ", ".join(f"`{name}`" for name in row.aliases)
            yield f"| {here} | {values(row)} | {default(row)} | {row.help} | {others} |"


def page() -> str:
    return HEAD + "\n".join(tables()) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
