"""Our own drafters keep the contract that third parties are given, and the contract notices who does not."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core import SamplingParams, Sequence
from paceline.drafters.contract import check_drafter
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.registry import check_kind, load_third_party
from paceline.errors import LoadError, UsageError
from testing import VOCAB, Setup, TinyTarget, make_cache, make_drafter


@pytest.mark.parametrize("kind", ["ngram", "mtp", "model"])
def test_our_drafters_keep_the_contract(kind: str) -> None:
    target = TinyTarget()
    check_drafter(lambda t, c: make_drafter(Setup(drafter=kind), target), target, make_cache(200))  # type: ignore[arg-type,return-value]


class Greedy(NgramDrafter):
    """Ignores its limits."""

    def draft(self, context: Any) -> Any:
        context.limits = [k + 1 for k in context.limits]
        out = super().draft(context)
        out.tokens = [[1] * k for k in context.limits]
        out.confidence = [[0.5] * k for k in context.limits]
        context.limits = [k - 1 for k in context.limits]
        return out


class Meddler(NgramDrafter):
    """Writes into the text."""

    def draft(self, context: Any) -> Any:
        context.sequences[0].tokens.append(1)
        return super().draft(context)


@pytest.mark.parametrize(("kind", "message"), [(Greedy, "allowed"), (Meddler, "changes neither")])
def test_the_contract_notices(kind: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_drafter(lambda t, c: kind(), TinyTarget(), make_cache(200))


def sequence(tokens: list[int], reference: tuple[int, ...] = ()) -> Sequence:
    return Sequence(0, tokens, len(tokens), SamplingParams(), 0, reference=reference)


def test_ngram_takes_the_longest_then_the_latest_match() -> None:
    drafter = NgramDrafter()
    assert drafter.match(sequence([1, 2, 3, 9, 2, 3, 8, 1, 2, 3]), 2) == ([9, 2], 3)
    drafter.forget(0)
    assert drafter.match(sequence([2, 3, 7, 2, 3, 8, 2, 3]), 2) == ([8, 2], 2)
    drafter.forget(0)
    assert drafter.match(sequence([1, 2, 3]), 4) == ([], 0)


def test_ngram_copies_from_the_reference_and_finds_its_place_again_after_an_edit() -> None:
    reference = tuple(range(20, 60))
    drafter = NgramDrafter()
    text = [1, 2, 20, 21, 22]
    assert drafter.match(sequence(text, reference), 3) == ([23, 24, 25], 3)
    edited = [*text, 99, 24, 25]  # one token was replaced
    assert drafter.match(sequence(edited, reference), 3) == ([26, 27, 28], 2)


def test_unknown_kinds_are_refused_with_a_hint() -> None:
    with pytest.raises(UsageError, match="did you mean ngram"):
        check_kind("ngramm")
    check_kind("./folder")
    check_kind("org/name")


def test_a_third_party_that_cannot_be_made_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        name = "theirs"

        def load(self) -> Any:
            raise ImportError("no module")

    monkeypatch.setattr("paceline.drafters.registry.entry_points", lambda group: [Point()])
    check_kind("theirs")
    with pytest.raises(LoadError, match=r"theirs.*no module"):
        load_third_party("theirs", TinyTarget(), make_cache())
    assert VOCAB
