"""docs/matrix.md: the cells of tests/matrix.py, each compared until enough tokens are counted.

    python scripts/matrix.py [--tokens 1000] [--deep 50000] [--minutes 30] [--machine "two cores of an AMD EPYC (Zen 4)"]

Goes on where it was stopped: counts are kept in --state, a line for each portion of a cell. The cells of `DEEP` are
counted in rounds, a portion of each, so that all of them grow alike. A difference ends it with the texts. The page
says what was counted, also where that is less than was asked for.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import matrix  # noqa: E402  it lies among the tests
from matrix import CONDITIONS, DRAFTERS, REASONS, SIGHTLESS, Counted, Zoo  # noqa: E402
from paceline.ops import native  # noqa: E402

Cell = tuple[str, str]  # drafter, condition
Counts = Mapping[Cell, Counted]
DEEP = ("new samplers", "banned words", "adapters")
HEAD = """# The matrix that switches nothing off

Engines switch speculation off where it is hard: beside tools, log probabilities, penalties, pictures. Or they leave it
on and the text changes. Here each drafter runs under each condition. A cell says how many tokens were compared with plain
decoding, text by text. In every cell, tokens, texts, ends and the bits of the log probabilities were equal.

`tests/lossless/test_matrix.py` runs every cell in the test suite. `python scripts/matrix.py --tokens {tokens} --deep
{deep}` ran them for this page, on {machine}: {total:,} tokens, and {accepted:,} of {drafted:,} drafted ones were kept.
A planted bug turns cells red.{missed}

The models are small and random: Llama, one with Meta's parallel heads, and a Gemma 4 that sees. The same code runs for
large ones. An untrained network is refused often and kept now and then, which is what a test needs. Free texts are
written in six tokens only, so that it is right now and then. Trees are those of EAGLE-3, 3 deep and 2 wide.

## Tokens compared

"""
MISSED = """

