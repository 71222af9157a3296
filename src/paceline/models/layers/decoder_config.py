"""config.json of Llama and its relatives -> one frozen `DecoderConfig`, whoever wrote it.

transformers 5 writes `rope_parameters` and `dtype`, older ones `rope_theta`, `rope_scaling` and `torch_dtype`. A field
that is missing has transformers' default only where a checkpoint cannot contradict it unseen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from paceline.errors import ConfigError
from paceline.kv.layout import LayerKV, LayerState
from paceline.models.fields import MOST, Fields, shown, token_ids
from paceline.models.layers.delta_net import DeltaConfig
from paceline.models.spec import CONV, FULL, SLIDING, MoeConfig, Split, layers_line
from paceline.ops.base import Activation

# of a layer's norms; "parallel": one, before attention and MLP, which both read its result
Placement = Literal["before", "after", "both", "both (GLM-4)", "parallel"]
PARTIAL = "partial_rotary_factor"
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
LONGROPE = ("longrope", "su")  # Phi's, under its newer and its older name


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary embeddings: base and scaling. `original` is the context before it was scaled, `low` and `high` are turns in
    it: pairs with fewer are divided by `factor`, pairs with more are kept (llama3 and yarn)."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: float = 8192.0  # positions
    attention: float = 1.0  # what q and k are multiplied with, each
    divisors: tuple[float, ...] = ()  # longrope: of the frequency of each pair, within the original context
    long_divisors: tuple[float, ...] = ()  # and where texts may be longer
    rounded: bool = True  # yarn: the pairs between which scaling begins and ends are whole numbers


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention; a head is `plain` elements and `head_dim` of the config that are rotated."""

    q_rank: int | None  # of queries; None: they are made at once
    rank: int  # of keys and values: what is cached of them
    plain: int
    value: int  # of a head
    interleaved: bool  # pairs that are rotated are stored beside each other
    scale: float  # of attention


@dataclass(frozen=True, slots=True)
class Routing:
    """A router by sigmoids: experts of the `kept` best of `groups`, chosen by sigmoid + bias; or one by softmax."""

    groups: int
    kept: int
    factor: float  # what the shares are multiplied with
    softmax: bool = False  # then without groups, and its bias is stored as a row


@dataclass(frozen=True, slots=True)
class ConvConfig:
    """Layers of a short convolution, see short_conv.py."""

    taps: int  # rows that one reads, itself among them
    biases: bool = False  # of both projections and of the convolution

    def storage(self, hidden: int) -> LayerKV:
        return LayerKV(CONV, 1, hidden, latent=hidden)


