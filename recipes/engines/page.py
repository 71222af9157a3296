"""docs/lossless.md from what `judge.py` wrote: the table, the worst examples, a plot of speed against differences.

python recipes/engines/page.py [--work FOLDER] [--machine "two cores of an AMD EPYC (Zen 4)"]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engines import ENGINES
from run import DEFAULT_WORK

DOCS = Path(__file__).resolve().parents[2] / "docs"

HEAD = """# Who is lossless?

Speculative decoding is meant to change the speed of an answer and nothing else. This page asks every engine that
installs from the ordinary package indexes: is a text with drafts the text without them? `recipes/engines` made the
page. Anybody can run it again:

```console
$ python recipes/engines/run.py setup
$ python recipes/engines/run.py ask {flags}
$ python recipes/engines/judge.py && python recipes/engines/page.py
```

The table below was made with these flags on {machine}. Makers of an engine who find it asked in a wrong way: a change
to its runner in `recipes/engines/runners` is welcome.

## How it is asked

- Every engine gets the same prompts as tokens. There are six kinds: code, talk, JSON, tool calls, copies of opaque
  identifiers, and edits.
- Texts are greedy. Plain decoding is asked twice in two processes: a difference there is the engine's own, and
  drafts are not to blame.
- Each drafted text is compared with the engine's own plain text, token by token. Engines are not compared with each
  other: their arithmetic differs, and that is nobody's fault.
- Where two texts part, a reference in float64 reads what they have in common, on the same weights. The *gap* says
  how far the lesser of the two tokens lies below the reference's best, in nats.
- A gap that the engine's rounding explains is a *near-tie*. How far rounding goes is measured: it is how far below
  the reference's best the engine's plain texts ever go. A gap beyond twice that, and beyond 0.05 nats, is a *plain
  error*: the engine took a token that the model would not take.

A near-tie is still another text. It comes from checking several rows with other arithmetic than one row. Whoever
compares runs, caches answers or looks for a bug sees it. paceline's kernels give a row the same bits whatever
stands beside it, so it has none.
"""


def name(row: dict[str, Any]) -> str:
    drafts = f", {row['drafts']} drafts" if row["drafts"] else ""
    batch = f", {row['parallel']} at once" if row["parallel"] > 1 else ""
    again = ", asked again" if row["repeat"] else ""
    return f"{row['mode']}{drafts}{batch}{again}"


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    head = (
        "engine",
        "mode",
        "texts",
        "tokens",
        "differing",
        "near-ties",
        "plain errors",
        "largest gap",
        "reach",
    )
    yield "| " + " | ".join(head) + " |"
    yield "|---|---|" + "---:|" * 7
    for row in rows:
        if "failed" in row:
            yield f"| {row['engine']} | {name(row)} | did not run: {row['failed'].replace('|', '/')} | | | | | | |"
            continue
        gap = (row["worst"] or {}).get("gap")
        counts = [str(row[key]) for key in ("differing", "near_ties", "errors")]
        nats = ["" if gap is None else f"{gap:.3f}", f"{row['reach']:.3f}"]
        cells = [
            f"{row['engine']} {row['version']}",
            name(row),
            str(row["asked"]),
            f"{row['tokens']:,}",
            *counts,
            *nats,
        ]
        yield "| " + " | ".join(cells) + " |"


def examples(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The worst text of each engine and model."""
    seen = set()
    ranked = sorted(rows, key=lambda r: -((r.get("worst") or {}).get("gap") or -1))
    for row in ranked:
        worst, key = row.get("worst"), (row["engine"], row["model"])
        if worst is None or key in seen:
            continue
        seen.add(key)
        gap = "no gap: a text ended" if worst["gap"] is None else f"gap {worst['gap']:.3f} nats"
        place = f"question `{worst['question']}`, token {worst['at']}"
        yield f"- **{row['engine']}**, {row['model']}, {name(row)}, {place}, {gap}:"
        yield f"  plain `{code(worst['plain'])}`, drafted `{code(worst['drafted'])}`"


def code(text: str) -> str:
    return text.replace("\n", "↵").replace("`", "'")


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Speed over the engine's own plain decoding against the share of texts that differ, a point for each cell."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for engine in ENGINES:
        own = [
            r for r in rows if r["engine"] == engine.name and "failed" not in r and r["drafts"] and r["asked"]
        ]
        if own:
            speed = [r["plain_seconds"] / r["seconds"] for r in own]
            axes.scatter(
                speed, [100 * r["differing"] / r["asked"] for r in own], label=engine.name, alpha=0.7
            )
    axes.axvline(1, color="gray", linewidth=0.7)
    axes.set_xlabel("times the engine's own plain speed")
    axes.set_ylabel("% of texts that differ")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def promises() -> Iterator[str]:
    yield "| engine | what its makers say of equal text |"
    yield "|---|---|"
    yield from (
        f"| {e.name} | {e.promise or 'no statement was found in its documentation'} |" for e in ENGINES
    )


def page(judged: dict[str, Any], given: argparse.Namespace) -> str:
    parts = [HEAD.format(flags=given.flags, machine=given.machine)]
    rows = sorted(
        judged["rows"],
        key=lambda r: (r["engine"], r["mode"] != "plain", r["mode"], r["drafts"], r["parallel"]),
    )
    for model in sorted({r["model"] for r in rows}):
        own = [r for r in rows if r["model"] == model]
        parts += [f"## {model}\n", *table(own), ""]
    parts += ["## The worst example of each\n", *examples(rows), ""]
    if given.plot:
        parts += ["## Speed against differences\n", "![A point for each mode](benchmarks/lossless.svg)\n"]
    parts += ["## What is promised\n", *promises(), ""]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK)
    parser.add_argument("--machine", default="this machine")
    parser.add_argument("--flags", default="", help="the flags that `run.py ask` had, to be shown")
    parser.add_argument(
        "--plot", action="store_true", help="speeds, too: only if nothing else ran beside the questions"
    )
    given = parser.parse_args()
    judged = json.loads((given.work / "judged.json").read_text(encoding="utf-8"))
    (DOCS / "lossless.md").write_text(page(judged, given), encoding="utf-8")
    if given.plot:
        plot(judged["rows"], DOCS / "benchmarks" / "lossless.svg")


if __name__ == "__main__":
    main()
