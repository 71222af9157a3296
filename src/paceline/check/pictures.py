"""Whether token identity holds with pictures and sound in the prompt. They are made from a seed: no file is read.

Chapter by chapter each prompt is written without a drafter, alone and with nothing shared, then by every drafter: other
draft lengths, batches, chunks of the prompt, prefixes found in the cache up to somewhere in a picture, and so short of
memory that the prompt is preempted and prefilled again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from paceline.check.certificate import Divergence, Finding
from paceline.check.crash import over
from paceline.check.scenes import CHURN, SQUEEZE, TOGETHER, UNSHARED, Output, Scene, play
from paceline.check.subject import Subject
from paceline.core import SamplingParams
from paceline.errors import PromptError
from paceline.kv.store import PAGE_SIZE
from paceline.media.pixels import VERSION
from paceline.media.reader import MediaReader
from paceline.media.talk import MediaItem, Talk
from paceline.soft_tokens import MediaPrompt, content_keys

NAME = "token identity with pictures"
ANSWER = 16  # tokens
SWAPPED = ("two", "swapped")  # the same ids, the pictures in the other order
LENGTHS: tuple[int | Literal["auto"], ...] = (4, 1, 7, 2, "auto", 3, 8, 5, 6)
PLAYS = ((TOGETHER, 4), (SQUEEZE, 3), (CHURN, 2), (UNSHARED, 3), (TOGETHER, 1), (TOGETHER, 6))
CHUNKS = (
    0,
    16,
    -1,
    7,
    1,
    64,
)  # rows of a prompt in one step: 0 all, -1 and 1 a row less and more than a picture


@dataclass(frozen=True, slots=True)
class Asked:
    name: str
    prompt: MediaPrompt
    params: SamplingParams
    told: Output  # without a drafter


@dataclass(slots=True)
class Seen:
    """What was compared so far."""

    tokens: int = 0
    texts: int = 0
    rows: int = 0  # soft tokens in prompts
    drafted: int = 0
    accepted: int = 0
    reused: int = 0
    preemptions: int = 0
    chunks: set[int] = field(default_factory=set)
    within: set[int] = field(
        default_factory=set
    )  # rows of a picture that were found in the cache, the others not
    names: set[str] = field(default_factory=set)
    apart: bool | None = None  # the same ids with swapped pictures are told apart
    divergence: Divergence | None = None


def reader_of(subject: Subject) -> MediaReader | str:
    """What reads pictures, or why they are not tried."""
    reader = subject.engine.parts.media
    if not isinstance(reader, MediaReader):
        return "the model reads text only"
    return reader.why_not("image") or reader


def described(subject: Subject) -> str:
    """A line of the certificate."""
    reader = reader_of(subject)
    if isinstance(reader, str):
        return f"not tried: {reader}"
    return f"made from a seed, preprocessing version {VERSION}{', and sound' if not reader.why_not('audio') else ''}"


def drawn(seed: int, width: int, height: int) -> NDArray[np.uint8]:
    """Squares of colour, [height, width, 3]."""
    small = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), np.uint8)
    return small[np.arange(height) * 5 // height][:, np.arange(width) * 7 // width]


def prompts(reader: MediaReader, room: int, chapter: int = 0) -> list[tuple[str, MediaPrompt]]:
    """Those that fit into `room` tokens: one picture, two, the two swapped, neighbours, a wide one, sound, text alone.

    Each chapter has other pictures, and other words before them, so that they begin elsewhere in a page. Large budgets
    are in the first.
    """
    shown = {kind: reader.tokenizer.token_text(ids.placeholder) for kind, ids in reader.tokens.items()}
    first = 3 * chapter
    one, two, wide = drawn(first + 1, 90, 60), drawn(first + 2, 90, 60), drawn(first + 3, 900, 30)
    see, lead = shown["image"], "x" * chapter
    asked: list[tuple[str, str, list[MediaItem]]] = [
        ("one", f"{lead}A picture: {see} It shows", [_item(one)]),
        ("two", f"{lead}First {see} and then {see} are", [_item(one), _item(two)]),
        ("swapped", f"{lead}First {see} and then {see} are", [_item(two), _item(one)]),
        ("neighbours", f"{lead}{see}{see} Both", [_item(two), _item(two)]),
        ("wide", f"{lead}Long before it some words stand.\n\n{see}", [_item(wide)]),
        ("text alone", f"{lead}No picture, no picture, no", []),
    ]
    asked += [
        (f"budget {budget}", f"{see} is", [_item(one, budget)])
        for budget in (140, 280, 560, 1120)
        if not chapter
    ]
    if reader.why_not("audio") is None and "audio" in shown:
        tone = np.sin(np.arange(8000) * 0.17 + chapter).astype(np.float32)
        sound = MediaItem("audio", (tone * np.linspace(0, 0.5, 8000, dtype=np.float32), 16_000))
        asked.append(("sound", f"{lead}Hear {shown['audio']} and see {see}", [sound, _item(one)]))
    made = ((name, _fitting(reader, text, items, room)) for name, text, items in asked)
    return [(name, prompt) for name, prompt in made if prompt is not None]


def _item(pixels: Any, budget: int = 70) -> MediaItem:
    return MediaItem("image", pixels, budget=budget)


def _fitting(reader: MediaReader, text: str, items: list[MediaItem], room: int) -> MediaPrompt | None:
    """None where it does not fit, which is counted before the tower runs."""
    try:
        talk = Talk([], items)
        return reader.prompt(text, talk) if len(reader.measured(text, talk)) <= room else None
    except PromptError:
        return None  # a budget that the model does not have


def compare(subject: Subject, seconds: float, noise_floor: float, seen: Seen, goal: int = 0) -> None:
    """Compare whole chapters until `goal` tokens are compared, one at least, or no new batch after `seconds`.

    Raises Broken.
    """
    end, chapter, before = time.perf_counter() + seconds, 0, subject.engine.state.preemptions
    while seen.divergence is None and (not chapter or (seen.tokens < goal and time.perf_counter() < end)):
        _chapter(subject, chapter, end, noise_floor, seen)
        chapter += 1
    seen.preemptions += subject.engine.state.preemptions - before


def _chapter(subject: Subject, chapter: int, end: float, noise_floor: float, seen: Seen) -> None:
    reader = reader_of(subject)
    assert isinstance(reader, MediaReader), "it is asked before"
    made = prompts(reader, subject.engine.max_len - ANSWER, chapter)
    asked = [_alone(subject, name, prompt, i + chapter) for i, (name, prompt) in enumerate(made)]
    by_name = {
        asked_item.name: asked_item.told.logprobs[0] for asked_item in asked if asked_item.told.logprobs
    }
    if set(SWAPPED) <= set(by_name):
        first, second = (by_name[name] for name in SWAPPED)
        seen.apart = seen.apart is not False and (first.token, first.raw) != (second.token, second.raw)
    lots = random.Random(chapter)
    for turn, batch in enumerate(_batches(subject, asked, chapter), 5 * chapter):
        if seen.texts and time.perf_counter() > end:
            return
        scene, chunk = PLAYS[turn % len(PLAYS)][0], CHUNKS[turn // 2 % len(CHUNKS)]
        if not scene.squeeze:
            _remember(subject, [asked_item.prompt for asked_item, _ in batch], lots)
        with _chunked(subject, chunk, batch[0][0].prompt) as rows, over(lambda batch=batch: _where(batch)):  # type: ignore[misc]
            done = play(subject, [(asked_item.prompt, params) for asked_item, params in batch], scene)
        for (asked_item, params), told in zip(batch, done, strict=True):
            seen.divergence = _difference(subject, asked_item, params, scene, told, noise_floor)
            if seen.divergence is not None:
                return
            _count(seen, asked_item, told, rows)


def _remember(subject: Subject, prompts: Seq[MediaPrompt], lots: random.Random) -> None:
    """Leave whole pages of each prompt's first rows in the prefix cache, so that hits end anywhere, also in a picture."""
    plain = SamplingParams(max_tokens=1, drafter="none")
    play(subject, [(prompt, plain) for prompt in prompts])
    index = subject.engine.state.cache.prefix
    for prompt in prompts:
        pages = lots.randrange(len(prompt)) // PAGE_SIZE
        for node in index.match([*content_keys(prompt, prompt.media), 0], "")[pages:]:
            for kind, page in list(node.pages.items()):
                index.take_back(kind, page)


