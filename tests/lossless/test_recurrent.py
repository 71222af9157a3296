"""A recurrent state never goes over a refused token: whatever was drafted, the bits are those of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoints import VOCAB
from decoders import build_decoder
from paceline.core import SamplingParams
from paceline.drafters.base import Drafter
from paceline.drafters.draft_model import ModelDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.engine.engine import Engine
from paceline.errors import CapacityError, UsageError
from paceline.kv.cache import KVCache
from paceline.kv.layout import RECENT, STATE
from paceline.kv.plan import plan_pages
from paceline.kv.states import States
from paceline.models.registry import load_target
from paceline.models.target import GraphTarget
from paceline.ops import native
from paceline.ops.base import Runner
from paceline.ops.reference import EagerRunner
from testing import OracleDrafter, RandomDrafter, ScriptedDrafter, Setup, make_engine, run, totals

pytestmark = pytest.mark.skipif(not native.available(), reason="not built")
LENGTH = 150  # tokens: three times what is kept beside a state


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    build_decoder("qwen3_5", folder)
    return folder


@pytest.fixture(scope="module")
def target(folder: Path) -> GraphTarget:
    return load_target(folder, runner=native.NativeRunner(2))


def text_of(length: int = LENGTH, seed: int = 3) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()  # type: ignore[no-any-return]


def make_cache(target: GraphTarget, sequences: int = 4, pages: int = 60) -> KVCache:
    kinds = dict.fromkeys(target.layout.kinds, pages)
    return KVCache(target.layout, kinds, max_sequences=sequences, max_tokens=256, dtype=target.kv_dtype)


class Text:
    """One sequence of a cache, fed with whatever tails."""

    def __init__(self, target: GraphTarget, cache: KVCache, id: int = 0) -> None:
        self.target, self.cache, self.id = target, cache, id
        cache.open(id, [0], share=False)

    def feed(self, tokens: Seq[int], keep: int | None = None, sure: int | None = None) -> torch.Tensor:
        """Hidden states of `tokens`, of which the first `keep` are kept."""
        items = [(self.id, list(tokens))]
        with self.cache.tail(items, sure=None if sure is None else [sure]) as tail:
            hidden = self.target.forward(tail.rows(), self.cache).clone()
            tail.commit([len(tokens) if keep is None else keep])
        return hidden

    def state(self) -> tuple[int, list[torch.Tensor]]:
        """Where it stands, and what it is in each layer."""
        assert self.cache.states is not None
        states = self.cache.states
        place = states.place[self.cache.slot(self.id)]
        return int(states.folded[place]), [layer[place].clone() for layer in states.states]


def plain(target: GraphTarget, text: Seq[int]) -> tuple[torch.Tensor, dict[int, list[torch.Tensor]]]:
    """Hidden states of a text that is written token by token, and its states at each page end."""
    one, rows, states = Text(target, make_cache(target)), [], {}
    for token in text:
        rows.append(one.feed([token]))
        states.setdefault(*one.state())
    return torch.cat(rows), states


@pytest.mark.parametrize("k", [1, 4, 16])
@pytest.mark.parametrize("begin", [1, 13, 16, 47, 63])
def test_every_keep_leaves_what_was_never_drafted(begin: int, k: int, target: GraphTarget) -> None:
    """After a round that keeps some of k drafts, every bit of what follows is that of a text that never drafted."""
    text, wrong = text_of(begin + 3 * k + 40), text_of(k, seed=9)
    expected, states = plain(target, text)
    for keep in range(k + 1):
        one = Text(target, make_cache(target))
        assert torch.equal(one.feed(text[:begin], sure=begin - 1), expected[:begin])
        at = begin
        for _ in range(3):  # rounds
            drafts = [*text[at : at + 1 + keep], *wrong[keep:]]
            seen = one.feed(drafts, keep=keep + 1)
            assert torch.equal(seen[: keep + 1], expected[at : at + keep + 1])
            at += keep + 1
        for token in text[at : at + 33]:
            assert torch.equal(one.feed([token])[0], expected[at])
            at += 1
        folded, state = one.state()
        assert folded == (at - 1) // 8 * 8
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(state, states[folded], strict=True))
        if not folded:
            continue
        assert all(bool(layer.abs().sum() > 0) for layer in state)


@pytest.mark.parametrize("name", ["granite4-h", "granite4-h-moe"])
def test_so_does_mamba(name: str, tmp_path: Path) -> None:
    build_decoder(name, tmp_path)
    made = load_target(tmp_path, runner=native.NativeRunner(2))
    test_every_keep_leaves_what_was_never_drafted(13, 4, made)


def test_bits_depend_on_neither_cuts_nor_threads_nor_neighbours(target: GraphTarget, folder: Path) -> None:
    text = text_of()
    expected, _ = plain(target, text)
    for chunk in (2, 3, 7, 33, LENGTH):
        one = Text(target, make_cache(target))
        parts = [one.feed(text[at : at + chunk]) for at in range(0, LENGTH, chunk)]
        assert torch.equal(torch.cat(parts), expected)
    single = load_target(folder, runner=native.NativeRunner(1))
    assert torch.equal(Text(single, make_cache(single)).feed(text), expected)
    native.set_threads(2)
    cache = make_cache(target)
    texts, parts = [text_of(seed=s) for s in (5, 3, 6)], []
    for i in range(3):
        cache.open(i, [0], share=False)
    assert cache.states is not None
    for at in range(0, LENGTH, 11):
        poisoned = int(cache.states.place[cache.slot(2)])
        for store in (*cache.states.states, *cache.states.recent):
            store[poisoned].fill_(float("nan"))  # a neighbour whose state is not a number
        with cache.tail([(i, tokens[at : at + 11]) for i, tokens in enumerate(texts)]) as tail:
            rows = tail.rows()
            hidden = target.forward(rows, cache)
            parts.append(hidden[rows.starts[1] : rows.starts[2]].clone())
            tail.commit([b - a for a, b in zip(rows.starts, rows.starts[1:])])
    assert torch.equal(torch.cat(parts), expected)


def test_plain_torch_says_the_same(target: GraphTarget, folder: Path) -> None:
    text, wrong = text_of(), text_of(9, seed=4)
    expected, states = plain(target, text)
    one = Text(other := load_target(folder, runner=EagerRunner()), make_cache(other))
    at = 0
    while at < LENGTH:
        new = text[at : at + 3]
        assert torch.allclose(
            one.feed([*new, *wrong], keep=len(new))[: len(new)], expected[at : at + 3], atol=5e-4
        )
        at += len(new)
        folded, state = one.state()
        assert all(
            torch.allclose(a, b, atol=5e-4) for a, b in zip(state, states[folded], strict=True) if folded
        )


def test_a_state_that_went_too_far_is_seen(target: GraphTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: a state brought over one row too many."""
    text, wrong = text_of(90), text_of(4, seed=9)
    expected, _ = plain(target, text)

    def greedy(states: States, slot: int, committed: int, tail: int, sure: int, stop: int | None) -> None:
        states.goal[slot] = max((committed + sure + 1) // 16 * 16, int(states.folded[states.place[slot]]))

    monkeypatch.setattr(States, "aim", greedy)
    one = Text(target, make_cache(target))
    for at in range(14):
        assert torch.equal(one.feed([text[at], *wrong], keep=1, sure=1)[0], expected[at])
    with pytest.raises(AssertionError, match="went over refused"):
        one.feed([text[14], *wrong], keep=1, sure=1)
    with pytest.raises(UsageError, match="stands behind the rows"):
        one.feed([text[15]], sure=0)


def test_what_cannot_be_kept_apart_is_refused(target: GraphTarget) -> None:
    one = Text(target, make_cache(target))
    assert one.cache.states is not None
    most = one.cache.states.most_refused
    assert most == RECENT - 10
    one.feed(text_of(7))
    one.feed(text_of(most), keep=0, sure=0)
    with pytest.raises(CapacityError, match=f"{most + 1} tokens of a text may be refused"):
        one.feed(text_of(most + 1), sure=0)
    assert one.feed(text_of(100), sure=99).isfinite().all()


def test_trees_are_refused(target: GraphTarget) -> None:
    with pytest.raises(UsageError, match="cannot branch: leave draft_tree out"):
        make_cache(target).grow_branches(4)


def test_states_are_counted(target: GraphTarget) -> None:
    layout = target.layout
    one = layout.bytes_per_state()
    assert one == 4 * sum(4 * 8 * 12 + RECENT * (2 * 2 * 8 + 4 * 12 + 8) for _ in range(3))
    sizes = {"itemsize": 4, "max_sequences": 3, "max_tokens": 64, "chunk": 16}
    least = 2 * one + 4 * layout.bytes_per_token(4)["full_attention"] * 16
    with pytest.raises(CapacityError, match="one text of 64 tokens needs"):
        plan_pages(layout, budget=least - 1, **sizes)
    assert plan_pages(layout, budget=least, **sizes) == {"full_attention": 4, STATE: 2}
    assert plan_pages(layout, budget=100 * least, **sizes)[STATE] == 7
    cache = make_cache(target)
    assert cache.states is not None
    assert cache.nbytes == 8 * one + 60 * 16 * layout.bytes_per_token(4)["full_attention"]
    cache.touch(cache.nbytes)
    few = KVCache(
        layout, {"full_attention": 60, STATE: 2}, max_sequences=4, max_tokens=64, dtype=torch.float32
    )
    few.open(0, [1, 2])
    assert few.fits(2)
    few.open(1, [1, 2])
    assert not few.fits(2)
    with pytest.raises(CapacityError):
        few.open(2, [1, 2])
    few.close(0)
    assert few.open(2, [1, 2]) == 0


# -- through the engine ------------------------------------------------------------------------------------------

PARAMS = SamplingParams(max_tokens=50, seed=4, temperature=0.8, ignore_eos=True)


def prompts(count: int = 3) -> list[list[int]]:
    return [text_of(length, seed=length) for length in (37, 5, 80, 20, 61)[:count]]


def engine_of(
    target: GraphTarget, drafter: Drafter | None, *, pages: int = 80, k: int = 4, **changes: object
) -> Engine:
    setup = Setup(k=k, step_tokens=70, prefill_chunk=9, **changes)  # type: ignore[arg-type]
    return make_engine(setup, drafter, target=target, cache=make_cache(target, 8, pages))


def expected_of(
    target: GraphTarget, texts: list[list[int]], params: SamplingParams = PARAMS
) -> list[list[int]]:
    return [run(engine_of(target, None), [text], params)[0].token_ids for text in texts]


def drafter_of(name: str, texts: list[list[int]], folder: Path, tmp_path: Path, runner: Runner) -> Drafter:
    if name == "ngram":
        return NgramDrafter()
    if name == "random":
        return RandomDrafter()
    if name == "oracle":
        return OracleDrafter(texts)
    if name == "scripted":
        return ScriptedDrafter(texts, lambda j: j % 3 == 2)
    build_decoder(
        "qwen3_5",
        tmp_path,
        seed=0,
        num_hidden_layers=3,
        layer_types=["linear_attention"] * 2 + ["full_attention"],
    )
    model = load_target(tmp_path, runner=runner)
    return ModelDrafter(model, make_cache(model, 8), VOCAB)


@pytest.mark.parametrize("name", ["ngram", "random", "scripted", "oracle", "model"])
def test_texts_are_those_of_plain_decoding(
    name: str, target: GraphTarget, folder: Path, tmp_path: Path
) -> None:
    texts = prompts()
    expected = expected_of(target, texts)
    whole = [t + o for t, o in zip(texts, expected, strict=True)]
    for k in (1, 4, 16) if name != "model" else (4,):
        drafter = drafter_of(name, whole, folder, tmp_path, target.runner)
        done = run(engine_of(target, drafter, k=k), texts, PARAMS)
        assert [c.token_ids for c in done] == expected
        assert totals(done)[0] > 0


@pytest.mark.parametrize("name", ["scripted", "random", "model"])
def test_preemption_and_cancellation(name: str, target: GraphTarget, folder: Path, tmp_path: Path) -> None:
    texts = prompts(5)
    expected = expected_of(target, texts)
    whole = [t + o for t, o in zip(texts, expected, strict=True)]
    engine = engine_of(
        target, drafter_of(name, whole, folder, tmp_path, target.runner), pages=14, prefix_cache=True
    )
    engine.add("gone", texts[2], PARAMS)
    for _ in range(9):
        engine.step()
    engine.cancel("gone")
    done = run(engine, texts, PARAMS)
    assert [c.token_ids for c in done] == expected
    assert engine.state.preemptions > 0
    assert engine.state.cache.open_sequences == 0


@pytest.mark.parametrize("name", [None, "scripted", "random", "model"])
def test_prefix_hits(name: str | None, target: GraphTarget, folder: Path, tmp_path: Path) -> None:
    """At the end of a prompt, where prompts part, and where a text ended; a hit goes as far as there is a state."""
    stem = text_of(70)
    texts = [stem + text_of(30, seed=s) for s in (11, 12, 13)]
    expected = expected_of(target, texts)
    whole = [t + o for t, o in zip(texts, expected, strict=True)]
    drafter = None if name is None else drafter_of(name, whole, folder, tmp_path, target.runner)
    engine = engine_of(target, drafter, pages=200, prefix_cache=True)
    seen = []
    for text, want in zip([*texts, texts[0]], [*expected, expected[0]], strict=True):
        (done,) = run(engine, [text], PARAMS)
        assert done.token_ids == want
        seen.append(done.stats.cached_prompt_tokens)
    # 64 is where the second parts from the first, known once it was computed; 96 the end of the first prompt
    assert seen == [0, 0, 64, 96]
    turn = [*texts[0], *expected[0], *text_of(9, seed=1)]
    (done,) = run(engine, [turn], PARAMS)
    assert done.token_ids == expected_of(target, [turn])[0]
    assert done.stats.cached_prompt_tokens in (128, 144)
    siblings = engine.run({"n": (text_of(40, seed=21), replace(PARAMS, n=3))})["n"]
    assert [one.stats.cached_prompt_tokens for one in siblings] == [0, 32, 32]


def test_a_text_goes_on_from_its_last_page_end(target: GraphTarget) -> None:
    """Wherever it ended: its own state may stand within a page. What it left on the way is given up."""
    engine = engine_of(target, None, pages=200, prefix_cache=True)
    cache = engine.state.cache
    for length in range(40, 56):
        cache.prefix.clear()
        prompt, params = text_of(37, seed=length), replace(PARAMS, max_tokens=length, min_tokens=length)
        (done,) = run(engine, [prompt], params)
        assert cache.prefix.held(STATE) == 2  # at the prompt's end, and the last one
        turn = [*prompt, *done.token_ids, *text_of(9, seed=1)]
        (again,) = run(engine, [turn], PARAMS)
        assert again.stats.cached_prompt_tokens == (37 + length - 2) // 16 * 16  # the last row was not sure
        assert again.token_ids == expected_of(target, [turn])[0]


def test_states_of_other_texts_give_way(target: GraphTarget) -> None:
    """Two states for all: what is kept for later texts is given up for those that are open."""
    pages = dict.fromkeys(target.layout.kinds, 100) | {STATE: 2}
    cache = KVCache(target.layout, pages, max_sequences=4, max_tokens=256, dtype=target.kv_dtype)
    engine = make_engine(
        Setup(prefix_cache=True, step_tokens=70, prefill_chunk=9), None, target=target, cache=cache
    )
    texts = prompts(5)
    assert [c.token_ids for c in run(engine, texts, PARAMS)] == expected_of(target, texts)
    assert cache.pools[STATE].free + cache.prefix.held(STATE) == 2
    (again,) = run(engine, texts[-1:], PARAMS)
    assert again.token_ids == expected_of(target, texts[-1:])[0]
    cache.prefix.clear()
    assert cache.pools[STATE].free == 2


def test_reject_is_greedy_where_the_text_is(target: GraphTarget) -> None:
    texts, params = prompts(), replace(PARAMS, temperature=0.0, verify="reject")
    expected = expected_of(target, texts, params)
    assert [c.token_ids for c in run(engine_of(target, RandomDrafter()), texts, params)] == expected
