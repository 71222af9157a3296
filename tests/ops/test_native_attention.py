"""Native attention over several blocks of keys: against float64, and row for row the bits of a row alone."""

from __future__ import annotations

import pytest
import torch

from paceline.core import Rows
from paceline.kv.cache import KVCache
from paceline.kv.layout import LayerKV, Layout
from paceline.ops import native
from paceline.ops.reference import ReferenceOps

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.why_not()))
LENGTHS, HEADS, WIDTH = (230, 70), 4, 24


def part(rows: Rows, start: int, end: int) -> Rows:
    cut = slice(start, end)
    return Rows(rows.tokens[cut], rows.positions[cut], rows.slots[cut], [0, end - start])


@pytest.mark.parametrize("window", [None, 90])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention(window: int | None, own: bool, kv_heads: int) -> None:
    kind = "sliding_attention" if window else "full_attention"
    layout = Layout((LayerKV(kind, kv_heads, WIDTH),), {kind: window})
    cache = KVCache(layout, {kind: 24}, max_sequences=2, max_tokens=256, dtype=torch.float32)
    torch.manual_seed(3)
    for store in (cache.k[0], cache.v[0]):
        store.normal_()
    new = [(i, [7] * (n // 2)) for i, n in enumerate(LENGTHS)]
    for i, n in enumerate(LENGTHS):
        cache.open(i, [7] * n, share=False)
        with cache.tail([(i, [7] * (n - n // 2))]) as tail:
            tail.commit([n - n // 2])
    with cache.tail(new) as tail:
        rows = tail.rows()
    q = torch.randn(rows.count, HEADS * WIDTH)
    runner = native.NativeRunner(2)

    def run(rows: Rows, q: torch.Tensor) -> torch.Tensor:
        return runner.run(
            lambda ops: (ops.attention(ops.given("q", HEADS * WIDTH), 0, HEADS, window, own),),
            rows, cache, {"q": q},
        )[0].clone()  # fmt: skip

    got = run(rows, q)
    if own:  # the reference takes a drafter's rows one at a time
        want = ReferenceOps(rows, cache, {}, torch.float64).attention(q.double(), 0, HEADS, window, own)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    for size in (1, 2, 5, 11):
        native.set_threads(1 + size % 2)
        pieces = [
            run(part(rows, at, min(at + size, rows.count)), q[at : at + size].contiguous())
            for at in range(0, rows.count, size)
        ]
        assert torch.equal(torch.cat(pieces), got), size
    native.set_threads(2)
