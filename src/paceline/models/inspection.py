"""What a checkpoint is and costs, read from its config and safetensors headers: no weight is loaded."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from paceline.checkpoints.card import quantized_by
from paceline.checkpoints.foreign import drafter_kind
from paceline.checkpoints.loading import Shapes, Tensors, modules_of, read_entries
from paceline.checkpoints.safetensors_file import Entry
from paceline.drafter_kinds import ASSISTANT_TYPES
from paceline.errors import LoadError, PairError
from paceline.kv.layout import Layout
from paceline.models.config import parse_target, read_config
from paceline.models.drafters.gemma4_assistant import assistant_shapes, check_pair
from paceline.models.drafters.heads import ROOM
from paceline.models.drafters.networks import kind_of, plan_network
from paceline.models.drafters.state_net import DrafterFiles
from paceline.models.families import spec_of
from paceline.models.families.gemma4.config import GemmaConfig, parse_assistant
from paceline.models.spec import ModelConfig
from paceline.ops.base import Runner

PARTS = (
    ("embed_tokens_per_layer", "per-layer embedding table"),
    ("embed_tokens", "embedding table"),
    ("lm_head", "output head"),
    ("masked_embedding", "output head"),
    (".experts.", "experts"),
    (".self_attn.", "attention"),
    (".linear_attn.", "linear attention"),
    (".mlp.gate.", "experts"),
    (".mlp.", "dense MLP"),
)


@dataclass(frozen=True, slots=True)
class Inspection:
    """Sizes in bytes as stored; `unsupported` says why it would be refused, empty if it would load."""

    path: Path
    model_type: str
    role: str  # "target" | "drafter" | "unknown"
    parameters: int = 0  # of the language model, each counted once
    weights: dict[str, int] = field(default_factory=dict)  # part -> bytes
    dtypes: dict[str, int] = field(default_factory=dict)  # dtype that is read -> tensors
    quantized: str | None = None  # by whom and how, in one line
    kept: dict[str, int] = field(
        default_factory=dict
    )  # part -> bytes in memory, where they differ from `weights`
    kv_per_token: dict[str, int] = field(default_factory=dict)  # layer kind -> bytes, for the given itemsize
    kv_as_int8: dict[str, int] = field(default_factory=dict)  # the same in int8, where it can be kept so
    windows: dict[str, int | None] = field(
        default_factory=dict
    )  # layer kind -> tokens that are kept, None = all
    state_bytes: int = 0  # of the recurrent states of one text
    layers: str = ""
    vocab_size: int = 0
    max_len: int = 0
    skipped: dict[str, int] = field(default_factory=dict)  # what is not loaded -> bytes
    unsupported: list[str] = field(default_factory=list)

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())


def inspect(
    path: Path | str, *, target: Path | str | None = None, itemsize: int = 4, runner: Runner | None = None
) -> Inspection:
    """Describe a target, or a drafter (then `target`, if given, is what it must fit). Never raises LoadError.

    `itemsize`: bytes of one K/V element (4 on CPU, 2 for bfloat16 on a GPU) unless `runner` packs the target's.
    """
    folder = Path(path)
    try:
        raw = read_config(folder)
    except LoadError as error:
        return Inspection(folder, "unknown", "unknown", unsupported=[str(error)])
    facts: dict[str, Any] = {"role": "target" if drafter_kind(raw) is None else "drafter"}
    troubles: list[str] = []
    try:
        drafter = kind_of(folder, target)
        facts |= {"role": "drafter" if drafter else "target"}
        facts |= (
            _describe_drafter(folder, raw, target)
            if drafter
            else _describe_target(folder, raw, itemsize, runner)
        )
    except LoadError as error:
        troubles.append(str(error))
        facts |= _sizes_or_nothing(folder)
    kind = raw.get("model_type") or raw.get("speculators_model_type") or "unknown"
    return Inspection(folder, str(kind), unsupported=troubles, **facts)


def check(path: Path, target: Path | None = None) -> None:
    """Raise what loading would raise, seen from config and headers alone. `target`: what its drafter must fit."""
    raw = read_config(path)
    if kind_of(path, target) is not None:
        _describe_drafter(path, raw, target)
    else:
        _describe_target(path, raw, 4, None)


def _describe_target(
    folder: Path, raw: dict[str, Any], itemsize: int, runner: Runner | None
) -> dict[str, Any]:
    config = parse_target(raw)
    spec = spec_of(config.model_type)
    shapes = spec.shapes(config)
    tensors = Tensors(folder, shapes, config.shared_layers, config.tied)
    layout = spec.layout(config)
    outputs = {entry.dtype for name, entry in tensors.entries.items() if ".self_attn.o_proj." in name}
    if runner is not None and runner.packs(layout) and outputs == {"BF16"}:  # as GraphTarget.kv_dtype
        itemsize = 2
    facts = _config_facts(config) | _stored(tensors, shapes) | _cache_facts(layout, itemsize)
    if runner is not None and runner.quantizes(layout):
        facts["kv_as_int8"] = layout.bytes_per_token(1)
    return facts


def _describe_drafter(folder: Path, raw: dict[str, Any], target: Path | str | None) -> dict[str, Any]:
    if raw.get("model_type") in ASSISTANT_TYPES:
        return _describe_assistant(folder, raw, target)
    fits = None if target is None else parse_target(read_config(Path(target)))
    plan = plan_network(DrafterFiles.of(folder, raw, target), fits)
    return _config_facts(plan.layers) | _stored(Tensors(folder, plan.shapes, rename=plan.rename), plan.shapes)


def _describe_assistant(folder: Path, raw: dict[str, Any], target: Path | str | None) -> dict[str, Any]:
    config = parse_assistant(raw)
    if target is not None:
        check_pair(config, _gemma(Path(target), folder), (str(folder), str(target)))
    shared = range(len(config.text.layers))
    shapes = assistant_shapes(config)
    tensors = Tensors(folder, shapes, shared, config.text.tied)
    return _config_facts(config.text) | _stored(tensors, shapes)


def _gemma(target: Path, drafter: Path) -> GemmaConfig:
    """The config of a drafter's target. PairError where it is of another family."""
    config = parse_target(read_config(target))
    if not isinstance(config, GemmaConfig):
        raise PairError(
            f"{drafter} is an MTP drafter for Gemma 4, but {target} is a {config.model_type}: use the drafter ngram, "
            "or a smaller model with the same tokenizer"
        )
    return config


