"""The questions that every engine is asked: made of lists, the same on every machine, 200 of six kinds.

code, talk, JSON by a schema that is told, tool calls, long copies of opaque identifiers, and an edit of a given
text. Copies and edits are what n-gram drafters draft for; opaque identifiers are what a wrong draft changes without
anybody seeing it.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

KINDS = {"code": 50, "talk": 50, "json": 25, "tool": 15, "copy": 30, "edit": 30}

CODE = (
    "a class Stack with push, pop and peek",
    "a function that reverses a linked list",
    "binary search in a sorted list",
    "quicksort",
    "a function that counts words in a text",
    "a class for a bank account",
    "a decorator that retries",
    "a context manager that measures time",
    "a parser for key=value lines",
    "a function that merges two sorted lists",
    "a least recently used cache",
    "a generator of prime numbers",
    "a function that flattens nested lists",
    "matrix multiplication without numpy",
    "a queue with two stacks",
    "a function that checks balanced brackets",
    "a Fibonacci function with memoisation",
    "a command line tool that counts lines",
    "a CSV reader without csv",
    "a function that finds duplicates",
    "a priority queue",
    "a trie for words",
    "a rate limiter",
    "an event emitter",
    "a function that formats bytes as KiB, MiB and GiB",
)
TALK = (
    "why leaves are green",
    "how a bicycle stays upright",
    "what inflation is",
    "how vaccines work",
    "why the sky is blue",
    "how bread rises",
    "what a black hole is",
    "how a river makes a valley",
    "why we sleep",
    "how a violin makes sound",
    "what photosynthesis does",
    "how the tides work",
    "what a contract is",
    "how a compass points north",
    "why ice floats",
    "how a refrigerator cools",
    "what democracy means",
    "how glass is made",
    "why birds migrate",
    "how a battery stores energy",
    "what a glacier is",
    "how paper is made",
    "why leaves fall in autumn",
    "how a telescope works",
    "what an algorithm is",
)
PEOPLE = ("Ada", "Grace", "Alan", "Edsger", "Barbara")
CITIES = ("Paris", "Nairobi", "Lima", "Oslo", "Hanoi")
LANGUAGES = ("Python", "JavaScript")


@dataclass(frozen=True)
class Asked:
    """One question: `text` is what the user says."""

    id: str
    kind: str
    text: str


def identifiers(start: int, count: int) -> list[str]:
    """Opaque strings: hashes, UUIDs and names of models with versions, in turn."""
    made = []
    for i in range(start, start + count):
        digest = hashlib.sha256(f"identifier {i}".encode()).hexdigest()
        name = f"mdl-{digest[:3]}-{int(digest[3:6], 16)}B-v{int(digest[6:8], 16)}.{int(digest[8:10], 16)}-it"
        made.append((digest[:24], str(uuid.UUID(digest[:32])), name)[i % 3])
    return made


def _code(i: int) -> str:
    return f"Write {CODE[i % len(CODE)]} in {LANGUAGES[i // len(CODE) % 2]}."


def _talk(i: int) -> str:
    how = ("Explain in three sentences", "Explain to a child")[i // len(TALK) % 2]
    return f"{how} {TALK[i % len(TALK)]}."


def _json(i: int) -> str:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "city": {"type": "string"}, "age": {"type": "integer"}},
    }
    told = f"{PEOPLE[i % 5]} is {20 + i} and lives in {CITIES[i // 5 % 5]}."
    return f"{told} Answer with JSON by this schema only: {json.dumps(schema)}"


def _tool(i: int) -> str:
    tools = [
        {"name": "weather", "parameters": {"city": "string", "day": "integer"}},
        {"name": "search", "parameters": {"query": "string"}},
    ]
    wish = f"weather in {CITIES[i % 5]} on day {i // 5 + 1}"
    return f"You can call these tools: {json.dumps(tools)}. Call one as JSON for: {wish}."


def _copy(i: int) -> str:
    lines = "\n".join(identifiers(20 * i, 20))
    return f"Repeat this list exactly, line by line, with nothing before or after it:\n{lines}"


def _edit(i: int) -> str:
    old, new = identifiers(10_000 + 2 * i, 2)
    lines = "\n".join(
        f"    self.{word}_{i} = {word}_{i}" for word in ("name", "size", "color", "weight", "price", "stock")
    )
    source = f"class Item{i}:\n  def __init__(self):\n{lines}\n    self.key = '{old}'\n"
    return f"Write this program again with the key changed to '{new}' and nothing else changed:\n{source}"


MAKE = {"code": _code, "talk": _talk, "json": _json, "tool": _tool, "copy": _copy, "edit": _edit}


def questions(count: int = 200, kinds: Sequence[str] | None = None) -> list[Asked]:
    """`count` questions with all kinds in turn, so that fewer of them are still a fair part.

    `kinds`: only those, as many as are asked for.
    """
    if kinds:
        return [
            Asked(f"{kind}-{i:02d}", kind, MAKE[kind](i))
            for i in range(-(-count // len(kinds)))
            for kind in kinds
        ][:count]
    made = [
        (i / size, Asked(f"{kind}-{i:02d}", kind, MAKE[kind](i)))
        for kind, size in KINDS.items()
        for i in range(size)
    ]
    return [asked for _, asked in sorted(made, key=lambda pair: pair[0])][:count]
