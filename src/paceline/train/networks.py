"""Networks of `models/drafters` as modules that learn: their own graphs, run by `DifferentiableOps`.

What a network computes is written there alone. Here stands which rows a draft round of each shape consists of: it must
be what the engine drafts, position by position.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.checkpoints.loading import Tensors
from paceline.checkpoints.safetensors_file import Entry
from paceline.errors import PairError, UsageError
from paceline.models.drafters.base import FINAL
from paceline.models.drafters.networks import plan_network
from paceline.models.drafters.state_net import (
    DrafterFiles,
    GraphNet,
    MaskedNet,
    Network,
    SteppingNet,
    draft_ids,
)
from paceline.models.registry import FiniteWeights
from paceline.models.target import GraphTarget
from paceline.ops.base import WeightKind
from paceline.ops.differentiable import DifferentiableOps, Role, Rounds, Rows
from paceline.ops.reference import dequantize
from paceline.train.parallel import Captured, DraftModule, seen_keys

NEW = Path("the new drafter")
HEAD, TABLE = "lm_head.weight", "embed_tokens.weight"
MAPPING = ("d2t", "t2d")  # which tokens the head's rows are of


@dataclass(slots=True)
class HeldTensors:
    """Tensors that are in memory, as a `TensorSource`; says in which order they were taken."""

    held: Mapping[str, torch.Tensor]
    folder: Path
    taken: list[str] = field(default_factory=list)

    @property
    def skipped(self) -> dict[str, Entry]:
        return {}

    @property
    def entries(self) -> Mapping[str, object]:
        return self.held

    def take(self, name: str) -> torch.Tensor:
        self.taken.append(name)
        return self.held[name]

    def take_scale(self, name: str) -> torch.Tensor | None:
        return None

    def take_blocks(self, name: str) -> tuple[torch.Tensor, WeightKind, torch.Tensor | None] | None:
        return None


Learner = SteppingNet | MaskedNet


class LearningModule(DraftModule):
    """A module that has no layers of its own: parameters by the names of a checkpoint, for a network to read."""

    def place(self, name: str, tensor: torch.Tensor, *, stored: bool = True) -> None:
        """Have `state_dict` give it by this name, if it is a parameter or `stored`."""
        *path, last = name.split(".")
        node: nn.Module = self
        for part in path:
            if part not in node._modules:
                node.add_module(part, nn.Module())
            node = node.get_submodule(part)
        if isinstance(tensor, nn.Parameter):
            node.register_parameter(last, tensor)
        else:
            node.register_buffer(last, tensor, persistent=stored)

    def named(self, name: str) -> torch.Tensor:
        """The tensor that was placed by this name."""
        path, _, last = name.rpartition(".")
        tensor: torch.Tensor = getattr(self.get_submodule(path), last)
        return tensor


class NetworkModule(LearningModule):
    """A network that reads hidden states of the target, with weights that learn.

    `net` reads the very parameters; its own runner, cache and rounds are the engine's business.
    """

    def __init__(
        self, described: Described, shared: Mapping[str, torch.Tensor], fixed: Collection[str] = ()
    ) -> None:
        """`shared`: what is the target's, by the names that the network's own would have; it stays as it is and is not
        stored. `fixed`: names of tensors that stay as they are, too.
        """
        super().__init__()
        target, network = described.target, described.network
        self.vocab, self.kind = target.vocab_size, described.kind
        fixed = {*fixed, *(name for name in described.tensors if name.endswith(TABLE))}
        tensors = {name: learning(name, x.to(target.device), fixed) for name, x in described.tensors.items()}
        tensors |= {name: x.to(target.device) for name, x in shared.items()}
        held = HeldTensors(tensors, described.folder)
        self.net = self.built(network.build(FiniteWeights(held, target.device), target))
        for name in held.taken:
            if name != "t2d":
                self.place(name, tensors[name], stored=name not in shared)
        self.taps = network.taps
        self._head = next(name for name in held.taken if name.endswith(HEAD))
        self.shares_head = self._head in shared  # it is the target's
        self.register_buffer("drafted", self.net.ids, persistent=False)
        self.drafted: torch.Tensor | None
        own = any(name.endswith(TABLE) for name in tensors)
        # what the target's scaled embeddings are multiplied with; None: it has a table of its own
        self.rescale = None if own else self.net.embedding_scale / target.embedding_scale

    @staticmethod
    @abstractmethod
    def built(net: GraphNet) -> Learner:
        """The network, known to be of the kind that is unrolled."""

    @property
    def head_rows(self) -> torch.Tensor:
        """[C, H], its own or the target's."""
        return self.named(self._head)

    @property
    def head(self) -> torch.Tensor:
        return self.head_rows

    @property
    def ids(self) -> torch.Tensor | None:
        return self.drafted

    @property
    def dtype(self) -> torch.dtype:
        """Of its parameters."""
        return next(self.parameters()).dtype

    def begin(self, captured: Captured, anchors: torch.Tensor) -> tuple[Rounds, DifferentiableOps]:
        """Rounds from these anchors, and a forward over the entries that they see."""
        states = captured.hidden if self.net.taps == (FINAL,) else captured.states
        assert states is not None, "the teacher taps the target where the module reads it"
        rounds = Rounds(self.net.layout, partial(seen_keys, captured, anchors))
        rows = Rows(captured.tokens[..., None], captured.positions[..., None], "entries")
        return rounds, DifferentiableOps(rows, rounds, {"states": states.flatten(0, 1)}, self.dtype)

    def embedded(self, captured: Captured, entries: DifferentiableOps) -> torch.Tensor:
        """[B, T, H] of the windows' tokens, as the network reads them."""
        if self.rescale is None:
            table, scale = self.net.embedding, self.net.embedding_scale
            return entries.embed(captured.tokens, table, scale)
        x = captured.embeddings if self.rescale == 1.0 else captured.embeddings * self.rescale
        return x.to(self.dtype)


