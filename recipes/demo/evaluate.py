"""Acceptance on held-out prompts, measured exactly and in parallel over a text the target wrote itself.

Under greedy decoding, and under the match rule with noise keyed by position, the text does not depend
on the drafter. A draft that was right so far has the text itself as its prefix, so one forward per draft
step gives the drafts of every possible round; a walk over the text then plays the rounds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import say, write_atomic
from drafter import DrafterShape, draft_tables, masked_logits, unroll
from model import Params, Shape, hidden_states, tables
from sample import continue_prompts, continue_rows, gumbel
from tokenizers import Tokenizer
from torch import Tensor

STEPS = 4


def play(right: np.ndarray, start: int) -> dict[str, Any]:
    """Walk a text in rounds; right[t, k] says whether draft k of the round with last token at t is right."""
    tried, taken = np.zeros(right.shape[1]), np.zeros(right.shape[1])
    at, rounds, made = start, 0, 0
    while at < len(right):
        run = 0
        for k in range(right.shape[1]):
            tried[k] += 1
            if not right[at, k]:
                break
            taken[k] += 1
            run += 1
        made += run + 1
        at += run + 1
        rounds += 1
    return {"rounds": rounds, "made": made, "tried": tried, "taken": taken}


def total(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Sum of several texts: mean tokens per target step and acceptance by position."""
    rounds = sum(p["rounds"] for p in parts)
    tried, taken = sum(p["tried"] for p in parts), sum(p["taken"] for p in parts)
    return {
        "tokens_per_step": round(sum(p["made"] for p in parts) / max(1, rounds), 3),
        "acceptance_by_position": [
            round(float(a / b), 3) if b else None for a, b in zip(taken, tried, strict=True)
        ],
        "reached_by_position": [round(float(a / tried[0]), 3) for a in taken],
    }


def pick(z: Tensor, heat: float, noise: Tensor | None) -> Tensor:
    """Greedy choice, or the choice under shared Gumbel noise."""
    return (z if noise is None else z + heat * noise).argmax(-1)


@torch.no_grad()
def mtp_right(
    teacher: tuple[Params, Shape],
    student: tuple[Params, DrafterShape],
    row: Tensor,
    heat: float,
    noise: Tensor | None,
    start: int,
) -> np.ndarray:
    """Which drafts are right at every position of one text; noise[i] belongs to the token at start + i."""
    (target, big), (drafter, shape) = teacher, student
    ids, n = row[None], len(row)
    hidden, kv = hidden_states(target, big, ids, tables(big, n))
    embed = target["model.embed_tokens.weight"]
    states = unroll(drafter, shape.text(big), STEPS, (ids, hidden, kv), embed, draft_tables(big, n))
    right = np.zeros((n, STEPS), dtype=bool)
    for k, x in enumerate(states):
        first = max(1, start - 1 - k)  # round at t drafts the token at t + 1 + k
        rounds = torch.arange(first, n - 1 - k)
        z = masked_logits(drafter, x[0, rounds - 1], shape.top_k)
        where = rounds + 1 + k
        guess = pick(z, heat, None if noise is None else noise[(where - start).clamp_min(0)])
        right[rounds.numpy(), k] = (guess == row[where]).numpy()
    return right


@torch.no_grad()
def model_right(
    params: Params, shape: Shape, row: Tensor, heat: float, noise: Tensor | None, start: int
) -> np.ndarray:
    """The same for the independent draft model."""
    h, _ = hidden_states(params, shape, row[None], tables(shape, len(row)))
    z = F.linear(h[0, start - 1 : -1], params["model.embed_tokens.weight"])
    good = (pick(z, heat, noise) == row[start:]).numpy()
    right = np.zeros((len(row), STEPS), dtype=bool)
    for t in range(start - 1, len(row)):
        for k in range(STEPS):
            where = t + 1 + k - start
            right[t, k] = 0 <= where < len(good) and good[where]
    return right


def ngram_right(row: Tensor, start: int, longest: int = 3) -> np.ndarray:
    """Prompt lookup: the latest earlier occurrence of the last 3, 2 or 1 tokens, and what followed it."""
    text = row.tolist()
    right = np.zeros((len(text), STEPS), dtype=bool)
    for t in range(start - 1, len(text)):
        for size in range(longest, 0, -1):
            tail = text[t + 1 - size : t + 1]
            at = next((i for i in range(t - size, -1, -1) if text[i : i + size] == tail), None)
            if at is not None:
                break
        if at is None:
            continue
        guess = text[at + size : at + size + STEPS]
        for k, token in enumerate(guess):
            right[t, k] = t + 1 + k < len(text) and text[t + 1 + k] == token
    return right


