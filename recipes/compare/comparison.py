"""What replies of several ways to the same prompts say: speeds by round, ratios, and where texts part."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from llama_server import Reply

Rounds = Seq[Seq[Reply]]  # [round][prompt]


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second of one way, an entry per round."""

    decode: list[float]
    request: list[float]
    tokens_per_step: float

    @classmethod
    def of(cls, rounds: Rounds) -> Speed:
        last = rounds[-1]
        emitted = sum(len(reply.token_ids) for reply in last)
        return cls(
            [
                sum(len(r.token_ids) - 1 for r in turn) / sum(r.decode_seconds for r in turn)
                for turn in rounds
            ],
            [sum(len(r.token_ids) for r in turn) / sum(r.seconds for r in turn) for turn in rounds],
            emitted / (emitted - sum(reply.accepted for reply in last)),
        )


def best(speeds: Mapping[str, Speed], prefix: str) -> str:
    """The way with the highest median decode speed among those whose name begins with `prefix`."""
    return max((n for n in speeds if n.startswith(prefix)), key=lambda n: statistics.median(speeds[n].decode))


def ratios(speeds: Mapping[str, Speed], way: str, other: str) -> list[float]:
    """Decode speed of `way` over that of `other`, sorted: one per round, for both ran in each."""
    return sorted(a / b for a, b in zip(speeds[way].decode, speeds[other].decode, strict=True))


def first_difference(text: Seq[int], other: Seq[int]) -> int | None:
    """Index of the first token that differs, None if the texts are equal."""
    for i, (a, b) in enumerate(zip(text, other, strict=True)):
        if a != b:
            return i
    return None


def parting(part: Mapping[str, Any]) -> str:
    """Where one text parts from ours, in words."""
    gap = "more than 8 tokens down" if part["gap_nats"] is None else f"{part['gap_nats']:.1e} nats apart"
    return f"prompt {part['prompt']} from token {part['token']}, the two {gap}"


def table(speeds: Mapping[str, Speed], base: str) -> str:
    """Markdown: a line per way, medians with the range of rounds, ratios to `base`."""
    lines = ["| way | decode, tokens/s | range | times " + base + " | request, tokens/s | tokens per step |"]
    lines.append("|---|---|---|---|---|---|")
    for name, speed in speeds.items():
        decode, ratio = statistics.median(speed.decode), statistics.median(ratios(speeds, name, base))
        lines.append(
            f"| {name} | {decode:.0f} | {min(speed.decode):.0f} to {max(speed.decode):.0f} | {ratio:.2f} "
            f"| {statistics.median(speed.request):.0f} | {speed.tokens_per_step:.2f} |"
        )
    return "\n".join(lines)
