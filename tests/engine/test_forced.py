"""Forced verdicts follow the chances that were given, and chances that make no sense are refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from paceline.core import SamplingParams
from paceline.engine.engine import Engine
from paceline.engine.forced import ForcedAcceptance
from paceline.errors import UsageError
from testing import VOCAB, RandomDrafter, Setup, make_engine, prompts, run


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1.2,0.5", "from 0 to 1"),
        ("0.5,-0.1", "from 0 to 1"),
        ("nan", "from 0 to 1"),
        ("0.5,0.6", "rises from 0.5 to 0.6"),
        (",".join(["0.5"] * 17), "1 to 16"),
        ("0.5,", "list of numbers"),
        ("", "list of numbers"),
        ("high", "list of numbers"),
    ],
)
def test_chances_that_make_no_sense_are_refused(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        ForcedAcceptance.parse(text)
    assert "\n" not in str(caught.value)


def test_kept_lengths_follow_the_chances() -> None:
    chances = (0.85, 0.6, 0.4, 0.27)
    forced = ForcedAcceptance.parse("0.85,0.60,0.40,0.27")
    assert forced.chances == chances
    tokens, rounds = list(range(7)), 20000  # six drafted, of which the last two have no chance
    kept: Counter[int] = Counter()
    for position in range(rounds):
        verdict = forced.verdict(tokens, 5, position)
        assert verdict.next_token == tokens[verdict.accepted]
        kept[verdict.accepted] += 1
    reached = rounds
    for j, chance in enumerate(chances):
        passed = reached - kept[j]
        assert passed / reached == pytest.approx(chance, abs=5 * (0.25 / reached) ** 0.5)
        reached = passed
    assert max(kept) == len(chances)


@pytest.mark.parametrize("chance", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_engine_keeps_what_the_chances_say(chance: float, temperature: float) -> None:
    plain = make_engine(Setup(), RandomDrafter())
    parts = replace(plain._parts, forced=ForcedAcceptance((chance,) * 16))
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=3, ignore_eos=True)
    got = run(Engine(parts), prompts(4), params)
    assert all(len(c.token_ids) == 40 and all(0 <= t < VOCAB for t in c.token_ids) for c in got)
    drafted, accepted = (sum(getattr(c.stats, name) for c in got) for name in ("drafted", "accepted"))
    assert drafted > 40
    if chance == 1.0:
        assert accepted == drafted
    elif chance == 0.0:
        assert accepted == 0
    else:
        assert 0.1 * drafted < accepted < 0.6 * drafted


def test_without_chances_nothing_is_forced() -> None:
    assert make_engine(Setup(), RandomDrafter()).state.forced is None
