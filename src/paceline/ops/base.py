"""The arithmetic that models are written in: one signature per operation, several implementations.

A model is a *graph*: a function that takes an `Ops` and calls its methods. `ops/reference.py` executes each call at
once with plain torch and is the oracle; `ops/native.py` records the calls once and replays them as one native call.
Every value is a matrix [N, width], one row per token; a row's result depends on no other row except through the
K/V cache. Weights are stored as `Weight`, activations are float32 on CPU and the model's dtype on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch

from paceline.core import ForwardBatch
from paceline.kv.cache import KVCache
from paceline.kv.layout import Layout
from paceline.ops.blocks import BLOCKS, BlockType
from paceline.ops.vector_math import settle

settle()  # in each process that computes: whatever does imports this module

WeightKind = Literal[
    "float32", "bfloat16", "float16", "int8", "int4",
    "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs", "mxfp4",
    "q2_k", "q3_k", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq1_s", "iq1_m", "tq1_0", "tq2_0", "nvfp4",
    "q1_0", "q2_0",
]  # fmt: skip
Activation = Literal["gelu", "silu"]  # gelu: the tanh approximation
Gate = Literal["gelu", "silu", "sigmoid", "relu"]  # sigmoid: without the input itself as a factor
LIMIT, SLOPE = (
    7.0,
    1.702,
)  # of the activation "clamped", gpt-oss's: g * sigmoid(SLOPE * g) * (u + 1), where g is the
# gate but at most LIMIT, and u what is gated but from -LIMIT to LIMIT
Value = Any  # torch.Tensor when executing, a symbol when recording


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """What an adapter adds to x @ W.T: (x @ a.T) @ b. a [rank, in] and b [rank, out], float32; b has the scale in it."""

    module: str  # the matrix that it belongs to
    a: torch.Tensor
    b: torch.Tensor

    @property
    def rank(self) -> int:
        return len(self.a)


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A matrix [out, in]. int8: scale [out]. int4: two a byte [out, in/2], low nibble first, scale [out, in/32].

    Kinds of `ops/blocks.py` in lower case: uint8 [out, bytes of a row], blocks as GGUF files hold them, no scale. nvfp4
    may have a scale [out], which those in the blocks are multiplied with.
    """

    data: torch.Tensor
    kind: WeightKind
    scale: torch.Tensor | None = None
    partial: bool = False  # has some of the inputs only: the results of all ranks are to be added
    # by the number of an adapter, what that adds for the rows that ask for it; in `linear` only
    adapted: tuple[LowRank | None, ...] = ()

    @property
    def out_features(self) -> int:
        return int(self.data.shape[0])

    @property
    def in_features(self) -> int:
        layout = self.blocks
        if layout is not None:
            return int(self.data.shape[1]) // layout.size * layout.elements
        return int(self.data.shape[1]) * (2 if self.kind == "int4" else 1)

    @property
    def blocks(self) -> BlockType | None:
        """How it is stored, if in blocks."""
        return BLOCKS.get(self.kind)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (self.scale.nbytes if self.scale is not None else 0)

    def release(self) -> None:
        """Forget the values, which a runner has taken over in a form of its own; shape and size stay."""
        object.__setattr__(self, "data", self.data.to("meta"))
        object.__setattr__(self, "scale", None if self.scale is None else self.scale.to("meta"))

    def rows(self, ids: torch.Tensor | slice) -> Weight:
        """With the outputs `ids` [n] in that order, a copy; of a slice a view."""
        adapted = tuple(
            None
            if low_rank is None
            else LowRank(low_rank.module, low_rank.a, low_rank.b[:, ids].contiguous())
            for low_rank in self.adapted
        )
        scale = None if self.scale is None else self.scale[ids]
        return Weight(self.data[ids], self.kind, scale, adapted=adapted)

    @property
    def unit(self) -> int:
        """Inputs that are stored together: a matrix can be cut between such groups."""
        return self.blocks.elements if self.blocks is not None else 32 if self.kind == "int4" else 1

    def part(self, start: int, stop: int) -> Weight:
        """A copy with the inputs from `start` to `stop`, both multiples of `unit`, marked as a part."""
        per = self.data.shape[1] / self.in_features  # elements of `data` for an input
        data = self.data[:, int(start * per) : int(stop * per)].contiguous()
        grouped = self.scale is not None and self.scale.dim() == 2
        scale = self.scale[:, start // 32 : stop // 32].contiguous() if grouped else self.scale  # type: ignore[index]
        adapted = tuple(
            None
            if low_rank is None
            else LowRank(low_rank.module, low_rank.a[:, start:stop].contiguous(), low_rank.b)
            for low_rank in self.adapted
        )
        return Weight(data, self.kind, scale, partial=True, adapted=adapted)


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """A mixture of experts: router [E, H], gate_up [E][2*I, H], down [E][H, I], and how the router works.

    With the activation "squared" there are no gates: gate_up is [E][I, H], and what is above 0 of it is squared.
    """

    router: Weight
    gate_up: tuple[Weight, ...]
    down: tuple[Weight, ...]
    top_k: int
    activation: Activation | Literal["clamped", "squared"]
    renormalize: bool = True  # the chosen experts' shares add up to 1
    eps: float | None = None  # of an rms norm of the router's input; None: it is read as it is
    router_scale: torch.Tensor | None = None  # [H], what the router's input is multiplied with
    expert_scale: torch.Tensor | None = None  # [E], what the shares are multiplied with
    # [E], of a router by sigmoids: experts are chosen by sigmoid + bias, and have the sigmoids as their shares
    choice_bias: torch.Tensor | None = None
    softmax: bool = False  # with choice_bias: of a router by softmax, instead
    groups: int = 1  # of E / groups experts each (with choice_bias)
    kept_groups: int = 1  # those whose two best add up to the most; experts of others are not chosen
    router_bias: torch.Tensor | None = None  # [E], added to the router's scores
    gate_up_bias: torch.Tensor | None = None  # [E, 2 * I]
    down_bias: torch.Tensor | None = None  # [E, H]


@dataclass(frozen=True, slots=True, eq=False)
class Growth:
    """What queries are multiplied with by their position: factors[position // every], the last one past the end."""

    factors: torch.Tensor  # [n], float32
    every: int  # positions


class Group(Protocol):
    """The processes, ranks, that compute one target together."""

    rank: int
    ranks: int

    def add(self, x: torch.Tensor) -> None:
        """x [N, width] becomes the sum of all ranks' x, in the order of the ranks: the same bits on each."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class DeltaRule:
    """Linear attention by the gated delta rule: its sizes, and what its rows go through before. All float32."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: torch.Tensor  # [rows, columns], the row itself last
    dt_bias: torch.Tensor  # [value heads]
    decay: torch.Tensor  # [value heads], below 0
    tiled: bool = False  # value head v reads key head v mod key_heads, not v // (value_heads / key_heads)
    plain: bool = False  # Mamba 2, see `Ops.delta_rule`
    conv_bias: torch.Tensor | None = None  # [columns]
    skip: torch.Tensor | None = (
        None  # [value heads], of plain ones: how much of v a row reads beside the state
    )


class Ops(Protocol):
    def tokens(self) -> Value:
        """Token ids of the rows, [N]."""
        ...

    def given(self, name: str, width: int) -> Value:
        """A float input [N, width] handed to `Runner.run` by name."""
        ...

    def embed(self, tokens: Value, table: Weight, scale: float) -> Value:
        """table[token] * scale, the scale rounded to the activation dtype first, as transformers does."""
        ...

    def linear(self, x: Value, weight: Weight, bias: torch.Tensor | None = None) -> Value:
        """x @ weight.T, added up over the ranks where `weight` is partial, plus bias [out]; before both, rows that ask
        for adapters (`ForwardBatch.adapters`) get what `weight.adapted` has of them."""
        ...

    def rms_norm(self, x: Value, weight: torch.Tensor | None, eps: float, groups: int = 1) -> Value:
        """x * (mean(x^2) + eps)^-1/2 * weight in float32, over each of `groups` equal slices of a row. `weight`: of a
        slice, the same for all, or of the whole row."""
        ...

    def layer_norm(self, x: Value, weight: torch.Tensor, eps: float) -> Value:
        """(x - mean(x)) * (mean((x - mean(x))^2) + eps)^-1/2 * weight in float32: no bias."""
        ...

    def rotary(
        self,
        x: Value,
        inv_freq: torch.Tensor,
        heads: int,
        factor: float = 1.0,
        growth: Growth | None = None,
    ) -> Value:
        """Rotate pairs (i, i + r/2) of each head by position * inv_freq[i], which has r/2 entries and may hold zeros, and
        multiply these r columns with `factor` and with what `growth` has for the position; the others stay."""
        ...

    def store_kv(self, layer: int, k: Value, v: Value | None) -> None:
        """Write the rows' K and V [N, kv_heads * d] at their positions into storage layer `layer`; latent: no V."""
        ...

    def attention(
        self,
        q: Value,
        layer: int,
        heads: int,
        window: int | None,
        sees_itself: bool,
        latent: int | None = None,
        softcap: float | None = None,
    ) -> Value:
        """Softmax attention with scale 1 over the row's own sequence; query head h reads K/V head h // (heads/kv_heads).

        A row at position p sees keys j with j <= p and j > p - window (sees_itself=True, the target), or with
        j <= p - 1 and j >= p - 1 - window (sees_itself=False, the MTP drafter: committed keys only). None = unbounded.
        Where there is a window, rows of `ForwardBatch.media` with a reach see all keys before that, too.
        `latent`: that of the layer; then a head's result is as wide. `softcap`: a score becomes
        softcap * tanh(score / softcap) before the softmax.
        """
        ...

    def sink_attention(self, q: Value, layer: int, window: int | None, sinks: torch.Tensor) -> Value:
        """As `attention` of rows that see themselves, but the softmax of head h has the score `sinks` [heads] of h beside
        those of its keys, which brings no value: what it takes is missing from the result.
        """
        ...

    def block_attention(self, q: Value, layer: int, heads: int, window: int | None = None) -> Value:
        """As `attention` of rows that see themselves, but a row sees all rows of its sequence in this run that are after
        it, too.
        """
        ...

    def add(self, x: Value, y: Value) -> Value: ...

    def mul(self, x: Value, y: Value) -> Value: ...

    def scale(self, x: Value, factor: float) -> Value: ...

    def gelu(self, x: Value) -> Value:
        """The tanh approximation, as Gemma uses it."""
        ...

    def gated(self, gate: Value, up: Value, activation: Gate) -> Value:
        """activation(gate) * up; a sigmoid may be one for the whole row"""
        ...

    def delta_rule(self, qkv: Value, b: Value, a: Value, layer: int, rule: DeltaRule) -> Value:
        """[N, value heads * value_dim]: what each row reads of the state of its text, after it has changed it.

        q, k and v are the silu of a convolution over rows; q and k have unit length. Of the state S [key_dim, value_dim]
        of a head: S *= exp(decay * softplus(a + dt_bias)); S += k (sigmoid(b) * (v - S^T k))^T; the row reads
        S^T q / key_dim^1/2.

        A `plain` rule is that of Mamba 2, where q is called C, k is B, v is x, and a is dt: q and k keep their length,
        S += k (softplus(a + dt_bias) * v)^T, and the row reads S^T q + skip * v. It does not read `b`.
        """
        ...

    def block_conv(self, x: Value, mix: Value, base: torch.Tensor) -> Value:
        """Sum over taps t of (base[t] + what row i of `mix` says of t) * x[i - t], row by row of each sequence in this
        run, with zeros before its first. base [T, width]; mix [N, T * groups], tap by tap, each for width/groups columns.
        """
        ...

    def short_conv(self, x: Value, layer: int, taps: torch.Tensor, bias: torch.Tensor | None) -> Value:
        """[N, width]: the sum of taps[-1 - j] * x of j rows before, of the same text; before a text x is 0. `taps` [rows,
        width], `bias` [width]. x is written into storage layer `layer`, which holds keys alone, of that width."""
        ...

    def softcap(self, x: Value, cap: float) -> Value:
        """cap * tanh(x / cap)"""
        ...

    def columns(self, x: Value, start: int, stop: int) -> Value: ...

    def concat(self, x: Value, y: Value) -> Value: ...

    def moe(self, router_input: Value, expert_input: Value, experts: Experts) -> Value:
        """Softmax router over its input, which may be rms-normed and scaled; top-k, renormalised if `experts` says so,
        times expert_scale; sum of the experts. With a choice_bias the router is one of sigmoids, see `Experts`."""
        ...

    def per_head(self, x: Value, weights: Seq[Weight], beside: Value | None = None) -> Value:
        """Each of len(weights) equal slices of a row times its own matrix, followed by its slice of `beside`."""
        ...

    def centroid_logits(
        self, x: Value, centroids: Weight, ordering: torch.Tensor, head: Weight, top_k: int
    ) -> tuple[Value, Value]:
        """The centroid head: (ids [N, C], logits [N, C]) of the top_k clusters' tokens, C = top_k * V / clusters.

        `head` [V, H] stands in the order of `ordering` [V], so that a cluster is read in one go.
        """
        ...


Graph = Callable[[Ops], tuple[Value, ...]]


class Rule(NamedTuple):
    """How to draw a token. Kernels read it in this order."""

    factor: float  # 1 / temperature, 0: greedy
    seed: int  # 64 bits without a sign
    position: int
    top_k: int = 0  # below 2^63, 0: all
    top_p: float = 1.0
    min_p: float = -math.inf  # its logarithm


class Stop(NamedTuple):
    """When a row's draft ends. Its survival is the product of what the confidence of each token so far is worth, and the
    next one gains survival times `chance`, less `price`. Rows that gain something go on, if together they gain `step`.
    """

    limit: int  # tokens
    # that token 1, 2, ... is kept if those before it are; empty: it goes on until `limit`
    chance: tuple[float, ...] = ()
    worth: Seq[
        tuple[float, float]
    ] = ()  # chance to be kept, by bin of the confidence: at 0, and its rise until 1
    price: float = 0.0  # tokens
    step: float = 0.0  # tokens that a further call of the network takes, however many rows take part


@dataclass(slots=True)
class Drawn:
    """A whole draft round: tokens (-1 where a row has ended) and their probabilities, each [steps][N]."""

    tokens: list[list[int]]
    confidence: list[list[float]]


@dataclass(frozen=True, slots=True)
class Lead:
    """What a draft round computes for its first token: rows of the target's states, scores after some of them."""

    graph: Graph  # reads `states`, gives what the round's own graph takes and what `head` takes
    head: Graph  # reads `hidden`, gives logits
    rows: ForwardBatch
    last: list[int]  # [N] which of the rows each row of the round goes on from


@dataclass(frozen=True, slots=True)
class RoundStart:
    """Where a draft round begins, by row [N]; plain numbers, since a tensor of so few costs more than its use."""

    tokens: list[int]  # the last one of each text
    positions: list[int]
    slots: list[int]
    ids: torch.Tensor | None = (
        None  # [C] the tokens that a drafter's scores are of, the same at each call; None: all
    )
    moves: bool = False  # each step stands one position after the last, not all at one
    first: torch.Tensor | None = None  # [N, C] scores of the first token: then `tokens` do not count
    lead: Lead | None = None  # how to get these: then `tokens` and `positions` are those of its rows `last`


@dataclass(frozen=True, slots=True)
class ChainStart:
    """Where the tokens of N blocks begin, whose steps differ by the token before alone: a graph without K/V, which reads
    tokens, `base`, `hidden` where it wants that, and `state` where it has one, and gives logits, then if `sure` the logit
    of a confidence [N, 1], then the next `state`, which begins with zeros.
    """

    tokens: list[int]  # [N], the one before the first of each block
    given: Mapping[
        str, torch.Tensor
    ]  # `base` and `hidden`, each [N * steps, width], a block's steps side by side
    ids: torch.Tensor | None  # [C] the tokens that the logits are of, the same at each call; None: all
    sure: bool
    state: int  # columns of the state; 0: none


class Runner(Protocol):
    """Runs a graph over rows. `graph` must be one stable object per model, so that a recording can be kept for it."""

    @property
    def reads_blocks(self) -> bool:
        """Whether weights in blocks are best handed over as they are, not as float32: it does not widen them anew each
        time."""
        ...

    @property
    def activations(self) -> torch.dtype | None:
        """What results are, where a runner keeps to one type whatever a target was loaded for; None: the target's."""
        ...

    def prepare(self, graphs: Seq[Graph]) -> None:
        """Do now what first runs would do, and let go of weights in the form they were loaded in.

        A weight that one of `graphs` also reads as a table stays; no graph beside them may read the others.
        """
        ...

    def packs(self, layout: Layout) -> bool:
        """Whether it reads K/V of such layers from a packed cache, too, where they are pairs of bfloat16."""
        ...

    def quantizes(self, layout: Layout) -> bool:
        """Whether it can keep K/V of such layers in int8."""
        ...

    def run(
        self, graph: Graph, rows: ForwardBatch, cache: KVCache | None, given: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Execute `graph`. Results are valid until the next run of the same graph."""
        ...

    def draft_round(
        self,
        graph: Graph,
        start: RoundStart,
        cache: KVCache,
        states: torch.Tensor,
        rules: list[Rule],
        stops: list[Stop],
    ) -> Drawn | None:
        """A draft round in one go, where the runner can (None where it cannot): each row as far as its stop says.

        `graph` reads `hidden` [N, H], at first `states[start.slots]` (with `start.first` `states` itself, with
        `start.lead` what that gives of `states`), and gives ([ids,] logits, hidden of the next step). Tokens are drawn
        with the noise of the target, `rules[i]` at its position + step.
        """
        ...

    def chain_round(
        self, graph: Graph, start: ChainStart, rules: list[Rule], stops: list[Stop]
    ) -> Drawn | None:
        """All tokens of some blocks in one go, where the runner can (None where it cannot): each row as far as its stop
        says, each token drawn with the noise of the target and then the next step's own. With `sure` a token's confidence
        is what that says for shared noise, see `shared_chance`.
        """
        ...


def shared_chance(logit: float) -> float:
    """The least chance that a token drawn with the target's noise is kept, by the logit of 1 - TV of both distributions.

    The chance of two coupled draws to agree is at least c / (2 - c) (arXiv 2408.07978).
    """
    sure = sigmoid(logit)
    return sure / (2.0 - sure)


def sigmoid(logit: float) -> float:
    """1 / (1 + e^-logit), 0 for NaN."""
    return 1.0 / (1.0 + math.exp(-logit)) if logit > -700.0 else 0.0
