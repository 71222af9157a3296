"""Trees of drafts under `match`: the text of plain decoding, token by token, whatever branch it takes."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decoders import build_decoder
from paceline import LLM
from paceline.config import EngineConfig
from paceline.core import Draft, SamplingParams, Sequence
from paceline.drafters.base import DraftContext, Kept
from paceline.errors import UsageError
from paceline.kv.fork import Fork
from paceline.kv.layout import LayerState
from paceline.kv.pages import OutOfPages, PagePool
from paceline.models.drafters.base import FINAL
from paceline.ops import native
from paceline.tree import Branches
from testing import (
    LAYOUT,
    VOCAB,
    Setup,
    TinyTarget,
    TreeDrafter,
    make_cache,
    make_engine,
    prompts,
    run,
    tiny_tokenizer,
    totals,
)

Patch = pytest.MonkeyPatch

SHAPES = [(1, 2), (1, 4), (2, 3), (3, 4), (4, 2), (5, 3), (6, 2), (6, 4)]
PARAMS = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "everything": {
        "temperature": 0.9, "top_k": 12, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1,
        "presence_penalty": 0.2, "frequency_penalty": 0.2, "logit_bias": {9: 1.0}, "logprobs": 3, "min_tokens": 9,
        "stop_token_ids": (7,),
    },
    "mirostat": {"temperature": 1.0, "mirostat": 2, "mirostat_tau": 2.0, "mirostat_eta": 0.5, "logprobs": 2},
}  # fmt: skip


def both(setup: Setup, texts: list[list[int]], params: SamplingParams) -> tuple[list, list]:
    """What is written without a drafter, and what with one."""
    without = run(
        make_engine(replace(setup, drafter="none", pages=200, prefix_cache=False, tree=None)), texts, params
    )
    known = [t + c.token_ids for t, c in zip(texts, without, strict=True)]
    return without, run(make_engine(replace(setup, texts=known)), texts, params)


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize(
    ("shape", "drafter"),
    [*product(SHAPES, ["trees", "mtp"]), ((2, 3), "states"), ((6, 4), "states")],
    ids=lambda x: x if isinstance(x, str) else f"{x[0]}x{x[1]}",
)
def test_shapes(shape: tuple[int, int], drafter: str, name: str) -> None:
    params = SamplingParams(max_tokens=40, seed=11, **PARAMS[name])
    texts = prompts(3, longest=24)
    setup = Setup(drafter=drafter, k=16, tree=shape)
    want, got = both(setup, texts, params)
    assert [c.token_ids for c in got] == [c.token_ids for c in want]
    assert [c.logprobs for c in got] == [c.logprobs for c in want]  # row by row: the same bits
    drafted, accepted = totals(got)
    assert 0 < accepted < drafted
    assert all(len(c.stats.drafted_by_position) <= shape[0] for c in got)


@pytest.mark.parametrize("prefix", [False, True], ids=["no prefix", "prefix hit"])
@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "preempted"])
@pytest.mark.parametrize("temperature", [1.0])
@pytest.mark.parametrize("drafter", ["trees", "mtp", "states"])
def test_preemption_and_prefixes(drafter: str, temperature: float, tight: bool, prefix: bool) -> None:
    stem = [2 + (i * 7) % (VOCAB - 2) for i in range(34)]
    texts = [stem + t for t in prompts(4, seed=5, longest=8)]
    params = SamplingParams(max_tokens=44, seed=6, temperature=temperature)
    setup = Setup(
        drafter=drafter, prefix_cache=prefix, pages=9 if tight else 64, step_tokens=64, k=16, tree=(4, 3)
    )
    want, _ = both(setup, texts, params)
    engine = make_engine(replace(setup, texts=[t + c.token_ids for t, c in zip(texts, want, strict=True)]))
    if prefix:
        run(engine, texts[:1], replace(params, max_tokens=2))
    got = run(engine, texts, params)
    assert [c.token_ids for c in got] == [c.token_ids for c in want]
    assert (engine.state.preemptions > 0) == tight
    assert not prefix or got[0].stats.cached_prompt_tokens == 32
    assert 0 < totals(got)[1] < totals(got)[0]
    cache = engine.state.cache
    assert len(cache.free_branches) == cache.branches
    cache.prefix.clear()
    assert all(pool.free == pool.count for pool in cache.pools.values())


class Even:
    """Allows tokens of one parity in turn: what may come depends on all that went before."""

    def __init__(self) -> None:
        self._done: list[int] = []

    def masks(self, draft: Seq[int]) -> list[np.ndarray | None]:
        text = [*self._done, *draft]
        return [
            np.arange(VOCAB) % 2 == sum(text[: len(self._done) + j]) % 3 % 2 for j in range(len(draft) + 1)
        ]

    def commit(self, tokens: Seq[int]) -> None:
        self._done += tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", ["trees", "mtp", "states"])
def test_constraints_follow_each_branch(drafter: str, temperature: float) -> None:
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=2, constraint=Even, logprobs=2)
    want, got = both(Setup(drafter=drafter, k=12, tree=(4, 3)), prompts(3, seed=8), params)
    assert [(c.token_ids, c.logprobs) for c in got] == [(c.token_ids, c.logprobs) for c in want]
    assert 0 < totals(got)[1] < totals(got)[0]


@pytest.mark.parametrize("drafter", ["trees", "mtp", "states"])
def test_stop_strings_inside_trees(drafter: str) -> None:
    (prompt,) = prompts(1, seed=6)
    tokenizer = tiny_tokenizer()
    free = run(make_engine(Setup()), [prompt], SamplingParams(max_tokens=30))[0].token_ids
    setup = Setup(drafter=drafter, k=16, texts=[prompt + free], tree=(6, 3))
    for at in range(3, 20, 3):
        stop = (tokenizer.decode(free[at : at + 1 + at % 3]), "zz")
        params = SamplingParams(max_tokens=30, stop=stop, min_tokens=at % 2 * 3, logprobs=0)
        (want,) = run(make_engine(Setup(), tokenizer=tokenizer), [prompt], params)
        (got,) = run(make_engine(setup, tokenizer=tokenizer), [prompt], params)
        assert (got.text, got.token_ids, got.finish_reason) == (want.text, want.token_ids, want.finish_reason)
        assert got.logprobs == want.logprobs
        assert len(got.origins) == len(got.token_ids)


def test_a_tree_shrinks_to_its_first_branch_before_a_text_gives_way() -> None:
    """Pages for the text and its first branch, and for nothing beside them."""
    (prompt,) = prompts(1, seed=6, longest=10)
    params = SamplingParams(max_tokens=44)
    (want,) = run(make_engine(Setup()), [prompt], params)
    setup = Setup(drafter="trees", k=12, tree=(4, 3), pages=4, texts=[prompt + want.token_ids])
    engine = make_engine(setup)
    tails: list[tuple[int, bool]] = []  # free pages, and whether the tail branches
    tail = engine.state.cache.tail

    def observed(items: Any, parents: Any = None, sure: Any = None) -> Any:
        out = tail(items, parents, sure)
        tails.append((engine.state.cache.pools["full_attention"].free, bool(out._forks)))
        return out

    engine.state.cache.tail = observed  # type: ignore[method-assign]
    (got,) = run(engine, [prompt], params)
    assert got.token_ids == want.token_ids
    assert engine.state.preemptions == 0
    assert {True, False} <= {branches for _, branches in tails}
    assert "memory" not in got.stats.reasons
    assert got.stats.accepted > 0


def test_not_a_number_in_a_branch_does_not_stay() -> None:
    """Token 3 poisons every text that holds it: here, drafts beside the right ones, and then texts themselves."""
    texts = prompts(4, seed=9)
    texts = [[t if t != 3 else 4 for t in text] for text in texts] + [[5, 3, 6]]
    params = SamplingParams(max_tokens=40, bad_token_ids=(3,))
    setup = Setup(drafter="trees", k=16, tree=(4, 4), poison=3, pages=14)
    want, got = both(setup, texts, params)
    assert [c.finish_reason for c in got] == [c.finish_reason for c in want]
    assert [c.token_ids for c in got] == [c.token_ids for c in want]


@pytest.mark.parametrize("drafter", ["mtp", "states"])
def test_branches_are_those_of_a_chain(drafter: str) -> None:
    """The likeliest token after the likeliest, ...: the chain of the same drafter is one of the branches."""
    texts = prompts(4, seed=7)
    params, seen = SamplingParams(max_tokens=30), []
    for tree in (None, (3, 4)):
        drafts: dict[tuple[int, ...], Any] = {}
        engine = make_engine(Setup(drafter=drafter, k=3 if tree is None else 16, tree=tree))
        ours = engine.state.drafters[drafter]
        draft = ours.draft

        def observed(context: DraftContext, draft: Any = draft, drafts: Any = drafts) -> Draft:
            out = draft(context)
            for row, sequence in enumerate(context.sequences):
                drafts[tuple(sequence.tokens)] = list(out.tokens[row]), out.tree(row)
            return out

        ours.draft = observed  # type: ignore[method-assign]
        run(engine, texts, params)
        seen.append(drafts)
    common = [text for text in seen[0].keys() & seen[1] if len(seen[0][text][0]) == 3 and seen[1][text][1]]
    assert len(common) > 20
    found = 0
    for text in common:
        chain, (tokens, parents) = seen[0][text][0], seen[1][text]
        after = -1
        for token in chain:
            after = next((j for j, p in enumerate(parents) if p == after and tokens[j] == token), None)
            if after is None:
                break
            found += 1
    assert found > 0.97 * 3 * len(common)  # a beam may leave it, rarely


class Ear(TreeDrafter):
    """Keeps the hidden states that its hook brings."""

    taps = (1, FINAL)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.heard: dict[int, list[torch.Tensor]] = {}

    def begin(self, sequence: Sequence) -> int:
        self.heard[sequence.id] = []
        return 0

    def on_commit(self, kept: list[Kept]) -> None:
        for rows in kept:
            assert rows.first == sum(len(part) for part in self.heard[rows.sequence.id])
            self.heard[rows.sequence.id].append(torch.cat(list(rows.states), dim=1).clone())

    def lacks(self, sequence: Sequence) -> str | None:
        return None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_hidden_states_are_those_of_the_path(temperature: float) -> None:
    """What hooks bring, and what they find at the text's end, is to the bit what plain decoding computes."""
    texts = prompts(3, seed=5)
    params = SamplingParams(max_tokens=30, temperature=temperature, seed=4)
    plain = run(make_engine(Setup()), texts, params)
    known = [t + c.token_ids for t, c in zip(texts, plain, strict=True)]
    ear = Ear(known, (5, 3))
    ear.needs_hidden = True
    last: list[tuple[int, torch.Tensor]] = []

    def draft(context: DraftContext) -> Draft:
        assert context.states is not None
        for sequence, slot in zip(context.sequences, context.slots, strict=True):
            last.append((len(sequence.tokens), context.states[slot].clone()))
        return TreeDrafter.draft(ear, context)

    ear.draft = draft  # type: ignore[method-assign]
    engine = make_engine(Setup(k=15, tree=(5, 3)), ear)
    assert [c.token_ids for c in run(engine, texts, params)] == [c.token_ids for c in plain]
    states = [_states(text) for text in known]
    for heard, whole in zip(ear.heard.values(), states, strict=True):
        got = torch.cat(heard)
        assert torch.equal(got, whole[: len(got)])
    ends = [row[-8:] for whole in states for row in whole]
    assert all(any(torch.equal(state, row) for row in ends) for _, state in last)


