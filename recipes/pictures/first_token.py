"""Time to the first token of a second question about the same picture, beside cached text of the same length.

    python recipes/pictures/first_token.py --model ./gemma-4-E2B-it

Without `--model` a random one of E2B's kind is made (extra `dev`), small enough to show what the picture alone costs. A
question is asked about a picture and about a text of as many tokens, both in the cache; the best of `--rounds` in turns.
Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image

from paceline import LLM

ROOT = Path(__file__).resolve().parents[2]


def made(folder: Path) -> Path:
    sys.path.insert(0, str(ROOT / "tests"))
    from media_models import build_seeing

    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 64}
    build_seeing("e2b", folder, global_head_dim=128, **sizes)
    return folder


def picture() -> bytes:
    out = io.BytesIO()
    Image.effect_mandelbrot((640, 480), (-2.0, -1.2, 0.8, 1.2), 60).convert("RGB").save(out, "PNG")
    return out.getvalue()


def asked(part: dict[str, Any], question: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part, {"type": "text", "text": question}]}]


def first_token(llm: LLM, part: dict[str, Any], question: str) -> tuple[float, Any]:
    begin = time.perf_counter()
    done = llm.chat(asked(part, question), max_tokens=1, temperature=0)[0]
    return time.perf_counter() - begin, done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        target = options.model or made(Path(scratch))
        with LLM(target, threads=options.threads, max_model_len=1024, drafter="none") as llm:
            image = {"type": "image", "image": picture()}
            cold, first = first_token(llm, image, "What is this?")
            wanted, words = len(first.prompt_token_ids), "a"
            while True:
                text = {"type": "text", "text": words}
                length = len(first_token(llm, text, "What is this?")[1].prompt_token_ids)
                if length >= wanted:
                    break
                words += " a" * max((wanted - length) // 2, 1) if wanted - length > 1 else "a"
            best = {"picture": float("inf"), "text": float("inf")}
            for i in range(options.rounds):
                for name, part in (("picture", image), ("text", text)):
                    seconds, done = first_token(llm, part, f"Question {i % 10}?")
                    best[name] = min(best[name], seconds)
                    assert i < 1 or done.stats.cached_prompt_tokens > wanted - 64, "it is in the cache"
            print(f"prompts of {wanted} and {length} tokens; the first time {cold * 1000:.1f} ms")
            print(f"a second question: picture {best['picture'] * 1000:.2f} ms, text {best['text'] * 1000:.2f} ms, "
                  f"{best['picture'] / best['text'] - 1:+.1%}")  # fmt: skip


if __name__ == "__main__":
    main()
