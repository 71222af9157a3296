"""docs/lossless.md from what `judge.py` wrote: the table, the worst examples, a plot of speed against differences.

python recipes/engines/page.py [--work FOLDER] [--machine "two cores of an AMD EPYC (Zen 4)"] [--flags "--questions 8"]

Speeds are told of cells that were asked with `run.py ask --speeds`, and of no other.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import row_invariance
from engines import ENGINES, PLAIN
from run import DEFAULT_WORK

DOCS = Path(__file__).resolve().parents[2] / "docs"

HEAD = """# Who is lossless?

Speculative decoding is meant to change the speed of an answer and nothing else. This page asks every engine that
installs from the ordinary package indexes: is a text with drafts the text without them? `recipes/engines` made the
page. Anybody can run it again:

```console
$ python recipes/engines/run.py setup
{commands}
$ python recipes/engines/judge.py && python recipes/engines/page.py
```

The tables were made on {machine}. Makers of an
engine who find it asked in a wrong way: a change to its runner in `recipes/engines/runners` is welcome. Not asked yet:
vLLM, SGLang, ik_llama.cpp, onnxruntime-genai. A runner of some sixty lines adds one.

## How it is asked

- Every engine gets the same prompts as tokens. There are six kinds: code, talk, JSON, tool calls, copies of opaque
  identifiers, and edits.
- Texts are greedy. Plain decoding is asked twice in two processes: a difference there is the engine's own, and
  drafts are not to blame. Plain decoding of several requests at once has a row, too: it shows what batches alone do.
- Each drafted text is compared with the engine's own plain text, token by token. Engines are not compared with each
  other: their arithmetic differs, and that is nobody's fault.
- The first table counts one request at a time. Several at once are counted beside it, with drafts and without: what
  differs without drafts is the batch's doing.
- Where two texts part, a reference in float64 reads what they have in common, on the same weights. The *gap* says
  how far the lesser of the two tokens lies below the reference's best, in nats.
- A gap that the engine's rounding explains is a *near-tie*. How far rounding goes is measured: the *reach* is how far
  below the reference's best the engine's plain texts go, over a dozen of them (four of a large model). A gap beyond
  twice that, and beyond 0.05 nats, is a *plain error*: the engine took a token that the model would not take. So is
  any gap beyond 1 nat.
- *Identifiers* are opaque strings that a question gives and an answer has to repeat: how many plain decoding wrote as
  they were given, and how many of those the drafted texts do not have.

A near-tie is still another text. It comes from checking several rows with other arithmetic than one row. Whoever
compares runs, caches answers or looks for a bug sees it. paceline's kernels give a row the same bits whatever
stands beside it, so it has none. The price of that is measured by `recipes/engines/row_invariance.py`.
"""


def name(row: dict[str, Any]) -> str:
    drafts = f", {row['drafts']} drafts" if row["drafts"] else ""
    batch = f", {row['parallel']} at once" if row["parallel"] > 1 else ""
    again = ", asked again" if row["repeat"] else ""
    return f"{row['mode']}{drafts}{batch}{again}"


def _table(head: Sequence[str], words: int, rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """A table of Markdown: `words` columns of words, then numbers."""
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * words + "---:|" * (len(head) - words)
    yield from ("| " + " | ".join(cells) + " |" for cells in rows)


COUNTS = ("asked", "tokens", "differing", "near_ties", "errors")


def engines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each engine: its modes that draft, one request at a time. Several at once differ by themselves, too."""
    head = (
        "engine", "modes", "texts", "tokens", "differing", "near-ties", "plain errors", "several at once: with drafts",
        "without",
    )  # fmt: skip
    there = [row for row in rows if "failed" not in row]

    def lines() -> Iterator[Sequence[str]]:
        for engine in dict.fromkeys(row["engine"] for row in there):
            mine = [row for row in there if row["engine"] == engine]
            drafted = [row for row in mine if row["mode"] != PLAIN]
            alone = [row for row in drafted if row["parallel"] == 1]
            counts = [f"{sum(row[key] for row in alone):,}" for key in COUNTS]
            beside = [_of([row for row in some if row["parallel"] > 1]) for some in (drafted, _plain(mine))]
            modes = str(len({row["mode"] for row in drafted}))
            yield (f"{engine} {mine[0]['version']}", modes, *counts, *beside)

    return _table(head, 1, lines())


