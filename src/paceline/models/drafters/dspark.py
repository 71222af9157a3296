"""DSpark: DFlash's block, whose tokens are chained by a thin head over the token before each (arXiv 2607.05147).

Scores of row k are those of the target's head plus W2 times a vector of rank r, made of W1's row of the token before
(the Markov head). A confidence head says how likely the token is kept. Sources of truth: DeepSpec's modeling/dspark,
speculators' models/dspark; formats: speculators, DeepSeek, SpecForge, LiquidAI.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from paceline.checkpoints.loading import Shapes, Weights
from paceline.core import ForwardBatch
from paceline.errors import ConfigError
from paceline.models.drafters.dflash import (
    OWN,
    TAPS,
    DFlashConfig,
    DFlashNet,
    Kin,
    check_block,
    dflash_shapes,
    inner_of,
    last_state_too,
    parse_block,
    renamed,
)
from paceline.models.drafters.speculators import ELSEWHERE, LAYER_KEYS
from paceline.models.drafters.speculators import KNOWN as KNOWN_KEYS
from paceline.models.drafters.state_net import (
    DrafterFiles,
    Fits,
    Network,
    NetworkKind,
)
from paceline.models.families.gemma4.config import GemmaConfig, parse_own_layers
from paceline.models.families.gemma4.layers import decoder_layer, layer_shapes, read_layers, store
from paceline.models.fields import Fields, shown
from paceline.models.layers.decoder_config import DecoderConfig, Rotary
from paceline.models.layers.linear import Linear
from paceline.models.spec import FULL
from paceline.models.target import GraphTarget
from paceline.ops.base import ChainStart, Drawn, Graph, Ops, Rule, Stop, Value, Weight

KIND, QWEN, GEMMA = "dspark", "Qwen3DSparkModel", "Gemma4DSparkModel"
# of a target with linear attention, whose config DeepSpec copies: its drafter has Qwen 3's layers all the same
COPIED = {
    "partial_rotary_factor", "mrope_interleaved", "mrope_section", "attn_output_gate", "output_gate_type",
    "full_attention_interval", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_value_head_dim", "linear_conv_kernel_dim", "mamba_ssm_dtype", "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings",
}  # fmt: skip
GEMMA_KEYS = {  # of a config of Gemma 4
    "global_head_dim", "num_global_key_value_heads", "attention_k_eq_v", "hidden_activation", "final_logit_softcapping",
    "num_kv_shared_layers", "hidden_size_per_layer_input", "vocab_size_per_layer_input", "use_double_wide_mlp",
    "use_bidirectional_attention", "per_layer_config",
}  # fmt: skip
TYPES = ("vanilla", "gated", "rnn")  # of Markov heads
HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
# as some say that rotated pairs are columns (2i, 2i + 1)
BONUS = "dspark_bonus_anchor"  # NVIDIA's word for it that the first row drafts nothing
STYLES = ("rope_is_neox_style", "is_neox_style")
KIN = Kin(
    KIND,
    own={*HEADS, *STYLES, BONUS, "confidence_head_alpha", "runtime_block_size", "draft_window_size"},
    inner={*HEADS, "attention_mode", "confidence_head_alpha"},
)
W1, W2, CONFIDENCE = "markov_head.markov_w1", "markov_head.markov_w2", "confidence_head.proj"


@dataclass(frozen=True, slots=True)
class DSparkConfig:
    block: DFlashConfig
    rank: int  # of the Markov head; 0: there is none, and it drafts as DFlash does
    markov: str = TYPES[0]  # one of TYPES
    confident: bool = True  # it has a confidence head
    reads_token: bool = True  # which reads W1's row, too
    gemma: GemmaConfig | None = None  # its layers, if they are Gemma 4's


def parse_dspark(raw: Mapping[str, Any]) -> DSparkConfig:
    """The drafter that a config.json describes. Raises ConfigError."""
    names = raw.get("architectures") or ()
    raw = _without_copies(raw) if QWEN in names and raw.get(TAPS) is None else raw
    gemma = _gemma_layers(raw) if GEMMA in names else None
    block = parse_block(raw, KIN, None if gemma is None else _as_decoder(gemma))
    inner = inner_of(raw, KIN)
    both = {**inner, **{key: value for key, value in raw.items() if value is not None}}
    fields = Fields(both, KIND)
    fields.refuse("attention_mode", (None, "gqa"), "only grouped attention is known")
    fields.refuse("markov_head_type", (None, *TYPES), f"a Markov head is one of {', '.join(TYPES)}")
    for name in (*HEADS[2:], *STYLES):
        fields.refuse(name, (None, True, False), "it is either true or false")
    rank = fields.size("markov_rank", 256, least=0)
    confident = both.get("enable_confidence_head") is not False
    reads_token = both.get("confidence_head_with_markov") is not False
    if confident and reads_token and not rank:
        if both.get("confidence_head_with_markov"):
            raise ConfigError(
                "dspark: confidence_head_with_markov is set, and markov_rank=0 leaves no Markov head to read: download "
                "config.json again"
            )
        reads_token = False
    if any(both.get(name) is False for name in STYLES):
        block = replace(block, layers=replace(block.layers, paired=True))
    return DSparkConfig(
        replace(block, first=_first(both, block.block)),
        rank,
        str(both.get("markov_head_type") or TYPES[0]),
        confident,
        reads_token,
        gemma,
    )


def _without_copies(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a config says of the drafter, and not of the target that it was copied from."""
    left = {key: value for key, value in raw.items() if key not in COPIED}
    if isinstance(rope := raw.get("rope_parameters"), Mapping):
        left["rope_parameters"] = {key: value for key, value in rope.items() if key not in COPIED}
    return left if left.keys() == raw.keys() else left | {"model_type": "qwen3"}