def _alone(subject: Subject, name: str, prompt: MediaPrompt, number: int) -> Asked:
    temperature = 0.8 if number % 2 and name not in SWAPPED else 0.0  # those two are compared with each other
    params = SamplingParams(
        max_tokens=ANSWER, seed=number, ignore_eos=True, temperature=temperature, logprobs=0
    )
    params = replace(params, drafter="none")
    with over(lambda: {"drafter": "none", "prompt": name}):
        told = play(subject, [(prompt, params)], Scene("alone", share=False))[0]
    return Asked(name, prompt, params, told)


Batch = list[tuple[Asked, SamplingParams]]


def _batches(subject: Subject, asked: Seq[Asked], chapter: int) -> Iterator[Batch]:
    each = [
        (
            question,
            replace(
                question.params, drafter=name, draft_tokens=LENGTHS[(2 * i + j + chapter) % len(LENGTHS)]
            ),
        )
        for i, name in enumerate(subject.drafters)
        for j, question in enumerate(asked)
    ]
    random.Random(chapter).shuffle(each)
    turn = 5 * chapter
    while each:
        size = PLAYS[turn % len(PLAYS)][1]
        yield each[:size]
        each, turn = each[size:], turn + 1


@contextmanager
def _chunked(subject: Subject, chunk: int, prompt: MediaPrompt) -> Iterator[int]:
    """Prompts are taken so many rows at a time, see CHUNKS."""
    scheduler = subject.engine.state.scheduler
    run = len(prompt.media[0].vectors) if prompt.media else 1
    rows = {0: len(prompt), -1: run - 1, 1: run + 1}.get(chunk, chunk)
    before = scheduler.step_tokens, scheduler.prefill_chunk
    scheduler.step_tokens = scheduler.prefill_chunk = max(rows, 1)
    try:
        yield rows
    finally:
        scheduler.step_tokens, scheduler.prefill_chunk = before