@dataclass(frozen=True, slots=True)
class MambaConfig:
    """Layers of Mamba 2, see mamba.py: `groups` of heads share a key and a query, which are `state` wide."""

    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int  # rows of the convolution
    conv_bias: bool = True
    biases: bool = False  # of both projections
    norm_groups: int = 1  # slices of what it gives that are normed by themselves
    decayed: bool = (
        False  # as llama.cpp writes them: A_log holds the decay itself, vectors have axes of one element
    )

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Columns that the convolution goes over."""
        return self.inner + 2 * self.groups * self.state

    @property
    def storage(self) -> LayerState:
        return LayerState(
            self.heads, self.state, self.head_dim, self.channels + 2 * self.heads, self.kernel - 1
        )


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder of two norms a layer. Sizes in elements, windows in tokens."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    kinds: tuple[
        str, ...
    ]  # of each layer, "sliding_attention" | "full_attention" | "linear_attention" | "conv"
    window: int | None  # of sliding layers
    rotary: Rotary
    eps: float
    max_len: int
    eos_token_ids: tuple[int, ...]
    tied: bool  # lm_head is the embedding table
    biases: frozenset[str] = frozenset()  # projections that have one
    head_norms: bool = False  # q and k are normed, head by head
    moe: MoeConfig | None = None
    sparse: frozenset[int] = frozenset()  # layers that have experts instead of an MLP
    renormalize: bool = True  # the chosen experts' shares add up to 1
    latent: Latent | None = None
    routing: Routing | None = None  # None: by softmax
    shared_expert: int = 0  # inner size of the one that every row passes, 0 = none
    shared_gate: bool = False  # and how much of it counts is a sigmoid of the row
    gated: bool = False  # the result of attention is gated by a second half of each query projection
    rotated: int | None = None  # first columns of a head that are rotated; None: all
    gate_apart: bool = False  # it is gated by a projection of its own
    norm_shift: float = 0.0  # what is added to the stored weights of norms
    last_shift: float | None = None  # the same of the last norm; None: as of all others
    plain_head_norms: bool = False  # norms of q and k have no weights
    normed_embedding: bool = False  # rows of the table are normed, without weights
    late_eps: float | None = None  # of norms after attention and MLP; None: as of all others
    softcap: float | None = None  # of logits
    delta: DeltaConfig | MambaConfig | None = (
        None  # of layers of linear attention, or of Mamba 2 in their place
    )
    conv: ConvConfig | None = None  # of layers of a short convolution
    placement: Placement = "before"  # of a layer's norms: before attention and MLP, after them, or both
    fused: frozenset[str] = frozenset()  # "qkv", "gate_up": stored as one matrix
    paired: bool = False  # what is rotated of a head is stored pair by pair
    activation: Activation = "silu"  # of the MLP
    wide_norms: bool = False  # q and k are normed over all heads at once
    unturned: frozenset[int] = frozenset()  # layers without rotary embeddings
    local_rotary: Rotary | None = None  # of layers with a window; None: as all others
    embedding_scale: float = 1.0
    attention_scale: float | None = None  # of scores; None: head_dim ** -0.5
    attention_softcap: float | None = None  # of scores
    centered: bool = False  # norms of rows are layer norms, without biases
    residual_scale: float = 1.0  # of what attention and MLP add to a row
    logit_scale: float = 1.0
    sinks: bool = False  # heads of attention have one each, see `Ops.sink_attention`
    biased_experts: bool = False  # router and experts have biases; experts' activation is "clamped"
    reach: int | None = None  # tokens that the files promise, where max_len is less
    query_growth: float = (
        0.0  # past the original context queries grow by it, with the logarithm of the position
    )

    def reaching(self, tokens: int | None) -> DecoderConfig:
        """For texts of up to `tokens`: LongRoPE has other factors for a context past the original one."""
        long = self.rotary.long_divisors
        if not long or self.reach is None or tokens is None or tokens <= self.max_len:
            return self
        return replace(self, rotary=replace(self.rotary, divisors=long), max_len=self.reach)

    def rotary_of(self, kind: str) -> Rotary:
        """That of layers of `kind`."""
        return self.local_rotary if self.local_rotary is not None and kind == SLIDING else self.rotary

    @property
    def norm_names(self) -> dict[str, str]:
        """The fields of a `Layer` that are norms, and what their tensors are called."""
        if self.placement == "after":
            return {"norm_in": "post_attention_layernorm", "norm_post": "post_feedforward_layernorm"}
        if self.placement == "parallel":
            return {"norm_in": "input_layernorm"}
        if self.placement == "before":
            return {"norm_in": "input_layernorm", "norm_post": "post_attention_layernorm"}
        names = (
            "input_layernorm",
            "pre_feedforward_layernorm",
            "post_attention_layernorm",
            "post_feedforward_layernorm",
        )
        if self.placement == "both (GLM-4)":
            names = (
                "input_layernorm",
                "post_attention_layernorm",
                "post_self_attn_layernorm",
                "post_mlp_layernorm",
            )
        return dict(zip(("norm_in", "norm_post", "after_attention", "after_mlp"), names))

    @property
    def layer_count(self) -> int:
        return len(self.kinds)

    @property
    def shared_layers(self) -> frozenset[int]:
        return frozenset()

    def describe(self) -> str:
        experts = [f"{self.moe.experts} experts, {self.moe.top_k} active"] if self.moe else []
        if self.moe and len(self.sparse) < len(self.kinds):
            experts[0] += f" in {len(self.sparse)} layers"
        window = [f"window {self.window}"] if SLIDING in self.kinds else []
        latent = [f"latent {self.latent.rank} + {self.head_dim}"] if self.latent else []
        return layers_line(list(self.kinds), window + latent + experts)


def split_decoder(config: DecoderConfig) -> Split:
    """What of it can be sharded among ranks."""
    dense = len(config.sparse) < len(config.kinds)
    inner = [config.intermediate_size] * dense + (
        [config.moe.intermediate_size] if config.sparse and config.moe else []
    )

    def local(heads: int, kv_heads: tuple[int, ...]) -> DecoderConfig:
        return replace(config, heads=heads, kv_heads=kv_heads[0])

    return Split(config.heads, (config.kv_heads,) * len(config.kinds), tuple(inner), local)


def parse_decoder(
    raw: Mapping[str, Any], kinds: tuple[str, ...] | None = None, partial: float | None = None
) -> DecoderConfig:
    """What all families of this shape write alike; `kinds` None: every layer sees everything. Raises ConfigError.

    `partial`: the share of a head that is rotated where the config does not say it; None: whole heads are.
    """
    kind = str(raw.get("model_type"))
    fields = Fields(raw, kind)
    fields.refuse("hidden_act", (None, "silu"), f"{kind} models use silu")
    if partial is None:
        fields.refuse(PARTIAL, (None, 1, 1.0), f"{kind} models rotate whole heads")
    heads, hidden = fields.size("num_attention_heads"), fields.size("hidden_size")
    kv_heads = fields.size("num_key_value_heads", heads)
    head_dim = fields.size("head_dim", hidden // heads)
    if heads % kv_heads or head_dim % 2 or (raw.get("head_dim") is None and hidden % heads):
        raise ConfigError(
            f"{kind}: {heads} heads of size {head_dim} over {kv_heads} K/V heads do not divide a width of {hidden}: "
            "download config.json again"
        )
    vocab, eos = fields.size("vocab_size"), raw.get("eos_token_id")
    rotary, max_len = _rotary(fields, partial is not None), fields.size("max_position_embeddings")
    if rotary.kind == "yarn":  # added to a config by hand, as Qwen's cards say, it makes the context longer
        max_len = max(max_len, int(min(rotary.original * rotary.factor, MOST["max_position_embeddings"])))
    kinds = kinds or (FULL,) * fields.size("num_hidden_layers")
    return DecoderConfig(
        model_type=kind,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=fields.size("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        kinds=kinds,
        window=fields.size("sliding_window", least=2) if SLIDING in kinds else None,
        rotary=rotary,
        eps=fields.number("rms_norm_eps", 1e-6),
        max_len=max_len,
        eos_token_ids=() if eos is None else token_ids(eos, vocab, kind),
        tied=bool(raw.get("tie_word_embeddings", False)),
        rotated=None if partial is None else _rotated(fields, head_dim, partial),
    )


def _rotated(fields: Fields, head_dim: int, partial: float) -> int:
    """Columns of a head that are rotated, by the share of it that the config says."""
    rope = fields.raw.get("rope_parameters") or fields.raw.get("rope_scaling") or {}
    share = Fields({**fields.raw, **rope}, fields.where).number(PARTIAL, partial)
    columns = int(head_dim * share)
    if share > 1 or columns < 2 or columns % 2:
        raise ConfigError(
            f"{fields.where}: {PARTIAL}={share:g} of a head of {head_dim} is not an even number of columns: download "
            "config.json again"
        )
    return columns


def sliding_kinds(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Layer kinds as Qwen writes them: `layer_types`, else `use_sliding_window` from layer `max_window_layers` on."""
    fields = Fields(raw, str(raw.get("model_type")))
    count, given = fields.size("num_hidden_layers"), raw.get("layer_types")
    slides = bool(raw.get("use_sliding_window")) and raw.get("sliding_window") is not None
    if given is None:
        first = fields.size("max_window_layers", 28, least=0) if slides else count
        return tuple(SLIDING if i >= first else FULL for i in range(count))
    if not isinstance(given, list) or len(given) != count or not all(k in (SLIDING, FULL) for k in given):
        raise ConfigError(f"{fields.where}: layer_types must name {count} layers, each {SLIDING} or {FULL}")
    if SLIDING in given and not slides:
        raise ConfigError(
            f"{fields.where}: layer_types has {SLIDING}, but there is no sliding_window in use: set use_sliding_window "
            "and sliding_window, or write full_attention"
        )
    return tuple(given)


