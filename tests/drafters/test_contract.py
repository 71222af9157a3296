"""Our own drafters keep the contract that third parties are given, and the contract notices who does not."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core import Draft, SamplingParams, Sequence
from paceline.drafters.contract import check_drafter
from paceline.drafters.guard import ReadOnlyError, read_only
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.registry import check_kind, load_third_party, third_party_taps
from paceline.drafters.states import StateDrafter
from paceline.errors import LoadError, UsageError
from paceline.models.drafters.base import FINAL
from testing import (
    VOCAB,
    Setup,
    TinyNet,
    TinyTarget,
    make_cache,
    make_drafter,
    make_engine,
    prompts,
    run,
    totals,
)


@pytest.mark.parametrize("kind", ["ngram", "lookahead", "mtp", "states", "model"])
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


class ThirdParty(StateDrafter):
    """A drafter with a memory that is not ours."""

    def __init__(self) -> None:
        super().__init__("third_party", TinyNet(TinyTarget()), make_cache(200))


class Painter(ThirdParty):
    """Writes into the states that it is given."""

    def on_commit(self, kept: Any) -> None:
        kept[0].states[0][0] = 0.0


class Failing(ThirdParty):
    """Fails in its hooks, or asked whether it can draft."""

    def __init__(self, fails: str) -> None:
        super().__init__()
        setattr(self, fails, self._fail)

    def _fail(self, *_: Any) -> Any:
        raise RuntimeError("not today")


def test_a_third_party_with_a_memory_drafts_as_ours_does() -> None:
    check_drafter(lambda t, c: ThirdParty(), TinyTarget(), make_cache(200))
    with pytest.raises(AssertionError, match=r"on_commit fails.*may not change"):
        check_drafter(lambda t, c: Painter(), TinyTarget(), make_cache(200))
    params = SamplingParams(max_tokens=20)
    texts = prompts(3)
    ours, theirs = make_engine(Setup(drafter="states")), make_engine(Setup(), ThirdParty())
    got = [run(engine, texts, params) for engine in (ours, theirs)]
    assert [c.token_ids for c in got[0]] == [c.token_ids for c in got[1]]
    assert totals(got[0]) == totals(got[1])
    assert totals(got[0])[1] > 0


@pytest.mark.parametrize("fails", ["begin", "on_commit", "lacks"])
def test_a_memory_that_fails_is_parked_and_the_text_goes_on(fails: str) -> None:
    params = SamplingParams(max_tokens=20)
    texts = prompts(3)
    done = run(make_engine(Setup(), Failing(fails)), texts, params)
    assert [c.token_ids for c in done] == [c.token_ids for c in run(make_engine(Setup()), texts, params)]
    for c in done:
        assert any(r.startswith("drafter failed: RuntimeError: not today") for r in c.stats.reasons)


def test_taps_that_a_factory_does_not_announce_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        name = "theirs"

        def load(self) -> Any:
            return lambda target, cache: ThirdParty()

    target = TinyTarget()
    monkeypatch.setattr("paceline.drafters.registry.entry_points", lambda group: [Point()])
    assert load_third_party("theirs", target, make_cache()).name == "third_party"
    target.tapped = ()  # type: ignore[assignment]
    with pytest.raises(LoadError, match="after layer 1, which its factory did not announce"):
        load_third_party("theirs", target, make_cache())
    assert third_party_taps("theirs") == ()
    monkeypatch.setattr(Point, "load", lambda self: ThirdParty)
    monkeypatch.setattr(ThirdParty, "taps", (FINAL, 1), raising=False)
    assert third_party_taps("theirs") == (1,)


def swallow(act: Any) -> None:
    with contextlib.suppress(Exception):
        act()


def grab(tensor: Any) -> None:
    """All ways to write into a tensor that torch announces."""
    for act in (
        lambda: tensor.zero_(),
        lambda: tensor.__setitem__(..., 0),
        lambda: tensor.__iadd__(1),
        lambda: tensor.data.fill_(3),
        lambda: tensor.detach().copy_(tensor + 1),
        lambda: torch.add(tensor, 1, out=tensor),
        lambda: tensor.view(-1).zero_(),
        lambda: tensor[0].mul_(7),
        lambda: tensor.numpy().fill(5),
        lambda: torch.relu_(tensor),
        lambda: tensor.unbind(0)[0].zero_(),
        lambda: torch.nn.functional.relu(tensor, inplace=True),
        lambda: torch._foreach_zero_([tensor]),
        lambda: tensor.T.fill_(2),
    ):
        swallow(act)


HOSTILE: dict[str, Any] = {
    "appends": lambda c: c.sequences[0].tokens.append(1),
    "appends by force": lambda c: list.append(c.sequences[0].tokens, 1),
    "changes a token": lambda c: c.sequences[0].tokens.__setitem__(-1, 1),
    "changes a token by force": lambda c: list.__setitem__(c.sequences[0].tokens, -1, 1),
    "clears": lambda c: c.sequences[0].tokens.clear(),
    "pending": lambda c: c.sequences[0].pending.clear(),
    "committed": lambda c: setattr(c.sequences[0], "committed", 0),
    "committed by force": lambda c: object.__setattr__(c.sequences[0], "committed", 0),
    "params": lambda c: setattr(c.sequences[0].params, "temperature", 9.0),
    "params by force": lambda c: object.__setattr__(c.sequences[0].params, "temperature", 9.0),
    "other params": lambda c: object.__setattr__(c.sequences[0], "params", SamplingParams(max_tokens=1)),
    "bias": lambda c: c.sequences[0].params.logit_bias.__setitem__(3, 99.0),
    "seed": lambda c: object.__setattr__(c.sequences[0], "seed", 1),
    "sequences": lambda c: c.sequences.clear(),
    "limits": lambda c: c.limits.__setitem__(slice(None), [99] * len(c.limits)),
    "slots": lambda c: c.slots.reverse(),
    "K": lambda c: [grab(t) for t in c.cache.k],
    "V": lambda c: [grab(t) for t in c.cache.v],
    "tables": lambda c: [grab(t) for t in c.cache.tables.values()],
    "states": lambda c: grab(c.states),
    "closes": lambda c: c.cache.close(c.sequences[0].id),
    "commits": lambda c: c.cache._commit(c.sequences[0].id, [1]),
}  # fmt: skip


def hostile(kind: str, quiet: bool) -> Any:
    class Hostile(NgramDrafter):
        needs_hidden = True

        def draft(self, context: Any) -> Any:
            if quiet:
                swallow(lambda: HOSTILE[kind](context))
            else:
                HOSTILE[kind](context)
            return Draft([[1] * k for k in context.limits], [[0.5] * k for k in context.limits])

    return Hostile()


@pytest.mark.parametrize("quiet", [False, True], ids=["", "quiet"])
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_drafter_that_changes_its_context_changes_no_text(kind: str, quiet: bool) -> None:
    params = SamplingParams(max_tokens=16, temperature=0.8, seed=3, logit_bias={2: -1.0})
    texts = prompts(2, seed=4)
    plain = run(make_engine(Setup()), texts, params)
    done = run(make_engine(Setup(), hostile(kind, quiet)), texts, params)
    assert [c.token_ids for c in done] == [c.token_ids for c in plain]
    assert [c.finish_reason for c in done] == [c.finish_reason for c in plain]


@pytest.mark.parametrize(
    "kind", [k for k in HOSTILE if k in ("appends", "clears", "committed", "params", "K", "V")]
)
def test_the_contract_notices_who_changes_the_context(kind: str) -> None:
    class Loud(NgramDrafter):
        def draft(self, context: Any) -> Any:
            if kind in "KV":
                (context.cache.k if kind == "K" else context.cache.v)[0].zero_()
            else:
                HOSTILE[kind](context)
            return super().draft(context)

    with pytest.raises(AssertionError, match="changes neither"):
        check_drafter(lambda t, c: Loud(), TinyTarget(), make_cache(200))


def test_what_a_third_party_computes_from_the_cache_is_its_own() -> None:
    tensor = torch.arange(6.0)
    shown = read_only(tensor)
    mine = shown * 2
    mine += shown
    assert mine.tolist() == [0, 3, 6, 9, 12, 15]
    assert torch.cat([shown[1:2], torch.ones(1)]).add_(1).tolist() == [2, 2]
    with pytest.raises(ReadOnlyError):
        shown[1:2].add_(1)
    assert tensor.tolist() == [0, 1, 2, 3, 4, 5]


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
    earlier = [end for end in range(2, len(text)) if text[end - 2 : end] == text[-2:]]
    assert bool(tokens) == bool(length) == bool(earlier)
    if tokens:
        assert len(tokens) == 6
        assert any(text[end - length : end] == text[-length:] and tokens[0] == text[end] for end in earlier)


def test_ngram_does_not_take_the_bytes_of_two_tokens_for_one() -> None:
    shifted = [256, 256, 5, 1, 1]  # 1, 1 stands one byte further within 256, 256
    assert NgramDrafter().match(sequence(shifted), 2) == ([], 0)


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
