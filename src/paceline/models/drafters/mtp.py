"""Multi-token prediction with K/V of its own: a decoder layer fed with [norm(embedding) ; norm(hidden state)].

Entry p of the first module pairs the target's state after its final norm at row p with token p + 1. One module drafts all
further tokens from its own output. Of several, module k pairs what module k - 1 gives for row p with token p + k, and
drafts the token at its depth. Sources of truth: transformers' modeling_layers.MtpModel, speculators' models/mtp.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from paceline.checkpoints.loading import Shapes, Weights
from paceline.core import ForwardBatch
from paceline.errors import ConfigError, PairError
from paceline.kv.cache import KVCache
from paceline.models.config import parse_target
from paceline.models.drafters.base import FINAL
from paceline.models.drafters.speculators import parse_layers
from paceline.models.drafters.state_net import (
    DrafterFiles,
    Fits,
    Inside,
    Network,
    NetworkKind,
    SteppingNet,
    misfit,
)
from paceline.models.fields import Fields, shown
from paceline.models.layers.attention import Attention, attend, store
from paceline.models.layers.decoder import Layer, attention_outputs, decoder_shapes, read_layer
from paceline.models.layers.decoder_config import DecoderConfig, MambaConfig
from paceline.models.layers.linear import read_norm
from paceline.models.layers.mlp import feed
from paceline.models.layers.rotary import inverse_frequencies
from paceline.models.spec import FULL
from paceline.models.target import GraphTarget
from paceline.ops.base import Graph, Ops, Value, Weight

KIND = "mtp"
PROMISES = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "mtp_num_layers")
FIRST, CHAINED = "mtp_hidden_states_first", "chain_hidden_post_norm"  # transformers' keys
# beginnings of the names of a module's tensors: DeepSeek's and GLM's, Qwen's, those of `speculators`
_RENAMED = {
    "shared_head.norm.": "norm.", "shared_head.head.": "lm_head.", "fc.": "eh_proj.",
    "pre_fc_norm_embedding.": "enorm.", "pre_fc_norm_hidden.": "hnorm.", "input_proj.": "eh_proj.",
    "token_layernorm.": "enorm.", "hidden_layernorm.": "hnorm.", "final_layernorm.": "norm.",
}  # fmt: skip
_NEWEST = dict(list(_RENAMED.items())[-4:])  # of `speculators`
_NUMBERED = re.compile(r"(?:(?P<mtp>mtp\.|mtp_)?)layers\.(?P<at>\d{1,9})\.(?P<rest>.+)")


@dataclass(frozen=True, slots=True)
class MtpConfig:
    layers: DecoderConfig  # one for each module
    hidden_first: bool = False  # [norm(hidden state) ; norm(embedding)]


def name_of(name: str, first: int) -> str | None:
    """What a module's tensor is called here; None for one of the target, which has layers below `first`."""
    inside = _NUMBERED.fullmatch(name)
    if inside is not None:
        at = int(inside["at"]) - (0 if inside["mtp"] else first)
        return None if at < 0 else f"layers.{at}.{_renamed(inside['rest'])}"
    return f"layers.0.{_renamed(name[4:])}" if name.startswith("mtp.") else None


def _renamed(name: str) -> str:
    begin = next((begin for begin in _RENAMED if name.startswith(begin)), None)
    return name if begin is None else _RENAMED[begin] + name[len(begin) :]


def speculators_name(name: str) -> str:
    """What the format of `speculators` calls a tensor of the only module."""
    own = name.removeprefix("layers.0.")
    begin = next((old for old in _NEWEST if own.startswith(_NEWEST[old])), None)
    return f"mtp_layers.0.{own if begin is None else begin + own[len(_NEWEST[begin]) :]}"


def modules_in(names: Iterable[str], layers: int) -> int:
    """How many modules the files of a target of so many layers hold: a number that is left out is no module."""
    modules = [made for name in names if (made := name_of(name, layers)) is not None]
    return len({made.split(".")[1] for made in modules})


