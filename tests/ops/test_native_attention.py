"""Native attention over several blocks of keys: against float64, and row for row the bits of a row alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from paceline.core import ForwardBatch
from paceline.errors import UsageError
from paceline.kv.cache import KVCache
from paceline.kv.layout import LayerKV, Layout
from paceline.kv.store import StoreType
from paceline.ops import native
from paceline.ops.base import Ops, Value
from paceline.ops.reference import ReferenceOps

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.why_not()))
LENGTHS, HEADS = (300, 70), 4  # more than a segment of keys, and less
packs = pytest.mark.skipif(
    not (native.available() and native.bf16_dot()), reason="needs products of bfloat16"
)


def part(rows: ForwardBatch, start: int, end: int) -> ForwardBatch:
    cut = slice(start, end)
    return ForwardBatch(rows.tokens[cut], rows.positions[cut], rows.slots[cut], [0, end - start])


def filled(layout: Layout, packed: bool) -> tuple[KVCache, ForwardBatch]:
    """Two texts, the second half of each still to be computed, over random keys and values."""
    dtype: StoreType = "packed" if packed else torch.float32
    cache = KVCache(layout, dict.fromkeys(layout.kinds, 24), max_sequences=2, max_tokens=320, dtype=dtype)
    torch.manual_seed(3)
    for store in (cache.k[0], cache.v[0]):
        store.normal_()
    for i, n in enumerate(LENGTHS):
        cache.open(i, [7] * n, share=False)
        with cache.tail([(i, [7] * (n - n // 2))]) as tail:
            tail.commit([n - n // 2])
    with cache.tail([(i, [7] * (n // 2)) for i, n in enumerate(LENGTHS)]) as tail:
        return cache, tail.rows()


@pytest.mark.parametrize("window", [None, 90])
@pytest.mark.parametrize("sees_itself", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    ("width", "packed"),
    [(24, False), pytest.param(32, True, marks=packs), pytest.param(96, True, marks=packs)],
)
def test_attention(window: int | None, sees_itself: bool, kv_heads: int, width: int, packed: bool) -> None:
    kind = "sliding_attention" if window else "full_attention"
    cache, rows = filled(Layout((LayerKV(kind, kv_heads, width),), {kind: window}), packed)
    q = torch.randn(rows.count, HEADS * width) * (0.3 if packed else 1.0)
    runner = native.NativeRunner(2)

    def run(rows: ForwardBatch, q: torch.Tensor) -> torch.Tensor:
        return runner.run(
            lambda ops: (ops.attention(ops.given("q", HEADS * width), 0, HEADS, window, sees_itself),),
            rows, cache, {"q": q},
        )[0].clone()  # fmt: skip

    got = run(rows, q)
    if sees_itself:  # the reference takes a drafter's rows one at a time
        want = ReferenceOps(rows, cache, {}, torch.float64).attention(
            q.double(), 0, HEADS, window, sees_itself
        )
        bounds = {"rtol": 0.0, "atol": 0.02} if packed else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(got.double(), want, **bounds)
        assert not packed or float((got - want).abs().mean()) < 3e-3
    for size in (1, 2, 5, 11):
        native.set_threads(1 + size % 2)
        pieces = [
            run(part(rows, at, min(at + size, rows.count)), q[at : at + size].contiguous())
            for at in range(0, rows.count, size)
        ]
        assert torch.equal(torch.cat(pieces), got), size
    native.set_threads(2)


@pytest.mark.parametrize("isa", ["best", "avx2", "generic"])
@pytest.mark.parametrize(("kv_heads", "width", "latent"), [(1, 72, 64), (2, 21, 13), (1, 40, 5), (4, 8, 8)])
def test_values_may_be_the_beginnings_of_keys(isa: str, kv_heads: int, width: int, latent: int) -> None:
    """Against float64; row by row the same bits, whoever stands beside, on any number of threads."""
    kind, heads = "full_attention", 8
    cache, rows = filled(Layout((LayerKV(kind, kv_heads, width, latent),), {kind: None}), packed=False)
    q, k = torch.randn(rows.count, heads * width), torch.randn(rows.count, kv_heads * width)

    def graph(ops: Ops) -> tuple[Value]:
        ops.store_kv(0, ops.given("k", kv_heads * width), None)
        return (ops.attention(ops.given("q", heads * width), 0, heads, None, True, latent),)

    if not native._extension().choose_isa(isa):
        pytest.skip(f"this processor has no {isa}")
    runner = native.NativeRunner(2)
    got = runner.run(graph, rows, cache, {"q": q, "k": k})[0].clone()
    want = ReferenceOps(rows, cache, {}, torch.float64).attention(q.double(), 0, heads, None, True, latent)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    for size in (1, 2, 5, 11):
        native.set_threads(1 + size % 3)
        pieces = []
        for at in range(0, rows.count, size):
            some = slice(at, min(at + size, rows.count))
            given = {"q": q[some].contiguous(), "k": k[some].contiguous()}
            pieces.append(runner.run(graph, part(rows, some.start, some.stop), cache, given)[0].clone())
        assert torch.equal(torch.cat(pieces), got), size
    q[5] = float("nan")
    spoilt = runner.run(graph, rows, cache, {"q": q, "k": k})[0]
    assert spoilt[5].isnan().all()
    others = torch.arange(rows.count) != 5
    assert torch.equal(spoilt[others], got[others])
    native.set_threads(2)
    assert native._extension().choose_isa("best")


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("packed", [False, True], ids=["float32", "packed"])
@pytest.mark.parametrize("window", [None, 3])
def test_a_row_of_a_block_sees_those_after_it(window: int | None, kv_heads: int, packed: bool) -> None:
    """All rows of a text in the run, however they are cut among threads; a text has the same bits beside others."""
    kind, width = "full_attention", 32
    cache, rows = filled(Layout((LayerKV(kind, kv_heads, width),), {kind: None}), packed)
    q = torch.randn(rows.count, HEADS * width) * (0.3 if packed else 1.0)
    runner = native.NativeRunner(2)

    def run(rows: ForwardBatch, q: torch.Tensor) -> torch.Tensor:
        graph = lambda ops: (ops.block_attention(ops.given("q", HEADS * width), 0, HEADS, window),)  # noqa: E731
        return runner.run(graph, rows, cache, {"q": q})[0].clone()

    got = run(rows, q)
    want = ReferenceOps(rows, cache, {}, torch.float64).block_attention(q.double(), 0, HEADS, window)
    bounds = {"rtol": 0.0, "atol": 0.02} if packed else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(got.double(), want, **bounds)
    causal = ReferenceOps(rows, cache, {}, torch.float64).attention(q.double(), 0, HEADS, window, True)
    assert not torch.allclose(want, causal, atol=0.05)
    for begin, end in pairwise(rows.starts):
        alone = run(part(rows, begin, end), q[begin:end].contiguous())
        assert torch.equal(alone, got[begin:end])


@pytest.mark.parametrize("isa", ["best", "avx2", "generic"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=packs)], ids=["float32", "packed"])
def test_a_sink_takes_its_share_of_each_row(isa: str, window: int | None, packed: bool) -> None:
    """Against float64; sinks far below and above all scores, and each head its own, however heads are cut."""
    kind, width = "sliding_attention" if window else "full_attention", 32
    if not native._extension().choose_isa(isa) or (packed and not native.bf16_dot()):
        native._extension().choose_isa("best")
        pytest.skip(f"not with {isa}")
    cache, rows = filled(Layout((LayerKV(kind, 2, width),), {kind: window}), packed)
    sinks = torch.tensor([0.5, 3.0, -2.0, 1.0, -300.0, 8.0, 400.0, 2.0])
    q = torch.randn(rows.count, 8 * width) * 0.3
    runner = native.NativeRunner(2)

    def run(rows: ForwardBatch, q: torch.Tensor) -> torch.Tensor:
        graph = lambda ops: (ops.sink_attention(ops.given("q", 8 * width), 0, window, sinks),)  # noqa: E731
        return runner.run(graph, rows, cache, {"q": q})[0].clone()

    got = run(rows, q)
    want = ReferenceOps(rows, cache, {}, torch.float64).sink_attention(q.double(), 0, window, sinks)
    bounds = {"rtol": 0.0, "atol": 0.02} if packed else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(got.double(), want, **bounds)
    by_head = got.view(rows.count, 8, width)
    assert by_head[:, 6].abs().max() < 1e-30
    assert by_head[:, 4].abs().mean() > 0.05
    for size in (1, 5):
        native.set_threads(1 + size % 2)
        pieces = [
            run(part(rows, at, min(at + size, rows.count)), q[at : at + size].contiguous())
            for at in range(0, rows.count, size)
        ]
        assert torch.equal(torch.cat(pieces), got), size
    native.set_threads(2)
    assert native._extension().choose_isa("best")


@pytest.mark.parametrize("isa", ["best", "avx2", "generic"])
@pytest.mark.parametrize("window", [None, 90])
@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=packs)], ids=["float32", "packed"])
def test_scores_are_capped(isa: str, window: int | None, packed: bool) -> None:
    """Against float64; scores far past the cap and near 0, row by row the same bits."""
    kind, width = "sliding_attention" if window else "full_attention", 32
    if not native._extension().choose_isa(isa) or (packed and not native.bf16_dot()):
        native._extension().choose_isa("best")
        pytest.skip(f"not with {isa}")
    cache, rows = filled(Layout((LayerKV(kind, 2, width),), {kind: window}), packed)
    q = torch.randn(rows.count, 8 * width) * torch.tensor([0.01, 0.3, 1.0, 5.0]).repeat_interleave(2 * width)
    runner = native.NativeRunner(2)

    def run(rows: ForwardBatch, q: torch.Tensor, cap: float | None = 2.0) -> torch.Tensor:
        def graph(ops: Ops) -> tuple[Value, ...]:
            return (ops.attention(ops.given("q", 8 * width), 0, 8, window, True, softcap=cap),)

        return runner.run(graph, rows, cache, {"q": q})[0].clone()

    got = run(rows, q)
    exact = ReferenceOps(rows, cache, {}, torch.float64)
    want = exact.attention(q.double(), 0, 8, window, True, softcap=2.0)
    bounds = {"rtol": 0.0, "atol": 0.03} if packed else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(got.double(), want, **bounds)
    assert float((run(rows, q, None) - got).abs().max()) > 1.0
    for size in (1, 5):
        native.set_threads(1 + size % 2)
        pieces = [
            run(part(rows, at, min(at + size, rows.count)), q[at : at + size].contiguous())
            for at in range(0, rows.count, size)
        ]
        assert torch.equal(torch.cat(pieces), got), size
    q[5] = float("nan")
    assert run(rows, q)[5].isnan().all()
    native.set_threads(2)
    assert native._extension().choose_isa("best")


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("counts", [(1, 7), (7, 1), (3, 4), (1, 1), (17, 2)])
def test_texts_of_uneven_rows_share_the_threads(kv_heads: int, counts: tuple[int, int]) -> None:
    """Which thread takes what depends on how many rows each text has; what comes out does not."""
    width, kind = 24, "full_attention"
    cache, rows = filled(Layout((LayerKV(kind, kv_heads, width),), {kind: None}), packed=False)
    second = LENGTHS[0] // 2  # the first row of the second text
    some = [*range(counts[0]), *range(second, second + counts[1])]
    q = torch.randn(len(some), HEADS * width)
    runner = native.NativeRunner(3)

    def run(at: list[int]) -> torch.Tensor:
        own = [some[i] for i in at]
        kept = ForwardBatch(rows.tokens[own], rows.positions[own], rows.slots[own], [0, len(own)])
        return runner.run(
            lambda ops: (ops.attention(ops.given("q", HEADS * width), 0, HEADS, None, True),),
            kept, cache, {"q": q[at].contiguous()},
        )[0].clone()  # fmt: skip

    alone = torch.cat([run([i]) for i in range(len(some))])
    for threads in (1, 2, 3):
        native.set_threads(threads)
        assert torch.equal(run(list(range(len(some)))), alone), threads
    native.set_threads(2)


@packs
def test_what_is_stored_packed_is_read_as_rounded_and_nothing_beside_it_changes() -> None:
    kind, heads, width = "full_attention", 2, 64
    cache, rows = filled(Layout((LayerKV(kind, heads, width),), {kind: None}), packed=True)
    page, place = rows.positions.long() // cache.page_size, rows.positions.long() % cache.page_size
    index = cache.tables[kind][rows.slots.long(), page].long() * cache.page_size + place
    others = torch.ones(len(cache.k[0]), dtype=torch.bool)
    others[index] = False
    everything = torch.arange(len(cache.k[0]))
    before = [part[others].clone() for part in cache.at(0, everything)]
    k, v = torch.randn(2, rows.count, heads * width)

    def store(ops: Ops) -> tuple[Value]:
        ops.store_kv(0, ops.given("k", heads * width), ops.given("v", heads * width))
        return (ops.attention(ops.given("k", heads * width), 0, heads, None, True),)

    runner = native.NativeRunner(2)
    for _ in range(50):  # rows of one page are stored by both threads
        runner.run(store, rows, cache, {"k": k, "v": v})
        for found, given in zip(cache.at(0, index), (k, v), strict=True):
            assert torch.equal(found, given.view(-1, heads, width).to(torch.bfloat16))
    after = [part[others] for part in cache.at(0, everything)]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


@packs
def test_what_a_row_does_not_see_may_be_no_number() -> None:
    """Places past a row's own, e.g. of drafts, share words with values that it sees."""
    kind, width = "sliding_attention", 32
    layout = Layout((LayerKV(kind, 1, width),), {kind: 21})
    cache, rows = filled(layout, packed=True)
    q, runner = torch.randn(rows.count, HEADS * width), native.NativeRunner(2)

    def graph(ops: Ops) -> tuple[Value]:
        return (ops.attention(ops.given("q", HEADS * width), 0, HEADS, 21, True),)

    clean = runner.run(graph, rows, cache, {"q": q})[0].clone()
    for at in (0, 40, 41, 70):
        bad = cache.tables[kind][0, int(rows.positions[at]) // 16].item() * 16 + int(rows.positions[at]) % 16
        saved = cache.k[0].clone(), cache.v[0].clone()
        poisoned = cache.v[0].view(-1, 1, 8, width, 2)
        poisoned[bad // 16, 0, bad % 16 // 2, :, bad % 2] = float("nan")
        cache.k[0].view(-1, 1, width // 2, 16, 2)[bad // 16, 0, :, bad % 16] = float("nan")
        assert torch.isnan(torch.cat([part.float() for part in cache.at(0, torch.tensor([bad]))])).all()
        got = runner.run(graph, rows, cache, {"q": q})[0]
        seen = (
            (torch.arange(rows.count) >= at)
            & (torch.arange(rows.count) <= at + 20)
            & (rows.slots == rows.slots[at])
        )
        assert torch.equal(got[~seen], clean[~seen])
        assert torch.isnan(got[seen]).all()
        cache.k[0].copy_(saved[0]), cache.v[0].copy_(saved[1])


def test_a_packed_cache_is_for_kernels_that_know_it() -> None:
    layout = Layout((LayerKV("full_attention", 1, 32),), {"full_attention": None})
    cache, rows = filled(layout, packed=True)
    ops = ReferenceOps(rows, cache, {})
    with pytest.raises(UsageError, match="one of float32"):
        ops.store_kv(0, torch.zeros(rows.count, 32), torch.zeros(rows.count, 32))
    odd = Layout((LayerKV("full_attention", 1, 24),), {"full_attention": None})
    assert native.NativeRunner(2).packs(layout) == native.bf16_dot()
    latent = Layout((LayerKV("full_attention", 1, 96, 64),), {"full_attention": None})
    assert not native.NativeRunner(2).packs(odd)
    assert not native.NativeRunner(2).packs(latent)
    assert not native.NativeRunner(2, exact=True).packs(layout)


@pytest.mark.parametrize("isa", ["best", "avx2", "generic"])
@pytest.mark.parametrize(("kv_heads", "width"), [(1, 96), (2, 64), (4, 32)])
def test_keys_and_values_in_int8(isa: str, kv_heads: int, width: int) -> None:
    """Rounded as they are stored, and read as what was rounded; a row's bits are its own; no number stays none."""
    kind = "full_attention"
    cache = KVCache(
        Layout((LayerKV(kind, kv_heads, width),), {kind: None}),
        {kind: 24}, max_sequences=1, max_tokens=320, dtype="int8",
    )  # fmt: skip
    cache.open(0, [7] * 300, share=False)
    with cache.tail([(0, [7] * 300)]) as tail:
        rows = tail.rows()
    k, v = torch.randn(2, rows.count, kv_heads * width)
    k[:, 3] *= 8
    v[7] = 0
    q = torch.randn(rows.count, HEADS * width) * 0.3

    def graph(ops: Ops) -> tuple[Value]:
        ops.store_kv(0, ops.given("k", kv_heads * width), ops.given("v", kv_heads * width))
        return (ops.attention(ops.given("q", HEADS * width), 0, HEADS, None, True),)

    if not native._extension().choose_isa(isa):
        pytest.skip(f"this processor has no {isa}")
    runner = native.NativeRunner(2)
    got = runner.run(graph, rows, cache, {"q": q, "k": k, "v": v})[0].clone()
    index = cache.tables[kind][0, rows.positions.long() // 16].long() * 16 + rows.positions.long() % 16
    for given, kept in zip((k, v), cache.at(0, index), strict=True):
        parts, found = given.view(-1, 32), kept.reshape(-1, 32)
        step = parts.abs().amax(1, keepdim=True) / 127
        assert ((found - parts).abs() <= 0.5001 * step).all()
        assert torch.equal(found.view(given.shape)[7], given[7]) or given is k
    want = ReferenceOps(rows, cache, {}, torch.float64).attention(q.double(), 0, HEADS, None, True)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    for size in (1, 5, 40):
        native.set_threads(1 + size % 3)
        pieces = []
        for at in range(0, rows.count, size):
            some = slice(at, min(at + size, rows.count))
            given = {name: x[some].contiguous() for name, x in (("q", q), ("k", k), ("v", v))}
            pieces.append(runner.run(graph, part(rows, some.start, some.stop), cache, given)[0].clone())
        assert torch.equal(torch.cat(pieces), got), size
    v[280, 5], k[290, 1] = float("inf"), float("nan")
    spoilt = runner.run(graph, rows, cache, {"q": q, "k": k, "v": v})[0]
    assert torch.equal(spoilt[:280], got[:280])
    assert spoilt[280:].isnan().any(1).all()
    native.set_threads(2)
    assert native._extension().choose_isa("best")


def test_what_cannot_be_kept_in_int8_is_refused() -> None:
    kind = "full_attention"
    runner = native.NativeRunner(2)
    odd, latent = (
        Layout((LayerKV(kind, 1, 24),), {kind: None}),
        Layout((LayerKV(kind, 1, 96, 64),), {kind: None}),
    )
    assert not runner.quantizes(odd)
    assert not runner.quantizes(latent)
    with pytest.raises(UsageError, match="kv_cache auto"):
        KVCache(latent, {kind: 4}, max_sequences=1, max_tokens=32, dtype="int8")
    layout = Layout((LayerKV(kind, 2, 64),), {kind: None})
    cache = KVCache(layout, {kind: 4}, max_sequences=1, max_tokens=64, dtype="int8")
    assert cache.nbytes == 64 * layout.bytes_per_token(1)[kind] == 64 * 2 * 2 * (64 + 8)
    assert cache.holds == "int8"
    cache.open(0, [7], share=False)
    with cache.tail([(0, [7])]) as tail, pytest.raises(UsageError, match="one of float32"):
        ReferenceOps(tail.rows(), cache, {}).store_kv(0, torch.zeros(1, 128), torch.zeros(1, 128))