def _cache_facts(layout: Layout, itemsize: int) -> dict[str, Any]:
    return {
        "kv_per_token": layout.bytes_per_token(itemsize),
        "windows": {k: layout.windows[k] for k in layout.kinds},
        "state_bytes": layout.bytes_per_state(),
    }


def _config_facts(config: ModelConfig) -> dict[str, Any]:
    return {"layers": config.describe(), "vocab_size": config.vocab_size, "max_len": config.max_len}


def _stored(tensors: Tensors, shapes: Shapes) -> dict[str, Any]:
    """Sizes of a checked model: its scales count as bytes, not as parameters."""
    facts = _sizes(tensors.entries, tensors.skipped)
    scales = {name: entry for name, entry in tensors.scales.items() if name in tensors.entries}
    weights = Counter(facts["weights"]) + Counter(_sizes(scales, {})["weights"])
    parameters = sum(math.prod(shape) for shape in shapes.values())
    facts |= {"parameters": parameters, "weights": dict(weights.most_common())}
    if tensors.quantized:
        facts["kept"] = dict(
            sum((_parts(some, "memory") for some in (tensors.entries, scales)), Counter[str]())
        )
    return facts | {"quantized": quantized_by(tensors.folder, tensors.quantized, parameters)}


def _parts(entries: dict[str, Entry], size: Literal["nbytes", "memory"]) -> Counter[str]:
    """Bytes by the part of the model."""
    weights: Counter[str] = Counter()
    for name, entry in entries.items():
        weights[next((part for key, part in PARTS if key in name), "norms and projections")] += getattr(
            entry, size
        )
    return weights


def _sizes(entries: dict[str, Entry], skipped: dict[str, Entry]) -> dict[str, Any]:
    weights = _parts(entries, "nbytes")
    left: Counter[str] = Counter()
    modules = modules_of(skipped)
    for name, entry in skipped.items():
        left["parallel heads" if name.startswith(f"{ROOM}.")
             else "multi-token prediction" if name.startswith(modules)
             else "K/V of layers that share another's" if ".self_attn." in name and name.startswith("layers.")
             else name.split(".")[0]] += entry.nbytes  # fmt: skip
    return {
        "parameters": sum(math.prod(entry.shape) for entry in entries.values()),
        "weights": dict(weights.most_common()),
        "dtypes": dict(Counter(entry.dtype for entry in entries.values()).most_common()),
        "skipped": dict(left.most_common()),
    }


def _sizes_or_nothing(folder: Path) -> dict[str, Any]:
    """Sizes of a model that would be refused, as far as its files can be read."""
    try:
        return _sizes(read_entries(folder), {})
    except LoadError:
        return {}
