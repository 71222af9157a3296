"""A share of a model for each rank: together they compute what one process does. Ranks are threads here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import FAMILIES, VOCAB, build_assistant, build_target
from decoders import build_decoder
from paceline.convert.to_gguf import write_gguf
from paceline.core import AdapterRows, ForwardBatch
from paceline.errors import UsageError
from paceline.hub.resolve import bundled
from paceline.kv.cache import KVCache
from paceline.models.adapter import Adapter, Part
from paceline.models.adapters import AdapterBank
from paceline.models.registry import load_assistant, load_target
from paceline.models.target import GraphTarget
from paceline.ops import native
from paceline.ops.base import Runner, Weight
from paceline.ops.quantize import quantizer
from paceline.ops.reference import EagerRunner

DECODERS = (
    "llama-tied-biases",
    "mistral-window",
    "qwen2-window",
    "qwen3",
    "qwen3-moe-mixed",
    "gpt-oss",
    "cohere2",
)
TOKENS = torch.randint(0, VOCAB, (21,), generator=torch.Generator().manual_seed(3)).tolist()
CUTS = [9, 1, 8, 3]


class Threads:
    """The sum over ranks that are threads, of which only one computes at a time."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.gate, self.turn = ranks, threading.Barrier(ranks, timeout=10), threading.Lock()
        self.parts: dict[int, torch.Tensor] = {}

    def of(self, rank: int) -> _One:
        return _One(self, rank)


class _One:
    def __init__(self, threads: Threads, rank: int) -> None:
        self._all, self.rank, self.ranks = threads, rank, threads.ranks

    def add(self, x: torch.Tensor) -> None:
        self._all.parts[self.rank] = x.clone()
        self._wait()
        x.copy_(sum((self._all.parts[r] for r in range(1, self.ranks)), self._all.parts[0]))
        self._wait()

    def _wait(self) -> None:
        self._all.turn.release()
        self._all.gate.wait()
        self._all.turn.acquire()


def eager(dtype: torch.dtype) -> Callable[[Any], Runner]:
    return lambda group: EagerRunner(dtype, group)


def native_runner(group: Any) -> Runner:
    return native.NativeRunner(1, False, group)


Compute = Callable[[GraphTarget], tuple[torch.Tensor, ...]]


def together(ranks: int, load: Callable[[tuple[int, int] | None, Any], GraphTarget], compute: Compute) -> Any:
    """What each rank computes, by rank."""
    threads = Threads(ranks)

    def one(rank: int) -> tuple[torch.Tensor, ...]:
        with threads.turn:
            return compute(load((rank, ranks), threads.of(rank)))

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))


def alone(
    load: Callable[[tuple[int, int] | None, Any], GraphTarget], compute: Compute
) -> tuple[torch.Tensor, ...]:
    return compute(load(None, None))


def loader(folder: Path, make: Callable[[Any], Runner], **options: Any) -> Callable[..., GraphTarget]:
    def load(shard: tuple[int, int] | None, group: Any) -> GraphTarget:
        target = load_target(folder, runner=make(group), shard=shard, **options)
        if isinstance(target.runner, native.NativeRunner):
            target.runner.prepare([target.hidden_graph])
        return target

    return load


def cache_of(target: GraphTarget) -> KVCache:
    pages = dict.fromkeys(target.layout.kinds, 8)
    return KVCache(target.layout, pages, max_sequences=2, max_tokens=64, dtype=target.kv_dtype)


def states(
    target: GraphTarget, cache: KVCache | None = None, cuts: list[int] = CUTS
) -> tuple[torch.Tensor, ...]:
    cache = cache or cache_of(target)
    cache.open(1, TOKENS, share=False)
    outs, at = [], 0
    for size in cuts:
        with cache.tail([(1, TOKENS[at : at + size])]) as tail:
            found = target.runner.run(target.hidden_graph, tail.rows(), cache, {})
            outs.append(
                found[0].clone() if found else torch.empty(0)
            )  # native plans of other ranks give nothing
            tail.commit([size])
        at += size
    return (torch.cat(outs),)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", [*DECODERS, *FAMILIES])
