"""Trees of rows through whole models: each row has the bits that it has in the chain that leads to it."""

from __future__ import annotations

import random

import pytest
import torch

from checkpoints import VOCAB, build_target
from decoders import build_decoder
from paceline.hub.resolve import bundled
from paceline.kv.cache import KVCache
from paceline.models.registry import load_target
from paceline.models.target import GraphTarget
from paceline.ops import native
from paceline.tree import branches, preorder

KINDS = ["eager", "native", "native demo", "eager latent", "native latent", "eager conv", "native conv"]


@pytest.fixture(scope="module", params=KINDS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GraphTarget:
    if request.param.startswith("native") and not native.available():
        pytest.skip(str(native.why_not()))
    if request.param == "native demo":
        return load_target(bundled("target"), runner=native.NativeRunner(2))
    folder = tmp_path_factory.mktemp("e2b")
    if request.param.endswith("latent"):
        build_decoder("deepseek", folder)
    elif request.param.endswith("conv"):
        build_decoder("lfm2", folder)
    else:
        build_target("e2b", folder)
    return load_target(folder, runner=native.NativeRunner(2) if request.param.startswith("native") else None)


def make(target: GraphTarget) -> KVCache:
    pages = dict.fromkeys(target.layout.kinds, 60)
    cache = KVCache(target.layout, pages, max_sequences=2, max_tokens=256, dtype=target.kv_dtype)
    cache.grow_branches(32)
    return cache


def random_tree(rng: random.Random, count: int) -> list[int]:
    parents = [rng.randrange(-1, j) for j in range(count)]
    order = preorder(parents, [rng.random() for _ in parents])
    place = {-1: -1} | {node: i for i, node in enumerate(order)}
    return [place[parents[node]] for node in order]


def chain(target: GraphTarget, tokens: list[int]) -> torch.Tensor:
    cache = make(target)
    cache.open(0, tokens, share=False)
    with cache.tail([(0, tokens)]) as tail:
        return target.forward(tail.rows(), cache).clone()


def same(target: GraphTarget, a: torch.Tensor, b: torch.Tensor) -> bool:
    exact = isinstance(target.runner, native.NativeRunner)
    return torch.equal(a, b) if exact else torch.allclose(a, b, rtol=1e-4, atol=1e-4)


def test_every_row_is_that_of_its_chain(target: GraphTarget) -> None:
    """Two texts beside each other, one of which branches, at all places of a page; then text goes on behind a branch."""
    rng = random.Random(3)
    cache = make(target)
    text = [rng.randrange(2, VOCAB) for _ in range(21)]
    cache.open(1, [], share=False)
    cache.open(2, [], share=False)
    with cache.tail([(1, text[:-1]), (2, text[:3])]) as tail:
        target.forward(tail.rows(), cache)
        tail.commit([len(text) - 1, 0])
    for turn in range(12):
        parents = random_tree(rng, 2 + turn)
        draft = [rng.randrange(2, VOCAB) for _ in parents]
        paths = branches(parents)
        with cache.tail([(2, text[:3]), (1, [text[-1], *draft])], [None, parents]) as tail:
            rows = tail.rows()
            states = target.forward(rows, cache).clone()[rows.starts[1] :]
            for path in paths:
                want = chain(target, [*text, *(draft[j] for j in path)])[len(text) - 1 :]
                assert same(target, states[[0, *(j + 1 for j in path)]], want)
            path = rng.choice(paths)
            path = path[: rng.randrange(len(path) + 1)]
            tail.commit([0, 1 + len(path)], [None, path])
        text += [*(draft[j] for j in path), rng.randrange(2, VOCAB)]
        assert cache.committed(1) == len(text) - 1
        held = {kind: pool.count - pool.free for kind, pool in cache.pools.items()}
        assert max(held.values()) <= -(-len(text) // cache.page_size) + 3
    assert len(cache.free_branches) == cache.branches