For the rows {rows} {deep:,} tokens a cell were asked for, and the least cell has {least:,}: it was stopped there.
The same command goes on.
"""
UNDER = {
    "tools": "a call of a function is required, its arguments held by a schema, after a thought",
    "schema after thinking": "an answer held by a JSON schema, after a thought",
    "thinking budget": "the same, after two tokens of a thought its closing mark has to follow",
    "logprobs": "the five likeliest tokens at each place, too",
    "new samplers": "typical, top-n-sigma, XTC, dynamic temperature, temperature last, DRY, Mirostat, and each greedy",
    "penalties": "repetition; presence and frequency; repetition over a window, in turn",
    "banned words": "texts of one and of two tokens that are never written, at temperature 0.8 and greedy",
    "adapters": "side by side: one adapter, a blend of two, none, at temperature 0.8 and greedy",
    "full prefix hit": "the whole prompt is in the cache, but for its last page",
    "K/V int8": "keys and values in 8 bits, for plain decoding as well",
    "cancel": "neighbours that share half a prompt come and are cancelled",
    "preemption": "so few pages that texts give way and are computed again",
    "replica killed": "an engine is lost in the middle of a text, and another goes on from its tokens",
}


@dataclass(frozen=True)
class Wanted:
    """Tokens of each cell, and of each cell under one of `DEEP`."""

    tokens: int
    deep: int = 0

    def of(self, cell: Cell) -> int:
        return max(self.tokens, self.deep if cell[1] in DEEP else 0)


def read(path: Path) -> dict[Cell, Counted]:
    """What was counted before."""
    counts: dict[Cell, Counted] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        raw = json.loads(line)
        if "first" in raw:  # a portion that begins behind the others
            cell = (raw["drafter"], raw["under"])
            counts[cell] = counts.get(cell, Counted()) + Counted(**raw["counted"])
    return counts


def counted(path: Path, wanted: Wanted, end: float = float("inf")) -> dict[Cell, Counted]:
    """All cells, with those of the state. No portion begins after `end` (time.monotonic). Raises matrix.Differs."""
    done = read(path)
    with (
        tempfile.TemporaryDirectory() as folder,
        Zoo(Path(folder)) as zoo,
        path.open("a", encoding="utf-8") as sink,
    ):
        while left := [cell for cell in matrix.cells() if done.get(cell, Counted()).tokens < wanted.of(cell)]:
            for i, (drafter, under) in enumerate(left):
                if time.monotonic() >= end:
                    return done
                before = done.get((drafter, under), Counted())
                where = f"{i + 1} of {len(left)}: {drafter} under {under}, {before.tokens} tokens so far"
                print(where, file=sys.stderr, flush=True)
                portion = matrix.cell(zoo, drafter, under, wanted.tokens, before.texts)
                done[drafter, under] = before + portion
                line = {"drafter": drafter, "under": under, "first": before.texts, "counted": asdict(portion)}
                sink.write(json.dumps(line) + "\n")
                sink.flush()
    return done


def table(counts: Counts, show: Callable[[Counted], str]) -> Iterator[str]:
    yield "| under | " + " | ".join(DRAFTERS) + " |"
    yield "|---|" + "---:|" * len(DRAFTERS)
    for under in CONDITIONS:
        cells = [show(counts[name, under]) if (name, under) in counts else "see below" for name in DRAFTERS]
        yield f"| {under} | " + " | ".join(cells) + " |"


def parts(counts: Counts) -> Iterator[str]:
    """Of each setting that is asked for in turn, the tokens of all drafters, and of the one with the fewest."""
    yield "| under | setting | tokens of all drafters | of the drafter with the fewest |"
    yield "|---|---|---:|---:|"
    for under in DEEP:
        for part in CONDITIONS[under].parts:
            each = [one.parts.get(part, 0) for (_, at), one in counts.items() if at == under]
            yield f"| {under} | {part} | {sum(each):,} | {min(each):,} |"


def missed(counts: Counts, wanted: Wanted) -> str:
    least = min(one.tokens for (_, under), one in counts.items() if under in DEEP)
    return (
        ""
        if least >= wanted.deep
        else MISSED.format(rows=", ".join(DEEP), deep=wanted.deep, least=least).rstrip()
    )


def page(counts: Counts, wanted: Wanted, machine: str) -> str:
    total = {key: sum(getattr(one, key) for one in counts.values()) for key in ("drafted", "accepted")}
    whole = sum(one.tokens for one in counts.values())
    said = {"tokens": wanted.tokens, "deep": wanted.deep, "missed": missed(counts, wanted)}
    out = [HEAD.format(machine=machine, total=whole, **said, **total)]
    out += ["\n".join(table(counts, lambda one: f"{one.tokens:,}"))]
    out += ["\n\n## Tokens by setting\n\n", "\n".join(parts(counts))]
    out += ["\n\n## Drafted tokens that were kept\n\n"]
    out += ["\n".join(table(counts, lambda one: f"{one.accepted:,} of {one.drafted:,}")), "\n\n"]
    out += [f"- {name} under {under}: {why}.\n" for (name, under), why in REASONS.items()]
    out += [
        f"- {name} under pictures: it drafts nothing there, for it cannot read them.\n" for name in SIGHTLESS
    ]
    out += ["\n## What is asked\n\n", *(f"- {under}: {what}.\n" for under, what in UNDER.items())]
    return "".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1000, help="of each cell at least")
    parser.add_argument("--deep", type=int, default=50_000, help=f"of each cell under {', '.join(DEEP)}")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which the page is written")
    parser.add_argument("--machine", default="this machine")
    parser.add_argument("--state", type=Path, default=Path(tempfile.gettempdir()) / "paceline-matrix.jsonl")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "matrix.md")
    given = parser.parse_args()
    if why := native.why_not():
        sys.exit(why)  # plain torch promises tokens, not bits
    wanted = Wanted(given.tokens, given.deep)
    try:
        counts = counted(given.state, wanted, time.monotonic() + 60 * given.minutes)
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on from here")
    if without := [" under ".join(cell) for cell in matrix.cells() if cell not in counts]:
        sys.exit(
            f"{len(without)} cells have no count yet, the first is {without[0]}: the same command goes on from here"
        )
    given.out.write_text(page(counts, wanted, given.machine), encoding="utf-8")


if __name__ == "__main__":
    main()
