"""Random requests with and without drafters over small models of all families, until enough tokens are compared.

    python scripts/fuzz.py [--tokens 1000000] [--state FILE] [--families llama,qwen3_5] [--write tests/lossless]

Goes on where it was stopped: --state keeps how many rounds are done. A difference is shrunk to the smallest request that
shows it and written as a test, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from fuzzing import FAMILIES, Worlds, search, write_test  # noqa: E402  they lie among the tests

EXAMPLES = 100  # of a round


@dataclass
class State:
    """How many rounds are done, and the tokens compared in them by family."""

    rounds: int = 0
    tokens: dict[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> State:
        return cls(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else cls()

    def write(self, path: Path) -> None:
        beside = path.with_suffix(".part")
        beside.write_text(json.dumps({"rounds": self.rounds, "tokens": self.tokens}), encoding="utf-8")
        os.replace(beside, path)


def go_on(given: argparse.Namespace, state: State) -> int:
    with tempfile.TemporaryDirectory() as folder:
        worlds = Worlds(Path(folder), dict(state.tokens))
        while sum(worlds.tokens.values()) < given.tokens:
            family = given.families[state.rounds % len(given.families)]
            found = search(worlds, [family], EXAMPLES, state.rounds)
            if found is not None:
                path = write_test(*found, given.write)
                print(f"a text changed with a drafter: {path} shows it", flush=True)
                return 1
            state.rounds, state.tokens = state.rounds + 1, dict(worlds.tokens)
            state.write(given.state)
            done = sum(state.tokens.values())
            print(
                f"{state.rounds} rounds, {done:,} of {given.tokens:,} tokens, none differs",
                file=sys.stderr,
                flush=True,
            )
    print(
        f"{sum(state.tokens.values()):,} tokens of {len(state.tokens)} families were compared, none differs"
    )
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--state", type=Path, default=Path(tempfile.gettempdir()) / "paceline-fuzz.json")
    parser.add_argument("--families", type=lambda s: s.split(","), default=list(FAMILIES))
    parser.add_argument(
        "--write", type=Path, default=ROOT / "tests" / "lossless", help="where a test is written"
    )
    given = parser.parse_args()
    if unknown := set(given.families) - set(FAMILIES):
        sys.exit(f"--families {','.join(sorted(unknown))}: the families are {', '.join(FAMILIES)}")
    try:
        sys.exit(go_on(given, State.read(given.state)))
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on from here")


if __name__ == "__main__":
    main()
