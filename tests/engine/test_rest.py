"""Steps at rest: while a prompt is read beside texts that rest, nobody is asked, and nothing is lost for the new text."""

from __future__ import annotations

from paceline.core import Draft, SamplingParams, Sequence
from paceline.engine.budget import NO_CONFIDENCE, PARKED_BY_COST, PREFILL
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