def _gemma_layers(raw: Mapping[str, Any]) -> GemmaConfig:
    """Raises ConfigError for what DeepSpec does not make, and for what is not known."""
    known = KNOWN_KEYS.union(OWN, KIN.own, LAYER_KEYS, GEMMA_KEYS, ELSEWHERE)
    if unknown := [key for key, value in raw.items() if key not in known and value not in (None, False, "")]:
        raise ConfigError(
            f"dspark: {unknown[0]}={shown(raw[unknown[0]])} is not known to this version, which would draft without it: "
            "update paceline, or use the drafter ngram"
        )
    kinds = raw.get("layer_types")
    if not isinstance(kinds, list) or any(kind != FULL for kind in kinds):
        raise ConfigError(
            "dspark: a Gemma 4 layer with a sliding window is not supported: use the drafter ngram"
        )
    return parse_own_layers(raw, KIND)


def _as_decoder(config: GemmaConfig) -> DecoderConfig:
    """Its sizes, as what has to do with its K/V and tables reads them."""
    layer = config.layers[0]
    return DecoderConfig(
        config.model_type, config.vocab_size, config.hidden_size, layer.intermediate_size, config.heads,
        layer.kv_heads, layer.head_dim, (FULL,) * len(config.layers), None, Rotary(config.rope[FULL].theta),
        config.eps, config.max_len, config.eos_token_ids, tied=True,
    )  # fmt: skip


def _first(raw: Mapping[str, Any], block: int) -> int:
    """The row that drafts the first token: the anchor's, 0, or the one after it. Raises ConfigError.

    A file that does not say it is one of the originals, which begin at the anchor, or one of `speculators`, which counts
    its drafted tokens: as many as rows, or one fewer. Old ones of these have the mask's rows alone.
    """
    anchored, bonus = raw.get("sample_from_anchor"), raw.get(BONUS)
    if bonus is not None and bonus is anchored:
        raise ConfigError(
            f"dspark: sample_from_anchor={shown(anchored)} and {BONUS}={shown(bonus)} say two things of the first row: "
            "download config.json again"
        )
    if bonus is not None:
        return 1 if bonus else 0
    if anchored is not None:
        return 0 if anchored else 1
    if raw.get(TAPS) is None:
        return 0
    methods = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
    count = methods[0].get("speculative_tokens") if isinstance(methods[0], Mapping) else None
    if count is not None and count not in (block, block - 1):
        raise ConfigError(
            f"dspark: speculative_tokens={shown(count)} of blocks of {block} rows, and no sample_from_anchor: add "
            "sample_from_anchor to config.json, true where the first row drafts"
        )
    return 0 if count == block else 1


def plan_dspark(files: DrafterFiles, fits: Fits | None) -> Network:
    """What is to be loaded. Raises ConfigError, WeightsError and, for another target's drafter, PairError."""
    config = parse_dspark(files.raw)
    taps = check_block(config.block, KIND, files, fits)
    config = replace(config, block=last_state_too(config.block, files, KIND))
    if len(config.block.taps) > len(taps):
        taps = (*taps, config.block.taps[-1])
    own = None if config.gemma is None else layer_shapes(config.gemma)
    if "enable_confidence_head" not in {**files.raw, **inner_of(files.raw, KIN)}:  # then the tensors say it
        config = replace(config, confident=f"{CONFIDENCE}.weight" in files.entries)
    shapes = dflash_shapes(config.block, files, own) | head_shapes(config)
    net = DSparkNet if config.gemma is None else GemmaDSparkNet
    return Network(shapes, config.block.layers, partial(net, config), renamed(config.block), taps)


def head_shapes(config: DSparkConfig) -> Shapes:
    """Name and shape of what DSpark has beyond DFlash."""
    hidden, rank = config.block.layers.hidden_size, config.rank
    shapes: Shapes = {}
    if rank:
        shapes |= {
            f"{W1}.weight": (config.block.layers.vocab_size, rank),
            f"{W2}.weight": (config.block.draft_vocab, rank),
        }
        if config.markov == "gated":
            shapes |= {
                "markov_head.gate_proj.weight": (rank, hidden + rank),
                "markov_head.gate_proj.bias": (rank,),
            }
        elif config.markov == "rnn":
            shapes |= {
                "markov_head.joint_proj.weight": (3 * rank, 2 * rank + hidden),
                "markov_head.joint_proj.bias": (3 * rank,),
            }
    if config.confident:
        width = hidden + rank if config.reads_token else hidden
        shapes |= {f"{CONFIDENCE}.weight": (1, width), f"{CONFIDENCE}.bias": (1,)}
    return shapes


