"""The families of models that run: one module each, with its config parser, its graph, and a `SPEC` that names them.

Here belongs what one family alone does: how its config.json is read, and what its layers do that no other's do.
Layers that families share are in `layers/`, networks that draft are in `drafters/`, and how a family writes a chat is
in `text/`. This file is the list: a family's module is imported when one of its models is looked at, not before.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.checkpoints.foreign import foreign_config, foreign_drafter
from paceline.drafter_kinds import ASSISTANT_TYPES
from paceline.errors import ConfigError
from paceline.models.fields import shown
from paceline.models.spec import ModelConfig, Split

if TYPE_CHECKING:
    import torch

    from paceline.checkpoints.loading import Shapes, Weights
    from paceline.kv.layout import Layout
    from paceline.models.target import GraphTarget
    from paceline.ops.base import Runner

# model_type of config.json -> module of this room; the order is that in which messages list what paceline runs
FAMILIES: Mapping[str, str] = {
    "gemma4_text": "gemma4.target", "gemma4_unified_text": "gemma4.target",
    "gemma4": "gemma4.target", "gemma4_unified": "gemma4.target",
    "llama": "llama",
    "mistral": "mistral", "ministral": "mistral", "ministral3": "mistral", "mistral3": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3", "qwen3_moe": "qwen3",
    "deepseek_v3": "deepseek_v3",
    "qwen3_5": "qwen3_5", "qwen3_5_text": "qwen3_5", "qwen3_5_moe": "qwen3_5", "qwen3_5_moe_text": "qwen3_5",
    "qwen3_next": "qwen3_5",
    "glm4_moe": "glm4", "glm4": "glm4",
    "gemma3_text": "gemma3", "gemma3": "gemma3",
    "gemma2": "gemma2",
    "cohere2": "cohere2",
    "nemotron_h": "nemotron_h",
    "smollm3": "smollm3",
    "olmo2": "olmo2", "olmo3": "olmo2",
    "granite": "granite", "granitemoehybrid": "granite",
    "phi3": "phi3",
    "gpt_oss": "gpt_oss",
    "lfm2": "lfm2", "lfm2_moe": "lfm2",
    "mixtral": "mixtral",
    "qwen2_moe": "qwen2_moe",
    "seed_oss": "seed_oss",
    "exaone4": "exaone4",
    "ernie4_5": "ernie4_5", "ernie4_5_moe": "ernie4_5",
    "glm4_moe_lite": "glm4_lite",
    "muse_glimmer": "muse_glimmer", "muse_glimmer_text": "muse_glimmer",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """All that loading and looking at a model of one family needs. `Any` is the family's own config."""

    parse: Callable[[Mapping[str, Any]], ModelConfig]  # of config.json; raises ConfigError
    shapes: Callable[[Any], Shapes]  # every tensor of the language model, by its canonical name
    layout: Callable[[Any], Layout]  # of its K/V cache
    build: Callable[[Any, Weights, Runner, torch.dtype], GraphTarget]
    split: Callable[[Any], Split] | None = None  # None: only one process computes it


def spec_of(model_type: str) -> ModelSpec:
    """The spec of a `model_type` of FAMILIES."""
    spec = importlib.import_module(f"paceline.models.families.{FAMILIES[model_type]}").SPEC
    assert isinstance(spec, ModelSpec)
    return spec


def model_type_of(raw: Mapping[str, Any], known: tuple[str, ...], role: str) -> str:
    """The `model_type` of a config.json, one of `known`, of a "target" or "drafter" (`role`). Raises ConfigError."""
    kind = raw.get("model_type")
    named = foreign_config(raw)  # drafters of other engines may have no type, or that of their layers
    if not isinstance(kind, str):
        unnamed = f"config.json has no model_type, so the {role} is unknown: download it again"
        raise ConfigError(named or unnamed)
    if kind in known and foreign_drafter(raw) is None:  # drafters of others bear the type of their layers
        return kind
    if kind in ASSISTANT_TYPES:
        raise ConfigError(f"model_type {kind!r} is an MTP drafter, not a target: give it as the drafter")
    if kind in FAMILIES and known == ASSISTANT_TYPES and foreign_drafter(raw) is None:
        raise ConfigError(
            f"model_type {kind!r} is a target, not an MTP drafter: give a *_assistant checkpoint"
        )
    if named is not None:
        raise ConfigError(named)
    close = [c for c in difflib.get_close_matches(kind[:80], known, n=1) if _digits(c) == _digits(kind)]
    hint = f"did you mean {close[0]!r}?" if close else f"paceline runs {', '.join(known)}"
    raise ConfigError(f"model_type {shown(kind)} is unknown as a {role}: {hint}")


def _digits(kind: str) -> str:
    """Another number is another model, not a misspelling."""
    return re.sub(r"\D", "", kind)
