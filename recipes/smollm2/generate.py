"""The target writes its own training data: given the opening of a user turn it writes the turn, then the answer.

    python recipes/smollm2/generate.py --out DIR [--hours 1]

One shard a round: `SHARD.npz` with `tokens` (all conversations, one after another), `starts` (where each begins) and
`answers` (after how many tokens its answer begins), and `SHARD.states` with the target's hidden states as they fell out
of its forwards, bfloat16 [tokens, 4, 576]: 4.6 KB a token. Started again, it goes on with the next shard.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from openings import opening
from recorder import install

from paceline.core import SamplingParams
from paceline.llm import LLM

SYSTEM = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
)
QUESTION, ANSWER = 96, 256  # tokens at most
TEMPERATURES = (0.0, 0.0, 0.6, 0.8, 0.8)  # of answers


def main() -> None:
    said = argparse.ArgumentParser()
    said.add_argument("--out", type=Path, required=True)
    said.add_argument("--hours", type=float, default=1.0)
    said.add_argument("--batch", type=int, default=64)
    said.add_argument("--round", type=int, default=256, help="conversations a shard")
    said.add_argument("--dtype", default="bfloat16")
    said.add_argument("--threads", type=int, default=None)
    said.add_argument(
        "--prompts", type=Path, help="answer these, one a line, greedily and at 0.8: shards 0 and 1"
    )
    args = said.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    end, total = time.time() + 3600 * args.hours, 0
    recorder = install()
    options = {"max_batch": args.batch, "max_model_len": 768, "dtype": args.dtype, "threads": args.threads}
    with LLM("smollm2", drafter="none", prefix_cache=False, draft_tokens=0, **options) as llm:
        recorder.on = True
        while time.time() < end:
            shard = len(list(args.out.glob("*.npz")))
            if args.prompts and shard == 2:
                break
            began = time.time()
            recorder.clear()
            if args.prompts:
                written = answer(llm, args.prompts.read_text().splitlines(), 0.8 * shard)
            else:
                written = write(llm, random.Random(f"smollm2 {shard}"), args.round)
            recorder.end()
            states = torch.cat([recorder.states(tokens) for _, tokens in written])
            states.view(torch.int16).numpy().tofile(args.out / f"{shard:05d}.states")
            starts = np.cumsum([0, *(len(tokens) for _, tokens in written)])
            tokens = np.concatenate([np.array(tokens, np.uint16) for _, tokens in written])
            file = args.out / f"{shard:05d}.npz"
            part = file.with_suffix(".part.npz")
            np.savez(part, tokens=tokens, starts=starts, answers=[at for at, _ in written])
            part.rename(file)
            total += len(tokens)
            print(
                f"{file.name}: {len(tokens)} tokens, {len(tokens) / (time.time() - began):.0f} a second",
                flush=True,
            )


def write(llm: LLM, rng: random.Random, count: int) -> list[tuple[int, list[int]]]:
    """(where the answer begins, tokens) of each conversation that came to an end in both turns."""
    encode = llm.tokenizer.encode
    turns = [SYSTEM + "<|im_start|>user\n" + opening(rng)[1] for _ in range(count)]
    prompts = [encode(turn, add_bos=False) for turn in turns]
    asked = SamplingParams(max_tokens=QUESTION, min_tokens=2, temperature=0.85, top_p=0.95)
    questions = llm.generate(prompts, [replace(asked, seed=rng.getrandbits(60)) for _ in prompts])
    close = encode("<|im_end|>\n<|im_start|>assistant\n", add_bos=False)
    opened = []
    for prompt, question in zip(prompts, questions, strict=True):
        text = [t for t in question.token_ids if t != close[0]]
        opened.append([*prompt, *text, *close])
    asked = SamplingParams(max_tokens=ANSWER)
    each = [replace(asked, temperature=rng.choice(TEMPERATURES), seed=rng.getrandbits(60)) for _ in opened]
    answers = llm.generate(opened, each)
    return [
        (len(p), [*p, *a.token_ids[:-1]])
        for p, a in zip(opened, answers, strict=True)
        if len(a.token_ids) > 4
    ]


def answer(llm: LLM, prompts: list[str], temperature: float) -> list[tuple[int, list[int]]]:
    """(where the answer begins, tokens) for each user turn."""
    turns = [f"{SYSTEM}<|im_start|>user\n{p}<|im_end|>\n<|im_start|>assistant\n" for p in prompts]
    ids = [llm.tokenizer.encode(turn.replace("\\n", "\n"), add_bos=False) for turn in turns]
    each = [SamplingParams(max_tokens=128, temperature=temperature, seed=seed) for seed in range(len(ids))]
    return [(len(p), [*p, *a.token_ids[:-1]]) for p, a in zip(ids, llm.generate(ids, each), strict=True)]


if __name__ == "__main__":
    main()
