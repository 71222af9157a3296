"""The paged cache against a naive list model, over long random histories that cross the window many times."""

from __future__ import annotations

import random
import resource
from pathlib import Path

import pytest
import torch

from paceline.errors import CapacityError
from paceline.kv.cache import KVCache
from paceline.kv.layout import LayerKV, Layout
from paceline.kv.pages import OutOfPages, PagePool
from paceline.kv.plan import plan_pages
from paceline.kv.store import PAGE_SIZE

WINDOW = 20
LAYOUT = Layout(
    (LayerKV("sliding_attention", 1, 2), LayerKV("full_attention", 1, 2)),
    {"sliding_attention": WINDOW, "full_attention": None},
)


def make(pages: int = 40, sequences: int = 6, tokens: int = 200) -> KVCache:
    return KVCache(
        LAYOUT,
        dict.fromkeys(LAYOUT.kinds, pages),
        max_sequences=sequences,
        max_tokens=tokens,
        dtype=torch.float32,
    )


def stamp(token: int, position: int) -> float:
    return float(token * 1000 + position)


def test_touched_memory_is_there_and_holds_what_it_held() -> None:
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("this system does not say what is resident")
    cache = make(pages=1 << 17)  # 67 MB
    cache.k[1][5, 0, 0] = 7.5
    before = int(statm.read_text(encoding="ascii").split()[1])
    cache.touch(cache.nbytes // 2)
    more = (int(statm.read_text(encoding="ascii").split()[1]) - before) * resource.getpagesize()
    assert 0.4 * cache.nbytes < more < 0.8 * cache.nbytes
    assert cache.k[1][5, 0, 0] == 7.5
    assert sum(float(store.abs().sum()) for store in (*cache.k, *cache.v)) == 7.5
    cache.touch(10 * cache.nbytes)  # all there is
    make(pages=1).touch(1)


def write(cache: KVCache, items: list[tuple[int, list[int]]], keep: list[int]) -> None:
    """What a forward does: write each row at its position, then keep a prefix of every tail."""
    with cache.tail(items) as tail:
        rows = tail.rows()
        for layer, spec in enumerate(LAYOUT.layers):
            for token, position, slot in zip(
                rows.tokens.tolist(), rows.positions.tolist(), rows.slots.tolist(), strict=True
            ):
                page = int(cache.tables[spec.kind][slot, position // PAGE_SIZE])
                cache.k[layer][page * PAGE_SIZE + position % PAGE_SIZE] = stamp(token, position)
        tail.commit(keep)


def readable(cache: KVCache, sequence: int, layer: int) -> list[float]:
    """K of the positions that the next tail or the drafter may read."""
    spec = LAYOUT.layers[layer]
    end = cache.committed(sequence)
    window = LAYOUT.windows[spec.kind]
    start = 0 if window is None else max(0, end - 1 - window)
    table = cache.tables[spec.kind][cache.slot(sequence)]
    return [
        float(cache.k[layer][int(table[p // PAGE_SIZE]) * PAGE_SIZE + p % PAGE_SIZE, 0, 0])
        for p in range(start, end)
    ]


def check(cache: KVCache, texts: dict[int, list[int]]) -> None:
    for sequence, text in texts.items():
        assert cache.committed(sequence) == len(text)
        for layer, spec in enumerate(LAYOUT.layers):
            window = LAYOUT.windows[spec.kind]
            start = 0 if window is None else max(0, len(text) - 1 - window)
            expected = [stamp(t, p) for p, t in enumerate(text)][start:]
            assert readable(cache, sequence, layer) == expected


def test_ten_thousand_random_operations_leak_nothing() -> None:
    rng = random.Random(7)
    cache, texts, prompts, next_id = make(), {}, {}, 0
    hits = refused = preempted = 0
    stems = [[rng.randrange(50) for _ in range(70)] for _ in range(3)]
    for _ in range(10_000):
        action = rng.random()
        if action < 0.12 and len(texts) < 6:
            prompt = stems[rng.randrange(3)][: rng.randrange(1, 70)] + [rng.randrange(50)]
            known = cache.open(next_id, prompt)
            assert known % PAGE_SIZE == 0
            assert known < len(prompt)
            hits += known > 0
            texts[next_id], prompts[next_id] = prompt[:known], prompt
            next_id += 1
        elif action < 0.2 and texts:  # abort or finish
            victim = rng.choice(list(texts))
            cache.close(victim, scrub=rng.random() < 0.1)
            del texts[victim]
        elif texts:
            chosen = rng.sample(list(texts), rng.randrange(1, len(texts) + 1))
            count = {s: rng.randrange(1, 30) for s in chosen}
            items = [
                (s, (prompts[s][len(texts[s]) :] or [rng.randrange(50) for _ in range(10)])[: count[s]])
                for s in chosen
            ]
            items = [(s, new) for s, new in items if len(texts[s]) + len(new) <= 200]
            keep = [rng.randrange(len(new) + 1) for _, new in items]
            refused += sum(k < len(new) for k, (_, new) in zip(keep, items, strict=True))
            try:
                write(cache, items, keep)
            except OutOfPages:
                victim = rng.choice(list(texts))
                cache.close(victim)
                del texts[victim]
                preempted += 1
                continue
            for k, (s, new) in zip(keep, items, strict=True):
                texts[s] += new[:k]
        if rng.random() < 0.05:
            check(cache, texts)
    check(cache, texts)
    assert hits > 50
    assert refused > 1000
    assert preempted > 5
    for sequence in list(texts):
        cache.close(sequence)
    for kind, pool in cache.pools.items():
        assert pool.free + cache.prefix.held(kind) == pool.count
    cache.prefix.clear()
    assert all(pool.free == pool.count for pool in cache.pools.values())
    assert cache.open_sequences == 0
    assert cache.usage() == dict.fromkeys(LAYOUT.kinds, 0.0)


def test_a_hit_never_covers_the_whole_prompt() -> None:
    cache = make()
    prompt = list(range(2 * PAGE_SIZE))
    cache.open(0, prompt)
    write(cache, [(0, prompt)], [len(prompt)])
    assert cache.open(1, prompt) == PAGE_SIZE
    assert cache.open(2, [*prompt, 1]) == 2 * PAGE_SIZE


def test_scopes_share_nothing() -> None:
    cache = make()
    prompt = list(range(40))
    cache.open(0, prompt, "alice")
    write(cache, [(0, prompt)], [40])
    assert cache.open(1, prompt, "bob") == 0
    assert cache.open(2, prompt, "alice") == 32
    assert cache.open(3, prompt, "alice", share=False) == 0


def test_refused_tokens_are_not_indexed() -> None:
    cache = make()
    cache.open(0, [1] * 30)
    write(cache, [(0, [1] * 30)], [10])
    cache.close(0)
    assert cache.open(1, [1] * 30) == 0


def test_out_of_pages_says_what_to_change_and_changes_nothing() -> None:
    pool = PagePool(3)
    pool.take(2)
    with pytest.raises(OutOfPages, match="cache_memory"):
        pool.take(2)
    assert pool.free == 1


def test_whether_a_text_fits_counts_pages_that_only_the_index_holds() -> None:
    cache = make(pages=8)
    for text in range(3):  # two whole pages of each stay with the index
        cache.open(text, [])
        write(cache, [(text, [text] * (2 * PAGE_SIZE + 1))], [2 * PAGE_SIZE + 1])
        cache.close(text)
    pool = cache.pools["full_attention"]
    assert (pool.free, cache.prefix.held("full_attention")) == (2, 6)
    assert cache.fits(8 * PAGE_SIZE)
    assert not cache.fits(8 * PAGE_SIZE + 1)
    assert cache.prefix.evictable("full_attention", 4) == 4
    assert cache.prefix.evictable("full_attention", 99) == 6
    assert cache.open(7, [0] * (2 * PAGE_SIZE + 1)) == 2 * PAGE_SIZE  # those two are in use now
    assert cache.fits(6 * PAGE_SIZE)
    assert not cache.fits(6 * PAGE_SIZE + 1)


def test_a_text_is_admitted_without_counting_all_that_the_index_holds() -> None:
    cache = make(pages=64, sequences=2)
    for text in range(16):
        cache.open(text, [])
        write(cache, [(text, [text] * (3 * PAGE_SIZE))], [3 * PAGE_SIZE])
        cache.close(text)
    asked: list[int] = []
    pool = cache.pools["full_attention"]
    refs = pool.refs
    pool.refs = lambda page: (asked.append(page), refs(page))[1]  # type: ignore[method-assign]
    assert cache.fits(4 * PAGE_SIZE)
    assert not asked
    assert cache.fits(18 * PAGE_SIZE)
    assert len(asked) == 2


def test_tail_beyond_the_context_is_refused() -> None:
    cache = make(tokens=32)
    cache.open(0, [1])
    with pytest.raises(CapacityError, match="max_model_len=32"):
        cache.tail([(0, [1] * 33)])


def test_plan_pages_fits_its_budget_or_says_what_is_missing() -> None:
    per_token = sum(LAYOUT.bytes_per_token(4).values())
    plan = plan_pages(LAYOUT, budget=2**16, itemsize=4, max_sequences=8, max_tokens=128, chunk=32)
    cost = sum(n * PAGE_SIZE * LAYOUT.bytes_per_token(4)[k] for k, n in plan.items())
    assert cost <= 2**16
    assert min(plan.values()) * PAGE_SIZE >= min(128, WINDOW)
    with pytest.raises(CapacityError, match="lower max_model_len"):
        plan_pages(LAYOUT, budget=per_token * 16, itemsize=4, max_sequences=1, max_tokens=4096, chunk=32)


def test_values_that_are_beginnings_of_keys_take_no_memory_of_their_own() -> None:
    layout = Layout(
        (LayerKV("full_attention", 1, 12, 8), LayerKV("full_attention", 1, 12)), {"full_attention": None}
    )
    assert layout.bytes_per_token(4) == {"full_attention": 3 * 12 * 4}
    pages = plan_pages(layout, budget=2**20, itemsize=4, max_sequences=1, max_tokens=64, chunk=16)
    assert pages == {"full_attention": 8}
    cache = KVCache(layout, pages, max_sequences=1, max_tokens=64, dtype=torch.float32)
    assert cache.nbytes == 8 * PAGE_SIZE * 3 * 12 * 4
    cache.open(0, [1] * 5, share=False)
    with cache.tail([(0, [1] * 5)]) as tail:
        cache.k[0].normal_()
        tail.commit([5])
    index = torch.arange(5) + cache.tables["full_attention"][0, 0] * PAGE_SIZE
    keys, values = cache.at(0, index)
    assert torch.equal(values, keys[..., :8])
    assert [part.shape for part in cache.at(1, index)] == [(5, 1, 12), (5, 1, 12)]
    before = cache.k[0].clone()
    cache.touch(cache.nbytes)
    assert torch.equal(cache.k[0], before)
    cache.close(0, scrub=True)
    assert not cache.k[0][index].any()
