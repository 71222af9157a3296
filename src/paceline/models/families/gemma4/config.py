"""config.json of the Gemma 4 family -> one frozen `GemmaConfig`, whoever wrote it.

Google and older transformers write `global_head_dim` and `num_global_key_value_heads`; newer transformers
write `per_layer_config`. Multimodal configs nest the language model under `text_config`. A field that is
missing has transformers' default only where a checkpoint cannot contradict it unseen: all sizes are required.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.drafter_kinds import ASSISTANT_TYPES
from paceline.errors import ConfigError
from paceline.models.families import model_type_of
from paceline.models.fields import Fields, shown, token_ids
from paceline.models.spec import FULL, SLIDING, MoeConfig, layers_line

TEXT_TYPES = ("gemma4_text", "gemma4_unified_text")


MULTIMODAL_TYPES = ("gemma4", "gemma4_unified")


@dataclass(frozen=True, slots=True)
class Rope:
    theta: float
    partial: float  # share of the pairs that rotate, 1.0 = all; the frequencies always span the whole head
    factor: float  # positions are divided by it


@dataclass(frozen=True, slots=True)
class LayerConfig:
    kind: str  # "sliding_attention" | "full_attention"
    head_dim: int
    kv_heads: int
    shared: bool  # has no K/V of its own and reads the last owning layer of its kind
    k_eq_v: bool  # values are the raw key projections
    intermediate_size: int


@dataclass(frozen=True, slots=True)
class GemmaConfig:
    """The language model. Sizes in elements, windows in tokens."""

    model_type: str  # as config.json says at its top
    vocab_size: int
    hidden_size: int
    heads: int
    layers: tuple[LayerConfig, ...]
    window: int
    rope: Mapping[str, Rope]  # by layer kind
    eps: float
    softcap: float | None
    max_len: int
    eos_token_ids: tuple[int, ...]
    tied: bool  # lm_head is the embedding table
    ple_size: int  # per-layer input embedding, 0 = none
    ple_vocab: (
        int  # tokens that have one; fewer than vocab_size where tokens were added and the table not resized
    )
    moe: MoeConfig | None
    modalities: tuple[str, ...]  # towers that the checkpoint may hold
    pad_id: int  # the token whose per-layer embedding soft tokens take
    bidirectional: bool  # rows of a picture see each other in sliding layers

    def window_of(self, kind: str) -> int | None:
        return self.window if kind == SLIDING else None

    @property
    def layer_count(self) -> int:
        return len(self.layers)

    @property
    def shared_layers(self) -> frozenset[int]:
        return frozenset(i for i, layer in enumerate(self.layers) if layer.shared)

    def describe(self) -> str:
        shared = len(self.shared_layers)
        extras = [f"{shared} share K/V"] if 0 < shared < len(self.layers) else []
        extras += [f"{self.moe.experts} experts, {self.moe.top_k} active"] if self.moe else []
        extras += [f"per-layer inputs of {self.ple_size}"] if self.ple_size else []
        return layers_line([layer.kind for layer in self.layers], extras)


@dataclass(frozen=True, slots=True)
class AssistantConfig:
    """The MTP drafter: `text` describes its Q-only layers."""

    model_type: str
    text: GemmaConfig
    backbone_hidden_size: int
    clusters: int  # of the ordered-embedding head, 0 = dense head
    top_clusters: int


def parse_gemma(raw: Mapping[str, Any]) -> GemmaConfig:
    """A target of the Gemma 4 family. Raises ConfigError."""
    kind = model_type_of(raw, TEXT_TYPES + MULTIMODAL_TYPES, "target")
    if kind in TEXT_TYPES:
        return _parse_text(Fields(raw, kind), raw, kind)
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise ConfigError(f"config.json of type {kind} has no text_config: download it again")
    return _parse_text(Fields(text, f"{kind}.text_config"), raw, kind)


def parse_own_layers(raw: Mapping[str, Any], kind: str) -> GemmaConfig:
    """Layers with K/V of their own, without experts or per-layer inputs, as a drafter `kind` may have them. Raises
    ConfigError.
    """
    plain = {**raw, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "enable_moe_block": False}
    return _parse_text(Fields(plain, kind), plain, kind)


def parse_assistant(raw: Mapping[str, Any]) -> AssistantConfig:
    """The MTP drafter described by a config.json. Raises ConfigError."""
    kind = model_type_of(raw, ASSISTANT_TYPES, "drafter")
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise ConfigError(f"config.json of type {kind} has no text_config: download it again")
    fields = Fields(text, f"{kind}.text_config")
    layers = fields.size("num_hidden_layers")
    shared = text.get("num_kv_shared_layers") or layers
    if shared != layers:
        raise ConfigError(
            f"{fields.where}: num_kv_shared_layers is {shown(shared)} of {layers}, but a drafter owns no K/V: "
            f"set it to {layers}"
        )
    plain = dict(text, num_kv_shared_layers=layers)
    plain.setdefault("hidden_size_per_layer_input", 0)
    config = _parse_text(Fields(plain, fields.where), raw, kind)
    if config.ple_size or config.moe:
        raise ConfigError(
            f"{fields.where}: per-layer inputs and experts are not part of any known Gemma 4 drafter"
        )
    top = Fields(raw, kind)
    clusters = top.size("num_centroids", 2048) if raw.get("use_ordered_embeddings") else 0
    chosen = top.size("centroid_intermediate_top_k", 32) if clusters else 0
    if clusters and (config.vocab_size % clusters or chosen > clusters):
        raise ConfigError(
            f"{kind}: {clusters} centroids, {chosen} of them active, do not divide a vocabulary of "
            f"{config.vocab_size}: download config.json again"
        )
    return AssistantConfig(kind, config, top.size("backbone_hidden_size"), clusters, chosen)


def _parse_text(fields: Fields, top: Mapping[str, Any], model_type: str) -> GemmaConfig:
    raw, unified = fields.raw, "unified" in model_type
    _refuse_unsupported(fields)
    heads = fields.size("num_attention_heads")
    layers = _layers(fields, heads)
    moe = None
    if raw.get("enable_moe_block"):
        moe = MoeConfig(
            fields.size("num_experts"), fields.size("top_k_experts"), fields.size("moe_intermediate_size")
        )
        if moe.top_k > moe.experts:
            raise ConfigError(f"{fields.where}: top_k_experts={moe.top_k} of only {moe.experts} experts")
    vocab = fields.size("vocab_size")
    ple = 0 if unified else fields.size("hidden_size_per_layer_input", 256, least=0)
    ple_vocab = fields.size("vocab_size_per_layer_input", vocab) if ple else 0
    softcap = raw.get("final_logit_softcapping")
    eos = next((e for e in (top.get("eos_token_id"), raw.get("eos_token_id")) if e is not None), 1)
    tied = next(
        (t for t in (top.get("tie_word_embeddings"), raw.get("tie_word_embeddings")) if t is not None), True
    )
    return GemmaConfig(
        model_type=model_type,
        vocab_size=vocab,
        hidden_size=fields.size("hidden_size"),
        heads=heads,
        layers=layers,
        window=fields.size(
            "sliding_window", None if any(x.kind == SLIDING for x in layers) else 512, least=2
        ),
        rope={kind: _rope(fields, kind) for kind in sorted({layer.kind for layer in layers})},
        eps=fields.number("rms_norm_eps", 1e-6),
        softcap=None if softcap is None else fields.number("final_logit_softcapping", 0.0),
        max_len=fields.size("max_position_embeddings", 262_144 if unified else 131_072),
        eos_token_ids=token_ids(eos, vocab, fields.where),
        tied=bool(tied),
        ple_size=ple,
        ple_vocab=ple_vocab,
        moe=moe,
        modalities=tuple(m for m in ("vision", "audio") if top.get(f"{m}_config") is not None),
        pad_id=min(fields.size("pad_token_id", 0, least=0), vocab - 1),
        bidirectional=raw.get("use_bidirectional_attention", "vision" if unified else None) == "vision",
    )


def _refuse_unsupported(fields: Fields) -> None:
    fields.refuse("attention_bias", (None, False), "no published Gemma 4 has biases")
    fields.refuse("hidden_activation", (None, "gelu_pytorch_tanh"), "Gemma 4 uses gelu_pytorch_tanh")
    fields.refuse(
        "use_bidirectional_attention",
        (None, False, "vision"),
        "text must be read causally, use a generative checkpoint",
    )


def _layers(fields: Fields, heads: int) -> tuple[LayerConfig, ...]:
    raw, count = fields.raw, fields.size("num_hidden_layers")
    kinds = raw.get("layer_types") or [FULL if (i + 1) % 6 == 0 else SLIDING for i in range(count - 1)] + [
        FULL
    ]
    if not isinstance(kinds, list) or len(kinds) != count or not all(k in (SLIDING, FULL) for k in kinds):
        raise ConfigError(f"{fields.where}: layer_types must name {count} layers, each {SLIDING} or {FULL}")
    if kinds[-1] != FULL:
        raise ConfigError(
            f"{fields.where}: the last of layer_types is {kinds[-1]}, Gemma 4 needs {FULL} there"
        )
    owners = count - fields.size("num_kv_shared_layers", 0, least=0)
    if owners < 0 or (owners and set(kinds[owners:]) - set(kinds[:owners])):
        raise ConfigError(
            f"{fields.where}: num_kv_shared_layers={count - owners} leaves a layer kind without K/V"
        )
    width = fields.size("intermediate_size")
    double = bool(raw.get("use_double_wide_mlp")) and owners > 0
    dims, kv_heads = _per_layer(fields, kinds)
    for i in range(count):
        if heads % kv_heads[i] or dims[i] % 2:
            raise ConfigError(
                f"{fields.where}: layer {i} has {heads} heads of size {dims[i]} over {kv_heads[i]} K/V "
                "heads, which do not divide: download config.json again"
            )
        source = max((j for j in range(owners) if kinds[j] == kinds[i]), default=i)
        if i >= owners and (dims[i], kv_heads[i]) != (dims[source], kv_heads[source]):
            raise ConfigError(
                f"{fields.where}: layer {i} shares the K/V of layer {source} but has other head sizes"
            )
    return tuple(
        LayerConfig(
            kind=kind,
            head_dim=dims[i],
            kv_heads=kv_heads[i],
            shared=i >= owners,
            k_eq_v=bool(raw.get("attention_k_eq_v")) and kind == FULL,
            intermediate_size=width * (2 if double and i >= owners else 1),
        )
        for i, kind in enumerate(kinds)
    )


def _per_layer(fields: Fields, kinds: list[str]) -> tuple[list[int], list[int]]:
    """Head size and K/V heads of each layer, from either way of writing them."""
    raw = fields.raw
    overrides = _overrides(fields, len(kinds))
    head_dim = fields.size("head_dim")
    kv_heads = fields.size("num_key_value_heads")
    wide, few = head_dim, kv_heads
    if overrides is None:
        wide = fields.size("global_head_dim", 512)
        few = fields.size("num_global_key_value_heads", kv_heads) if raw.get("attention_k_eq_v") else kv_heads
    dims, heads = [], []
    for i, kind in enumerate(kinds):
        layer = Fields((overrides or {}).get(i, {}), f"{fields.where}.per_layer_config[{i}]")
        dims.append(layer.size("head_dim", wide if kind == FULL else head_dim))
        heads.append(layer.size("num_key_value_heads", few if kind == FULL else kv_heads))
        size = raw.get("global_head_dim")
        if kind == FULL and size is not None and size != dims[-1]:
            raise ConfigError(
                f"{fields.where}: global_head_dim={shown(size)} but per_layer_config gives layer {i} a head_dim of "
                f"{dims[-1]}: remove the wrong one"
            )
    return dims, heads


def _overrides(fields: Fields, count: int) -> dict[int, Mapping[str, Any]] | None:
    raw = fields.raw.get("per_layer_config")
    if raw is None:
        return None
    items = dict(enumerate(raw)) if isinstance(raw, list) else raw
    if not isinstance(items, Mapping) or not all(_is_layer(i, count) for i in items):
        raise ConfigError(f"{fields.where}: per_layer_config must map layer numbers below {count} to fields")
    overrides: dict[int, Mapping[str, Any]] = {}
    for i, layer in items.items():
        unknown = (
            set(layer) - {"head_dim", "num_key_value_heads"} if isinstance(layer, Mapping) else {shown(layer)}
        )
        if unknown:
            raise ConfigError(
                f"{fields.where}: per_layer_config overrides {', '.join(sorted(unknown))} in layer {i}, "
                "which paceline does not support"
            )
        overrides[int(i)] = layer
    return overrides


def _is_layer(key: object, count: int) -> bool:
    return len(str(key)) < 9 and str(key).isdecimal() and int(str(key)) < count


def _rope(fields: Fields, kind: str) -> Rope:
    defaults = {
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    }
    raw = fields.raw.get("rope_parameters")
    _check_legacy_rope(fields, None if raw is not None else defaults)
    raw = defaults if raw is None else raw
    if not isinstance(raw, Mapping) or not isinstance(raw.get(kind), Mapping):
        raise ConfigError(f"{fields.where}: rope_parameters has no entry for {kind}")
    rope = Fields(raw[kind], f"{fields.where}.rope_parameters.{kind}")
    if "rope_theta" not in rope.raw:
        raise ConfigError(f"{rope.where} lacks rope_theta: download config.json again")
    theta = rope.number("rope_theta", 1.0)
    rope_type = rope.raw.get("rope_type", "default")
    if rope_type == "default":
        return Rope(theta, 1.0, 1.0)
    if rope_type == "proportional":
        partial = rope.number("partial_rotary_factor", 1.0)
        if partial > 1:
            raise ConfigError(f"{rope.where}: partial_rotary_factor={partial} is more than 1")
        return Rope(theta, partial, rope.number("factor", 1.0))
    raise ConfigError(
        f"{rope.where}: rope_type {shown(rope_type)} is not supported: Gemma 4 uses default and proportional"
    )


def _check_legacy_rope(fields: Fields, used: Mapping[str, Mapping[str, Any]] | None) -> None:
    """Refuse fields of older configs that say something else than is `used` (None: rope_parameters says it)."""
    scaling = fields.raw.get("rope_scaling")
    kind = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, Mapping) else scaling
    if kind not in (None, "default"):
        raise ConfigError(
            f"{fields.where}: rope_scaling of type {shown(kind)} is not supported: Gemma 4 was made without it, "
            "remove it, or write rope_parameters"
        )
    if used is None:
        return
    for name, layers in (("rope_theta", FULL), ("rope_local_base_freq", SLIDING)):
        value = fields.raw.get(name)
        if value is not None and value != used[layers]["rope_theta"]:
            raise ConfigError(
                f"{fields.where}: {name}={shown(value)} is written in the old way: write it as rope_theta of "
                f"rope_parameters.{layers}"
            )
