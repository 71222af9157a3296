"""`check` with pictures: it holds on a tiny model that sees, and refutes an engine that sees nothing or loses a token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from media_models import build_seeing
from paceline import LLM
from paceline.check import pictures
from paceline.check.subject import Subject
from paceline.media.reader import MediaReader


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("seeing")
    build_seeing("moe26b", folder)
    with LLM(folder, drafter="ngram", threads=1, max_model_len=256, cache_memory=2**26, profile_dir="none",
             activations="float32") as llm:  # fmt: skip
        yield Subject(llm.engine, ())


def found(subject: Subject, goal: int = 0) -> Any:
    seen = pictures.Seen()
    subject.engine.state.cache.prefix.clear()
    pictures.compare(subject, 60.0, 0.0, seen, goal)
    return pictures.finding(subject, seen)


def test_it_holds(subject: Subject) -> None:
    shown = found(subject, 150)
    assert shown.outcome == "holds", shown
    assert shown.counts["tokens compared"] > 150
    assert shown.counts["offsets in a picture where a hit ended"] > 4
    assert shown.counts["soft tokens"] > 300
    assert shown.counts["preemptions"] > 0
    assert shown.counts["tokens drafted"] > 0
    assert {"two", "swapped", "neighbours", "budget 140", "text alone"} <= set(
        shown.covered["prompts"].split(", ")
    )
    assert "made from a seed" in pictures.described(subject)


def test_a_model_that_does_not_look_is_refuted(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    first = MediaReader._vectors

    def blank(*given: Any) -> Any:
        vectors, known = first(*given)
        return vectors * 0, known

    monkeypatch.setattr(MediaReader, "_vectors", blank)
    assert "pictures are not seen" in found(subject).words


def test_a_lost_token_is_refuted(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = pictures._alone

    def spoilt(*given: Any) -> Any:
        asked = plain(*given)
        asked.told.tokens[3] += 1
        return asked

    monkeypatch.setattr(pictures, "_alone", spoilt)
    shown = found(subject)
    assert shown.outcome == "refuted"
    assert shown.divergence is not None
    assert shown.divergence.position == 3