def _states(text: list[int]) -> torch.Tensor:
    """After the first layer, and after all, of each row."""
    target, cache = TinyTarget(), make_cache()
    cache.open(0, text, share=False)
    with cache.tail([(0, text)]) as tail:
        final, first = target.states(tail.rows(), cache)
    return torch.cat([first, final], dim=1)


def test_what_is_no_tree_parks_its_drafter() -> None:
    def answering(parents: list[int], tokens: list[int]) -> Any:
        def draft(self: Any, context: DraftContext) -> Draft:
            return Draft([list(tokens)], [[0.5] * len(tokens)], parents=[list(parents)])

        return draft

    (prompt,) = prompts(1, seed=6)
    want = run(make_engine(Setup()), [prompt], SamplingParams(max_tokens=6))[0].token_ids
    for parents, tokens, words in (
        ([0, -1], [1, 2], "each has one before it"), ([-1], [1, 2], "each has one before it"),
        ([-1, -1], [2, 2], "twice the same token"), ([-1, -1, -1], [1, 2, 3], "more than 2 tokens stand beside"),
    ):  # fmt: skip
        drafter = TreeDrafter([], (3, 2))
        drafter.draft = answering(parents, tokens).__get__(drafter)  # type: ignore[method-assign]
        (got,) = run(make_engine(Setup(k=8, tree=(3, 2)), drafter), [prompt], SamplingParams(max_tokens=6))
        assert got.token_ids == want
        assert any(words in reason for reason in got.stats.reasons)
    drafter = TreeDrafter([], (3, 2))  # an engine that was not asked for trees
    drafter.draft = answering([-1, -1], [1, 2]).__get__(drafter)  # type: ignore[method-assign]
    (got,) = run(make_engine(Setup(k=8), drafter), [prompt], SamplingParams(max_tokens=6))
    assert any("more than 1 tokens stand beside" in reason for reason in got.stats.reasons)


