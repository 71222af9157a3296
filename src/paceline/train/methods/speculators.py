"""What drafters in the format of `speculators` have in common. Source of truth: speculators 0.9.0, config.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from safetensors import safe_open
from torch import nn

from paceline.capacity import make_cache
from paceline.checkpoints.loading import find_files
from paceline.config import EngineConfig
from paceline.drafters.base import Drafter
from paceline.drafters.registry import over
from paceline.errors import PairError
from paceline.models.config import parse_target, read_config
from paceline.models.families.gemma4.config import GemmaConfig
from paceline.models.layers.decoder_config import DecoderConfig
from paceline.models.registry import load_network
from paceline.models.target import GraphTarget
from paceline.train.capture import TargetTeacher, load_frozen
from paceline.train.methods.base import TORCH_NAMES, Exported
from paceline.train.parallel import DraftModule

if TYPE_CHECKING:
    from paceline.train.loop import Hooks, Run

CACHE_SHARE = 0.1  # of what is free, for the drafter's own K/V in a comparison


def default_taps(layers: int) -> tuple[int, ...]:
    """Where EAGLE-3 reads; in a target of few layers three around its middle."""
    taps = (2, layers // 2, layers - 3)
    return taps if taps[0] < taps[1] < taps[2] else (layers // 2 - 1, layers // 2, layers // 2 + 1)


class SpeculatorsMethod(ABC):
    """What methods share whose drafter steps through a layer with K/V of its own; see `base.Method`."""

    copies: ClassVar[tuple[str, ...]] = ()
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {"draft_tokens": 3, "batch": 4, "optimizer": "muon", "lr": 0.02}
    )

    @abstractmethod
    def describe(self, module: DraftModule) -> str:
        """As `base.Method`."""

    def last_batches(self, module: DraftModule) -> int:
        return 0

    def finish(self, run: Run, hooks: Hooks) -> tuple[DraftModule, str]:
        return run.module, self.describe(run.module)

    def drafter(self, name: str, folder: Path, target: GraphTarget) -> Callable[[EngineConfig], Drafter]:
        net = load_network(folder, target)

        def make(config: EngineConfig) -> Drafter:
            return over(name, net, make_cache(net, replace(config, max_model_len=None), CACHE_SHARE))

        return make


class TappingMethod(SpeculatorsMethod):
    """One whose drafter reads hidden states of some layers of the target."""

    taps: tuple[int, ...] | None

    def check(self, target: Path) -> None:
        layers = parse_target(read_config(target)).layer_count
        taps = self.taps or default_taps(layers)
        if taps[0] < 0 or taps[-1] > layers or any(a >= b for a, b in pairwise(taps)):
            raise PairError(
                f"hidden states after layers {list(taps)} cannot be read of {target}, which has {layers} layers: give "
                f"--taps that rise from 0 to {layers}"
            )

    def teacher(self, target: Path, device: str = "cpu") -> TargetTeacher:
        self.check(target)
        return TargetTeacher(load_frozen(target, device))


def speculators_config(target: GraphTarget, algorithm: str) -> dict[str, Any]:
    """What the drafter was made for; how it proposes is said when it is finished."""
    architectures = read_config(target.path).get("architectures") or []
    return {
        "algorithm": algorithm, "default_proposal_method": "greedy", "proposal_methods": [],
        "verifier": {"name_or_path": target.path.name, "architectures": architectures},
    }  # fmt: skip


def finished_config(exported: Exported) -> dict[str, Any]:
    """config.json of the finished drafter."""
    method = {
        "proposal_type": "greedy", "speculative_tokens": exported.draft_tokens, "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }  # fmt: skip
    said = dict(exported.config.get("speculators_config") or {}) | {"proposal_methods": [method]}
    return dict(exported.config) | {"dtype": TORCH_NAMES[exported.dtype], "speculators_config": said}


def layer_config(target: GraphTarget) -> dict[str, Any]:
    """A Llama layer of the target's own widths."""
    config = parse_target(read_config(target.path))
    if isinstance(config, DecoderConfig):
        rotary = config.rotary
        rope: dict[str, Any] = {"rope_theta": rotary.theta, "rope_type": rotary.kind}
        if rotary.kind != "default":
            rope["factor"] = rotary.factor
        if rotary.kind in ("llama3", "yarn"):
            rope["original_max_position_embeddings"] = int(rotary.original)
        if rotary.kind == "llama3":
            rope |= {"low_freq_factor": rotary.low, "high_freq_factor": rotary.high}
        if rotary.kind == "yarn":
            rope |= {"beta_slow": rotary.low, "beta_fast": rotary.high, "attention_factor": rotary.attention}
        sizes = config.heads, config.kv_heads, config.head_dim, config.intermediate_size
    else:
        assert isinstance(config, GemmaConfig)
        first, rope = config.layers[0], {"rope_theta": 10_000.0, "rope_type": "default"}
        sizes = config.heads, first.kv_heads, first.head_dim, first.intermediate_size
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    return dict(zip(names, sizes, strict=True)) | {
        "model_type": "llama", "hidden_size": target.hidden_size, "num_hidden_layers": 1,
        "vocab_size": target.vocab_size, "rms_norm_eps": config.eps, "rope_parameters": rope,
        "max_position_embeddings": target.max_len, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip


def fresh_parameters(module: nn.Module, seed: int) -> None:
    """Matrices of unit gain."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)


def tensors_in(folder: Path, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Tensors of a checked folder by the names that its files give them."""
    wanted = set(names)
    out: dict[str, torch.Tensor] = {}
    for path in find_files(folder):
        with safe_open(path, framework="pt") as file:
            out |= {name: file.get_tensor(name) for name in wanted & set(file.keys())}
    return out
