"""Our own drafters keep the contract that third parties are given, and the contract notices who does not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    drafter.forget(0)
    assert drafter.match(sequence([]), 4) == ([], 0)


def test_ngram_goes_on_with_a_text_that_repeats() -> None:
    drafter = NgramDrafter()
    assert drafter.match(sequence([9, 1, 2, 3, 1, 2, 3, 1, 2]), 5) == ([3, 1, 2, 3, 1], 4)
    drafter.forget(0)
    assert drafter.match(sequence([5, 7, 7, 7]), 4) == ([7, 7, 7, 7], 2)


@given(st.lists(st.integers(0, 2), max_size=40))
def test_ngram_proposes_only_what_followed_a_real_match(text: list[int]) -> None:
    tokens, length = NgramDrafter().match(sequence(text), 6)
    assert NgramDrafter().peek(sequence(text)) == bool(tokens)
    earlier = [end for end in range(2, len(text)) if text[end - 2 : end] == text[-2:]]
    assert bool(tokens) == bool(length) == bool(earlier)
    if tokens:
        assert len(tokens) == 6
        assert any(text[end - length : end] == text[-length:] and tokens[0] == text[end] for end in earlier)


def test_ngram_does_not_take_the_bytes_of_two_tokens_for_one() -> None:
    shifted = [256, 256, 5, 1, 1]  # 1, 1 stands one byte further within 256, 256
    assert NgramDrafter().match(sequence(shifted), 2) == ([], 0)
    assert not NgramDrafter().peek(sequence(shifted))


def test_ngram_follows_a_growing_text() -> None:
    drafter, text = NgramDrafter(), [4, 5, 6]
    assert drafter.match(sequence(text), 2) == ([], 0)
    assert drafter.match(sequence([*text, 4, 5]), 2) == ([6, 4], 2)
    assert drafter.match(sequence([*text, 4, 5, 8, 4, 5]), 1) == ([8], 2)


def test_ngram_copies_from_the_reference_and_finds_its_place_again_after_an_edit() -> None:
    reference = tuple(range(20, 60))
    drafter = NgramDrafter()
    text = [1, 2, 20, 21, 22]
    assert drafter.match(sequence(text, reference), 3) == ([23, 24, 25], 3)
    edited = [*text, 99, 24, 25]  # one token was replaced
    assert drafter.match(sequence(edited, reference), 3) == ([26, 27, 28], 2)
    assert drafter.match(sequence([*edited, 26], reference), 2) == ([27, 28], 3)


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