def take_the_wrong_branch(patch: Patch) -> None:
    end = Fork.end
    patch.setattr(Fork, "end", lambda self, path: end(self, []))


def store_for_the_first_branch_only(patch: Patch) -> None:
    place = Fork.place

    def wrong(self: Fork, row: int, skip: int, positions: list[int], slots: list[int], out: Branches) -> None:
        place(self, row, skip, positions, slots, out)
        out.further.clear()

    patch.setattr(Fork, "place", wrong)


def leave_out_the_committed_part(patch: Patch) -> None:
    place = Fork.place

    def wrong(self: Fork, row: int, skip: int, positions: list[int], slots: list[int], out: Branches) -> None:
        place(self, row, skip, positions, slots, out)
        out.copies.clear()

    patch.setattr(Fork, "place", wrong)


PLANTS: list[Callable[[Patch], None]] = [
    take_the_wrong_branch, store_for_the_first_branch_only, leave_out_the_committed_part
]  # fmt: skip


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_these_tests_have_teeth(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    plant(monkeypatch)
    want, got = both(
        Setup(drafter="trees", k=16, tree=(4, 3)), prompts(3, seed=8), SamplingParams(max_tokens=40)
    )
    assert [c.token_ids for c in got] != [c.token_ids for c in want]


def test_a_fork_that_does_not_fit_takes_nothing() -> None:
    cache = make_cache(pages=4, sequences=1)
    cache.grow_branches(3)
    cache.open(0, [2] * 20, share=False)
    with cache.tail([(0, [2] * 20)]) as tail:
        TinyTarget().forward(tail.rows(), cache)
        tail.commit([20])
    free = [pool.free for pool in cache.pools.values()]

    def untouched() -> bool:
        return [pool.free for pool in cache.pools.values()] == free and len(cache.free_branches) == 3

    with cache.tail([(0, [2, 3, 4, 5])], [[-1, -1, -1]]):
        assert not untouched()
    assert untouched()
    for parents in ([-1] * 4, [-1] * 5):  # more pages, more branches than there are
        with pytest.raises(OutOfPages):
            cache.tail([(0, [2, *range(len(parents))])], [parents])
        assert untouched()
    cache.pools["full_attention"] = PagePool(0)
    with pytest.raises(OutOfPages):  # the first kind has pages, the second has none
        cache.tail([(0, [2, 3, 4, 5])], [[-1, -1, -1]])
    assert cache.pools["sliding_attention"].free == free[0]


@pytest.mark.skipif(not native.available(), reason="needs the compiled kernels")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_bundled_pair_writes_the_same_to_the_bit(temperature: float) -> None:
    """Gemma's assistant over the native kernels, across the sliding window; log probabilities show every bit."""
    texts = ["def moving_average(values, window):\n", "Once upon a time, ", "import os\n\n"]
    params = SamplingParams(max_tokens=100, temperature=temperature, seed=3, logprobs=2, ignore_eos=True)
    plain = LLM("demo", drafter="none", profile_dir=None, max_model_len=256).generate(texts, params)
    llm = LLM("demo", drafter="mtp", draft_tree="6x4", draft_tokens=16, max_model_len=256)
    got = llm.generate(texts, params)
    assert [(c.token_ids, c.logprobs) for c in got] == [(c.token_ids, c.logprobs) for c in plain]
    assert sum(c.stats.accepted for c in got) > sum(c.stats.steps for c in got) * 0.7


@pytest.mark.parametrize(
    "tree", ["4", "4x1", "0x2", "17x2", "6x5", "x", "4x2x2", "-1x2", "²x2", 42, True, (4, 2)]
)
def test_shapes_out_of_range_are_refused(tree: Any) -> None:
    with pytest.raises(UsageError, match=r"draft_tree=.* is not possible: give DEPTHxWIDTH from 1x2 to 16x4"):
        EngineConfig(draft_tree=tree)


def test_a_drafter_of_chains_refuses_trees() -> None:
    with pytest.raises(UsageError, match="drafts chains: leave draft_tree out"):
        LLM("demo", drafter="ngram", draft_tree="4x2", profile_dir=None)


def test_the_drafter_that_was_found_is_named_where_it_refuses_trees(tmp_path: Path) -> None:
    build_decoder("llama", tmp_path)
    with pytest.raises(UsageError, match="the drafter ngram drafts chains"):
        LLM(tmp_path, draft_tree="4x2", max_model_len=64, profile_dir=None)


def test_what_cannot_branch_refuses_trees() -> None:
    layout = replace(LAYOUT, states=(LayerState(1, 2, 2, 2, 1),))
    assert not layout.branches
    cache = make_cache()
    cache.layout = layout
    with pytest.raises(UsageError, match="cannot branch: leave draft_tree out"):
        cache.grow_branches(2)
