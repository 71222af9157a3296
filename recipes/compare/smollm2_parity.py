"""SmolLM2's own GGUF file, float32 activations, against transformers: greedy answers to chat prompts, token by token.

    pip install accelerate  # transformers wants it for GGUF files
    python recipes/compare/smollm2_parity.py --prompts 20 --tokens 100

Where two texts part, the gap between the two tokens (transformers' float32 logits) says whether it was a near-tie.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from paceline import LLM
from paceline.hub.resolve import smollm2
from paceline.text.chat import ChatTemplate

QUESTIONS = (
    "What is the capital of Australia?", "Explain in two sentences why leaves are green.",
    "Write a Python function that adds two numbers.", "Name three planets.", "Why does ice float on water?",
    "Write a short poem about the sea.", "What is 17 times 24?", "Translate to French: good morning.",
    "List five fruits.", "Who wrote Hamlet?", "What does a CPU do?", "Give me a recipe for pancakes.",
    "Explain what a prime number is.", "Write an email that asks for a day off.", "What is photosynthesis?",
    "How do I boil an egg?", "Describe a sunset in one sentence.", "What is the largest ocean?",
    "Write a SQL query that counts users.", "Tell me a joke.",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Parting:
    question: str
    at: int
    gap: float  # between the two tokens, in logits of transformers


def compare(llm: LLM, model: torch.nn.Module, questions: tuple[str, ...], tokens: int) -> list[Parting]:
    """Where the greedy answers part; empty if they are equal."""
    template, parted = ChatTemplate.of(llm.tokenizer), []
    for question in questions:
        text = template.render([{"role": "user", "content": question}])
        ids = llm.tokenizer.encode(text, add_bos=False)
        mine = llm.generate([ids], llm.params(max_tokens=tokens, temperature=0))[0].token_ids
        with torch.no_grad():
            logits = model(torch.tensor([ids + mine])).logits[0, len(ids) - 1 : -1]
        for at, (token, row) in enumerate(zip(mine, logits, strict=True)):
            if int(row.argmax()) != token:
                parted.append(Parting(question, at, float(row.max() - row[token])))
                break
    return parted


def load(threads: int = 2) -> tuple[LLM, torch.nn.Module]:
    file = Path(smollm2())
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    options = {"activations": "float32", "max_model_len": 512, "threads": threads, "cache_memory": 2**28}
    return LLM("smollm2", drafter="none", **options), model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=100)
    options = parser.parse_args()
    questions = QUESTIONS[: options.prompts]
    parted = compare(*load(), questions, options.tokens)
    for one in parted:
        print(f"{one.question!r} parts at token {one.at}: {one.gap:.2e} between the two")
    print(f"{len(questions) - len(parted)} of {len(questions)} answers are identical")


if __name__ == "__main__":
    main()
