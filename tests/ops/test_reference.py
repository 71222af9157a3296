"""The oracle's own arithmetic: quantized matrices, ragged attention, experts."""

from __future__ import annotations

import pytest
import torch

from paceline.core import ForwardBatch
from paceline.kv.cache import KVCache
from paceline.kv.layout import LayerKV, Layout
from paceline.ops import native, reaches
from paceline.ops.base import Experts, Weight
from paceline.ops.reference import EagerRunner, ReferenceOps, dequantize


def test_dequantize_int8_and_int4():
    data = torch.tensor([[-128, 0, 127], [1, 2, 3]], dtype=torch.int8)
    weight = Weight(data, "int8", torch.tensor([0.5, 2.0]))
    assert dequantize(weight, None, torch.float32).tolist() == [[-64, 0, 63.5], [2, 4, 6]]
    assert dequantize(weight, torch.tensor([1, 1]), torch.float32).tolist() == [[2, 4, 6]] * 2
    values = torch.arange(64).remainder(16).view(1, 64)  # nibbles 0..15 stand for -8..7
    packed = (values[:, ::2] | values[:, 1::2] << 4).to(torch.uint8)
    weight = Weight(packed, "int4", torch.tensor([[1.0, 3.0]]))
    expected = (values - 8).float() * torch.tensor([1.0, 3.0]).repeat_interleave(32)
    assert torch.equal(dequantize(weight, None, torch.float32), expected)
    assert weight.in_features == 64


def naive_attention(q, k, v, sinks, first: int, last: int):
    """One row over keys first..last, head by head."""
    heads, kv_heads = len(sinks), k.shape[1]
    out = []
    for h, x in enumerate(q.view(heads, -1)):
        g = h // (heads // kv_heads)
        scores = torch.cat((k[first : last + 1, g] @ x, sinks[h : h + 1]))  # the sink has no value
        out.append(torch.softmax(scores, dim=0)[:-1] @ v[first : last + 1, g])
    return torch.cat(out)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("sees_itself", [True, False])
@pytest.mark.parametrize("pieces", [1 << 27, 40])
def test_attention_over_ragged_rows(window, sees_itself, pieces, monkeypatch):
    monkeypatch.setattr(reaches, "MAX_SCORES", pieces)
    kind = "sliding_attention" if window else "full_attention"
    layout = Layout((LayerKV(kind, 2, 4),), {kind: window})
    cache = KVCache(layout, {kind: 24}, max_sequences=3, max_tokens=64, dtype=torch.float64)
    torch.manual_seed(0)
    lengths, news = [20, 1, 37], [3, 1, 5]
    keys = {i: torch.randn(2, n, 2, 4, dtype=torch.float64) for i, n in enumerate(lengths)}
    for i, n in enumerate(lengths):
        cache.open(i, [7] * n, share=False)
        with cache.tail([(i, [7] * n)]) as tail:
            run = ReferenceOps(tail.rows(), cache, {}, torch.float64)
            run.store_kv(0, keys[i][0].flatten(1), keys[i][1].flatten(1))
            tail.commit([n - news[i] if sees_itself else n])
    tokens = [(i, [7] * news[i]) for i in range(3)]
    with cache.tail(tokens) as tail:
        rows = tail.rows()
    q = torch.randn(rows.count, 16, dtype=torch.float64)
    ops = ReferenceOps(rows, cache, {}, torch.float64)
    none, sinks = (
        torch.full((4,), -torch.inf, dtype=torch.float64),
        torch.tensor([-2.0, 0.5, 3.0, 40.0]).double(),
    )
    got = ops.attention(q, 0, 4, window, sees_itself)
    sunk = ops.sink_attention(q, 0, window, sinks) if sees_itself else None
    for n in range(rows.count):
        i = next(i for i in range(3) if rows.starts[i] <= n < rows.starts[i + 1])
        p = int(rows.positions[n])
        last = p if sees_itself else min(p - 1, lengths[i] - 1)
        if p - 1 > last:
            continue  # beyond what is committed: no drafter asks for it
        first = 0 if window is None else max(0, p - window + 1 if sees_itself else p - 1 - window)
        expected = naive_attention(q[n], *keys[i], none, first, last)
        assert torch.allclose(got[n], expected, atol=1e-12), (n, p)
        if sunk is not None:
            assert torch.allclose(sunk[n], naive_attention(q[n], *keys[i], sinks, first, last), atol=1e-12)