def _where(batch: Batch) -> dict[str, str]:
    return {
        "drafter": ", ".join(dict.fromkeys(str(params.drafter) for _, params in batch)),
        "prompt": ", ".join(question.name for question, _ in batch),
    }


def _count(seen: Seen, question: Asked, told: Output, rows: int) -> None:
    seen.texts += 1
    seen.tokens += len(told.tokens)
    seen.rows += sum(len(item.vectors) for item in question.prompt.media)
    seen.drafted += told.stats.drafted
    seen.accepted += told.stats.accepted
    seen.reused += told.stats.cached_prompt_tokens
    seen.chunks.add(rows)
    cached = told.stats.cached_prompt_tokens
    seen.within |= {cached - item.start for item in question.prompt.media if item.start < cached < item.end}
    seen.names.add(question.name)


def _difference(
    subject: Subject, question: Asked, params: SamplingParams, scene: Scene, told: Output, noise_floor: float
) -> Divergence | None:
    mine, other = question.told.tokens, told.tokens
    if mine == other and not told.error and question.told.text == told.text:
        return None
    at = next(
        (i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), min(len(mine), len(other))
    )
    drafter = f"{params.drafter} drafting {params.draft_tokens}"
    name = f"{question.name}, {drafter}, temperature {params.temperature:g}, {scene.name}"
    return Divergence(
        case=name, position=at, plain_token=mine[at] if at < len(mine) else -1,
        other_token=other[at] if at < len(other) else -1,
        plain_text=subject.decode(mine), other_text=subject.decode(other),
        gap=None, noise_floor=noise_floor, kind="near-tie" if noise_floor else "bug", what=told.error or "",
    )  # fmt: skip


def finding(subject: Subject, seen: Seen) -> Finding:
    counts = {
        "tokens compared": seen.tokens, "texts": seen.texts, "soft tokens": seen.rows, "tokens drafted": seen.drafted,
        "tokens kept": seen.accepted, "preemptions": seen.preemptions, "prompt tokens found in the cache": seen.reused,
        "offsets in a picture where a hit ended": len(seen.within),
    }  # fmt: skip
    covered = {
        "drafters": ", ".join(subject.drafters),
        "prompts": ", ".join(sorted(seen.names)),
        "chunks": ", ".join(map(str, sorted(seen.chunks))),
    }

    def said(outcome: Literal["holds", "refuted", "not shown"], words: str) -> Finding:
        return Finding(NAME, outcome, words, counts, seen.divergence, covered)

    if seen.divergence is not None:
        return said("refuted", "a text with a picture changed with a drafter")
    if seen.apart is False:
        return said(
            "refuted", "two pictures in the other order give the same numbers: the pictures are not seen"
        )
    if not seen.texts or not seen.drafted:
        return said("not shown", "nothing was drafted after a picture: give it more time and context")
    return said("holds", "with a picture in the prompt every token equals the one without a drafter")
