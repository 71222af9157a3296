"""Paths -> loaded models. The one place that knows which class runs which `model_type`."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.models.config import parse_target, read_config
from paceline.models.gemma4 import GemmaTarget, target_shapes
from paceline.models.loading import Tensors, Transform, Weights
from paceline.ops.base import Runner
from paceline.ops.reference import EagerRunner


def load_target(
    path: Path | str,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    runner: Runner | None = None,
    transform: Transform | None = None,
) -> GemmaTarget:
    """Load a target from a folder. Raises ConfigError and WeightsError.

    dtype None: on CPU weights stay as stored, elsewhere bfloat16. Activations are float32 on CPU (float64 if asked
    for), elsewhere `dtype`. `transform` sees each matrix by its name and may quantize or repack it.
    """
    folder, device = Path(path), torch.device(device)
    config = parse_target(read_config(folder))
    shared = [i for i, layer in enumerate(config.layers) if layer.shared]
    tensors = Tensors(folder, target_shapes(config), shared, config.tied)
    active, stored = choose_dtypes(dtype, device)
    weights = Weights(tensors, device, stored, transform)
    target = GemmaTarget(config, weights, runner or EagerRunner(active), active)
    tensors.finish()
    return target


def choose_dtypes(dtype: torch.dtype | None, device: torch.device) -> tuple[torch.dtype, torch.dtype | None]:
    """(activations, weights or None to keep what is stored)."""
    if device.type == "cpu":
        return (torch.float64, None) if dtype == torch.float64 else (torch.float32, dtype)
    return (dtype or torch.bfloat16,) * 2
