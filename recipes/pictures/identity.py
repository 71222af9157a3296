"""Token identity with pictures and sound, of all drafters on small random models of Gemma 4's four kinds.

    nice -n 19 python recipes/pictures/identity.py --tokens 20000 --out identity.json

Each pair of a kind and a drafter compares `--tokens` tokens, as the chapter of `paceline check` does: draft lengths 1 to
8, batches of mixed requests, chunks of the prompt, hits that end in a picture, preemption, temperatures 0 and 0.8. What
is done stands in `--out` and is not done again. The exit code is 1 if a token differed. Needs the extra `dev`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from checkpoints import build_assistant, build_target  # noqa: E402
from decoders import build_decoder  # noqa: E402
from dflash_files import build_dflash  # noqa: E402
from eagle3_files import build_eagle3  # noqa: E402
from media_models import KINDS, VOCAB, build_seeing, write_tokenizer  # noqa: E402
from mtp_files import build_mtp  # noqa: E402
from paceline import LLM  # noqa: E402
from paceline.check import pictures  # noqa: E402
from paceline.check.subject import Subject  # noqa: E402

FAMILY = {"e2b": "e2b", "moe26b": "26b", "dense31b": "31b", "unified12b": "12b"}
DRAFTERS = ("assistant", "trees", "ngram", "lookahead", "model", "eagle3", "mtp", "dflash")


def built(kind: str, drafter: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """A target, and what a drafter for it is asked for with."""
    target, other = folder / "target", folder / "drafter"
    build_seeing(kind, target)
    if drafter in ("assistant", "trees"):
        build_assistant(FAMILY[kind], other, vocab_size=VOCAB, sliding_window=40)
        return target, {"drafter": str(other)} | ({"draft_tree": "4x3"} if drafter == "trees" else {})
    if drafter == "model":
        build_target("dense", other, vocab_size=VOCAB)
        write_tokenizer(other)
        return target, {"drafter": str(other)}
    if drafter == "eagle3":
        build_eagle3(other, hidden=48, vocab=VOCAB)
        return target, {"drafter": str(other)}
    if drafter == "dflash":
        build_dflash(other, hidden=48, vocab=VOCAB)
        return target, {"drafter": str(other)}
    if drafter == "mtp":
        build_decoder("llama", folder / "like", vocab_size=VOCAB, num_hidden_layers=5)
        build_mtp(folder / "like", other, "speculators")
        return target, {"drafter": str(other)}
    return target, {"drafter": drafter}


def compared(kind: str, drafter: str, tokens: int) -> dict[str, Any]:
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        target, options = built(kind, drafter, Path(scratch))
        with LLM(target, activations="float32", threads=1, max_model_len=512, cache_memory=2**26, profile_dir="none",
                 image_tokens=70, **options) as llm:  # fmt: skip
            subject, seen = Subject(llm.engine, ()), pictures.Seen()
            pictures.compare(subject, float("inf"), 0.0, seen, tokens)
            found = pictures.finding(subject, seen)
    return asdict(found) | {"offsets": sorted(seen.within), "seconds": round(time.perf_counter() - begin, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=20_000, help="of each pair of a kind and a drafter")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=list(DRAFTERS))
    parser.add_argument("--out", type=Path, default=Path("identity.json"))
    options = parser.parse_args()
    done: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    for kind in options.kinds:
        for drafter in options.drafters:
            name = f"{kind} {drafter} {options.tokens}"
            if name not in done:
                done[name] = compared(kind, drafter, options.tokens)
                options.out.write_text(json.dumps(done, indent=1, default=str) + "\n")
            print(
                f"{name}: {done[name]['outcome']}, {done[name]['words']} {done[name]['counts']}", flush=True
            )
    sys.exit(any(one["outcome"] == "refuted" for one in done.values()))


if __name__ == "__main__":
    main()
