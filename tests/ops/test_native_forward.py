"""Whole models through recorded plans: equal to the reference, and a row's bits depend on nothing beside it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from checkpoints import FAMILIES, VOCAB, build_assistant, build_target
from paceline.core import ForwardBatch
from paceline.kv.cache import KVCache
from paceline.models.families.gemma4.target import GemmaTarget
from paceline.models.registry import load_assistant, load_target
from paceline.ops import native

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.why_not()))
LENGTH = 40  # five windows


def make_cache(target: GemmaTarget) -> KVCache:
    pages = dict.fromkeys(target.layout.kinds, 16)
    return KVCache(target.layout, pages, max_sequences=4, max_tokens=64, dtype=torch.float32)


def hidden_states(target: GemmaTarget, tokens: list[int], cuts: list[int]) -> tuple[torch.Tensor, KVCache]:
    """Hidden states of `tokens`, computed in chunks of the sizes `cuts`."""
    cache = make_cache(target)
    cache.open(1, tokens, share=False)
    outs, at = [], 0
    for size in cuts:
        with cache.tail([(1, tokens[at : at + size])]) as tail:
            outs.append(target.forward(tail.rows(), cache).clone())
            tail.commit([size])
        at += size
    return torch.cat(outs), cache


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[GemmaTarget, GemmaTarget, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    build_target(request.param, folder / "target")
    build_assistant(request.param, folder / "assistant", ordered=request.param == "e2b")
    reference = load_target(folder / "target")
    return reference, load_target(folder / "target", runner=native.NativeRunner(2)), folder


def test_forward_equals_reference(pair: tuple[GemmaTarget, GemmaTarget, Path]) -> None:
    reference, target, _ = pair
    tokens = torch.randint(0, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()
    want, _ = hidden_states(reference, tokens, [LENGTH])
    got, _ = hidden_states(target, tokens, [LENGTH])
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(target.logits(got), reference.logits(want), rtol=1e-3, atol=1e-3)


def test_bits_do_not_depend_on_chunks_or_threads(pair: tuple[GemmaTarget, GemmaTarget, Path]) -> None:
    _, target, _ = pair
    rng = random.Random(5)
    tokens = [rng.randrange(VOCAB) for _ in range(LENGTH)]
    want, _ = hidden_states(target, tokens, [LENGTH])
    logits = target.logits(want).clone()
    for trial in range(6):
        cuts: list[int] = []
        while sum(cuts) < LENGTH:
            cuts.append(min(rng.randint(1, 9), LENGTH - sum(cuts)))
        native.set_threads(1 + trial % 2)
        got, _ = hidden_states(target, tokens, cuts if trial else [1] * LENGTH)
        assert torch.equal(got, want)
        assert torch.equal(target.logits(got[trial : trial + 5]), logits[trial : trial + 5])
    native.set_threads(2)


def test_bits_do_not_depend_on_neighbours(pair: tuple[GemmaTarget, GemmaTarget, Path]) -> None:
    _, target, _ = pair
    rng = random.Random(7)
    texts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (30, 17, 9)]
    alone = [hidden_states(target, text, [len(text)])[0] for text in texts]
    cache = make_cache(target)
    for i, text in enumerate(texts):
        cache.open(i, text, share=False)
    with cache.tail(list(enumerate(texts))) as tail:
        together = target.forward(tail.rows(), cache).clone()
        tail.commit([len(text) for text in texts])
    assert torch.equal(together, torch.cat(alone))


def test_drafter_step_equals_reference(pair: tuple[GemmaTarget, GemmaTarget, Path]) -> None:
    reference, target, folder = pair
    tokens = [(7 * i) % VOCAB for i in range(LENGTH)]
    outs = []
    for model in (reference, target):
        assistant = load_assistant(folder / "assistant", model)
        hidden, cache = hidden_states(model, tokens, [LENGTH])
        slot = torch.tensor([cache.slot(1)], dtype=torch.int32)
        rows = ForwardBatch(torch.tensor([5]), torch.tensor([LENGTH], dtype=torch.int32), slot, [0, 1])
        outs.append(assistant.step(rows, hidden[-1:].clone(), cache))
    want, got = outs
    torch.testing.assert_close(got.hidden, want.hidden, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-3, atol=1e-3)
    assert (want.ids is None and got.ids is None) or torch.equal(got.ids, want.ids)


def test_bad_input_is_refused_in_python(pair: tuple[GemmaTarget, GemmaTarget, Path]) -> None:
    _, target, _ = pair
    cache = make_cache(target)
    small = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(native.UsageError, match="outside the vocabulary"):
        target.forward(ForwardBatch(torch.tensor([VOCAB]), small, small, [0, 1]), cache)
    with pytest.raises(native.UsageError, match="outside the K/V cache"):
        target.forward(ForwardBatch(torch.tensor([1]), small + 64, small, [0, 1]), cache)
    many = torch.zeros(native.most_rows() + 1, dtype=torch.int32)
    with pytest.raises(native.UsageError, match="more rows than"):
        target.forward(ForwardBatch(many.long(), many, many, [0, len(many)]), cache)
    with pytest.raises(native.UsageError, match=r"rows\.positions must be"):
        target.forward(ForwardBatch(torch.tensor([1]), small.long(), small, [0, 1]), cache)
    with pytest.raises(native.UsageError, match=r"must be \["):
        target.logits(torch.zeros(2, 7))
