"""Finding markers in text that arrives in pieces of any size."""

from __future__ import annotations

from collections.abc import Sequence


def held(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end of `text` could still become one of `markers`: keep them back."""
    longest = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:size]):
                longest = size
                break
    return longest


def first(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Where the earliest of `markers` begins in `text`, and which one it is."""
    hits = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    return min(hits, default=None)
