"""A matrix with its bias, and the norms of a decoder: what every layer is made of."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.checkpoints.loading import Weights
from paceline.models.layers.decoder_config import DecoderConfig
from paceline.ops.base import Ops, Value, Weight


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    weight: Weight
    bias: Tensor | None

    def __call__(self, ops: Ops, x: Value) -> Value:
        return ops.linear(x, self.weight, self.bias)

    def rows(self, ids: Tensor | slice) -> Linear:
        """With the outputs `ids` in that order, a copy; of a slice a view."""
        at = ids.to(self.weight.data.device) if isinstance(ids, Tensor) else ids
        return Linear(self.weight.rows(at), None if self.bias is None else self.bias[at])


def read_linear(weights: Weights, config: DecoderConfig, name: str) -> Linear:
    """The matrix `name`, with a bias where the config says that its kind has one."""
    biased = name.rpartition(".")[2] in config.biases
    return Linear(weights.matrix(name), weights.vector(f"{name}.bias") if biased else None)


def read_norm(weights: Weights, config: DecoderConfig, name: str) -> Tensor:
    """What a normed row is multiplied with: the tensor itself where nothing is added, so that it can learn."""
    scale = weights.norm(name)
    return scale + config.norm_shift if config.norm_shift else scale
