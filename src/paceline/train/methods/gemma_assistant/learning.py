"""The Gemma 4 assistant as a module that learns: fresh, of a folder, or with another head.

A round is: query at position t (the pending token) for every step; keys j <= t - 1 of the same text (sliding layers:
j >= t - 1 - window). The first input is the target's embedding of token t beside the target's hidden state at t - 1; step
i > 0 takes the embedding of token t + i and the state that step i - 1 projected. Parameters carry the names of the
Hugging Face layout: export is a plain dump.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoints.loading import Tensors
from paceline.errors import PairError
from paceline.kv.layout import LayerKV, Layout
from paceline.models.config import read_config
from paceline.models.drafters.gemma4_assistant import GemmaAssistant, assistant_shapes, differences
from paceline.models.families.gemma4.config import AssistantConfig, GemmaConfig, parse_assistant
from paceline.models.registry import FiniteWeights
from paceline.ops.base import Weight
from paceline.ops.differentiable import DifferentiableOps, LayerKeys, Rounds, Rows
from paceline.ops.reference import EagerRunner
from paceline.train.networks import NEW, HeldTensors, LearningModule, learning
from paceline.train.parallel import Captured, seen_keys

INIT_SCALE = 0.02
TABLE, PRE, POST = "model.embed_tokens.weight", "pre_projection.weight", "post_projection.weight"
CLUSTERS = "masked_embedding"
CENTROIDS, ORDERING = f"{CLUSTERS}.centroids.weight", f"{CLUSTERS}.token_ordering"


@dataclass(frozen=True, slots=True)
class Target:
    """What the network needs of one: the captured windows hold all that it reads."""

    layout: Layout  # a layer of each kind
    dtype: torch.dtype = torch.float32
    embedding: Weight = dataclasses.field(default_factory=lambda: Weight(torch.empty(0, 0), "float32"))
    embedding_scale: float = 1.0


class AssistantModule(LearningModule):
    """A trainable assistant. Its loss scores the whole vocabulary."""

    def __init__(self, config: AssistantConfig, tensors: Mapping[str, torch.Tensor]) -> None:
        """`tensors` by their names in the Hugging Face layout, in float32."""
        super().__init__()
        self.config, self.vocab = config, config.text.vocab_size
        self.runs_otherwise = bool(config.clusters)
        kinds = {
            layer.kind: LayerKV(layer.kind, layer.kv_heads, layer.head_dim) for layer in config.text.layers
        }
        self.layout = Layout(tuple(kinds.values()), {kind: config.text.window_of(kind) for kind in kinds})
        still = (*(name for name in tensors if name.endswith("layer_scalar")), ORDERING)
        for name, tensor in tensors.items():
            value = tensor.clone() if name in still else learning(name, tensor, (CENTROIDS,))
            self.place(name, value)
        self.net = self._network()
        self._sorted: tuple[int, GemmaAssistant] | None = (
            None  # version of the head, a network with its rows in order
        )

    def _network(self) -> GemmaAssistant:
        held = {name.removeprefix("model."): self.named(name) for name in names_of(self.config)}
        weights = FiniteWeights(HeldTensors(held, NEW), self.head.device)
        with torch.no_grad():  # a centroid head is a copy of the rows
            return GemmaAssistant(self.config, weights, Target(self.layout), EagerRunner())

    @property
    def head(self) -> torch.Tensor:
        """[V, hidden]"""
        return self.named(TABLE)

    def unroll(self, captured: Captured, anchors: torch.Tensor, steps: int) -> list[torch.Tensor]:
        at = torch.arange(anchors.shape[0], device=anchors.device)[:, None]
        rounds = Rounds(self.layout, partial(seen_keys, captured, anchors))
        for kind in self.layout.kinds:
            rounds.layers[self.layout.last_of(kind)] = LayerKeys(captured.kv[kind])
        positions, states = captured.positions[at, anchors, None], []
        carried = captured.hidden[at, anchors - 1].flatten(0, 1)
        for i in range(steps):
            rows = Rows(captured.tokens[at, anchors + i, None], positions, "own")
            ops = DifferentiableOps(rows, rounds, {"hidden": carried}, self.head.dtype)
            token = captured.embeddings[at, anchors + i].flatten(0, 1).to(self.head.dtype)
            state, carried = self.net.through(ops, token)
            states.append(state.view(*anchors.shape, -1))
        return states

    @torch.no_grad()
    def running_logits(self, states: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, V] as it will run: with a centroid head all but the candidates are -inf."""
        if not self.config.clusters:
            return self.logits(states)
        version = self.head._version
        if self._sorted is None or self._sorted[0] != version:
            self._sorted = version, self._network()
        nobody = torch.zeros(len(states), 1, 1, dtype=torch.int64, device=states.device)
        rounds = Rounds(self.layout, lambda window: nobody)
        ops = DifferentiableOps(Rows(nobody, nobody, "own"), rounds, {}, self.head.dtype)
        ids, logits = self._sorted[1].scores(ops, states)
        out = torch.full((len(states), self.vocab), -torch.inf, device=states.device)
        return out.scatter_(1, ids, logits.float())