def inside(names: Iterable[str], raw: Mapping[str, Any]) -> Inside:
    """What of it is among a target's tensors. Raises ConfigError."""
    count = modules_in(names, parse_target(raw).layer_count)
    text = raw.get("text_config")
    raw = {**raw, **text} if isinstance(text, Mapping) else raw
    word = next((key for key in PROMISES if raw.get(key)), None)
    if count:
        short = ""
        if word is not None and isinstance(raw[word], int) and raw[word] > count:
            promise = f"config.json promises {shown(raw[word])} ({word})"
            short = f", where {promise}: another download of this model may hold the rest"
        return Inside(f"{count} module{'s' * (count > 1)} for multi-token prediction{short}")
    if word is None:
        return Inside()
    return Inside(
        promised=f"config.json promises multi-token prediction ({word}={shown(raw[word])}), which the weights do not "
        "hold: another download of this model may"
    )


def parse_mtp(raw: Mapping[str, Any]) -> DecoderConfig:
    """The target that a drafter in the format of `speculators` says it was made for. Raises ConfigError."""
    if Fields(raw, KIND).size("num_nextn_predict_layers", 1) != 1:
        raise ConfigError("mtp: several modules are not known in this format: use the drafter ngram")
    return parse_layers(raw, KIND, {FIRST, *PROMISES})


def plan_mtp(files: DrafterFiles, fits: Fits | None) -> Network:
    """What is to be loaded: a target's own modules, or a drafter in the format of `speculators`."""
    raw, entries, folder = files.raw, files.entries, files.folder
    fields = Fields(raw, KIND)
    fields.refuse(FIRST, (None, False, True), "it is either true or false")
    fields.refuse(CHAINED, (None,), "modules without a norm of their own are not read: use the drafter ngram")
    if "speculators_model_type" in raw:
        target, first, count = parse_mtp(raw), 0, 1
        if fits is not None:
            misfit(files, KIND, fits, target.hidden_size, target.vocab_size, target.layer_count)
    else:
        parsed = parse_target(raw)
        if not isinstance(parsed, DecoderConfig) or isinstance(parsed.delta, MambaConfig):
            raise PairError(
                f"{folder} holds modules for multi-token prediction, which are not read of a {parsed.model_type}: use "
                "the drafter ngram"
            )
        target, first, count = parsed, parsed.layer_count, modules_in(entries, parsed.layer_count)
    given = {made for name in entries if (made := name_of(name, first)) is not None}
    kind = FULL if FULL in target.kinds else target.kinds[0]
    sparse = frozenset(k for k in range(count) if f"layers.{k}.mlp.gate.weight" in given)
    config = MtpConfig(replace(target, kinds=(kind,) * count, sparse=sparse), bool(raw.get(FIRST)))
    return Network(
        _shapes(config.layers, given),
        config.layers,
        partial(MtpNet, config),
        lambda name: name_of(name, first),
    )


def _shapes(config: DecoderConfig, given: set[str]) -> Shapes:
    """Of every tensor; a table or a head only where the checkpoint has one of its own."""
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes = {name: shape for name, shape in decoder_shapes(config).items() if name.startswith("layers.")}
    for k in range(len(config.kinds)):
        at = f"layers.{k}"
        shapes |= {f"{at}.{name}.weight": (hidden,) for name in ("enorm", "hnorm", "norm")}
        shapes[f"{at}.eh_proj.weight"] = (hidden, 2 * hidden)
        own = (f"{at}.embed_tokens.weight", f"{at}.lm_head.weight")
        shapes |= {name: (vocab, hidden) for name in own if name in given}
    return shapes


@dataclass(frozen=True, slots=True, eq=False)
class Module:
    token_norm: Tensor  # [H]
    hidden_norm: Tensor  # [H]
    projection: Weight
    layer: Layer
    norm: Tensor  # [H]
    embedding: Weight
    embedding_scale: float
    head: Weight


