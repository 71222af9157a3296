"""An edit of a reference is followed, and what it replaces is replaced in later proposals."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.core import SamplingParams, Sequence
from paceline.drafters.alignment import FOLLOWED, LONGEST_CHANGE, Alignment
from paceline.drafters.ngram import NgramDrafter

OLD, NEW = [50, 51], [60, 61, 62]  # a name, and what it is renamed to


def file(name: list[int]) -> list[int]:
    return [1, 2, *name, 3, 4, 5, *name, 6, 7, *name, 8, 9]


def test_a_rename_is_made_again_at_every_place() -> None:
    reference, wanted = file(OLD), file(NEW)
    text: list[int] = []
    alignment = Alignment(reference, 0)
    proposed = []
    for token in wanted:
        alignment.follow(text)
        proposed.append(alignment.propose(text, 1))
        text.append(token)
    wrong = [i for i, guess in enumerate(proposed) if guess != [wanted[i]]]
    assert wrong == [2, 3, 4, 5, 6]  # the first place, and the two tokens that show that it is over
    alignment = Alignment(reference, 0)
    alignment.follow(wanted[:7])
    assert alignment.propose(wanted[:7], 99) == wanted[7:]
    for end in range(7, len(wanted)):  # also from the middle of a new name
        alignment.follow(wanted[:end])
        assert alignment.propose(wanted[:end], 99) == wanted[end:]


class FakeWords:
    """Tokens ending in 1 to 4 go on with a word; 100 more is the same word after a space."""

    def respaced(self, tokens: tuple[int, ...]) -> tuple[int, ...] | None:
        if tokens[0] % 10:
            return None
        return (tokens[0] + (100 if tokens[0] < 100 else -100), *tokens[1:])

    def goes_on(self, token: int) -> bool:
        return 1 <= token % 10 <= 4 and token >= 50


LEAD = [
    *range(20, 20 + FOLLOWED)
]  # what a text must have followed before one of its words is guessed to be new


def test_where_words_are_known_a_new_one_is_taken_for_the_old_one_until_it_is_known() -> None:
    reference, wanted = LEAD + file(OLD), LEAD + file(NEW)
    text: list[int] = []
    alignment = Alignment(reference, 0, FakeWords())
    proposed = []
    for token in wanted:
        alignment.follow(text)
        proposed.append(alignment.propose(text, 1))
        text.append(token)
    wrong = [i - FOLLOWED for i, guess in enumerate(proposed) if guess != [wanted[i]]]
    assert wrong == [2, 3, 4]  # where it begins, and whether 60, or 60 and 61, are the whole of it
    alignment, begun = Alignment(reference, 0, FakeWords()), [*wanted[: FOLLOWED + 5], 3]
    alignment.follow(begun)
    assert alignment.apart
    assert alignment.propose(begun, 99) == reference[FOLLOWED + 5 :]  # one equal token behind the word is one


def test_a_guess_is_offered_as_one_and_only_to_a_text_that_followed() -> None:
    drafter = NgramDrafter(words=FakeWords())

    def match(sid: int, text: list[int]) -> tuple[list[int], int]:
        reference = tuple(LEAD + file(OLD))
        return drafter.match(Sequence(sid, [9, *text], 1, SamplingParams(), 0, reference=reference), 2)

    assert match(0, [*LEAD, 1, 2, 60]) == ([3, 4], 1)
    assert match(1, [*LEAD[:-3], 60]) == ([], 0)
    assert match(2, [*LEAD, 1, 2, *range(60, 68)]) == ([], 0)  # far more than a word


def test_a_guess_has_no_more_tokens_than_were_asked_for() -> None:
    reference = [1, *OLD, *LEAD, 70, *OLD, 5]
    text = [1, *NEW, *LEAD, 80]  # another new word, for 70
    alignment = Alignment(reference, 0, FakeWords())
    alignment.follow(text)
    assert alignment.apart
    for limit in range(1, 6):
        assert alignment.propose(text, limit) == [*NEW, 5][:limit]


def test_a_word_is_replaced_with_and_without_the_space_before_it() -> None:
    reference = [1, 2, 50, 51, 3, 4, 150, 51, 5]
    text = [1, 2, 60, 61, 62, 3, 4]
    alignment = Alignment(reference, 0, FakeWords())
    alignment.follow(text)
    assert alignment.propose(text, 9) == [160, 61, 62, 5]
    plain = Alignment(reference, 0)
    plain.follow(text)
    assert plain.propose(text, 9) == [150, 51, 5]


def test_what_a_text_keeps_is_not_replaced_any_more() -> None:
    reference = file(OLD)
    text = [1, 2, *NEW, 3, 4, 5, *OLD, 6]
    alignment = Alignment(reference, 0)
    alignment.follow(text[:8])
    assert alignment.propose(text[:8], 2) == NEW[:2]
    alignment.follow(text)
    assert alignment.propose(text, 3) == [7, *OLD]


def test_what_is_left_out_and_what_is_put_in() -> None:
    reference = list(range(20))
    shorter = [0, 1, 2, 5, 6, 7]
    alignment = Alignment(reference, 0)
    alignment.follow(shorter)
    assert alignment.propose(shorter, 3) == [8, 9, 10]
    longer = [0, 1, 2, 90, 91, 3, 4, 5]
    alignment = Alignment(reference, 0)
    alignment.follow(longer)
    assert alignment.propose(longer, 2) == [6, 7]


def test_a_text_that_has_gone_elsewhere_is_lost_until_it_is_found_again() -> None:
    reference = list(range(100, 300))
    text = [100, 101, *range(500 + 2 * LONGEST_CHANGE)]
    alignment = Alignment(reference, 0)
    alignment.follow(text)
    assert alignment.lost
    assert alignment.propose(text, 4) == []
    drafter = NgramDrafter()
    back = Sequence(0, [9, *text, 250, 251, 252], 1, SamplingParams(), 0, reference=tuple(reference))
    assert drafter.match(back, 3) == ([253, 254, 255], 3)
    back.tokens.append(253)
    assert drafter.match(back, 2) == ([254, 255], 4)


def test_the_text_begins_where_the_reference_does() -> None:
    start = Sequence(0, [9, 9, 8], 3, SamplingParams(), 0, reference=(4, 5, 6))
    assert NgramDrafter().match(start, 2) == ([4, 5], 1)


def test_the_end_of_the_reference_is_the_end_of_the_copy() -> None:
    alignment = Alignment([1, 2, 3], 0)
    alignment.follow([1, 2, 3])
    assert alignment.propose([1, 2, 3], 5) == []
    alignment.follow([1, 2, 3, 4, 5])
    assert alignment.propose([1, 2, 3, 4, 5], 5) == []


@given(st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(0, 3), max_size=60), st.data())
def test_any_text_can_be_followed_in_any_portions(
    text: list[int], reference: list[int], data: st.DataObject
) -> None:
    portions = Alignment(reference, 0)
    at = 0
    while at < len(text):
        at += data.draw(st.integers(1, 9))
        portions.follow(text[:at])
        tokens = portions.propose(text[:at], 5)
        assert len(tokens) <= 5
        assert set(tokens) <= {*text, *reference}
    exact = Alignment(text, 0)
    exact.follow(text)
    assert not exact.lost