def test_ranks_together_compute_what_one_does(family: str, ranks: int, tmp_path: Path) -> None:
    """In float64, so that only an error shows; with 4 ranks, K/V heads are there more than once."""
    build = build_decoder if family in DECODERS else build_target
    build(family, tmp_path)
    load = loader(tmp_path, eager(torch.float64), dtype=torch.float64)
    (want,) = alone(load, states)
    each = together(ranks, load, states)
    torch.testing.assert_close(each[0][0], want, rtol=1e-11, atol=1e-11)
    assert all(torch.equal(part[0], each[0][0]) for part in each)


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "native"])
def test_adapters_are_cut_as_their_matrices_are(kernels: bool, tmp_path: Path) -> None:
    """Of a matrix that is cut by outputs, and of one that is cut by inputs."""
    build_decoder("llama", tmp_path)
    plain = alone(loader(tmp_path, native_runner if kernels else eager(torch.float64)), states)
    generator = torch.Generator().manual_seed(3)
    layer = load_target(tmp_path).layers[1]  # type: ignore[attr-defined]
    parts = {}
    for name, weight in (
        ("self_attn.q_proj", layer.attention.q.weight),
        ("mlp.down_proj", layer.mlp.down.weight),
    ):
        a = torch.randn(3, weight.in_features, generator=generator)
        parts[f"layers.1.{name}"] = Part(a, torch.randn(weight.out_features, 3, generator=generator), 0.2)
    bank = AdapterBank.of([("a", Adapter(tmp_path, parts, {}, []))])

    def adapted(target: GraphTarget) -> tuple[torch.Tensor, ...]:
        cache = cache_of(target)
        cache.open(1, TOKENS, share=False)
        with cache.tail([(1, TOKENS)]) as tail:
            rows = tail.rows()
            rows.adapters = AdapterRows(rows.starts, [((0, 0.7),)])
            found = target.runner.run(target.hidden_graph, rows, cache, {})
            tail.commit([len(TOKENS)])
        return (found[0].clone() if found else torch.empty(0),)

    dtype, near = (torch.float32, 1e-4) if kernels else (torch.float64, 1e-11)
    load = loader(tmp_path, native_runner if kernels else eager(dtype), dtype=dtype, adapters=bank)
    (want,) = alone(load, adapted)
    torch.testing.assert_close(together(2, load, adapted)[0][0], want, rtol=near, atol=near)
    assert (want - plain[0]).abs().max() > 0.01