def names_of(config: AssistantConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor in the Hugging Face layout, whose head is tied."""
    beside = (PRE, POST, CENTROIDS, ORDERING)
    shapes = assistant_shapes(tied(config)).items()
    return {name if name in beside else f"model.{name}": shape for name, shape in shapes}


def tied(config: AssistantConfig) -> AssistantConfig:
    """The head is the table, under whichever name it was stored."""
    return dataclasses.replace(config, text=dataclasses.replace(config.text, tied=True))


def check_pair(config: AssistantConfig, target: GemmaConfig) -> None:
    """PairError unless such a drafter can read the target's K/V and states."""
    if wrong := differences(config, target):
        raise PairError(
            f"the drafter does not fit the target: {'; '.join(wrong)}. Use an --init made for this target, or --init "
            "scratch"
        )


@torch.no_grad()
def new_module(config: AssistantConfig, seed: int, embedding: torch.Tensor | None = None) -> AssistantModule:
    """Fresh weights. With the target's `embedding` [V, H] the head starts as the target's own, seen along
    its main directions, and the projections from and to hidden states likewise: the first steps then say
    what the target says.
    """
    generator, shapes = torch.Generator().manual_seed(seed), names_of(config)
    tensors = {name: _fresh(name, shapes[name], generator) for name in sorted(shapes, key=_turn)}
    wide, hidden = config.backbone_hidden_size, config.text.hidden_size
    if embedding is None:
        tensors[TABLE] *= INIT_SCALE
        return AssistantModule(config, tensors)
    rows = embedding.float().cpu()
    axes = torch.linalg.eigh(torch.cov(rows.T)).eigenvectors.flip(1)[:, :hidden]  # [H, hidden]
    width = axes.shape[1]
    tensors[TABLE].zero_()[:, :width] = rows @ axes
    tensors[PRE] *= 0.7
    tensors[PRE][:width, wide:] = axes.T
    tensors[POST].zero_()[:, :width] = axes
    return AssistantModule(config, tensors)


def _turn(name: str) -> tuple[bool, bool, int, bool]:
    """When a tensor is drawn: what a seed gives shall not hang on the order in which shapes are listed."""
    layer = int(name.split(".")[2]) if name.startswith("model.layers.") else 0
    return not name.startswith("model."), name != TABLE, layer, ".mlp." in name


def _fresh(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if name == ORDERING:
        return torch.arange(shape[0])
    if len(shape) == 1:
        return torch.ones(shape)
    return torch.empty(shape).normal_(0.0, shape[1] ** -0.5, generator=generator)


def load_module(folder: Path) -> tuple[AssistantModule, dict[str, Any], torch.dtype]:
    """An assistant folder as (module in float32, raw config, dtype of its weights). Raises LoadError."""
    raw = read_config(folder)
    config = parse_assistant(raw)
    stored = Tensors(folder, assistant_shapes(config), range(len(config.text.layers)), config.text.tied)
    if stored.scales:
        raise PairError(
            f"{folder} is quantized, which cannot be trained: give the drafter that it was made of"
        )
    read = {name: stored.take(name) for name in [*stored.entries]}
    if "lm_head.weight" in read:  # of one whose head is not tied; some writers store it under its own name
        read["embed_tokens.weight"] = read.pop("lm_head.weight")
    floats = {name: x.float() if x.is_floating_point() else x.long() for name, x in read.items()}
    beside = (PRE, POST, CENTROIDS, ORDERING)
    tensors = {name if name in beside else f"model.{name}": tensor for name, tensor in floats.items()}
    return AssistantModule(tied(config), tensors), dict(raw), read[PRE].dtype
