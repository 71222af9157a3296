"""From an assistant's config.json to the shape that training needs, and back to a module with weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from paceline.errors import PairError, WeightsError
from paceline.kv.layout import Layout
from paceline.models.config import read_config
from paceline.models.families.gemma4.config import parse_assistant
from paceline.models.families.gemma4.layers import inverse_frequencies
from paceline.train.methods.gemma_assistant.module import DrafterModule, DrafterShape, LayerShape

INIT_SCALE = 0.02


def shape_of(raw: Mapping[str, Any]) -> DrafterShape:
    """The shape described by an assistant's config.json. Raises ConfigError."""
    config = parse_assistant(raw)
    text = config.text
    kinds = {layer.kind: layer for layer in text.layers}
    return DrafterShape(
        layers=tuple(LayerShape(layer.kind, layer.kv_heads, layer.head_dim) for layer in text.layers),
        heads=text.heads,
        hidden=text.hidden_size,
        intermediate=text.layers[0].intermediate_size,
        vocab=text.vocab_size,
        target_hidden=config.backbone_hidden_size,
        eps=text.eps,
        windows={kind: text.window_of(kind) for kind in kinds},
        inv_freq={kind: inverse_frequencies(text, layer) for kind, layer in kinds.items()},
        clusters=config.clusters,
        top_clusters=config.top_clusters,
    )


def check_pair(shape: DrafterShape, layout: Layout, hidden_size: int, vocab_size: int) -> None:
    """PairError unless a drafter of `shape` can read the target's K/V and states."""
    if shape.target_hidden != hidden_size:
        raise PairError(
            f"the drafter reads hidden states of {shape.target_hidden}, the target has {hidden_size}: "
            "use an --init made for this target, or --init scratch"
        )
    if shape.vocab != vocab_size:
        raise PairError(f"the drafter has {shape.vocab} tokens, the target {vocab_size}: use --init scratch")
    for layer in shape.layers:
        if layer.kind not in layout.kinds:
            raise PairError(
                f"the target has no {layer.kind} layer with K/V for the drafter to read: use --init scratch"
            )
        storage = layout.layers[layout.last_of(layer.kind)]
        if (storage.kv_heads, storage.head_dim) != (layer.kv_heads, layer.head_dim):
            raise PairError(
                f"the target's {layer.kind} K/V is {storage.kv_heads} heads of {storage.head_dim}, the "
                f"drafter expects {layer.kv_heads} of {layer.head_dim}: use --init scratch"
            )


@torch.no_grad()
def new_module(shape: DrafterShape, seed: int, embedding: torch.Tensor | None = None) -> DrafterModule:
    """Fresh weights. With the target's `embedding` [V, H] the head starts as the target's own, seen along
    its main directions, and the projections from and to hidden states likewise: the first steps then say
    what the target says.
    """
    module = DrafterModule(shape)
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in module.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
    if embedding is None:
        module.head.mul_(INIT_SCALE)
        return module
    rows = embedding.float()
    axes = torch.linalg.eigh(torch.cov(rows.T)).eigenvectors.flip(1)[:, : shape.hidden]  # [H, hidden]
    width = axes.shape[1]
    module.head.zero_()[:, :width] = rows @ axes
    module.pre_projection.weight.mul_(0.7)
    module.pre_projection.weight[:width, shape.target_hidden :] = axes.T
    module.post_projection.weight.zero_()[:, :width] = axes
    return module


def load_module(folder: Path) -> tuple[DrafterModule, dict[str, Any], torch.dtype]:
    """An assistant folder as (module in float32, raw config, dtype of its weights). Raises LoadError."""
    raw = read_config(folder)
    module = DrafterModule(shape_of(raw))
    tensors: dict[str, torch.Tensor] = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightsError(
            f"{folder} has no .safetensors files: give an assistant folder in Hugging Face layout"
        )
    try:
        for file in files:
            tensors |= load_file(file)
    except (OSError, SafetensorError) as error:
        raise WeightsError(
            f"the weights in {folder} cannot be read ({error}): download them again"
        ) from error
    if "lm_head.weight" in tensors:  # tied; some writers store the head under its own name
        head = tensors.pop("lm_head.weight")
        tensors.setdefault("model.embed_tokens.weight", head)
    want = module.state_dict()
    wrong = sorted(set(want) ^ set(tensors)) or [n for n, t in want.items() if t.shape != tensors[n].shape]
    if wrong:
        raise WeightsError(f"{folder}: {len(wrong)} tensors do not fit, e.g. {wrong[0]}: download it again")
    dtype = tensors["pre_projection.weight"].dtype
    module.load_state_dict({n: t.float() if t.is_floating_point() else t for n, t in tensors.items()})
    return module, dict(raw), dtype
