"""Lookahead guesses with what the target said itself, forgets it with the text, and sees no noise of `reject`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline import LLM
from paceline.assembly import choose_drafter
from paceline.config import EngineConfig
from paceline.control.adaptive import AdaptivePolicy
from paceline.control.base import StepOutcome
from paceline.control.cost_model import CostTable, DraftCost, table_of
from paceline.core import SamplingParams, Sequence
from paceline.drafters.base import DraftContext, Seen
from paceline.drafters.contract import GreedyPicker
from paceline.drafters.lookahead import LONGEST, MOST, PRIOR, TRAJECTORY, LookaheadDrafter
from paceline.engine.forced import ForcedAcceptance
from paceline.hub.resolve import bundled
from testing import Setup, make_cache, make_engine, prompts, run, totals


def text_of(tokens: list[int], prompt: int | None = None) -> Sequence:
    return Sequence(7, tokens, len(tokens) if prompt is None else prompt, SamplingParams(), 0)


def drafted(drafter: LookaheadDrafter, text: Sequence, limit: int) -> tuple[list[int], list[float]]:
    context = DraftContext([text], [limit], [0], None, [False], make_cache(), GreedyPicker(1))
    draft = drafter.draft(context)
    assert draft.drafter == ["lookahead"]
    return draft.tokens[0], draft.confidence[0]


def test_at_the_beginning_it_guesses_the_last_token() -> None:
    tokens, confidence = drafted(LookaheadDrafter(), text_of([3, 4, 5]), 3)
    assert tokens == [5, 5, 5]
    assert confidence == [PRIOR[0]] * 3


def test_the_last_trajectory_is_drafted_for_its_places() -> None:
    """Jacobi's iteration: what the target said in place of the guesses is the next guess."""
    drafter, text = LookaheadDrafter(), text_of([3, 4, 5])
    guess, _ = drafted(drafter, text, 4)
    text.tokens.append(9)
    drafter.on_verify([Seen(text, 3, tuple(guess), (9, 11, 12, 13, 14))])
    tokens, confidence = drafted(drafter, text, 5)
    assert tokens[:4] == [11, 12, 13, 14]
    assert confidence[:4] == [PRIOR[TRAJECTORY]] * 4


def test_the_pool_says_how_an_n_gram_goes_on_that_never_became_text() -> None:
    drafter, text = LookaheadDrafter(), text_of([3, 4, 5], 2)
    text.tokens += [6]
    drafter.on_verify(
        [Seen(text, 3, (20, 21, 22, 23), (6, 21, 22, 23, 24))]
    )  # refused, but what the target says after 20
    text.tokens += [20, 21, 22]
    tokens, confidence = drafted(drafter, text, 2)
    assert tokens == [23, 24]
    assert min(confidence) >= PRIOR[LONGEST - 1]


def test_confidence_is_what_was_right_before() -> None:
    drafter, text = LookaheadDrafter(), text_of([3, 4, 5])
    rates = []
    for right in (True, False):
        for _ in range(30):
            guess, confidence = drafted(drafter, text, 1)
            rates.append(confidence[0])
            said = guess[0] if right else len(text.tokens) + 100
            first = len(text.tokens)
            text.tokens.append(said)
            drafter.on_verify([Seen(text, first, tuple(guess), (said,))])
    assert rates[30] > 0.9
    assert rates[-1] < 0.2