def listed_kinds(fields: Fields, every: int) -> tuple[str, ...]:
    """Layer kinds as `layer_types` lists them, else a layer without a window after `every` - 1 that have one."""
    count, given = fields.size("num_hidden_layers"), fields.raw.get("layer_types")
    if given is None:
        return tuple(SLIDING if (i + 1) % every else FULL for i in range(count))
    if not isinstance(given, list) or len(given) != count or not all(k in (SLIDING, FULL) for k in given):
        raise ConfigError(
            f"{fields.where}: layer_types={shown(given)} must name {count} layers, each {SLIDING} or {FULL}"
        )
    return tuple(given)


def rotary_by_kind(
    raw: Mapping[str, Any], fields: Fields, thetas: tuple[float, float]
) -> tuple[dict[str, Any], Rotary]:
    """(rope_parameters of layers without a window, the rotary embeddings of those with one, which are never scaled).

    transformers 5 writes `rope_parameters` by kind; older ones `rope_theta` and `rope_scaling` of the layers without.
    `thetas`: the bases of both kinds where they are not said.
    """
    given = raw.get("rope_parameters")
    if isinstance(given, Mapping) and (FULL in given or SLIDING in given):
        local = Fields(given.get(SLIDING) or {}, f"{fields.where}.rope_parameters")
        local.refuse("rope_type", (None, "default"), "layers with a window have plain rotary embeddings")
        return {"rope_theta": thetas[0], **(given.get(FULL) or {})}, Rotary(
            local.number("rope_theta", thetas[1])
        )
    scaled = raw.get("rope_scaling") or given or {}
    if not isinstance(scaled, Mapping):
        raise ConfigError(
            f"{fields.where}: rope_scaling is {shown(scaled)}, not an object: download config.json again"
        )
    return {"rope_theta": fields.number("rope_theta", thetas[0]), **scaled}, Rotary(thetas[1])


