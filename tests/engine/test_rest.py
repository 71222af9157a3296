"""Steps at rest: while a prompt is read beside texts that rest, nobody is asked, and nothing is lost for the new text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.core import Draft, SamplingParams, Sequence
from paceline.engine.budget import NO_CONFIDENCE, PARKED_BY_COST, PREFILL
from paceline.engine.propose import _go_on
from paceline.engine.rest import ALWAYS, Rest, nothing
from paceline.engine.scheduler import Work


def work(sequence_id: int, count: int = 1, *, last: bool = True) -> Work:
    return Work(Sequence(sequence_id, [1, 2], 2, SamplingParams(), 0), count, last)


def resting(steps: int = 5) -> Rest:
    return Rest([1, 2], steps, nothing([PARKED_BY_COST, NO_CONFIDENCE]))


def reasons(draft: Draft | None) -> list[str | None]:
    assert draft is not None
    assert not any(draft.tokens)
    return draft.reasons


def test_a_prompt_that_is_read_pauses_a_rest_and_does_not_end_it() -> None:
    rest = resting()
    reading = [work(1), work(2), work(3, 8)]
    assert not rest.holds(reading)
    assert reasons(rest.pause(reading)) == [PARKED_BY_COST, NO_CONFIDENCE, PREFILL]
    assert rest.paused
    assert reasons(rest.pause([work(2), work(3, 8, last=False)])) == [
        NO_CONFIDENCE,
        PREFILL,
    ]  # the other has ended
    assert rest.holds([work(1), work(2)])  # the new one was taken back
    assert not rest.paused
    assert rest.steps == 5


def test_a_rest_is_not_paused_by_other_texts_or_where_it_is_over() -> None:
    assert resting().pause([work(1), work(2)]) is None  # no prompt
    assert resting().pause([work(1), work(4), work(3, 8)]) is None  # one that decodes and did not rest
    assert resting(0).pause([work(1), work(3, 8)]) is None
    assert reasons(Rest([1], ALWAYS, nothing([None])).pause([work(1), work(3, 8)])) == [None, PREFILL]


class Told:
    """A controller that notes what it is asked, and a watch that finds something or not."""

    def __init__(self, finds: bool) -> None:
        self.asked: list[str] = []
        self._finds = finds

    def watch(self, sequences: list[Sequence]) -> Any:
        self.asked.append("watch")
        return self

    def finds(self) -> bool:
        self.asked.append("finds")
        return self._finds

    def copies(self, sequences: list[Sequence], rooms: list[int]) -> None:
        self.asked.append("copies")


@pytest.mark.parametrize(
    ("kept", "finds", "asked"),
    [
        (2, False, ["copies", "watch"]),  # most likely it goes on
        (1, False, ["watch", "finds"]),
        (0, True, ["watch", "finds", "copies"]),
    ],
)
def test_after_a_copy_that_was_lost_a_watch_says_whether_there_is_more(
    kept: int, finds: bool, asked: list[str]
) -> None:
    controller, now = Told(finds), [work(1)]
    ours = now[0].sequence
    live = SimpleNamespace(room=lambda most: 10)
    state: Any = SimpleNamespace(controller=controller, lives={1: live}, max_len=99, tell=lambda: None)
    rest = Rest([1], 5, nothing([PARKED_BY_COST]), "ngram")
    rest.draft([ours], Draft([[7, 8]], [[0.9, 0.9]], None, [None], ["ngram"]))
    ours.tokens += [7, 8, 9][:kept] + [4]
    assert _go_on(state, rest, now) is rest.empty
    assert controller.asked == asked
    controller.asked.clear()
    assert _go_on(state, rest, now) is rest.empty
    assert controller.asked[:1] == ["finds"]  # it is the same watch