class SteppingModule(NetworkModule):
    """Entry p joins the target's states of row p with the token p + 1. A round with token t pending starts at entry
    t - 1, and each further step takes what the step before gave in place of the target's states.
    """

    net: SteppingNet

    @staticmethod
    def built(net: GraphNet) -> SteppingNet:
        assert isinstance(net, SteppingNet), "only such a network steps"
        return net

    def unroll(self, captured: Captured, anchors: torch.Tensor, steps: int) -> list[torch.Tensor]:
        net, at = self.net, torch.arange(anchors.shape[0], device=anchors.device)[:, None]
        rounds, entries = self.begin(captured, anchors)
        token, first = self.embedded(captured, entries), net.seen(entries)
        # the last entry of a window has no token after it, and no round sees it
        net.keep(entries, first, token.roll(-1, 1).flatten(0, 1))
        x = first.view(*captured.tokens.shape, -1)[at, anchors - 1].flatten(0, 1)
        positions, states = captured.positions[at, anchors - 1], []
        for i in range(steps):
            role: Role = "own" if i else "again"
            rows = Rows(captured.tokens[at, anchors + i, None], positions[..., None] + i, role)
            ops = DifferentiableOps(rows, rounds, {}, self.dtype)
            x, state = net.through(ops, x, token[at, anchors + i].flatten(0, 1))
            states.append(state.view(*anchors.shape, -1))
        return states


class BlockModule(NetworkModule):
    """Entry p is made of the target's states of row p. A round with token t pending is a block of that token and masks
    behind it, which see the entries before t and each other.
    """

    net: MaskedNet

    @staticmethod
    def built(net: GraphNet) -> MaskedNet:
        assert isinstance(net, MaskedNet), "only such a network drafts blocks"
        return net

    def __init__(
        self, described: Described, shared: Mapping[str, torch.Tensor], fixed: Collection[str] = ()
    ) -> None:
        """As `NetworkModule`."""
        super().__init__(described, shared, fixed)
        mask = dequantize(
            self.net.embedding, torch.tensor([self.net.mask], device=self.net.device), torch.float32
        )
        self.register_buffer("mask_row", mask[0] * self.net.embedding_scale, persistent=False)
        self.mask_row: torch.Tensor

    @property
    def most(self) -> int:
        """Tokens that a block can draft."""
        return self.net.block - self.net.first

    def unroll(self, captured: Captured, anchors: torch.Tensor, steps: int) -> list[torch.Tensor]:
        if steps > self.most:
            raise UsageError(f"--draft-tokens {steps}: the blocks of this drafter hold {self.most} at most")
        net, at = self.net, torch.arange(anchors.shape[0], device=anchors.device)[:, None]
        rounds, entries = self.begin(captured, anchors)
        net.keep(entries, net.seen(entries))
        tokens = captured.tokens[at, anchors, None]  # [B, A, 1]
        block = torch.cat((tokens, torch.full_like(tokens.expand(-1, -1, net.block - 1), net.mask)), -1)
        positions = captured.positions[at, anchors, None] + torch.arange(net.block, device=anchors.device)
        token = self.embedded(captured, entries)[at, anchors][:, :, None]
        masks = self.mask_row.to(token.dtype).expand(*anchors.shape, net.block - 1, -1)
        ops = DifferentiableOps(Rows(block, positions, "own"), rounds, {}, self.dtype)
        states = net.through(ops, torch.cat((token, masks), 2).flatten(0, 2)).view(*block.shape, -1)
        return list(states[:, :, net.first : net.first + steps].unbind(2))


