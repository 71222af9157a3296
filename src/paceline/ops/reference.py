"""`Ops` executed at once with plain torch, on any device and dtype: the oracle, and the path without a
compiler.

Weights are widened to the dtype of the activations, norms and softmax are computed in float32 (float64 stays
float64), as transformers does. What this does not promise: the same bits for a row whatever rows stand beside
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.core import ForwardBatch
from paceline.errors import UsageError
from paceline.kv.cache import KVCache
from paceline.kv.layout import RECENT, Layout
from paceline.ops import blocks
from paceline.ops.base import (
    LIMIT,
    SLOPE,
    ChainStart,
    DeltaRule,
    Experts,
    Gate,
    Graph,
    Group,
    Growth,
    LowRank,
    RoundStart,
    Rule,
    Stop,
    Weight,
)
from paceline.ops.reaches import Reaches, attend

INT4_GROUP = 32


class EagerRunner:
    """Runs a graph by calling it. `dtype` is that of activations."""

    reads_blocks = False  # it can, but would widen them at each call
    activations = None

    def __init__(self, dtype: torch.dtype = torch.float32, group: Group | None = None) -> None:
        """`group`: the ranks that add up what partial weights give."""
        self.dtype, self._group = dtype, group

    def prepare(self, graphs: Seq[Graph]) -> None:
        """Nothing: weights are read as they were loaded."""

    def packs(self, layout: Layout) -> bool:
        """Never."""
        return False

    def quantizes(self, layout: Layout) -> bool:
        """Never."""
        return False

    @torch.no_grad()
    def run(
        self, graph: Graph, rows: ForwardBatch, cache: KVCache | None, given: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        out = graph(ops := ReferenceOps(rows, cache, given, self.dtype, self._group))
        if ops.recurs and cache is not None and cache.states is not None:  # of all layers, or of none
            cache.states.settle(rows.slots[rows.starts[:-1]].tolist())
        return out

    def draft_round(
        self,
        graph: Graph,
        start: RoundStart,
        cache: KVCache,
        states: Tensor,
        rules: list[Rule],
        stops: list[Stop],
    ) -> None:
        """Not here: drafters go step by step."""

    def chain_round(self, graph: Graph, start: ChainStart, rules: list[Rule], stops: list[Stop]) -> None:
        """Not here either."""


class ReferenceOps:
    """One forward over `rows`. Rows of a sequence, or of a branch, are neighbours with rising positions."""

    def __init__(
        self,
        rows: ForwardBatch,
        cache: KVCache | None,
        given: Mapping[str, Tensor],
        dtype: torch.dtype = torch.float32,
        group: Group | None = None,
    ) -> None:
        self.rows, self.cache, self.dtype, self._group = rows, cache, dtype, group
        self._given = given
        self.recurs = False  # whether recurrent states were brought on
        self._exact = torch.float64 if dtype == torch.float64 else torch.float32
        self._rotary: dict[int, tuple[Tensor, Tensor]] = {}  # id of inv_freq, alive as long as the graph
        self._written: dict[str, Tensor] = {}
        branches = (
            rows.branches
        )  # of trees: rows that are stored for further slots, and runs in one slot each
        self._runs = rows.starts if branches is None else branches.runs
        self._further = [] if branches is None else branches.further
        if branches is not None and cache is not None:
            cache.copy_pages(branches.copies)
        self._reaches = Reaches(rows, cache, self._runs)

    # -- inputs ----------------------------------------------------------------------------------------------

    def tokens(self) -> Tensor:
        return self.rows.tokens

    def given(self, name: str, width: int) -> Tensor:
        value = self._given[name].to(self.dtype)  # [N, width]
        assert value.shape[1] == width, f"{name} has width {value.shape[1]}, not {width}"
        return value

    def embed(self, tokens: Tensor, table: Weight, scale: float) -> Tensor:
        rows = dequantize(table, tokens, self.dtype)  # [N, width]
        return rows * torch.tensor(scale, dtype=self.dtype, device=rows.device)

    # -- arithmetic ------------------------------------------------------------------------------------------

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        bias = None if bias is None else bias.to(x.dtype)
        if not weight.partial and (not weight.adapted or self.rows.adapters is None):
            return F.linear(x, dequantize(weight, None, x.dtype), bias)
        y = self._adapt(x, F.linear(x, dequantize(weight, None, x.dtype)), weight.adapted)
        y = self._reduce(y) if weight.partial else y
        return y if bias is None else y + bias

    def _adapt(self, x: Tensor, y: Tensor, adapted: tuple[LowRank | None, ...]) -> Tensor:
        """`y` with what the adapters of each text add to its rows."""
        rows = self.rows.adapters
        if not adapted or rows is None:
            return y
        for (start, end), blend in zip(pairwise(rows.starts), rows.texts, strict=True):
            for number, factor in blend:
                adapter = adapted[number]
                if adapter is not None and start < end:
                    inner = x[start:end] @ adapter.a.to(x.dtype).T
                    y[start:end] += (inner * factor) @ adapter.b.to(x.dtype)
        return y

    def _reduce(self, y: Tensor) -> Tensor:
        assert self._group is not None, "a partial weight needs the other ranks"
        self._group.add(y)
        return y

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float, groups: int = 1) -> Tensor:
        wide = x.to(self._exact).view(x.shape[0], groups, -1)  # [N, groups, width / groups]
        weight = None if weight is None else weight.to(self._exact)
        if weight is not None and len(weight) > wide.shape[2]:  # each slice has its own
            normed = F.rms_norm(wide, wide.shape[-1:], None, eps) * weight.view(groups, -1)
        else:
            normed = F.rms_norm(wide, wide.shape[-1:], weight, eps)
        return normed.view(x.shape).to(x.dtype)

    def layer_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide, weight = x.to(self._exact), weight.to(self._exact)
        return F.layer_norm(wide, wide.shape[-1:], weight, eps=eps).to(x.dtype)

    def rotary(
        self, x: Tensor, inv_freq: Tensor, heads: int, factor: float = 1.0, growth: Growth | None = None
    ) -> Tensor:
        if id(inv_freq) not in self._rotary:
            device = self.rows.positions.device
            angles = self.rows.positions.to(self._exact)[:, None] * inv_freq.to(
                device, self._exact
            )  # [N, d / 2]
            self._rotary[id(inv_freq)] = (
                angles.cos().to(x.dtype)[:, None],
                angles.sin().to(x.dtype)[:, None],
            )
        cos, sin = (part * factor for part in self._rotary[id(inv_freq)])  # [N, 1, d / 2]
        if growth is not None:
            step = (self.rows.positions.long() // growth.every).clamp(max=len(growth.factors) - 1)
            by = growth.factors[step].to(x.dtype)[:, None, None]
            cos, sin = cos * by, sin * by
        half = len(inv_freq)
        x_ = x.view(x.shape[0], heads, -1)
        low, high, rest = x_[..., :half], x_[..., half : 2 * half], x_[..., 2 * half :]
        return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1).view(x.shape)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def mul(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x * factor

    def gelu(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")

    def gated(self, gate: Tensor, up: Tensor, activation: Gate) -> Tensor:
        if activation == "sigmoid":
            return torch.sigmoid(gate) * up
        if activation == "relu":
            return F.relu(gate) * up
        return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up

    def block_conv(self, x: Tensor, mix: Tensor, base: Tensor) -> Tensor:
        taps, width = base.shape
        own = mix.view(len(x), taps, -1)  # [N, T, groups]
        kernel = base.to(x.dtype) + own.repeat_interleave(width // own.shape[2], 2)
        out = kernel[:, 0] * x
        for tap in range(1, taps):
            earlier = torch.zeros_like(x)
            for begin, end in pairwise(self._runs):
                if end - begin > tap:
                    earlier[begin + tap : end] = x[begin : end - tap]
            out = out + kernel[:, tap] * earlier
        return out

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return torch.tanh(x / cap) * cap

    def columns(self, x: Tensor, start: int, stop: int) -> Tensor:
        return x[:, start:stop]

    def concat(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat((x, y), dim=-1)

    # -- attention -------------------------------------------------------------------------------------------

    def store_kv(self, layer: int, k: Tensor, v: Tensor | None) -> None:
        assert self.cache is not None
        if self.cache.packed or self.cache.quantized:
            raise UsageError(
                f"only the native kernels write a K/V cache of {self.cache.holds}: make one of float32"
            )
        spec = self.cache.layout.layers[layer]
        if spec.kind not in self._written:
            page = self.cache.page_size
            position, slots = self.rows.positions.long(), self.rows.slots.long()
            if self._further:
                rows, more = torch.tensor(self._further, device=slots.device).T
                position, slots = torch.cat((position, position[rows])), torch.cat((slots, more))
            pages = self.cache.tables[spec.kind][slots, position // page].long()
            self._written[spec.kind] = pages * page + position % page  # [N], then one for each of `_further`
        shape = (-1, spec.kv_heads, spec.head_dim)
        for store, new in ((self.cache.k[layer], k), (self.cache.v[layer], v)):
            if new is not None:
                every = torch.cat((new, new[[row for row, _ in self._further]])) if self._further else new
                store.index_copy_(0, self._written[spec.kind], every.reshape(shape).to(store.dtype))

    def attention(
        self,
        q: Tensor,
        layer: int,
        heads: int,
        window: int | None,
        sees_itself: bool,
        latent: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        assert self.cache is not None
        assert latent == self.cache.layout.layers[layer].latent
        return self._read(q, layer, heads, window, 0 if sees_itself else -1, softcap=softcap)

    def sink_attention(self, q: Tensor, layer: int, window: int | None, sinks: Tensor) -> Tensor:
        return self._read(q, layer, len(sinks), window, 0, sinks)

    def block_attention(self, q: Tensor, layer: int, heads: int, window: int | None = None) -> Tensor:
        return self._read(q, layer, heads, window, None)

    def _read(
        self,
        q: Tensor,
        layer: int,
        heads: int,
        window: int | None,
        last: int | None,
        sinks: Tensor | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """`last`: the last key that a row sees, from its own position on; None: the last row's of its sequence."""
        assert self.cache is not None
        spec = self.cache.layout.layers[layer]
        group = heads // spec.kv_heads
        reach = self._reaches.of(spec.kind, window, last, group)
        take, back, longest = self._reaches.padding()
        batch = len(self._runs) - 1
        q = q[take].view(batch, longest, spec.kv_heads, group, spec.head_dim)
        q = q.permute(0, 2, 1, 3, 4).reshape(batch, spec.kv_heads, longest * group, spec.head_dim)
        k, v = (
            part.view(batch, reach.keys, spec.kv_heads, -1).transpose(1, 2).to(q.dtype)
            for part in self.cache.at(layer, reach.index)
        )  # [B, kv_heads, S, d]
        if sinks is not None:  # [kv_heads, T * group, 1]
            sinks = sinks.to(self._exact).view(spec.kv_heads, 1, group)
            sinks = sinks.expand(-1, longest, -1).flatten(1)[..., None]
        out = attend(q, (k, v), reach.mask, self._exact, sinks, softcap)
        out = out.view(batch, spec.kv_heads, longest, group, spec.value_dim)
        return out.permute(0, 2, 1, 3, 4).reshape(batch * longest, heads * spec.value_dim)[back]

    # -- linear attention ------------------------------------------------------------------------------------

    def delta_rule(self, qkv: Tensor, b: Tensor, a: Tensor, layer: int, rule: DeltaRule) -> Tensor:
        assert self.cache is not None
        assert self.cache.states is not None
        states, held = self.cache.states, torch.cat((qkv, b, a), dim=-1).to(self._exact)
        slots, positions = self.rows.slots.tolist(), self.rows.positions.tolist()
        out, self.recurs = qkv.new_zeros(len(qkv), rule.value_heads * rule.value_dim), True
        for start, end in pairwise(self.rows.starts):
            if start == end:
                continue
            first, last = positions[start], positions[end - 1] + 1
            place, begin, goal = states.span(slots[start], first, last)
            oldest, recent = begin - states.history, states.recent[layer][place]
            before = [position % RECENT for position in range(max(oldest, 0), first)]
            x = torch.cat((recent.new_zeros(max(0, -oldest), held.shape[1]), recent[before], held[start:end]))
            state = states.states[layer][place]
            if not begin:
                state.zero_()
            read, state_at_goal = recur(x[begin - oldest - states.history :], state, goal - begin, rule)
            out[start:end] = read[first - begin :].to(out.dtype)
            state.copy_(state_at_goal)
            tail = range(max(first, last - RECENT), last)
            recent[[position % RECENT for position in tail]] = held[end - len(tail) : end]
        return out

    def short_conv(self, x: Tensor, layer: int, taps: Tensor, bias: Tensor | None) -> Tensor:
        self.store_kv(layer, x, None)
        assert self.cache is not None
        page, table = self.cache.page_size, self.cache.tables[self.cache.layout.layers[layer].kind]
        out = torch.zeros_like(x) if bias is None else bias.to(x.dtype).expand_as(x).clone()
        for back, tap in enumerate(taps.flip(0)):
            position = self.rows.positions.long() - back
            there = position >= 0
            position = position.clamp(min=0)
            index = table[self.rows.slots.long(), position // page].long() * page + position % page
            held = self.cache.at(layer, index)[0].flatten(1).to(x.dtype)
            out += torch.where(there[:, None], held * tap.to(x.dtype), 0)
        return out

    # -- mixtures and heads ----------------------------------------------------------------------------------

    def moe(self, router_input: Tensor, expert_input: Tensor, experts: Experts) -> Tensor:
        seen = router_input if experts.eps is None else self.rms_norm(router_input, None, experts.eps)
        if experts.router_scale is not None:
            seen = seen * experts.router_scale.to(router_input.dtype)
        if experts.choice_bias is None:
            scores = self.linear(seen, experts.router, experts.router_bias)
            law = torch.softmax(scores, dim=-1, dtype=self._exact)  # [N, E]
            share, chosen = torch.topk(law, experts.top_k, dim=-1)  # [N, top_k]
        else:
            scores = self.linear(seen.to(self._exact), experts.router)
            law = torch.softmax(scores, dim=-1) if experts.softmax else torch.sigmoid(scores)
            chosen = torch.topk(among_groups(law + experts.choice_bias, experts), experts.top_k).indices
            share = law.gather(1, chosen)
        if experts.renormalize:
            share = share / (share.sum(dim=-1, keepdim=True) + (0 if experts.choice_bias is None else 1e-20))
        if experts.expert_scale is not None:
            share = share * experts.expert_scale[chosen].to(self._exact)
        out = torch.zeros_like(expert_input)
        for e in sorted(set(chosen.flatten().tolist())):
            row, rank = torch.where(chosen == e)
            biases = experts.gate_up_bias, experts.down_bias
            first, last = (None if bias is None else bias[e].to(out.dtype) for bias in biases)
            read = self._activated(
                self.linear(expert_input[row], experts.gate_up[e], first), experts.activation
            )
            value = F.linear(read, dequantize(experts.down[e], None, out.dtype), last)
            out.index_add_(0, row, (value * share[row, rank, None]).to(out.dtype))
        return self._reduce(out) if experts.down[0].partial else out

    def _activated(self, x: Tensor, activation: str) -> Tensor:
        """Of an expert's gates and values, or of its values alone, what its way down reads."""
        if activation == "squared":
            return self.gated(x, x, "relu")
        gate, up = x.chunk(2, dim=-1)
        return clamped(gate, up) if activation == "clamped" else self.gated(gate, up, cast(Gate, activation))

    def per_head(self, x: Tensor, weights: Seq[Weight], beside: Tensor | None = None) -> Tensor:
        count, rows = len(weights), len(x)
        slices = x.view(rows, count, -1).unbind(1)
        out = torch.stack([self.linear(part, w) for part, w in zip(slices, weights, strict=True)], 1)
        if beside is not None:
            out = torch.cat((out, beside.view(rows, count, -1)), -1)
        return out.flatten(1)

    def centroid_logits(
        self, x: Tensor, centroids: Weight, ordering: Tensor, head: Weight, top_k: int
    ) -> tuple[Tensor, Tensor]:
        clusters = torch.topk(self.linear(x, centroids), top_k, dim=-1).indices  # [N, top_k]
        places = torch.arange(ordering.numel(), device=x.device).view(centroids.out_features, -1)
        places = places[clusters].flatten(1)  # [N, C]
        rows = dequantize(head, places.flatten(), x.dtype).view(*places.shape, -1)  # [N, C, H]
        return ordering.view(-1)[places], (rows @ x[..., None]).squeeze(-1)


def clamped(gate: Tensor, up: Tensor) -> Tensor:
    """The activation of gpt-oss's experts, see `LIMIT`."""
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return gate * torch.sigmoid(SLOPE * gate) * (up + 1)


def among_groups(choice: Tensor, experts: Experts) -> Tensor:
    """[N, E] with -inf for experts outside of the groups that are kept."""
    if experts.kept_groups == experts.groups:
        return choice
    by_group = choice.view(len(choice), experts.groups, -1)
    best_groups = by_group.topk(2, dim=-1).values.sum(-1).topk(experts.kept_groups, dim=-1).indices
    left = torch.ones(by_group.shape[:2], dtype=torch.bool, device=choice.device).scatter(
        1, best_groups, False
    )
    return by_group.masked_fill(left[..., None], -torch.inf).flatten(1)


def dequantize(weight: Weight, rows: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The matrix (rows None), or some of its rows, in `dtype`: [R, in]."""
    data = weight.data if rows is None else weight.data[rows]
    layout = weight.blocks
    if layout is not None:
        scale = weight.scale if weight.scale is None or rows is None else weight.scale[rows]
        beside = None if scale is None else scale.cpu().numpy()
        values = blocks.dequantize(layout.name, data.cpu().numpy(), beside)
        return torch.from_numpy(values).to(data.device, dtype)
    if weight.scale is None:
        return data.to(dtype)
    scale = (weight.scale if rows is None else weight.scale[rows]).to(dtype)
    if weight.kind == "int8":
        return data.to(dtype) * scale[:, None]
    nibbles = torch.stack((data & 15, data >> 4), dim=-1).to(torch.int8) - 8  # [R, in / 2, 2]
    return (nibbles.view(data.shape[0], -1, INT4_GROUP).to(dtype) * scale[..., None]).flatten(1)


def recur(x: Tensor, state: Tensor, goal: int, rule: DeltaRule) -> tuple[Tensor, Tensor]:
    """(what each row reads [T, value heads * value_dim], the state after `goal` rows).

    x [history + T, ...] is what rows hold, `state` [value heads, key_dim, value_dim] that before the first of the T.
    """
    kernel, channels = rule.conv.shape
    count, heads, keys = len(x) - kernel + 1, rule.value_heads, rule.key_heads * rule.key_dim
    mixed = torch.stack([x[t : t + count, :channels] * rule.conv[t].to(x) for t in range(kernel)]).sum(0)
    mixed = mixed if rule.conv_bias is None else mixed + rule.conv_bias.to(x)
    q, k, v = torch.split(F.silu(mixed), [keys, keys, channels - 2 * keys], dim=-1)
    head = torch.arange(heads)
    of = head % rule.key_heads if rule.tiled else head // (heads // rule.key_heads)
    q, k = (part.view(count, rule.key_heads, -1)[:, of] for part in (q, k))
    v = v.view(count, heads, -1)
    if not rule.plain:
        q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (q, k))
        q = q * rule.key_dim**-0.5
    b, a = torch.split(x[kernel - 1 :, channels:], heads, dim=-1)
    step = F.softplus(a + rule.dt_bias.to(x))  # [T, heads]
    rate = step if rule.plain else torch.sigmoid(b)
    fade = torch.exp(rule.decay.to(x) * step)
    skipped = None if rule.skip is None else v * rule.skip.to(x)[:, None]
    at_goal, reads = state, []
    for t in range(count):
        state = state * fade[t, :, None, None]
        known = 0.0 if rule.plain else torch.einsum("hkv,hk->hv", state, k[t])
        change = (v[t] - known) * rate[t, :, None]
        state = state + k[t, :, :, None] * change[:, None]
        read = torch.einsum("hkv,hk->hv", state, q[t])
        reads.append((read if skipped is None else read + skipped[t]).flatten())
        if t + 1 == goal:
            at_goal = state
    return torch.stack(reads), at_goal
