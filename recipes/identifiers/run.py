"""2,000 opaque identifiers to be repeated, by a target alone and with each drafter: how many came out otherwise.

    python recipes/identifiers/run.py smollm2 --drafter eagle3 --drafter ngram --drafter FOLDER --state FILE

A drafter may change no token, so every difference is a fault. The text is written once without a drafter and once with
each, at temperature 0 and 0.8. What is counted is whole answers that differ, and identifiers that came out as they were
given. With --state it goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from paceline import LLM, SamplingParams

WORDS = ("qwen", "llama", "gemma", "glm", "lfm", "nemotron", "mistral", "kimi")
EACH = 8  # identifiers of a prompt
PIECE = 25  # prompts that are asked at once, and kept
HEATS = (0.0, 0.8)
ASK = "Copy this list exactly, one entry a line, and nothing else.\n"
IDENTIFIER = re.compile(r"[\w./:-]{9,}")


def identifiers(count: int, seed: int = 0) -> list[str]:
    """Hashes, uuids, and names of models and files."""
    rng = random.Random(seed)
    out = []
    for i in range(count):
        kind = i % 4
        if kind == 0:
            out.append(f"{rng.getrandbits(160):040x}")
        elif kind == 1:
            out.append(str(uuid.UUID(int=rng.getrandbits(128), version=4)))
        elif kind == 2:
            size, half = rng.randint(1, 400), rng.randint(0, 9)
            out.append(
                f"{rng.choice(WORDS)}-{size}.{half}b-it-q{rng.randint(2, 8)}_k-{rng.getrandbits(24):06x}"
            )
        else:
            out.append(f"sha256:{rng.getrandbits(96):024x}/part-{rng.randint(0, 99999):05d}.gguf")
    return out


def lists(count: int) -> list[str]:
    names = identifiers(count)
    return ["\n".join(names[i : i + EACH]) for i in range(0, len(names), EACH)]


@dataclass
class State:
    """The answers of each piece, named by drafter, temperature and number."""

    settings: dict[str, object]  # what the answers hang on
    pieces: dict[str, list[dict[str, object]]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path | None, settings: dict[str, object]) -> State:
        """Raises SystemExit for a file of other settings."""
        if path is None or not path.exists():
            return cls(settings)
        state = cls(**json.loads(path.read_text(encoding="utf-8")))
        if state.settings != settings:
            raise SystemExit(f"{path} is of a run with {state.settings}: give another --state")
        return state

    def write(self, path: Path) -> None:
        beside = path.with_suffix(".part")
        text = json.dumps({"settings": self.settings, "pieces": self.pieces})
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)


def ask(
    llm: LLM, given: argparse.Namespace, heat: float, texts: list[str], first: int
) -> list[dict[str, object]]:
    """The answers to some lists, of which the first has this number."""
    params = [
        SamplingParams(
            max_tokens=given.tokens or len(llm.tokenizer.encode(text)), temperature=heat, seed=first + i
        )
        for i, text in enumerate(texts)
    ]
    got = llm.generate([ASK + text for text in texts], params)
    return [
        {
            "tokens": one.token_ids, "drafted": one.stats.drafted, "kept": one.stats.accepted,
            "written": len(set(IDENTIFIER.findall(one.text)) & set(text.split("\n"))),
        }
        for one, text in zip(got, texts, strict=True)
    ]  # fmt: skip


def fill(given: argparse.Namespace, state: State, drafter: str, texts: list[str]) -> None:
    """Ask for all pieces of a drafter that are not there yet."""
    left = [
        (heat, first)
        for heat in HEATS
        for first in range(0, len(texts), PIECE)
        if f"{drafter} {heat} {first}" not in state.pieces
    ]
    if not left:
        return
    with LLM(given.target, drafter=drafter, max_model_len=2048) as llm:
        for i, (heat, first) in enumerate(left):
            answers = ask(llm, given, heat, texts[first : first + PIECE], first)
            state.pieces[f"{drafter} {heat} {first}"] = answers
            if given.state is not None:
                state.write(given.state)
            print(f"{drafter}: {i + 1} of {len(left)} pieces", file=sys.stderr, flush=True)


def row(state: State, drafter: str, heat: float, count: int) -> dict[str, object]:
    """What a drafter has written and changed."""
    answers, plain = (
        [one for first in range(0, count, PIECE) for one in state.pieces[f"{name} {heat} {first}"]]
        for name in (drafter, "none")
    )
    differ = sum(a["tokens"] != b["tokens"] for a, b in zip(answers, plain, strict=True))
    total = {name: sum(int(str(one[name])) for one in answers) for name in ("written", "drafted", "kept")}
    tokens = sum(len(one["tokens"]) for one in answers)  # type: ignore[arg-type]
    return {
        "drafter": drafter, "temperature": heat, "answers": len(answers), "tokens": tokens, **total, "differ": differ
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("--drafter", action="append", required=True)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument(
        "--tokens", type=int, default=0, help="of an answer at most; 0: as many as its list has"
    )
    parser.add_argument("--state", type=Path, help="where it is kept how far it is")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    texts = lists(given.count)
    state = State.read(given.state, {"target": given.target, "count": given.count, "tokens": given.tokens})
    rows: list[dict[str, object]] = []
    for drafter in ["none", *given.drafter]:
        fill(given, state, drafter, texts)
        for heat in HEATS:
            rows.append(row(state, drafter, heat, len(texts)))
            print(rows[-1], flush=True)
    if given.out:
        given.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return 1 if any(one["differ"] for one in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
