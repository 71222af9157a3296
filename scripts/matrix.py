"""docs/matrix.md: the cells of tests/matrix.py, each compared until enough tokens are counted.

    python scripts/matrix.py [--tokens 1000] [--machine "two cores of an AMD EPYC (Zen 4)"]

Goes on where it was stopped: counts are kept in --state, a line for each cell. A difference ends it with the texts.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import matrix  # noqa: E402  it lies among the tests
from matrix import CONDITIONS, DRAFTERS, REASONS, SIGHTLESS, Counted, Zoo  # noqa: E402
from paceline.ops import native  # noqa: E402

Counts = Mapping[tuple[str, str], Counted]
HEAD = """# The matrix that switches nothing off

Engines switch speculation off where it is hard: beside tools, log probabilities, penalties, pictures. Or they leave it
on and the text changes. Here each drafter runs under each condition. A cell says how many tokens were compared with plain
decoding, text by text. In every cell, tokens, texts, ends and the bits of the log probabilities were equal.

`tests/lossless/test_matrix.py` runs every cell in the test suite. `python scripts/matrix.py --tokens {tokens}` ran them
for this page, on {machine}: {total:,} tokens, and {accepted:,} of {drafted:,} drafted ones were kept. A
planted bug turns cells red.

The models are small and random: Llama, one with Meta's parallel heads, and a Gemma 4 that sees. The same code runs for
large ones. An untrained network is refused often and kept now and then, which is what a test needs. Free texts are
written in six tokens only, so that it is right now and then. Trees are those of EAGLE-3, 3 deep and 2 wide.

## Tokens compared

"""
UNDER = {
    "tools": "a call of a function is required, its arguments held by a schema, after a thought",
    "schema after thinking": "an answer held by a JSON schema, after a thought",
    "logprobs": "the five likeliest tokens at each place, too",
    "new samplers": "typical, top-n-sigma, XTC, dynamic temperature, temperature last, DRY, Mirostat, in turn",
    "penalties": "repetition; presence and frequency; repetition over a window, in turn",
    "banned words": "texts of one and of two tokens that are never written",
    "adapters": "side by side: one adapter, a blend of two, none; each is chosen by its request",
    "full prefix hit": "the whole prompt is in the cache, but for its last page",
    "K/V int8": "keys and values in 8 bits, for plain decoding as well",
    "cancel": "neighbours that share half a prompt come and are cancelled",
    "preemption": "so few pages that texts give way and are computed again",
    "replica killed": "an engine is lost in the middle of a text, and another goes on from its tokens",
}


def counted(path: Path, tokens: int) -> dict[tuple[str, str], Counted]:
    """All cells, those of the state first. Raises matrix.Differs."""
    done: dict[tuple[str, str], Counted] = {}
    if path.exists():
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        done = {
            (one["drafter"], one["under"]): Counted(**one["counted"])
            for one in lines
            if one["asked"] == tokens
        }
    left = [cell for cell in matrix.cells() if cell not in done]
    with (
        tempfile.TemporaryDirectory() as folder,
        Zoo(Path(folder)) as zoo,
        path.open("a", encoding="utf-8") as sink,
    ):
        for i, (drafter, under) in enumerate(left):
            print(f"{i + 1} of {len(left)}: {drafter} under {under}", file=sys.stderr, flush=True)
            done[drafter, under] = one = matrix.cell(zoo, drafter, under, tokens)
            line = {"drafter": drafter, "under": under, "asked": tokens, "counted": asdict(one)}
            sink.write(json.dumps(line) + "\n")
            sink.flush()
    return done


def table(counts: Counts, show: Callable[[Counted], str]) -> Iterator[str]:
    yield "| under | " + " | ".join(DRAFTERS) + " |"
    yield "|---|" + "---:|" * len(DRAFTERS)
    for under in CONDITIONS:
        cells = [show(counts[name, under]) if (name, under) in counts else "see below" for name in DRAFTERS]
        yield f"| {under} | " + " | ".join(cells) + " |"


def page(counts: Counts, tokens: int, machine: str) -> str:
    total = {key: sum(getattr(one, key) for one in counts.values()) for key in ("drafted", "accepted")}
    whole = sum(one.tokens for one in counts.values())
    parts = [HEAD.format(tokens=tokens, machine=machine, total=whole, **total)]
    parts += [
        "\n".join(table(counts, lambda one: f"{one.tokens:,}")),
        "\n\n## Drafted tokens that were kept\n\n",
    ]
    parts += ["\n".join(table(counts, lambda one: f"{one.accepted:,} of {one.drafted:,}")), "\n\n"]
    parts += [f"- {name} under {under}: {why}.\n" for (name, under), why in REASONS.items()]
    parts += [
        f"- {name} under pictures: it drafts nothing there, for it cannot read them.\n" for name in SIGHTLESS
    ]
    parts += ["\n## What is asked\n\n", *(f"- {under}: {what}.\n" for under, what in UNDER.items())]
    return "".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1000, help="of each cell at least")
    parser.add_argument("--machine", default="this machine")
    parser.add_argument("--state", type=Path, default=Path(tempfile.gettempdir()) / "paceline-matrix.jsonl")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "matrix.md")
    given = parser.parse_args()
    if why := native.why_not():
        sys.exit(why)  # plain torch promises tokens, not bits
    try:
        counts = counted(given.state, given.tokens)
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on from here")
    given.out.write_text(page(counts, given.tokens, given.machine), encoding="utf-8")


if __name__ == "__main__":
    main()
