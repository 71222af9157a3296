"""The texts that `paceline bench` and `paceline check` run. They ship with the package and never change
silently.

A workload is a function of (tokenizer, vocabulary, how many, longest prompt): the same arguments give the
same prompts. Held-out code comes with the demo pair; where that is not installed, four short files of ours
stand in.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from importlib import resources
from typing import Protocol

import numpy as np

from paceline.core import Constraint
from paceline.errors import UsageError


class Encoder(Protocol):
    def encode(self, text: str, add_bos: bool | None = None) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: list[int]
    reference: tuple[int, ...] | None = None  # text that the answer may be copied from
    constraint: Callable[[], Constraint] | None = None


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a prompt may be made of, and how long it may get."""

    vocab_size: int
    longest: int
    special: frozenset[int] = frozenset()


Source = Callable[[Encoder, Bounds, int], list[Prompt]]


def prompts(name: str, encoder: Encoder, bounds: Bounds, count: int) -> list[Prompt]:
    """`count` prompts of a workload; UsageError for a name that is none."""
    if name not in WORKLOADS:
        raise UsageError(f"unknown workload {name!r}: use one or more of {', '.join(WORKLOADS)}")
    workload = WORKLOADS[name](encoder, bounds, count)
    return [workload[i % len(workload)] for i in range(count)]


def _data(name: str) -> str:
    return (resources.files("paceline.bench") / "data" / name).read_text(encoding="utf-8")


def _held_out() -> list[str]:
    """Prompts of files that the demo pair never saw, or ours where there is no demo."""
    try:
        lines = (resources.files("paceline") / "demo" / "heldout.jsonl").read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return _data("code.py.txt").split("%%\n")
    return [json.loads(line)["prompt"] for line in lines.splitlines() if line.strip()]


def _last(tokens: list[int], bounds: Bounds, share: float = 1.0) -> list[int]:
    """The first token (begin of text) and as many of the last ones as fit."""
    keep = max(int(bounds.longest * share), 2)
    return tokens if len(tokens) <= keep else [tokens[0], *tokens[len(tokens) - keep + 1 :]]


def _code(encoder: Encoder, bounds: Bounds, count: int) -> list[Prompt]:
    texts = _held_out()
    return [Prompt(_last(encoder.encode(text), bounds, 0.25)) for text in texts[: max(count, 1)]]


def _prose(encoder: Encoder, bounds: Bounds, count: int) -> list[Prompt]:
    return [
        Prompt(_last(encoder.encode(t.strip("\n")), bounds, 0.25)) for t in _data("prose.txt").split("%%\n")
    ]


RENAMES = (("entries", "items"), ("limit", "size"), ("max_age", "lifetime"), ("clock", "timer"))


def _edit(encoder: Encoder, bounds: Bounds, count: int) -> list[Prompt]:
    """Return this file with one name changed: nearly all of the answer stands in the prompt."""
    file = _data("edit.py.txt")
    out = []
    for old, new in RENAMES:
        head, rest = file[: file.index("class Cache:")], file[file.index("class Cache:") :]
        ask = f"{file}\n\n# The same file with {old} renamed to {new}:\n{head.replace(old, new)}"
        out.append(Prompt(_last(encoder.encode(ask), bounds), tuple(encoder.encode(rest, add_bos=False))))
    return out


@functools.lru_cache(maxsize=128)
def _only(token: int, vocab_size: int) -> np.ndarray:
    """bool [V]: nothing else is allowed."""
    mask = np.zeros(vocab_size, dtype=np.bool_)
    mask[token] = True
    mask.flags.writeable = False
    return mask


class Dictation:
    """Allows one answer only. For targets too small to follow a request: what would the engine do with one that does?"""

    def __init__(self, answer: tuple[int, ...], vocab_size: int) -> None:
        self._answer, self._vocab_size, self._done = answer, vocab_size, 0

    def masks(self, draft: Seq[int]) -> list[np.ndarray | None]:
        return [self._mask(self._done + j) for j in range(len(draft) + 1)]

    def _mask(self, at: int) -> np.ndarray | None:
        return _only(self._answer[at], self._vocab_size) if at < len(self._answer) else None

    def commit(self, tokens: Seq[int]) -> None:
        self._done += len(tokens)


def _dictated(encoder: Encoder, bounds: Bounds, count: int) -> list[Prompt]:
    """The edit task with the right answer dictated."""
    file = _data("edit.py.txt")
    rest = file[file.index("class Cache:") :]
    out = []
    for prompt, (old, new) in zip(_edit(encoder, bounds, count), RENAMES, strict=True):
        answer = tuple(encoder.encode(rest.replace(old, new), add_bos=False))
        make = functools.partial(Dictation, answer, bounds.vocab_size)
        out.append(Prompt(prompt.tokens, prompt.reference, make))
    return out


def _json(encoder: Encoder, bounds: Bounds, count: int) -> list[Prompt]:
    """Records that repeat their keys."""
    out = []
    for seed in range(4):
        rng = random.Random(seed)
        records = [
            {
                "id": 100 + i,
                "name": rng.choice(("north", "south", "east", "west")),
                "active": rng.random() < 0.5,
                "size": rng.randrange(10) * 10,
                "tags": ["a", "b"],
            }
            for i in range(12)
        ]
        text = "DATA = [\n" + "".join(f"    {record},\n" for record in records)
        out.append(Prompt(_last(encoder.encode(text), bounds, 0.5)))
    return out


def _random(encoder: Encoder, bounds: Bounds, count: int) -> list[Prompt]:
    """Uniformly random tokens: nothing to predict, the adversary of every drafter."""
    allowed = [i for i in range(bounds.vocab_size) if i not in bounds.special]
    length = min(64, bounds.longest)
    return [Prompt(random.Random(seed).choices(allowed, k=length)) for seed in range(max(count, 1))]


def _long(encoder: Encoder, bounds: Bounds, count: int) -> list[Prompt]:
    """As much text as the context takes."""
    everything = "\n\n".join([*_held_out(), _data("edit.py.txt"), _data("prose.txt")])
    tokens = encoder.encode(everything)
    while len(tokens) < bounds.longest:
        tokens = tokens + (tokens[1:] or tokens)  # a tokenizer may make one token of everything
    starts = range(0, max(len(tokens) - bounds.longest, 1), max(bounds.longest // 4, 1))
    return [Prompt([tokens[0], *tokens[s + 1 : s + bounds.longest]]) for s in list(starts)[: max(count, 1)]]


WORKLOADS: dict[str, Source] = {
    "code": _code, "prose": _prose, "edit": _edit, "dictated": _dictated, "json": _json, "random": _random, "long": _long,
}  # fmt: skip
