"""Shows a benchmark: a table for the terminal, one self-contained HTML page, atomically written files."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from html import escape
from pathlib import Path
from typing import Any

from rich.table import Table

from paceline.bench.plot import Chart, svg
from paceline.bench.runner import NONE
from paceline.bench.table import Line
from paceline.errors import UsageError

COLUMNS = (
    "workload", "batch", "temp", "setting", "tokens/s", "ratio (quartiles)", "tokens/step",
    "kept by position", "first token", "ms/token (p95)", "J/token",
)  # fmt: skip
NARROW = 7  # columns that fit 80 characters, the ratio without its quartiles
WIDE = 150  # characters that all of them take
MEANINGS = {
    "setting": "what drafts, and how many tokens at most in each step; none is plain decoding",
    "ratio": "tokens per second over those of plain decoding beside it, in the same minute; the middle half in brackets",
    "tokens/step": "tokens that one pass of the target brings; plain decoding brings 1",
    "kept by position": "share of first, second, ... drafted tokens that the target would have written itself",
    "first token": "seconds to the first token of a prompt that is in the prefix cache",
    "ms/token (p95)": "wait for a token: the median, and what 95 of 100 stay below",
    "J/token": "energy of the processor or the GPU for a token",
}

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:75rem;margin:2rem auto;padding:0 1rem;color:#1f2937;"
    "background:#fff}table{border-collapse:collapse;font-size:13px}td,th{padding:.25rem .6rem;"
    "border-bottom:1px solid #8884;text-align:right}td:first-child,th:first-child,:is(td,th):nth-child(4)"
    "{text-align:left}svg{width:30rem;max-width:100%;font:11px system-ui,sans-serif;fill:currentColor}"
    ".title{font-weight:600;font-size:13px}.grid{stroke:#8883}.base{stroke:currentColor;stroke-dasharray:4 3}"
    "pre{white-space:pre-wrap;overflow-wrap:anywhere;font-size:12px}.wide{overflow-x:auto}"
    ".first{font-size:1.2rem;font-weight:600}dt{font-weight:600}dd{margin:0 0 .4rem 1rem}"
    "@media (prefers-color-scheme:dark){body{background:#111827;color:#e5e7eb}"
    "svg [fill^='#'],svg [stroke^='#']{filter:brightness(1.5)}}"
)


def cells(line: Line) -> list[str]:
    """One table row as text, in the order of COLUMNS."""
    ratio = ""
    if line.ratio:
        ratio = f"{line.ratio.median:.2f} ({line.ratio.low:.2f}-{line.ratio.high:.2f})"
    return [
        line.cell.workload,
        str(line.cell.batch),
        f"{line.cell.temperature:g}",
        line.setting.label + (" (other text!)" if line.same_text is False else ""),
        f"{line.speed:.1f}",
        ratio,
        f"{line.tokens_per_step:.2f}",
        " ".join(f"{a:.2f}"[1:] if a < 1 else "1" for a in line.acceptance[:6]),
        f"{line.first_token * 1e3:.0f} ms",
        f"{line.gap * 1e3:.2f} ({line.gap_p95 * 1e3:.2f})",
        "" if line.joules_per_token is None else f"{line.joules_per_token:.2f}",
    ]


def shown(table: Seq[Line], width: int) -> list[int]:
    """Indices into COLUMNS: all that were measured, or those that fit a narrow terminal."""
    if width < WIDE:
        return list(range(NARROW))
    measured = any(line.joules_per_token is not None for line in table)
    return [i for i, name in enumerate(COLUMNS) if measured or name != "J/token"]


def terminal_table(table: Seq[Line], width: int = WIDE) -> Table:
    """A table of at most `width` characters, as far as the names of workloads and settings allow."""
    out = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    columns = shown(table, width)
    narrow = len(columns) == NARROW
    for i in columns:
        name = COLUMNS[i].partition(" (")[0] if narrow else COLUMNS[i]
        out.add_column(name, justify="left" if i in (0, 3) else "right", no_wrap=True)
    for line in table:
        slow = line.ratio is not None and line.setting != NONE and line.ratio.median < 0.98
        row = [cells(line)[i] for i in columns]
        if narrow:
            row[5] = row[5].partition(" ")[0]
        out.add_row(*row, style="red" if slow else "dim" if line.setting == NONE else "")
    return out


def charts(table: Seq[Line], rungs: Mapping[int, float]) -> list[Chart]:
    """Speed-up by draft length (one line per batch size), by batch (auto), the staircase, and what was
    kept.
    """
    fixed: dict[str, list[tuple[float, float]]] = {}
    auto: dict[str, list[tuple[float, float]]] = {}
    shares: dict[str, list[tuple[float, float]]] = {}
    for line in table:
        if line.setting == NONE or not line.ratio:
            continue
        name = f"{line.cell.workload} T={line.cell.temperature:g}"
        if line.setting.draft_tokens == "auto":
            auto.setdefault(name, []).append((line.cell.batch, line.ratio.median))
        else:
            key = f"{line.cell.workload} x{line.cell.batch} T={line.cell.temperature:g}"
            fixed.setdefault(key, []).append((float(line.setting.draft_tokens), line.ratio.median))
        old = shares.get(name, [])
        if len(line.acceptance) > len(old):
            shares[name] = [(i + 1.0, a) for i, a in enumerate(line.acceptance)]
    steps = {"step": [(float(n), s * 1e3) for n, s in rungs.items()]} if rungs else {}
    return [
        Chart("Speed-up by draft length", "tokens drafted", "times as fast as none", fixed, 1.0),
        Chart("Speed-up of auto by batch size", "texts at once", "times as fast as none", auto, 1.0),
        Chart("What a target step costs", "rows: texts and drafted tokens", "ms", steps),
        Chart("Kept drafts by position", "position in the draft", "share kept", shares, top=1.0),
    ]


def page(table: Seq[Line], sentences: Seq[str], extra: Mapping[str, Any], rungs: Mapping[int, float]) -> str:
    """The whole report as one HTML document."""
    columns = shown(table, WIDE)
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(cells(line)[i])}</td>' for i in columns)}</tr>" for line in table
    )
    head = "".join(f"<th>{escape(COLUMNS[i])}</th>" for i in columns)
    pictures = "".join(svg(chart) for chart in charts(table, rungs) if chart.series and not chart.single)
    facts = escape(json.dumps(extra, indent=1, default=str))
    words = "".join(
        f"<p{' class=first' if i == 0 else ''}>{escape(text)}</p>" for i, text in enumerate(sentences)
    )
    terms = "".join(f"<dt>{escape(term)}</dt><dd>{escape(what)}</dd>" for term, what in MEANINGS.items())
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>paceline bench</title><style>{STYLE}</style>"
        f"<h1>paceline bench</h1>{words}{pictures}<h2>Every cell</h2>"
        f'<div class="wide"><table><tr>{head}</tr>{rows}</table></div><h2>What the words mean</h2><dl>{terms}</dl>'
        f"<h2>How this was measured</h2><pre>{facts}</pre></html>\n"
    )


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    temporary: str | None = None
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as out:
            temporary = out.name
            out.write(text)
        os.replace(temporary, path)
    except OSError as problem:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise UsageError(f"cannot write {path} ({problem.strerror}): choose another place") from problem