def _rotary(fields: Fields, partial: bool) -> Rotary:
    raw = fields.raw
    name = "rope_parameters" if raw.get("rope_parameters") is not None else "rope_scaling"
    settings = raw.get(name) or {}
    if not isinstance(settings, Mapping):
        raise ConfigError(
            f"{fields.where}: {name} is {shown(settings)}, not an object: download config.json again"
        )
    rope = Fields(settings, f"{fields.where}.{name}")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10_000.0))
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind in LONGROPE and partial:
        return _longrope(rope, theta, fields)
    if kind not in ROPE_TYPES:
        raise ConfigError(
            f"{rope.where}: rope type {shown(kind)} is not supported, only {', '.join(ROPE_TYPES)}: use a checkpoint "
            f"with one of these, or remove {name} where texts stay within the original context"
        )
    if not partial:
        rope.refuse(PARTIAL, (None, 1, 1.0), "whole heads are rotated")
    if kind == "default":
        return Rotary(theta)
    needed = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [key for key in needed[: 4 if kind == "llama3" else 1] if settings.get(key) is None]
    if missing:
        raise ConfigError(f"{rope.where} lacks {', '.join(missing)}: download config.json again")
    factor = rope.number("factor", 1.0)
    if kind == "linear":
        return Rotary(theta, kind, factor)
    if kind == "yarn":
        return _yarn(rope, theta, fields.size("max_position_embeddings"))
    low, high, original = (rope.number(key, 1.0) for key in needed[1:])
    if high <= low:
        raise ConfigError(
            f"{rope.where}: high_freq_factor={high:g} is not above low_freq_factor={low:g}: download config.json again"
        )
    return Rotary(theta, kind, factor, low, high, original)


def _longrope(rope: Fields, theta: float, fields: Fields) -> Rotary:
    """LongRoPE (arXiv 2402.13753); source: transformers' modeling_rope_utils. `original` is the context in which the
    short factors hold."""
    context = float(fields.size("max_position_embeddings"))
    original = fields.number(
        "original_max_position_embeddings", rope.number("original_max_position_embeddings", context)
    )
    short, long = rope.raw.get("short_factor"), rope.raw.get("long_factor") or []
    lists = all(
        isinstance(factors, list) and all(isinstance(x, int | float) and x > 0 for x in factors)
        for factors in (short, long)
    )
    if not short or not lists or original <= 1 or len(long) not in (0, len(short)):
        raise ConfigError(
            f"{rope.where}: short_factor and long_factor are no lists of numbers above 0 of one length, or the original "
            f"context of {original:g} tokens is too short: download config.json again"
        )
    factor = rope.number("factor", context / original)
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    stretch = rope.number("attention_factor", usual)
    return Rotary(
        theta, "longrope", factor, original=original, attention=stretch,
        divisors=tuple(map(float, short)), long_divisors=tuple(map(float, long)),
    )  # fmt: skip


def _yarn(rope: Fields, theta: float, context: int) -> Rotary:
    """YaRN (arXiv 2309.00071), with the defaults of transformers' modeling_rope_utils."""
    rope.refuse(
        "truncate", (None, True, False), "whether the pairs where scaling begins and ends are rounded"
    )
    factor, original = rope.number("factor", 1.0), rope.number("original_max_position_embeddings", context)
    low, high = rope.number("beta_slow", 1.0), rope.number("beta_fast", 32.0)
    if high <= low or theta <= 1:
        raise ConfigError(
            f"{rope.where}: beta_fast={high:g} is not above beta_slow={low:g}, or rope_theta={theta:g} not above 1: "
            "download config.json again"
        )

    def growth(share: float) -> float:
        return 0.1 * share * math.log(max(factor, 1.0)) + 1.0

    both = rope.raw.get("mscale") and rope.raw.get("mscale_all_dim")
    attention = growth(1.0)
    if both:
        attention = growth(rope.number("mscale", 1.0)) / growth(rope.number("mscale_all_dim", 1.0))
    stretch = rope.number("attention_factor", attention)
    rounded = rope.raw.get("truncate") is not False
    return Rotary(theta, "yarn", factor, low, high, original, stretch, rounded=rounded)
