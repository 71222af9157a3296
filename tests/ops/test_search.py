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
        for where in (False, True):
            found = native.finds(tokens, where)
            assert found == python.finds(tokens, where)
            assert found == bool((python.in_reference if where else python.in_text)(tokens)[1])


@pytest.mark.parametrize("search", [s.search, s.PythonSearch])
def test_the_latest_of_the_longest_matches_counts(search: Callable[[list[int]], s.Search]) -> None:
    reference = [7, 1, 2, 3, 4, 5, 8, 2, 3, 4, 5]
    assert search(reference).in_reference([9, 2, 3, 4, 5]) == (11, 4)
    repeats = search(reference)
    assert repeats.in_reference([9, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5]) == (11, 4)  # five count as four
    assert repeats.in_text([9, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5]) == (6, 4)
    assert search([]).in_text([]) == search([]).in_reference([1]) == (0, 0)


WORTH = [0.0, 0.0, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0]


@pytest.mark.skipif(s.extension("Watch") is None, reason="the native kernels are not built")
@given(st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=5), st.floats(0.0, 4.0), st.data())
def test_both_watches_say_the_same(
    texts: list[tuple[list[int], list[int]]], need: float, data: st.DataObject
) -> None:
    every = data.draw(st.integers(1, 5))
    native, python = s.watch(need, 2, 8, every), s.PythonWatch(need, 2, 8, every)
    assert not isinstance(native, s.PythonWatch)
    growing: list[list[int]] = [[] for _ in texts]
    for i, (_, reference) in enumerate(texts):
        worth = [0.0] * len(WORTH) if data.draw(st.booleans()) else WORTH
        native.add(s.search(reference), growing[i], worth)
        python.add(s.PythonSearch(reference), growing[i], worth)
    for at in range(30):
        for own, (text, _) in zip(growing, texts, strict=True):
            own += text[at * 3 : at * 3 + 3]
        assert native.finds() == python.finds()


@pytest.mark.parametrize("watch", [s.watch, s.PythonWatch])
def test_a_watch_says_when_copies_are_worth_it_together_and_then_waits(
    watch: Callable[[float, int, int], s.Watch],
) -> None:
    first, second = [1, 2, 3, 4, 9], [5, 6, 7, 8, 9]
    watching = watch(1.5, 2, 3)
    for tokens in (first, second):
        watching.add(s.search([*first, *second]), tokens, WORTH)
    for tokens, more in ((first, [7, 1]), (second, [7, 5])):
        tokens += more
        assert not watching.finds()  # nothing matches
    first += [2, 3, 4]  # worth 1.0 and no more
    assert not watching.finds()
    second += [6, 7, 8]
    found = [watching.finds() for _ in range(10)]
    assert found == [True, False, False, True, False, False, False, True, False, False]


def test_without_the_extension_it_is_searched_through_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s, "extension", lambda having: None)
    assert isinstance(s.search([1, 2]), s.PythonSearch)
    assert isinstance(s.watch(1.0, 1, 1), s.PythonWatch)
