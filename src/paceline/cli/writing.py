"""What `run` shows of a text while it comes, in pieces without any terminal: who shows them gives them colour."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from paceline.chat.road import Turn
    from paceline.core import Delta, SamplingParams, Stats
    from paceline.llm import LLM
    from paceline.text.formats.events import Event
    from paceline.text.formats.thoughts import Parted
    from paceline.text.marked import Answer

LOSSY = "lossy: verify=typical may have kept drafts that the model itself would not have written"
Kind = Literal["said", "draft", "thought", "prompt", "note", "error"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of text. `said`, `draft` (drafted and kept), `thought` are the model's; `note`, `error` lines of ours."""

    text: str
    kind: Kind = "said"


class Painter:
    """A text in pieces as its deltas come. With `drafts` each token is one, of the kind that it is."""

    def __init__(self, llm: LLM, params: SamplingParams, turn: Turn | None = None, *, drafts: bool) -> None:
        """`turn`: of a chat; None for a plain text."""
        from paceline.text.stream import TextStream

        self._drafts = drafts
        self._answer: Answer | None = None
        if turn is not None:
            self._answer = llm.chats.answer(turn.asked, turn.prompt.inside, turn.params, "run").events
        self._plain = TextStream(llm.tokenizer, params)
        self._stopped = False
        self.tokens: list[int] = []
        self.answered = ""  # the answer without thoughts
        self.thoughts = ""

    def push(self, delta: Delta) -> Iterator[Piece]:
        self.tokens += delta.token_ids
        if self._drafts:
            for token, origin in zip(delta.token_ids, delta.origins, strict=True):
                yield from self._pieces(self._one(token), "draft" if origin == "draft" else "said")
            if delta.finish_reason is not None:
                yield from self._pieces(self._end(), "said")
        else:
            pieces = self._plainly(delta.text) if self._answer is None else _parted(self._answer.push(delta))
            yield from self._pieces(pieces, "said")

    def _one(self, token: int) -> Parted:
        if self._answer is not None:
            return _parted(self._answer.one(token))
        pushed = self._plain.push([token])
        self._stopped = self._stopped or pushed.stopped
        return self._plainly(pushed.text)

    def _end(self) -> Parted:
        if self._answer is not None:
            return _parted(self._answer.end())
        return self._plainly("" if self._stopped else self._plain.finish())

    def _plainly(self, text: str) -> Parted:
        from paceline.text.formats.thoughts import Parted

        return Parted(content=text)

    def _pieces(self, parted: Parted, kind: Kind) -> Iterator[Piece]:
        self.answered += parted.content
        self.thoughts += parted.reasoning
        if parted.reasoning:
            yield Piece(parted.reasoning, "thought")
        if parted.content:
            yield Piece(parted.content, kind)


def _parted(events: list[Event]) -> Parted:
    from paceline.text.marked import parted

    return parted(events)


def chats(llm: LLM, asked: bool | None) -> bool:
    """Whether prompts go through the chat template: as asked, else if the model was taught to chat."""
    return bool(llm.info["chat"]) if asked is None else asked


def why(reason: str | None, asked: int, room: int, context: int, more: str = "-n") -> str | None:
    """Why a text ended, if it was cut: one that breaks off looks like a fault unless the reason is said.

    `more`: what gives more tokens where it is shown.
    """
    if reason != "length":
        return None
    if asked >= room:
        return f"stopped: the context of {context} tokens is full (--max-model-len)"
    return f"stopped at max_tokens={asked} ({more} gives more)"


def stats_lines(stats: Stats) -> list[str]:
    """Lines on how fast a text was and what speculation did for it."""
    seconds = max(stats.seconds, 1e-9)
    lines = [
        f"{stats.emitted} tokens in {stats.seconds:.2f} s: {stats.emitted / seconds:.1f} tokens/s "
        f"{'with drafts' if stats.drafted else 'without drafts'}, "
        f"first after {stats.first_token_seconds * 1000:.0f} ms",
        f"{stats.tokens_per_step:.2f} tokens per step ({stats.steps} steps; "
        f"kept {stats.accepted} of {stats.drafted} drafted)",
    ]
    if (used := stats.media) is not None:
        kinds = {"picture": used.images, "clip": used.clips, "soft token": used.soft_tokens}
        what = ", ".join(f"{count} {kind}{'s' * (count != 1)}" for kind, count in kinds.items() if count)
        lines.append(
            f"{what}: decoded in {used.decoding_seconds * 1000:.0f} ms, tower {used.tower_seconds * 1000:.0f} ms"
            + (f", {used.known} known from before" if used.known else "")
        )
    if stats.drafted:
        by_position = zip(stats.accepted_by_position + [0] * 16, stats.drafted_by_position, strict=False)
        lines.append("kept by position: " + " ".join(f"{a / d:.0%}" for a, d in by_position))
    if stats.drafters:
        lines.append("drafted by: " + ", ".join(f"{name} {n}" for name, n in stats.drafters.items()))
    if stats.reasons:
        lines.append(
            "steps without a draft: " + ", ".join(f"{what} {n}" for what, n in stats.reasons.items())
        )
    return lines


def status_line(stats: Stats) -> str:
    """How fast an answer was, and what drafts brought, in as few words as can be."""
    speed = f"{stats.emitted} tokens, {stats.emitted / max(stats.seconds, 1e-9):.0f} a second"
    return f"{speed}, {stats.accepted} of them from drafts" if stats.drafted else f"{speed}, no drafts"


def short_name(target: str) -> str:
    """How a loaded model is called: a repository of the hub, a file, or a folder, without the path to it."""
    path = Path(target)
    if path.parent.name == "snapshots":
        return path.parents[1].name.removeprefix("models--").replace("--", "/")
    return f"{path.parent.name}/{path.name}" if path.name == "target" else path.name


def clean(text: str) -> str:
    """What was typed or pasted, without control characters but newline and tab, and without lone surrogates."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").encode("utf-8", "replace").decode()
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def harmless(text: str) -> str:
    """A model's text for a terminal: control characters but newline and tab, which could change it, as U+FFFD."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\ufffd" for c in text)