def heldout_prompts(work: Path, tokenizer: Tokenizer, count: int = 60) -> list[dict[str, Any]]:
    """Held-out prompts of 64 to 512 tokens with what follows them, from distinct places of held-out files."""
    random = np.random.default_rng(7)
    lengths = random.permutation(np.linspace(64, 512, count).astype(int))
    lines = (work / "corpus/held.jsonl").read_text(encoding="utf-8").split("\n")
    documents = [json.loads(line) for line in lines if line]
    encoded = [(d["id"], tokenizer.encode(d["text"], add_special_tokens=False).ids) for d in documents]
    out: list[dict[str, Any]] = []
    for i, length in enumerate(lengths.tolist()):
        fits = [item for item in encoded if len(item[1]) > length + 160]
        if not fits:
            break
        name, ids = fits[i % len(fits)]
        at = int(random.integers(0, len(ids) - length - 150))
        prompt = tokenizer.decode(ids[at : at + length - 1])
        out.append(
            {
                "id": f"{i:02d}:{name}",
                "prompt": prompt,
                "reference": tokenizer.decode(ids[at + length - 1 : at + length + 127]),
            }
        )
    return out


def excerpts(work: Path, count: int = 24, size: int = 3000) -> list[dict[str, Any]]:
    """Beginnings of held-out files, for measuring bits per byte without the corpus."""
    lines = (work / "corpus/held.jsonl").read_text(encoding="utf-8").split("\n")
    documents = [json.loads(line) for line in lines if line]
    return [{"id": d["id"], "text": d["text"][:size]} for d in documents[:count]]


def write_heldout(path: Path, prompts: list[dict[str, Any]]) -> None:
    """One JSON object per line."""
    lines = "".join(json.dumps(p) + "\n" for p in prompts)
    write_atomic(path, lambda temporary: temporary.write_text(lines, encoding="utf-8"))


def acceptance(
    target: tuple[Params, Shape],
    drafter: tuple[Params, DrafterShape],
    draft: tuple[Params, Shape],
    prompts: list[Tensor],
    new: int = 128,
    heats: tuple[float, ...] = (0.0, 0.8),
) -> dict[str, Any]:
    """Mean tokens per target step of all drafter kinds at several temperatures."""
    report: dict[str, Any] = {}
    for heat in heats:
        parts: dict[str, list[dict[str, Any]]] = {"mtp": [], "model": [], "ngram": []}
        texts: list[Tensor] = []
        noises: list[Tensor | None] = []
        for at in range(0, len(prompts), 15):
            few = prompts[at : at + 15]
            noise = gumbel(len(few), new, target[1].vocab, 5000 + at) if heat else None
            texts += continue_prompts(*target, few, new, heat, noise)
            noises += list(noise) if noise is not None else [None] * len(few)
        for row, flat, prompt in zip(texts, noises, prompts, strict=True):
            start = len(prompt)
            # the first token after the prompt comes from the prefill step; rounds start there
            table = {
                "mtp": mtp_right(target, drafter, row, heat, flat, start),
                "model": model_right(*draft, row, heat, flat, start),
                "ngram": ngram_right(row, start),
            }
            for kind, right in table.items():
                parts[kind].append(play(right[:-STEPS], start))
        report[f"T={heat:g}"] = {kind: total(found) for kind, found in parts.items()}
        for kind, found in report[f"T={heat:g}"].items():
            say(
                f"evaluate: T={heat:g} {kind}: {found['tokens_per_step']} tokens per step, "
                f"by position {found['acceptance_by_position']}"
            )
    return report


def samples(
    target: Params, big: Shape, tokenizer: Tokenizer, prompts: list[dict[str, Any]], new: int
) -> list[dict[str, Any]]:
    """Three greedy continuations, of prompts from the start, the middle and the end of the list."""
    out = []
    for at in (0, len(prompts) // 2, len(prompts) - 1):
        ids = torch.tensor(tokenizer.encode(prompts[at]["prompt"]).ids)[-big.context + new :]
        row = continue_rows((target, big), ids[None], new, torch.tensor([0.0]), 0)[0]
        text = tokenizer.decode(row[len(ids) :].tolist())
        out.append({"id": prompts[at]["id"], "prompt": prompts[at]["prompt"], "text": text})
    return out