def test_the_pool_is_bounded_and_forgotten() -> None:
    drafter, text = LookaheadDrafter(), text_of([3], 1)
    text.tokens += list(range(MOST // LONGEST + 200))
    assert len(drafted(drafter, text, 2)[0]) == 2
    assert len(drafter._texts[7].pool) == MOST
    drafter.forget(7)
    drafter.forget(7)
    assert not drafter._texts


def test_another_drafters_draft_teaches_the_pool_and_not_the_confidence() -> None:
    drafter, text = LookaheadDrafter(), text_of([3, 4, 5])
    drafted(drafter, text, 2)
    text.tokens.append(8)
    drafter.on_verify([Seen(text, 3, (30, 31), (8, 31, 32))])
    assert drafter._texts[7].tries == [4.0] * len(PRIOR)
    text.tokens += [30, 31]
    assert drafted(drafter, text, 1)[0] == [32]


class Witness(LookaheadDrafter):
    """A third party's drafter that keeps what its hook brings."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Seen] = []

    def on_verify(self, seen: list[Seen]) -> None:
        assert all(type(one.sequence).__name__ == "SequenceView" for one in seen)
        self.seen += seen
        super().on_verify(seen)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("rule", ["match", "reject", "block", "typical"])
def test_it_is_told_the_targets_tokens_at_all_rows(rule: Any, temperature: float) -> None:
    """Unless the noise of a refused row is used once more, for a later token of the text: see `Witness`."""
    witness = Witness()
    engine = make_engine(Setup(k=3), witness, verify=rule)
    (done,) = run(engine, prompts(1), SamplingParams(max_tokens=20, temperature=temperature, seed=3))
    got = rule in ("match", "typical") or temperature == 0
    assert bool(witness.seen) == got
    whole = [*done.prompt_token_ids, *done.token_ids]
    for one in witness.seen:
        assert len(one.chosen) == len(one.drafted) + 1
        if rule == "match":
            assert one.chosen[0] == whole[one.first]
            kept = next(
                (j for j in range(len(one.drafted)) if one.drafted[j] != one.chosen[j]), len(one.drafted)
            )
            assert list(one.chosen[:kept]) == whole[one.first : one.first + kept]


class Broken(LookaheadDrafter):
    name = "broken"

    def on_verify(self, seen: list[Seen]) -> None:
        seen[0].sequence.tokens.append(1)


def test_one_that_fails_is_parked_and_changes_nothing() -> None:
    texts, params = prompts(2), SamplingParams(max_tokens=20)
    plain = run(make_engine(Setup()), texts, params)
    got = run(make_engine(Setup(k=3), Broken()), texts, params)
    assert [one.token_ids for one in got] == [one.token_ids for one in plain]
    assert any("drafter failed: ReadOnlyError" in reason for one in got for reason in one.stats.reasons)


def test_texts_know_nothing_of_each_other() -> None:
    """Beside others a text drafts what it drafts alone; in the end nothing is kept."""
    texts, params = prompts(4), SamplingParams(max_tokens=30)
    drafter = LookaheadDrafter()
    setup = Setup(k=4, pages=200, step_tokens=500, prefill_chunk=100)  # prompts are read in one step
    together = run(make_engine(setup, drafter), texts, params)
    assert not drafter._texts
    for text, one in zip(texts, together, strict=True):
        (alone,) = run(make_engine(setup, LookaheadDrafter()), [text], params)
        assert (alone.stats.drafted, alone.stats.accepted) == (one.stats.drafted, one.stats.accepted)


def test_a_text_that_repeats_is_written_in_fewer_steps() -> None:
    params = SamplingParams(max_tokens=200, frequency_penalty=-1.0)
    done = run(make_engine(Setup(k=4), LookaheadDrafter()), prompts(3), params)
    assert all(len(one.token_ids) / one.stats.steps > 3 for one in done)


def test_with_forced_acceptance_a_step_writes_more_than_one_token() -> None:
    engine = make_engine(Setup(k=4), LookaheadDrafter(), forced=ForcedAcceptance((0.9, 0.8, 0.7, 0.6)))
    done = run(engine, prompts(3), SamplingParams(max_tokens=60))
    assert all(len(one.token_ids) / one.stats.steps > 1.5 for one in done)


class Priced(AdaptivePolicy):
    """Every step takes what the table says: what rows cost is the test's choice, not this machine's."""

    def __init__(self, table: CostTable, row_cost: float) -> None:
        super().__init__(table)
        self._row_cost = row_cost

    def observe(self, outcome: StepOutcome) -> None:
        rows = len(outcome.rows) + outcome.drafted + outcome.prefill_rows
        super().observe(replace(outcome, target_seconds=0.01 * (1 + self._row_cost * (rows - 1))))


@pytest.mark.parametrize(("row_cost", "least", "most"), [(0.01, 0.5, 1.0), (0.6, 0.0, 0.1)])
def test_auto_drafts_only_while_it_pays(row_cost: float, least: float, most: float) -> None:
    """`row_cost`: what a row more costs, of a step. A text that is hardly ever guessed is left alone where it is dear."""
    rows = [1, 2, 5, 9, 17]
    table = table_of(
        rows, [0.01 * (1 + row_cost * (n - 1)) for n in rows], {"lookahead": DraftCost(1e-5, 0.0, 1e-6)}
    )
    engine = make_engine(Setup(), LookaheadDrafter(), policy=Priced(table, row_cost), draft_tokens="auto")
    params = SamplingParams(max_tokens=300, temperature=1.5, seed=2)
    (done,) = run(engine, prompts(1), params)
    drafts = sum(done.stats.drafters.values()) / done.stats.steps
    assert drafts <= most
    (greedy,) = run(engine, prompts(1), SamplingParams(max_tokens=300, frequency_penalty=-1.0))
    assert sum(greedy.stats.drafters.values()) / greedy.stats.steps >= least


def test_a_user_chooses_it_by_name() -> None:
    for name in ("lookahead", "lookahead+ngram"):
        assert choose_drafter(EngineConfig(drafter=name), bundled("target")) == (name, None, "as asked")
    params = SamplingParams(max_tokens=40, temperature=0.7, seed=1)
    with LLM("demo", drafter=name, max_model_len=256, profile_dir="none", draft_tokens=4) as llm:
        got = llm.generate("def add(a, b):\n    return a", params)[0]
        assert llm.info["drafter"] == name
    with LLM("demo", drafter="none", max_model_len=256, profile_dir="none") as llm:
        assert got.token_ids == llm.generate("def add(a, b):\n    return a", params)[0].token_ids
    assert got.stats.drafters.get("lookahead")
    assert totals([got])[0] > 0
