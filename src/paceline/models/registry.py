"""Paths -> loaded models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from paceline.checkpoints.loading import Tensors, Transform, Weights
from paceline.errors import PairError, WeightsError
from paceline.kv.store import stored_as
from paceline.models.adapters import AdapterBank
from paceline.models.config import parse_target, read_config, suppressed_ids
from paceline.models.drafters.base import FINAL
from paceline.models.drafters.gemma4_assistant import GemmaAssistant, assistant_shapes, check_pair
from paceline.models.drafters.networks import plan_network
from paceline.models.drafters.state_net import DrafterFiles, GraphNet
from paceline.models.families import spec_of
from paceline.models.families.gemma4.config import GemmaConfig, parse_assistant
from paceline.models.families.gemma4.layers import split_gemma
from paceline.models.families.gemma4.target import GemmaTarget
from paceline.models.inspection import Inspection, inspect
from paceline.models.shards import Shard, sharded, split_of
from paceline.models.target import GraphTarget
from paceline.ops.base import Runner, Weight
from paceline.ops.reference import EagerRunner

__all__ = [
    "Inspection",
    "choose_dtypes",
    "inspect",
    "load_assistant",
    "load_network",
    "load_target",
]


class FiniteWeights(Weights):
    def vector(self, name: str) -> Tensor:
        data = super().vector(name)
        self._check(name, data)
        return data

    def _weight(self, name: str, data: Tensor, scale: Tensor | None) -> Weight:
        self._check(name, data if scale is None else scale)
        return super()._weight(name, data, scale)

    def _check(self, name: str, data: Tensor) -> None:
        """Raises WeightsError."""
        if data.is_floating_point() and not bool(data.isfinite().all()):
            raise WeightsError(
                f"{self.folder}: the drafter's {name} holds values that are not finite: download or train it again, "
                "or use the drafter ngram"
            )


def load_target(
    path: Path | str,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    runner: Runner | None = None,
    transform: Transform | None = None,
    shard: tuple[int, int] | None = None,
    adapters: AdapterBank | None = None,
) -> GraphTarget:
    """Load a target from a folder. Raises ConfigError and WeightsError.

    dtype None: on CPU weights stay as stored, elsewhere bfloat16. Activations are float32 on CPU (float64 if
    asked for), elsewhere `dtype`. `transform` sees each matrix by its name and may quantize or repack it. `shard`: only
    what (rank, of how many) has of it; its results are right beside a `runner` that adds up over the ranks. `adapters`:
    those that rows of a forward may ask for.
    """
    folder, device = Path(path), torch.device(device)
    raw = read_config(folder)
    config = parse_target(raw)
    spec = spec_of(config.model_type)
    tensors = Tensors(folder, spec.shapes(config), config.shared_layers, config.tied)
    active, stored = choose_dtypes(dtype, device)
    runner = runner or EagerRunner(active)
    weights = Weights(tensors, device, stored, transform, runner.reads_blocks)
    if adapters is not None:
        weights.adapted = adapters.on(device)
    if shard is not None:
        weights, config = sharded(weights, Shard.of(split_of(config), *shard))
    target = spec.build(config, weights, runner, active)
    target.shard = shard
    target.suppress(suppressed_ids(raw, config.vocab_size))
    tensors.finish()
    if adapters is not None:
        adapters.check(target)
    return target


def load_assistant(
    path: Path | str,
    target: GraphTarget,
    *,
    dtype: torch.dtype | None = None,
    runner: Runner | None = None,
    transform: Transform | None = None,
) -> GemmaAssistant:
    """Load the MTP drafter made for `target`, on its device. Raises PairError, ConfigError and WeightsError.

    `runner` None: the target's. dtype as for `load_target`. It is sharded as the target is.
    """
    folder = Path(path)
    config = parse_assistant(read_config(folder))
    if not isinstance(target, GemmaTarget):
        raise PairError(
            f"{folder} is an MTP drafter for Gemma 4, which {target.path} is not: use the drafter ngram, or a smaller "
            "model with the same tokenizer"
        )
    whole = target.config if target.shard is None else parse_target(read_config(target.path))
    assert isinstance(whole, GemmaConfig)
    check_pair(config, whole, (str(folder), str(target.path)))
    tensors = Tensors(folder, assistant_shapes(config), range(len(config.text.layers)), config.text.tied)
    on_cpu = target.device.type == "cpu"
    _, stored = choose_dtypes(dtype if on_cpu else dtype or stored_as(target.kv_dtype), target.device)
    runner = runner or target.runner
    weights: Weights = FiniteWeights(tensors, target.device, stored, transform, runner.reads_blocks)
    if target.shard is not None:
        part = Shard.of(split_gemma(config.text), *target.shard)
        weights, text = sharded(weights, part)
        config = replace(config, text=text)
    assistant = GemmaAssistant(config, weights, target, runner)
    tensors.finish()
    return assistant


def load_network(
    path: Path | str,
    target: GraphTarget,
    *,
    dtype: torch.dtype | None = None,
    transform: Transform | None = None,
) -> GraphNet:
    """Load a drafter network and tap the target at the layers it reads. Call before the target's first forward.

    `path` is the target's own where it holds modules. Raises PairError, ConfigError and WeightsError. dtype as above.
    """
    folder = Path(path)
    plan = plan_network(DrafterFiles.of(folder, read_config(folder), target.path), target)
    tensors = Tensors(folder, plan.shapes, rename=plan.rename)
    on_cpu = target.device.type == "cpu"
    _, stored = choose_dtypes(dtype if on_cpu else dtype or stored_as(target.kv_dtype), target.device)
    weights = FiniteWeights(tensors, target.device, stored, transform, target.runner.reads_blocks)
    net = plan.build(weights, target)
    tensors.finish()
    target.tap([tap for tap in plan.taps if tap != FINAL])
    return net


def choose_dtypes(dtype: torch.dtype | None, device: torch.device) -> tuple[torch.dtype, torch.dtype | None]:
    """(activations, weights or None to keep what is stored)."""
    if device.type == "cpu":
        return (torch.float64, None) if dtype == torch.float64 else (torch.float32, dtype)
    return (dtype or torch.bfloat16,) * 2