class DSparkNet(DFlashNet):
    """A loaded drafter network; implements `ChainedNet`."""

    chained = True

    def __init__(self, config: DSparkConfig, weights: Weights, target: GraphTarget) -> None:
        super().__init__(config.block, weights, target)
        self.own, self.chained = config, bool(config.rank)
        self.embedding_scale = 1.0  # the table's rows as they are, also where they are the target's

        def linear(name: str) -> Linear:
            return Linear(weights.matrix(name), weights.vector(f"{name}.bias"))

        if config.rank:
            self.w1, self.w2 = weights.matrix(W1), weights.matrix(W2)
        self.gate = linear("markov_head.gate_proj") if config.rank and config.markov == "gated" else None
        self.joint = linear("markov_head.joint_proj") if config.rank and config.markov == "rnn" else None
        self.confidence = linear(CONFIDENCE) if config.confident else None
        self.state_width = config.rank if self.joint is not None else 0
        self.confident = self.confidence is not None and self.chained
        self.chain_graph = self._chain

    @property
    def graphs(self) -> list[Graph]:
        return [*super().graphs, *([self.chain_graph] if self.chained else [])]

    def chain(
        self, tokens: ForwardBatch, given: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Scores [N, C] after the tokens before, the logit of their confidence [N, 1], the state of the next step."""
        out = list(self.runner.run(self.chain_graph, tokens, None, given))
        logits = out.pop(0)
        sure = out.pop(0) if self.confident else None
        return logits, sure, out.pop(0) if self.state_width else None

    def chain_round(self, start: ChainStart, rules: list[Rule], stops: list[Stop]) -> Drawn | None:
        """All steps of a round with their draws in one go; None on a runner that cannot."""
        return self.runner.chain_round(self.chain_graph, start, rules, stops)

    def _chain(self, ops: Ops) -> tuple[Value, ...]:
        base = ops.given("base", self.head.out_features)
        token = self.token(ops)
        latent, after, sure = token, list[Value](), list[Value]()
        if self.gate is not None or self.joint is not None or self.confidence is not None:
            hidden = ops.given("hidden", self.hidden_size)
        if self.gate is not None:
            latent = ops.gated(self.gate(ops, ops.concat(hidden, token)), token, "sigmoid")
        if self.joint is not None:
            rank, state = self.own.rank, ops.given("state", self.own.rank)
            z = self.joint(ops, ops.concat(ops.concat(state, token), hidden))
            gate, candidate, out = (ops.columns(z, i * rank, (i + 1) * rank) for i in range(3))
            old = ops.gated(gate, state, "sigmoid")
            new = ops.gated(ops.scale(gate, -1.0), ops.softcap(candidate, 1.0), "sigmoid")
            latent, after = ops.softcap(out, 1.0), [ops.add(old, new)]
        logits = ops.add(base, ops.linear(latent, self.w2))
        if self.confidence is not None:
            sure = [self.sureness(ops, hidden, token)]
        return (logits, *sure, *after)

    def token(self, ops: Ops) -> Value:
        """What the Markov head reads of the rows' tokens."""
        return ops.embed(ops.tokens(), self.w1, 1.0)

    def sureness(self, ops: Ops, hidden: Value, token: Value) -> Value:
        """The logit that a token is kept, of a row of the block and what `token` gives for the one before it."""
        assert self.confidence is not None, "only asked of one that has such a head"
        return self.confidence(ops, ops.concat(hidden, token) if self.own.reads_token else hidden)


class GemmaDSparkNet(DSparkNet):
    """One whose backbone has layers of Gemma 4: four norms, scale 1, embeddings times the root of the width."""

    def __init__(self, config: DSparkConfig, weights: Weights, target: GraphTarget) -> None:
        assert config.gemma is not None, "only such a config describes one"
        self.gemma = config.gemma
        super().__init__(config, weights, target)
        self.embedding_scale = config.gemma.hidden_size**0.5

    def _read_layers(self, weights: Weights) -> list[Weight]:
        self.gemma_layers = read_layers(weights, self.gemma, self.layout)
        return [layer.attention.o for layer in self.gemma_layers]

    def keep(self, ops: Ops, x: Value) -> None:
        for layer in self.gemma_layers:
            store(ops, x, layer.attention, self.gemma.eps)

    def through(self, ops: Ops, x: Value) -> Value:
        for layer in self.gemma_layers:
            x = decoder_layer(ops, x, layer, self.gemma.eps, None, sees_itself=None)
        return ops.rms_norm(x, self.norm, self.gemma.eps)

    def _logits(self, ops: Ops) -> tuple[Value, ...]:
        (x,) = super()._logits(ops)
        return (x if self.gemma.softcap is None else ops.softcap(x, self.gemma.softcap),)


NETWORK = NetworkKind(plan_dspark, parse_dspark)