def _plain(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["mode"] == PLAIN]


def _of(rows: list[dict[str, Any]]) -> str:
    return f"{sum(r['differing'] for r in rows)} of {sum(r['asked'] for r in rows)}" if rows else ""


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each cell. Identifiers have a column where plain decoding had any."""
    head = (
        "engine", "mode", "texts", "tokens", "differing", "near-ties", "plain errors", "largest gap", "reach",
        "identifiers lost",
    )  # fmt: skip
    columns = len(head) if any(row.get("identifiers") for row in rows) else len(head) - 1
    return _table(head[:columns], 2, (_line(row)[:columns] for row in rows))


def _line(row: dict[str, Any]) -> Sequence[str]:
    if "failed" in row:
        return row["engine"], name(row), f"did not run: {_cell(row['failed'])}", *[""] * 7
    gap = (row["worst"] or {}).get("gap")
    mode = name(row) + (f"; then ended: {_cell(row['died'])}" if row.get("died") else "")
    return (
        row["engine"],
        mode,
        str(row["asked"]),
        f"{row['tokens']:,}",
        *(str(row[key]) for key in ("differing", "near_ties", "errors")),
        "" if gap is None else f"{gap:.3f}",
        "" if row["reach"] is None else f"{row['reach']:.3f}",
        f"{row['identifiers_lost']} of {row['identifiers']}" if row.get("identifiers") else "",
    )


def _cell(text: str) -> str:
    return text.replace("|", "/")


def speeds(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each mode that drafts, of cells beside which nothing else ran."""
    head = ("engine", "mode", "plain, tokens/s", "with drafts, tokens/s", "times", "differing")

    def lines() -> Iterator[Sequence[str]]:
        for row in rows:
            if row["mode"] != PLAIN and "failed" not in row and row["seconds"]:
                fast, slow = row["tokens"] / row["seconds"], row["tokens"] / row["plain_seconds"]
                times = f"{fast / slow:.2f}"
                differing = f"{row['differing']} of {row['asked']}"
                yield row["engine"], name(row), f"{slow:.1f}", f"{fast:.1f}", times, differing

    return _table(head, 2, lines())