def test_heads_that_are_read_by_unequal_numbers_of_ranks(tmp_path: Path) -> None:
    """12 heads over 3 K/V heads: each of 2 ranks has one and a half of them."""
    build_decoder("llama", tmp_path, num_attention_heads=12, num_key_value_heads=3)
    load = loader(tmp_path, eager(torch.float64), dtype=torch.float64)
    torch.testing.assert_close(together(2, load, states)[0], alone(load, states), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("family", ["dense", "e2b", "31b"])
def test_the_mtp_drafter_reads_what_its_rank_has(family: str, tmp_path: Path) -> None:
    build_target(family, tmp_path / "target")
    build_assistant(family, tmp_path / "drafter", ordered=family == "e2b")

    def draft(target: GraphTarget) -> tuple[torch.Tensor, ...]:
        net, cache = load_assistant(tmp_path / "drafter", target, dtype=torch.float64), cache_of(target)
        (hidden,) = states(target, cache)
        last = torch.tensor([len(TOKENS) - 1], dtype=torch.int32)
        rows = ForwardBatch(torch.tensor(TOKENS[-1:]), last, torch.zeros(1, dtype=torch.int32), [0, 1])
        out = net.step(rows, hidden[-1:], cache)
        return out.logits, out.hidden

    load = loader(tmp_path / "target", eager(torch.float64), dtype=torch.float64)
    torch.testing.assert_close(together(2, load, draft)[0], alone(load, draft), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("family", ["dense", "26b", "llama-tied-biases", "qwen3-moe", "gpt-oss"])
def test_native_segments_compute_what_plain_torch_does(family: str, tmp_path: Path) -> None:
    """And a row's bits do not depend on how the text is cut."""
    (build_target if family in FAMILIES else build_decoder)(family, tmp_path)
    (want,) = alone(loader(tmp_path, eager(torch.float32)), states)
    ((got,), _) = together(2, loader(tmp_path, native_runner), states)
    torch.testing.assert_close(got, want, rtol=5e-4, atol=5e-4)
    ((whole,), _) = together(2, loader(tmp_path, native_runner), lambda t: states(t, None, [len(TOKENS)]))
    assert torch.equal(whole, got)


@pytest.mark.parametrize("kind", ["int8", "int4", "gguf"])
def test_quantized_weights_are_cut_between_their_groups(kind: str, tmp_path: Path) -> None:
    """They have the values of the whole model's, so that only the order of sums differs."""
    options: dict[str, Any] = {}
    folder = tmp_path / "model"
    if kind == "gguf":
        folder = folder.with_suffix(".gguf")
        write_gguf(bundled("target"), folder, "q4_0")
    else:
        build_decoder("llama", folder, hidden_size=64, head_dim=32)
        options = {"transform": quantizer(kind)}
    exact = lambda group: native.NativeRunner(1, True, group)  # noqa: E731
    (want,) = alone(loader(folder, exact, **options), states)
    ((got,), _) = together(2, loader(folder, exact, **options), states)
    torch.testing.assert_close(got, want, rtol=5e-3, atol=5e-3)


def test_a_group_is_not_cut(tmp_path: Path) -> None:
    build_decoder("llama", tmp_path, hidden_size=64, head_dim=32, num_key_value_heads=4)
    with pytest.raises(UsageError, match=r"down_proj is stored in groups of 32 .* use tensor_parallel=2"):
        load_target(tmp_path, transform=quantizer("int4"), shard=(0, 4))


def test_sizes_that_do_not_divide_name_the_most_that_does(tmp_path: Path) -> None:
    build_decoder("llama", tmp_path)
    for ranks in (3, 8):
        with pytest.raises(
            UsageError,
            match=f"tensor_parallel={ranks} does not divide .*4 heads.*: use {min(ranks, 4) // 2 * 2}",
        ):
            load_target(tmp_path, shard=(0, ranks))


def test_sizes_that_only_more_ranks_divide(tmp_path: Path) -> None:
    build_decoder(
        "llama", tmp_path, hidden_size=72, num_attention_heads=9, num_key_value_heads=3, intermediate_size=72
    )
    with pytest.raises(
        UsageError, match=r"tensor_parallel=2 does not divide .*9 heads.*: leave it out, or use 3"
    ):
        load_target(tmp_path, shard=(0, 2))


def test_a_family_that_is_not_shared_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from paceline.models import shards
    from paceline.models.families import spec_of

    build_decoder("llama", tmp_path)
    monkeypatch.setattr(
        shards,
        "spec_of",
        lambda name: replace(spec_of(name), split=None) if name == "llama" else spec_of(name),
    )
    with pytest.raises(UsageError, match=r"not possible for llama, only for .*gemma4"):
        load_target(tmp_path, shard=(0, 2))


def test_a_drafter_with_too_few_heads_is_refused(tmp_path: Path) -> None:
    build_target("dense", tmp_path / "target", num_attention_heads=8, num_key_value_heads=2)
    build_assistant("dense", tmp_path / "drafter", num_attention_heads=2, num_key_value_heads=2)
    target = load_target(tmp_path / "target", shard=(0, 4))
    with pytest.raises(UsageError, match=r"tensor_parallel=4 does not divide .*2 heads"):
        load_assistant(tmp_path / "drafter", target)


def test_a_part_of_a_weight() -> None:
    weight = Weight(torch.arange(8.0).view(2, 4), "float32")
    part = weight.part(2, 4)
    assert part.partial
    assert part.data.tolist() == [[2, 3], [6, 7]]
