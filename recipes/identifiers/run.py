"""2,000 opaque identifiers to be repeated, by a target alone and with each drafter: how many came out otherwise.

    python recipes/identifiers/run.py smollm2 --drafter eagle3 --drafter ngram --drafter FOLDER

A drafter may change no token, so every difference is a fault. The text is written once without a drafter and once with
each, at temperature 0 and 0.8. What is counted is whole answers that differ, and identifiers in them.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import uuid
from pathlib import Path

from paceline import LLM, SamplingParams

WORDS = ("qwen", "llama", "gemma", "glm", "lfm", "nemotron", "mistral", "kimi")
EACH = 8  # identifiers of a prompt
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


def prompts(names: list[str]) -> list[str]:
    return [
        "Copy this list exactly, one entry a line, and nothing else.\n" + "\n".join(names[i : i + EACH])
        for i in range(0, len(names), EACH)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("--drafter", action="append", required=True)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=0, help="of an answer at most; 0: enough for all")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    asked = prompts(identifiers(args.count))
    most = args.tokens or EACH * 48
    plain: dict[float, list[list[int]]] = {}
    rows, wrong = [], 0
    for drafter in ["none", *args.drafter]:
        with LLM(args.target, drafter=drafter, max_model_len=2048) as llm:
            for heat in (0.0, 0.8):
                params = [
                    SamplingParams(max_tokens=most, temperature=heat, seed=i) for i in range(len(asked))
                ]
                got = llm.generate(asked, params)
                ids = [one.token_ids for one in got]
                if drafter == "none":
                    plain[heat] = ids
                    written = sum(len(IDENTIFIER.findall(one.text)) for one in got)
                    rows.append({"drafter": drafter, "temperature": heat, "identifiers written": written})
                    print(rows[-1], flush=True)
                    continue
                differ = sum(a != b for a, b in zip(ids, plain[heat], strict=True))
                wrong += differ
                drafted, kept = (
                    sum(getattr(one.stats, name) for one in got) for name in ("drafted", "accepted")
                )
                rows.append({
                    "drafter": drafter, "temperature": heat, "answers": len(ids), "tokens": sum(map(len, ids)),
                    "drafted": drafted, "kept": kept, "answers that differ": differ,
                })  # fmt: skip
                print(rows[-1], flush=True)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