@pytest.mark.parametrize("activation", ["gelu", "silu", "clamped"])
@pytest.mark.parametrize("normed", [False, True], ids=["bare", "normed"])
@pytest.mark.parametrize("renormalize", [False, True], ids=["raw", "renormalized"])
@pytest.mark.parametrize("runner", ["eager", "native"])
def test_experts_one_by_one(activation, normed, renormalize, runner):
    torch.manual_seed(1)
    hidden, wide, count, top = 8, 6, 4, 2
    gate_up, down = torch.randn(count, 2 * wide, hidden), torch.randn(count, hidden, wide)
    router, scale, each = torch.randn(count, hidden), torch.rand(hidden), torch.rand(count)
    kind = {"eps": 1e-6, "router_scale": scale, "expert_scale": each} if normed else {}
    biased = activation == "clamped"
    biases = [
        3 * torch.randn(count, *size) if biased else torch.zeros(count, *size)
        for size in ((), (2 * wide,), (hidden,))
    ]
    if biased:
        kind |= dict(zip(("router_bias", "gate_up_bias", "down_bias"), biases))
    experts = Experts(
        Weight(router, "float32"), tuple(Weight(w, "float32") for w in gate_up),
        tuple(Weight(w, "float32") for w in down), top, activation, renormalize=renormalize, **kind,
    )  # fmt: skip
    if runner == "native" and not native.available():
        pytest.skip(str(native.why_not()))
    x, y = torch.randn(5, hidden), torch.randn(5, hidden)
    rows = ForwardBatch(torch.zeros(5, dtype=torch.int64), torch.zeros(5), torch.zeros(5), [0, 5])
    (got,) = (EagerRunner() if runner == "eager" else native.NativeRunner(2)).run(
        lambda ops: (ops.moe(ops.given("x", hidden), ops.given("y", hidden), experts),),
        rows,
        None,
        {"x": x, "y": y},
    )
    for n in range(5):
        seen = x[n] * (x[n].pow(2).mean() + 1e-6) ** -0.5 * scale if normed else x[n]
        distribution = torch.softmax(router @ seen + biases[0], 0)
        chosen = distribution.topk(top).indices
        total = distribution[chosen].sum() if renormalize else 1.0
        want = torch.zeros(hidden)
        for e in chosen.tolist():
            gate, up = (gate_up[e] @ y[n] + biases[1][e]).chunk(2)
            gelu = torch.nn.functional.gelu(gate, approximate="tanh")
            h = (gelu if activation == "gelu" else gate * torch.sigmoid(gate)) * up
            if biased:
                low, (gate, up) = gate.clamp(max=7.0), (gate, up.clamp(-7.0, 7.0))
                h = low * torch.sigmoid(1.702 * low) * (up + 1.0)
            want += (down[e] @ h + biases[2][e]) * distribution[e] / total * (each[e] if normed else 1.0)
        assert torch.allclose(got[n], want, atol=1e-5)


def test_embedding_scale_is_rounded_to_the_activation_dtype():
    table = Weight(torch.ones(2, 3), "float32")
    rows = ForwardBatch(torch.tensor([1]), torch.zeros(1), torch.zeros(1), [0, 1])
    ops = ReferenceOps(rows, None, {}, torch.bfloat16)
    assert ops.embed(ops.tokens(), table, 3072**0.5).unique().item() == 55.5
