"""Pictures and sound clips in a prompt: rows whose embeddings a tower has computed, soft tokens in place of text.

The prompt holds a placeholder's id at each of these rows. What distinguishes two pictures is `SoftTokens.key`.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Kind = Literal["image", "audio"]
_ABOVE_TOKENS = 1 << 40  # no vocabulary is as large


@dataclass(frozen=True, slots=True)
class Spent:
    """What an item of a prompt has cost, in seconds. `known`: an earlier request has paid for its soft tokens."""

    decoding: float = 0.0
    tower: float = 0.0  # waiting for other pictures included
    known: bool = False


@dataclass(frozen=True, slots=True)
class MediaUse:
    """Pictures and sound of a prompt, all together."""

    images: int
    clips: int
    soft_tokens: int
    known: int  # items whose soft tokens were kept from an earlier request
    decoding_seconds: float
    tower_seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class SoftTokens:
    """One picture or clip: rows `start` to `end` - 1 of a prompt."""

    kind: Kind
    start: int
    vectors: torch.Tensor  # [n, hidden_size] float32
    key: int  # SHA-256 of what was seen or heard, and of how it was prepared
    together: bool = False  # its rows see each other in layers with a window, also those after them
    spent: Spent = Spent()

    @property
    def end(self) -> int:
        return self.start + len(self.vectors)


class MediaPrompt(list[int]):
    """Token ids of a prompt, and what its placeholders stand for, in order."""

    __slots__ = ("media",)

    def __init__(self, tokens: Iterable[int], media: Seq[SoftTokens]) -> None:
        super().__init__(tokens)
        self.media = tuple(media)


def media_of(prompt: list[int]) -> tuple[SoftTokens, ...]:
    """What the placeholders of a prompt stand for; nothing for one of text alone."""
    return prompt.media if isinstance(prompt, MediaPrompt) else ()


def use_of(media: Seq[SoftTokens]) -> MediaUse | None:
    """None for a prompt of text alone."""
    if not media:
        return None
    images, spent = sum(item.kind == "image" for item in media), [item.spent for item in media]
    return MediaUse(
        images, len(media) - images, sum(item.end - item.start for item in media), sum(part.known for part in spent),
        sum(part.decoding for part in spent), sum(part.tower for part in spent),
    )  # fmt: skip


def copied(prompt: Seq[int]) -> list[int]:
    """A list of the ids of a prompt, with its media."""
    return prompt if isinstance(prompt, MediaPrompt) else list(prompt)


def content_keys(tokens: list[int], media: Seq[SoftTokens]) -> list[int]:
    """`tokens` with a number of its own for each row of each picture: equal where the content is equal."""
    if not media:
        return tokens
    keys = list(tokens)
    for item in media:
        keys[item.start : item.end] = [
            (item.key << 16 | row) + _ABOVE_TOKENS for row in range(len(item.vectors))
        ]
    return keys


def whole_runs(media: Seq[SoftTokens], begin: int, count: int) -> int:
    """How many of the next `count` rows from `begin` on belong in one forward: rows that see each other stay together."""
    for item in media:
        if item.together and item.start < begin + count < item.end:
            return item.start - begin if item.start > begin else item.end - begin
    return count


@dataclass(frozen=True, slots=True, eq=False)
class MediaRows:
    """What of a forward's rows are soft tokens."""

    pieces: list[tuple[int, torch.Tensor]]  # first row, vectors [n, hidden_size]
    # [N], by row: the end of the run that it sees all of where there is a window; 0 for one that sees none after itself
    reach: list[int] | None


def media_rows(
    media: Seq[Seq[SoftTokens]], firsts: Seq[int], starts: Seq[int], shift: int = 0
) -> MediaRows | None:
    """Of a batch of B texts: `firsts` [B] positions of their first rows, `starts` [B + 1] offsets. None: text alone.

    `shift`: a row stands for the token so many positions further, as in drafters with a cache of their own.
    """
    pieces: list[tuple[int, torch.Tensor]] = []
    reach = [0] * starts[-1]
    for items, first, start, stop in zip(media, firsts, starts, starts[1:], strict=False):
        for item in items:
            begin, end = max(item.start - shift, first), min(item.end - shift, first + stop - start)
            if begin < end:
                row = start + begin - first
                pieces.append((row, item.vectors[begin + shift - item.start : end + shift - item.start]))
                reach[row : row + end - begin] = [item.end * item.together] * (end - begin)
    return MediaRows(pieces, reach if any(reach) else None) if pieces else None