def examples(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The worst text of each engine and model."""
    seen = set()
    ranked = sorted(
        (row for row in rows if row["mode"] != PLAIN),
        key=lambda r: -((r.get("worst") or {}).get("gap") or -1),
    )
    for row in ranked:
        worst, key = row.get("worst"), (row["engine"], row["model"])
        if worst is None or key in seen:
            continue
        seen.add(key)
        gap = "no gap: a text ended" if worst["gap"] is None else f"gap {worst['gap']:.3f} nats"
        begin = code(worst["asked"][:60])
        place = f"question `{worst['question']}` (`{begin}…`), token {worst['at']}"
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
            r
            for r in rows
            if r["engine"] == engine.name and "failed" not in r and r["mode"] != PLAIN and r["asked"]
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


def settings(rows: list[dict[str, Any]]) -> Iterator[str]:
    seen = {r["engine"]: (r["version"], r["settings"]) for r in rows if "failed" not in r}
    return _table(("engine", "version", "asked with"), 3, ((e, *said) for e, said in sorted(seen.items())))


def page(judged: dict[str, Any], given: argparse.Namespace) -> str:
    commands = "\n".join(f"$ python recipes/engines/run.py ask {flags}" for flags in given.flags)
    parts = [HEAD.format(commands=commands, machine=given.machine)]
    rows = sorted(
        judged["rows"],
        key=lambda r: (r["engine"], r["mode"] != PLAIN, r["mode"], r["drafts"], r["parallel"]),
    )
    texts, alone = ([r for r in rows if r.get("speeds", False) == fast] for fast in (False, True))
    for model in sorted({r["model"] for r in texts}):
        own = [r for r in texts if r["model"] == model]
        parts += [
            f"## {MODELS.get(model, model)}\n",
            *engines(own),
            "",
            "Each mode by itself:\n",
            *table(own),
            "",
        ]
    parts += ["## The worst example of each\n", *examples(texts), ""]
    if alone:
        parts += ["## Speed\n", SPEED, *speeds(alone), ""]
        parts += ["![A point for each mode: speed against differences](benchmarks/lossless.svg)\n"]
    parts += sampled(given.work)
    parts += price(given.work)
    parts += ["## What is promised\n", *promises(), "", "## Versions\n", *settings(rows), ""]
    return "\n".join(parts)


def sampled(work: Path) -> Iterator[str]:
    """What `sampled.py` found. Nothing if it was not run."""
    path = work / "sampled.json"
    if not path.exists():
        return
    said = json.loads(path.read_text(encoding="utf-8"))
    yield "## Sampled texts\n"
    yield SAMPLED.format(**said)
    head = (
        "engine",
        "mode",
        "samples of each side",
        "place",
        "chi-squared",
        "degrees",
        "p",
        "would be found",
        "",
    )

    def lines() -> Iterator[Sequence[str]]:
        for row in said["rows"]:
            for place, fit in enumerate(row["fits"], 1):
                found = "differs" if fit["p_value"] < fit["alpha"] else "no difference seen"
                numbers = (f"{fit['statistic']:.1f}", str(fit["freedom"]), f"{fit['p_value']:.2g}")
                yield (
                    row["engine"],
                    row["mode"],
                    f"{fit['samples']:,}",
                    str(place),
                    *numbers,
                    f"{fit['detectable']:.3f}",
                    found,
                )

    yield from _table(head, 2, lines())
    yield ""


SAMPLED = """Where seeds do not hold, texts cannot be compared, but their tokens can be counted.
`python recipes/engines/sampled.py` draws short texts at temperature {temperature} with and without drafts, each with
a seed of its own. It compares the first {places} tokens that may be drafted, place by place: the {cells} most frequent
tokens and the rest. The test is chi-squared at a level of {alpha:g} for all rows and places together. *Would be found*
is the total variation that it sees with chance 90%. A total variation of 0.02 takes {needed:,} samples of each side.
"""


def price(work: Path) -> Iterator[str]:
    """What `row_invariance.py` measured, and what others say of theirs. Nothing if it was not run."""
    path = work / "row_invariance.json"
    if path.exists():
        said = json.loads(path.read_text(encoding="utf-8"))
        yield "## What equal bits cost\n"
        yield PRICE.format(**said)
        yield from row_invariance.table([row_invariance.Line(**line) for line in said["lines"]])
        yield ""


PRICE = """Two linears of Qwen2.5 1.5B with random weights, `python recipes/engines/row_invariance.py`, {threads} threads,
{isa}. Ours add a row's products in one order for any number of rows. The library is torch {torch}, which chooses a
kernel by the number of rows. On a CPU, threads share out the outputs, so no sum has to be split to keep them busy.
On a GPU it has to be, and equal bits cost more there. vLLM's batch-invariant mode, tuned for a card, takes 36% more
time on an RTX 4090 D and 59% more on an H20
([vllm-project/vllm#27433](https://github.com/vllm-project/vllm/issues/27433), Qwen3 1.7B in bfloat16).
"""
MODELS = {
    "smollm2": "SmolLM2 135M, with itself rounded to 4 bits as the draft model",
    "coder": "Qwen2.5-Coder 1.5B (Q4_K_M), with its 0.5B sibling as the draft model",
}
SPEED = "Only these cells were asked while nothing else ran. Each engine is compared with its own plain decoding.\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK)
    parser.add_argument("--machine", default="this machine")
    parser.add_argument(
        "--flags", action="append", default=[], help="the flags of a `run.py ask`, to be shown; several times"
    )
    given = parser.parse_args()
    judged = json.loads((given.work / "judged.json").read_text(encoding="utf-8"))
    (DOCS / "lossless.md").write_text(page(judged, given), encoding="utf-8")
    if alone := [row for row in judged["rows"] if row.get("speeds")]:
        plot(alone, DOCS / "benchmarks" / "lossless.svg")


if __name__ == "__main__":
    main()
