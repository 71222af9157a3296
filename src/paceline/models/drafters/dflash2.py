"""DFlash 2: DFlash's block with a short convolution around each sublayer, and tokens chosen as a path.

Row i of a block is mixed with the rows before it, by taps that hang on row i: before and after attention and MLP. Of the
`top_k` tokens of a row one is chosen by its score and by how well it follows the token before it (a product of two
codebooks). Sources of truth: vLLM's and llama.cpp's DFlash 2; formats: z-lab's, speculators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from paceline.checkpoints.loading import Shapes, Weights
from paceline.errors import ConfigError
from paceline.models.drafters.dflash import (
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
from paceline.models.drafters.state_net import (
    DrafterFiles,
    Fits,
    Network,
    NetworkKind,
)
from paceline.models.fields import Fields
from paceline.models.target import GraphTarget
from paceline.ops.base import Graph, Ops, Value, Weight

KIND = "dflash2"
SIZES = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 256,
    "selector_top_k": 16,
}  # with defaults
SCALES = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
KIN = Kin(KIND, own={*SIZES, *SCALES, "draft_ffn_type"}, inner={*SIZES, *SCALES})
SELECTOR, SUBLAYERS = "candidate_selector", ("attention", "mlp")
EMBEDDING_FILE = "mask_embedding.pt"  # of some, in place of the mask token's row


@dataclass(frozen=True, slots=True)
class DFlash2Config:
    block: DFlashConfig
    taps: int  # rows that the convolution reads, the row itself included
    group: int  # channels that share their taps
    rank: int  # of the codebooks
    top_k: int  # candidates of a row
    scale: float = 1.0  # of embeddings,
    multiplier: float = 1.0  # of logits
    softcap: float | None = None  # and their bound


def parse_dflash2(raw: Mapping[str, Any]) -> DFlash2Config:
    """The drafter that a config.json describes. Raises ConfigError."""
    block, inner = parse_block(raw, KIN), inner_of(raw, KIN)
    fields = Fields({**inner, **{key: value for key, value in raw.items() if value is not None}}, KIND)
    fields.refuse("draft_ffn_type", (None, "dense"), "use the drafter ngram")
    fields.refuse("sample_from_anchor", (None, False), "the first row of a DFlash 2 block drafts nothing")
    sizes = {
        name: fields.size(name, usual, least=2 if name == "selector_top_k" else 1)
        for name, usual in SIZES.items()
    }
    hidden, group = block.layers.hidden_size, sizes["conv_group_size"]
    if hidden % group:
        raise ConfigError(
            f"dflash2: conv_group_size={group} does not divide a width of {hidden}: download config.json again"
        )
    if block.draft_vocab != block.layers.vocab_size:
        raise ConfigError(
            f"dflash2: a head of {block.draft_vocab} of {block.layers.vocab_size} tokens is not supported: use ngram"
        )
    narrow = [window for window in block.windows if window is not None and window < block.block]
    if narrow:
        raise ConfigError(
            f"dflash2: a window of {narrow[0]} is shorter than a block of {block.block} rows: not supported"
        )
    cap = fields.raw.get("final_logit_softcapping")
    return DFlash2Config(
        block,
        sizes["conv_kernel_size"],
        group,
        sizes["selector_rank"],
        sizes["selector_top_k"],
        fields.number("input_embedding_scale", 1.0),
        fields.number("output_multiplier", 1.0),
        None if cap is None else fields.number("final_logit_softcapping", 1.0),
    )


def plan_dflash2(files: DrafterFiles, fits: Fits | None) -> Network:
    """What is to be loaded. Raises ConfigError, WeightsError and, for another target's drafter, PairError."""
    config = parse_dflash2(files.raw)
    if (files.folder / EMBEDDING_FILE).is_file():
        raise ConfigError(
            f"{files.folder} has a {EMBEDDING_FILE}, which takes the place of the mask token's embedding and is not "
            "read: use another drafter, or ngram"
        )
    taps = check_block(config.block, KIND, files, fits)
    config = replace(config, block=last_state_too(config.block, files, KIND))
    if len(config.block.taps) > len(taps):
        taps = (*taps, config.block.taps[-1])
    shapes = dflash_shapes(config.block, files) | path_shapes(config)
    return Network(shapes, config.block.layers, partial(DFlash2Net, config), renamed(config.block), taps)