class MtpNet(SteppingNet):
    """Loaded modules; implements `StateNet` if it is one, else `ChainNet`."""

    def __init__(self, config: MtpConfig, weights: Weights, target: GraphTarget) -> None:
        layers = config.layers
        super().__init__(layers, target, (FINAL,), target.hidden_size, None)
        self.config, self.shift = config, len(layers.kinds)
        inv_freq = inverse_frequencies(layers.rotary, layers.rotated or layers.head_dim).to(weights.device)
        self.modules = tuple(_read(weights, layers, k, inv_freq, target) for k in range(self.shift))
        first = self.modules[0]
        self.embedding, self.embedding_scale, self.head = first.embedding, first.embedding_scale, first.head
        self._set_store(attention_outputs(module.layer for module in self.modules))
        self.stages: list[tuple[Graph, Graph]] = [
            (partial(self._stage, module), partial(self._scores, module)) for module in self.modules
        ]

    @property
    def graphs(self) -> list[Graph]:
        return super().graphs if self.shift == 1 else [graph for stage in self.stages for graph in stage]

    def stage(self, depth: int, rows: ForwardBatch, states: Tensor, cache: KVCache) -> Tensor:
        """What the module of a depth gives for rows, of what the one before gives for them; writes its K/V."""
        return self.runner.run(self.stages[depth][0], rows, cache, {"states": states})[0]

    def stage_logits(self, depth: int, hidden: Tensor) -> Tensor:
        """Scores of the token at a depth."""
        return self._scored(self.stages[depth][1], hidden)

    def seen(self, ops: Ops) -> Value:
        """The target's state after its final norm, `states`."""
        return ops.given("states", self.width)

    def keep(self, ops: Ops, x: Value, token: Value | None = None) -> Value:
        """Write K/V of rows of the first module."""
        config, layer = self.config.layers, self.modules[0].layer
        if not isinstance(layer.attention, Attention):
            return self.through(ops, x, token)[0]
        h = ops.rms_norm(self._inputs(ops, self.modules[0], x, token), layer.norm_in, config.eps)
        store(ops, h, layer.attention, config)
        return h

    def through(self, ops: Ops, x: Value, token: Value | None = None) -> tuple[Value, Value]:
        """What the head reads, which the next depth takes, too."""
        return (self._through(ops, self.modules[0], x, token),) * 2

    def _stage(self, module: Module, ops: Ops) -> tuple[Value, ...]:
        return (self._through(ops, module, ops.given("states", self.hidden_size)),)

    def _scores(self, module: Module, ops: Ops) -> tuple[Value, ...]:
        return (ops.linear(ops.given("hidden", self.hidden_size), module.head),)

    def _inputs(self, ops: Ops, module: Module, x: Value, token: Value | None = None) -> Value:
        """What the layer of a module reads."""
        config = self.config.layers
        if token is None:
            token = ops.embed(ops.tokens(), module.embedding, module.embedding_scale)
        token = ops.rms_norm(token, module.token_norm, config.eps)
        h = ops.rms_norm(x, module.hidden_norm, config.eps)
        both = ops.concat(h, token) if self.config.hidden_first else ops.concat(token, h)
        return ops.linear(both, module.projection)

    def _through(self, ops: Ops, module: Module, x: Value, token: Value | None = None) -> Value:
        """What the head reads and the next depth takes."""
        config, layer = self.config.layers, module.layer
        x = self._inputs(ops, module, x, token)
        x = ops.add(x, attend(ops, ops.rms_norm(x, layer.norm_in, config.eps), layer.attention, config))
        x = ops.add(x, feed(ops, ops.rms_norm(x, layer.norm_post, config.eps), layer.mlp))
        return ops.rms_norm(x, module.norm, config.eps)


def _read(weights: Weights, layers: DecoderConfig, k: int, inv_freq: Tensor, target: GraphTarget) -> Module:
    at = f"layers.{k}"
    own = weights.has(f"{at}.embed_tokens.weight")
    return Module(
        read_norm(weights, layers, f"{at}.enorm"),
        read_norm(weights, layers, f"{at}.hnorm"),
        weights.matrix(f"{at}.eh_proj"),
        read_layer(weights, layers, k, inv_freq),
        read_norm(weights, layers, f"{at}.norm"),
        weights.matrix(f"{at}.embed_tokens") if own else target.embedding,
        1.0 if own else target.embedding_scale,
        weights.matrix(f"{at}.lm_head") if weights.has(f"{at}.lm_head.weight") else target.head,
    )


NETWORK = NetworkKind(plan_mtp, parse_mtp, inside=inside)
