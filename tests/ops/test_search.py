"""The native search finds what the one through bytes does, however the text grows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.ops import search as s

TOKENS = st.lists(st.integers(0, 2) | st.sampled_from([256, 1 << 16]), max_size=90)


@pytest.mark.skipif(s.extension("Search") is None, reason="the native kernels are not built")
@given(TOKENS, TOKENS, st.data())
def test_both_find_the_same(text: list[int], reference: list[int], data: st.DataObject) -> None:
    native, python = s.search(reference), s.PythonSearch(reference)
    assert not isinstance(native, s.PythonSearch)
    tokens: list[int] = []
    while len(tokens) < len(text):
        tokens += text[len(tokens) : len(tokens) + data.draw(st.integers(1, 40))]
        assert native.in_text(tokens) == python.in_text(tokens)
        assert native.in_reference(tokens) == python.in_reference(tokens)


@pytest.mark.parametrize("search", [s.search, s.PythonSearch])
def test_the_latest_of_the_longest_matches_counts(search: Callable[[list[int]], s.Search]) -> None:
    reference = [7, 1, 2, 3, 4, 5, 8, 2, 3, 4, 5]
    assert search(reference).in_reference([9, 2, 3, 4, 5]) == (11, 4)
    repeats = search(reference)
    assert repeats.in_reference([9, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5]) == (11, 4)  # five count as four
    assert repeats.in_text([9, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5]) == (6, 4)
    assert search([]).in_text([]) == search([]).in_reference([1]) == (0, 0)


def test_without_the_extension_it_is_searched_through_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s, "extension", lambda having: None)
    assert isinstance(s.search([1, 2]), s.PythonSearch)