def path_shapes(config: DFlash2Config) -> Shapes:
    """Name and shape of what DFlash 2 has beyond DFlash."""
    layers = config.block.layers
    hidden, vocab = layers.hidden_size, layers.vocab_size
    shapes: Shapes = {
        f"{SELECTOR}.hidden_projection.weight": (config.rank, hidden),
        f"{SELECTOR}.predecessor_codebook": (vocab, config.rank),
        f"{SELECTOR}.successor_codebook": (vocab, config.rank),
    }
    for i in range(len(layers.kinds)):
        for name in SUBLAYERS:
            at = f"layers.{i}.{name}_conv"
            shapes[f"{at}.base_kernel"] = (2, config.taps, hidden)
            shapes[f"{at}.kernel_projection.weight"] = (2 * config.taps * (hidden // config.group), hidden)
    return shapes


@dataclass(frozen=True, slots=True, eq=False)
class Convolution:
    base: Tensor  # [2, taps, H]: before and after the sublayer
    projection: Weight  # [2 * taps * groups, H]: what a row adds to them


class DFlash2Net(DFlashNet):
    """A loaded drafter network; implements `PathNet`."""

    def __init__(self, config: DFlash2Config, weights: Weights, target: GraphTarget) -> None:
        super().__init__(config.block, weights, target)
        self.own, self.top_k = config, config.top_k
        self.embedding_scale = config.scale
        self.convolutions = [
            {name: _convolution(weights, f"layers.{i}.{name}_conv") for name in SUBLAYERS}
            for i in range(len(self.layers))
        ]
        self.projection = weights.matrix(f"{SELECTOR}.hidden_projection")
        self.predecessor = weights.table(f"{SELECTOR}.predecessor_codebook")
        self.successor = weights.table(f"{SELECTOR}.successor_codebook")
        self.projection_graph = self._projection

    @property
    def graphs(self) -> list[Graph]:
        return [*super().graphs, self.projection_graph]

    def projected(self, hidden: Tensor) -> Tensor:
        """Of what `logits` takes [M, H] the factors [M, rank] of `follows`, on the host."""
        return self._scored(self.projection_graph, hidden).float().cpu()

    def follows(self, before: int, projected: Tensor, tokens: Tensor) -> Tensor:
        """How well each of `tokens` [K] follows the token before it, by a row [rank] of `projected`; float32 [K]."""
        weight = self.predecessor[before].float() * projected
        return self.successor.index_select(0, tokens).float() @ weight

    def _around(self, ops: Ops, h: Value, layer: int, name: str, inner: Callable[[Value], Value]) -> Value:
        conv, taps = self.convolutions[layer][name], self.own.taps
        mix = ops.linear(h, conv.projection)
        half = taps * (self.hidden_size // self.own.group)
        u = ops.block_conv(h, ops.columns(mix, 0, half), conv.base[0])
        return ops.block_conv(inner(u), ops.columns(mix, half, 2 * half), conv.base[1])

    def _logits(self, ops: Ops) -> tuple[Value, ...]:
        (x,) = super()._logits(ops)
        x = x if self.own.multiplier == 1.0 else ops.scale(x, self.own.multiplier)
        return (x if self.own.softcap is None else ops.softcap(x, self.own.softcap),)

    def _projection(self, ops: Ops) -> tuple[Value, ...]:
        return (ops.linear(ops.given("hidden", self.hidden_size), self.projection),)


def _convolution(weights: Weights, name: str) -> Convolution:
    base = weights.exact(f"{name}.base_kernel").contiguous()
    return Convolution(base, weights.matrix(f"{name}.kernel_projection"))


NETWORK = NetworkKind(plan_dflash2, parse_dflash2)
