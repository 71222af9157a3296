"""Sampled texts of an engine with drafts and without: do their tokens follow one distribution?

    python recipes/engines/sampled.py --only llama.cpp --modes draft-simple [--distance 0.02 | --samples 4000]

For engines whose seeds do not hold from plain to drafted decoding. Short texts are drawn for one prompt at temperature 1,
each with a seed of its own. The first token is never drafted. The next five are counted, place by place, and compared
by the audit's test of two samples, at a level for all modes and places together. How many samples a total variation
takes is computed first, and said. Goes on where it was stopped; judges what there is.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from draft import Files, Talk, prepare
from engines import ENGINES, PLAIN, Engine
from run import DEFAULT_WORK, Cell, Died, File, Process, python_of, setup_of

from paceline.audit.audit import ALPHA
from paceline.check.chi2 import Fit, compare_samples, noncentrality

PLACES = 5  # tokens that may be drafted, each with a test of its own
CELLS = 19  # tokens of a place that are told apart, the most frequent; the rest is one more
POWER = 0.9
PROMPT = "Name three colours of the sky, with commas between them."
BATCH = 16


def level(modes: int) -> float:
    """The level of one test, so that all of them together are wrong with chance ALPHA at most."""
    return ALPHA / (modes * PLACES)


def needed(distance: float, modes: int) -> int:
    """Samples of each side that show a total variation of `distance` with chance POWER.

    Two samples of n have noncentrality of at least 2 n distance^2 (see `chi2.compare_samples`).
    """
    return int(noncentrality(CELLS, level(modes), POWER) / (2 * distance**2)) + 1


def fits(plain: Sequence[Sequence[int]], drafted: Sequence[Sequence[int]], modes: int) -> list[Fit]:
    """A test for each place. A text that has ended has token -1 there."""
    out = []
    for place in range(1, PLACES + 1):
        sides = [Counter(t[place] if place < len(t) else -1 for t in texts) for texts in (plain, drafted)]
        often = [token for token, _ in (sides[0] + sides[1]).most_common(CELLS)]
        counts = [[side[token] for token in often] for side in sides]
        rest = [sum(side.values()) - sum(known) for side, known in zip(sides, counts, strict=True)]
        mine, other = ([*known, left] for known, left in zip(counts, rest, strict=True))
        out.append(compare_samples(mine, other, level(modes), POWER))
    return out


def path_of(work: Path, cell: Cell) -> Path:
    return work / "sampled" / cell.file_name


def texts_of(path: Path) -> list[list[int]]:
    return [line["tokens"] for line in File(path).lines()]


def draw(cell: Cell, engine: Engine, files: Files, given: argparse.Namespace) -> None:
    """Draw what is missing of a side's samples, with seeds that the other side does not have. Raises Died."""
    path = path_of(given.work, cell)
    path.parent.mkdir(parents=True, exist_ok=True)
    done = len(texts_of(path))
    if done >= given.samples:
        return
    ids = given.ids
    offset = 0 if cell.mode == PLAIN else 1 << 24
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        setup = setup_of(cell, engine, files, given.threads)
        with Process(python_of(engine, given.work), engine, setup, Path(folder) / "log") as process:
            process.read()
            with path.open("a", encoding="utf-8") as sink:
                while done < given.samples:
                    count = min(BATCH, given.samples - done)
                    asked = [_question(ids, offset + done + i, given.temperature) for i in range(count)]
                    process.write(asked)
                    said = [{"tokens": process.read()["tokens"]} for _ in range(count)]
                    sink.writelines(json.dumps(line) + "\n" for line in said)
                    sink.flush()
                    done += count
                    if done % (64 * BATCH) == 0:
                        print(f"  {cell.mode}: {done:,} of {given.samples:,}", file=sys.stderr, flush=True)
    print(f"  {cell.file_name}: {done:,} texts, {time.monotonic() - begin:.0f} s", flush=True)


def _question(ids: list[int], seed: int, temperature: float) -> dict[str, Any]:
    return {
        "id": str(seed),
        "prompt": ids,
        "max_tokens": PLACES + 1,
        "temperature": temperature,
        "seed": seed,
    }


def prompt(files: Files) -> list[int]:
    return Talk(files.gguf).prompt(PROMPT)


def rows(engine: Engine, files: Files, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    plain = Cell(engine.name, PLAIN, given.model, 0, BATCH, given.temperature)
    draw(plain, engine, files, given)
    for mode in given.modes:
        cell = replace(plain, mode=mode, drafts=given.drafts)
        draw(cell, engine, files, given)
        sides = [texts_of(path_of(given.work, one)) for one in (plain, cell)]
        for place, fit in enumerate(found := fits(*sides, len(given.modes)), 1):
            print(
                f"{engine.name} {mode}, token {place}: p = {fit.p_value:.3g}, sees {fit.detectable:.3f}",
                flush=True,
            )
        yield {
            "engine": engine.name,
            "mode": f"{mode}, {given.drafts} drafts",
            "fits": [asdict(fit) for fit in found],
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK)
    parser.add_argument("--only", default="llama.cpp", help="one engine")
    parser.add_argument("--modes", type=lambda s: s.split(","), default=["draft-simple"])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--distance", type=float, default=0.02, help="total variation that is to be seen")
    parser.add_argument("--samples", type=int, help="of each side, instead of what the distance takes")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    engine = next((e for e in ENGINES if e.name == given.only), None)
    files = prepare(given.model, given.work)
    if engine is None or files is None:
        sys.exit(
            f"--only {given.only} --model {given.model}: the engines are {', '.join(e.name for e in ENGINES)}"
        )
    if unknown := set(given.modes) - {mode.name for mode in engine.modes}:
        sys.exit(f"--modes {','.join(unknown)}: {engine.name} has {', '.join(m.name for m in engine.modes)}")
    count = needed(given.distance, len(given.modes))
    print(f"a total variation of {given.distance:g} takes {count:,} samples of each side", flush=True)
    given.samples, given.ids = given.samples or count, prompt(files)
    try:
        made = list(rows(engine, files, given))
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on from here")
    except Died as error:
        sys.exit(f"{engine.name} ended: {error}")
    said = {"temperature": given.temperature, "places": PLACES, "cells": CELLS, "alpha": ALPHA}
    told = {**said, "needed": needed(0.02, len(given.modes)), "rows": made}
    (given.work / "sampled.json").write_text(json.dumps(told, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
