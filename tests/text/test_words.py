"""Words in tokens of a real vocabulary, as a drafter needs them that follows an edit."""

from __future__ import annotations

import pytest

from paceline.hub.resolve import bundled
from paceline.text.tokenizer import Tokenizer, Words


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(bundled("target"))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("limit", " limit"), (" limit", "limit"), (" max_age", "max_age"), ("größe", " größe")],
)
def test_the_same_word_with_and_without_its_space(tokenizer: Tokenizer, text: str, wanted: str) -> None:
    tokens = tuple(tokenizer.encode(text, add_bos=False))
    found = Words(tokenizer).respaced(tokens)
    assert found is not None
    assert tokenizer.decode(found) == wanted
    assert Words(tokenizer).respaced(found) == tokens


@pytest.mark.parametrize("text", ["", " ", "a b", ".limit", "limit =", "<bos>", "\n"])
def test_what_is_no_word(tokenizer: Tokenizer, text: str) -> None:
    assert Words(tokenizer).respaced(tuple(tokenizer.encode(text, add_bos=False))) is None


def test_what_goes_on_with_a_word(tokenizer: Tokenizer) -> None:
    words = Words(tokenizer)
    _, *rest = tokenizer.encode("max_lifetimes=None", add_bos=False)
    said = [(tokenizer.token_text(token), words.goes_on(token)) for token in rest]
    assert said
    assert all(goes_on == (text[0].isalnum() or text[0] == "_") for text, goes_on in said)
    assert not words.goes_on(tokenizer.encode(" limit", add_bos=False)[0])