@dataclass(frozen=True, slots=True)
class Described:
    """A network that is about to learn: what its config and its tensors say."""

    target: GraphTarget
    folder: Path
    kind: str  # its arithmetic, as far as parameters do not say it
    network: Network
    tensors: Mapping[str, torch.Tensor]  # float32, beside `MAPPING`
    dtype: torch.dtype  # in which it is stored

    @property
    def ids(self) -> torch.Tensor | None:
        """The tokens [C] that it drafts, None: all. Raises WeightsError."""
        vocab, mapping = self.network.layers.vocab_size, self.tensors.get("d2t")
        held = FiniteWeights(HeldTensors(self.tensors, self.folder), self.target.device)
        return draft_ids(held, vocab if mapping is None else len(mapping), vocab)

    @classmethod
    def fresh(cls, raw: Mapping[str, Any], target: GraphTarget, own: Mapping[str, torch.Tensor]) -> Described:
        """A new one: vectors of ones and matrices of zeros beside `own`. Raises ConfigError and PairError."""
        entries = {name: Entry(name, NEW, "F32", tuple(x.shape), 0) for name, x in own.items()}
        network = plan_network(DrafterFiles(raw, entries, NEW, str(target.path)), target)
        made = {
            n: (torch.zeros if len(s) > 1 else torch.ones)(s)
            for n, s in network.shapes.items()
            if n not in own
        }
        stored = target.embedding.data.dtype
        dtype = stored if stored.is_floating_point else torch.bfloat16
        return cls(target, NEW, _arithmetic(raw), network, {**made, **own}, dtype)

    @classmethod
    def loaded(cls, folder: Path, raw: Mapping[str, Any], target: GraphTarget) -> Described:
        """That of a folder. Raises LoadError."""
        network = plan_network(DrafterFiles.of(folder, raw, target.path), target)
        stored = Tensors(folder, network.shapes, rename=network.rename)
        if stored.scales:
            raise PairError(
                f"{folder} is quantized, which cannot be trained: give the drafter that it was made of"
            )
        tensors = {name: stored.take(name) for name in [*stored.entries]}
        dtype = next(x.dtype for x in tensors.values() if x.dim() > 1)
        floats = {name: x if name in MAPPING else x.float() for name, x in tensors.items()}
        return cls(target, folder, _arithmetic(raw), network, floats, dtype)


def _arithmetic(raw: Mapping[str, Any]) -> str:
    """What a config.json says, but for what the drafter was made for."""
    return json.dumps({key: x for key, x in raw.items() if key != "speculators_config"}, sort_keys=True)


def learning(name: str, tensor: torch.Tensor, fixed: Collection[str]) -> torch.Tensor:
    """A parameter, unless it is a table of token ids."""
    if not tensor.is_floating_point():
        return tensor
    return nn.Parameter(tensor.clone(), requires_grad=name not in fixed)


def fresh_parameters(module: nn.Module, seed: int) -> None:
    """Matrices of unit gain, whatever device they are on."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                drawn = torch.empty(parameter.shape).normal_(
                    0.0, parameter.shape[1] ** -0.5, generator=generator
                )
                parameter.copy_(drawn)
