"""A LoRA adapter, a folder in PEFT's layout or a GGUF file: what it adds to the matrices of its base, scale * B @ A.

Names, scale and patterns as PEFT's `LoraConfig` and `get_peft_model_state_dict` write them
(https://huggingface.co/docs/peft/package_reference/lora). A merged one is added to the weights while they are loaded,
before quantization, in float32. Those that requests choose are in adapters.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.checkpoints.gguf.names import NAMES, checkpoint_name, half_split_rows, rotated_heads
from paceline.checkpoints.gguf.reader import Gguf, is_gguf
from paceline.checkpoints.loading import Shapes, canonical, may_skip
from paceline.checkpoints.safetensors_file import read_header
from paceline.errors import ConfigError, PairError, WeightsError, shown
from paceline.files import read_json
from paceline.models.config import parse_target, read_config
from paceline.models.families import spec_of
from paceline.ops.base import Weight

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MERGE = "merge it with PEFT's merge_and_unload() and give the merged folder as the target"
_PART = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<part>[AB])(\.\w+)?(\.weight)?")
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_.-]*")
_ROOT = "base_model.model."
# fields of LoraConfig that change what the numbers mean, and values under which they do not
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (None, False), "fan_in_fan_out": (None, False), "lora_bias": (None, False), "bias": (None, "none"),
    "alora_invocation_tokens": (None,), "use_qalora": (None, False), "target_parameters": (None, [], ()),
    "trainable_token_indices": (None,), "megatron_config": (None,), "layer_replication": (None,),
}  # fmt: skip
_BASE_CHANGED = ("pissa", "olora", "loftq", "corda")  # initialisations after which the base is another one


@dataclass(frozen=True, slots=True)
class Part:
    """What is added to one matrix [out, in]: scale * b @ a, with a [r, in] and b [out, r]; transposed for a table."""

    a: Tensor
    b: Tensor
    scale: float
    table: bool = False

    def delta(self) -> Tensor:
        product = self.scale * (self.b.float() @ self.a.float())
        return product.T if self.table else product


@dataclass(frozen=True, slots=True)
class _Place:
    """What an adapter is read for: the target's shapes; and where it lies, for messages."""

    shapes: Shapes
    folder: Path


class Adapter:
    """Parts by the name of the module, and whole matrices (`modules_to_save`) that replace the base's."""

    def __init__(
        self, folder: Path, parts: dict[str, Part], whole: dict[str, Tensor], skipped: list[str]
    ) -> None:
        self.folder, self.parts, self.whole, self.skipped = folder, parts, whole, skipped

    def __call__(self, name: str, weight: Weight) -> Weight:
        """A `Transform`: the weight with this adapter's part merged into it."""
        part, whole = self.parts.get(name), self.whole.get(name)
        if part is None and whole is None:
            return weight
        if weight.kind in ("int8", "int4"):
            raise WeightsError(
                f"{name} is stored as {weight.kind}, into which {self.folder} cannot be merged: give the base that is "
                "not quantized, and --quantize"
            )
        data = weight.data if whole is None else whole.to(weight.data.device)
        if part is not None:
            data = data.float() + part.delta().to(data.device)
        return Weight(data.to(weight.data.dtype).contiguous(), weight.kind)


def load_adapter(folder: Path, target: Path) -> Adapter:
    """The adapter of a folder or a GGUF file, checked against the target's config before any weight of that is read.

    Raises LoadError.
    """
    if is_gguf(folder):
        return read_gguf_adapter(folder, target)
    raw = read_json(folder / CONFIG)
    if raw is None:
        raise ConfigError(f"{folder} has no {CONFIG}: give the folder of a LoRA adapter in PEFT's layout")
    _check_kind(raw, folder)
    config = parse_target(read_config(target))
    shapes, shared = spec_of(config.model_type).shapes(config), set(config.shared_layers)
    by_module: dict[str, dict[str, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    skipped: list[str] = []
    for stored, data in _read(folder).items():
        name = canonical(stored.removeprefix(_ROOT))
        match = _PART.fullmatch(name)
        if may_skip(f"{match['module']}.weight" if match else name, shared):
            skipped.append(name)  # of a tower, or of K/V that are read from another layer
            continue
        if match is None:
            whole[_whole_name(name, data, shapes, folder)] = data
            continue
        kind = f"{match['part']}{'t' if match['embedding'] else ''}"
        by_module.setdefault(match["module"], {})[kind] = data
    parts = {module: _part(raw, module, tensors, shapes, folder) for module, tensors in by_module.items()}
    if not parts and not whole:
        raise WeightsError(f"{folder} has no tensors for the language model: give another adapter")
    return Adapter(folder, parts, whole, skipped)


def _check_kind(raw: Mapping[str, Any], folder: Path) -> None:
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise ConfigError(f"{folder} is an adapter of type {str(kind)[:40]}, not LORA: {_MERGE}")
    for name, plain in _PLAIN.items():
        if raw.get(name) not in plain:
            raise ConfigError(f"{folder}: {name}={str(raw[name])[:40]} is not supported: {_MERGE}")
    start = str(raw.get("init_lora_weights")).lower()
    if start.startswith(_BASE_CHANGED):
        raise ConfigError(
            f"{folder} was begun with {start[:40]}, which changes the base's weights, too: {_MERGE}"
        )


def _read(folder: Path) -> dict[str, Tensor]:
    """All tensors of the adapter, checked. WeightsError for a file that is damaged, pickled or not finite."""
    path = folder / WEIGHTS
    if not path.exists():
        pickled = (folder / "adapter_model.bin").exists()
        why = "only adapter_model.bin, a pickle, which can run code" if pickled else f"no {WEIGHTS}"
        raise WeightsError(f"{folder} has {why}: save the adapter as safetensors")
    read_header(path)
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path} cannot be read ({error}): download it again") from error
    bad = next(
        (n for n, t in tensors.items() if not t.is_floating_point() or not bool(t.isfinite().all())), None
    )
    if bad is not None:
        raise WeightsError(
            f"{path}: {bad} holds values that are not finite numbers: train or download it again"
        )
    return tensors


def _whole_name(name: str, data: Tensor, shapes: Shapes, folder: Path) -> str:
    module = name.replace(".modules_to_save.default", "").removesuffix(".weight")
    if shapes.get(f"{module}.weight") != tuple(data.shape) or data.dim() != 2:
        raise PairError(
            f"{folder} holds {name} {list(data.shape)}, which this target has no place for: {_MERGE}"
        )
    return module


def _part(
    raw: Mapping[str, Any], module: str, tensors: dict[str, Tensor], shapes: Shapes, folder: Path
) -> Part:
    rank = _matched(raw.get("rank_pattern"), module, raw.get("r"))
    alpha = _matched(raw.get("alpha_pattern"), module, raw.get("lora_alpha"))
    if not _positive(rank, int) or not _positive(alpha, (int, float)):
        raise ConfigError(
            f"{folder}: r={str(rank)[:40]}, lora_alpha={str(alpha)[:40]} are no numbers above 0"
        )
    scale = alpha / rank**0.5 if raw.get("use_rslora") else alpha / rank
    return _fitting(module, tensors, _Place(shapes, folder), rank, scale)


def _fitting(
    module: str, tensors: Mapping[str, Tensor], place: _Place, rank: int | None, scale: float
) -> Part:
    """The two matrices of a module as a part. `rank` None: what A has."""
    shapes, folder = place.shapes, place.folder
    table = "At" in tensors
    a, b = tensors.get("At" if table else "A"), tensors.get("Bt" if table else "B")
    if a is None or b is None:
        raise WeightsError(f"{folder}: {module} has only one of lora_A and lora_B: download it again")
    shape = shapes.get(f"{module}.weight")
    if shape is None or len(shape) != 2:
        raise PairError(
            f"{folder} changes {module}, which this target does not have: give the base it was trained on"
        )
    rank = len(a) if rank is None else rank
    wanted = [(rank, shape[0]), (shape[1], rank)] if table else [(rank, shape[1]), (shape[0], rank)]
    if [tuple(a.shape), tuple(b.shape)] != wanted:
        raise PairError(
            f"{folder}: {module} has lora_A {list(a.shape)} and lora_B {list(b.shape)} where this target needs "
            f"{list(wanted[0])} and {list(wanted[1])}: give the base it was trained on"
        )
    return Part(a, b, scale, table)


def read_gguf_adapter(path: Path, target: Path) -> Adapter:
    """An adapter as llama.cpp's convert_lora_to_gguf writes it: rows of q and k in the order of its architecture."""
    model = Gguf(path)
    architecture = str(model.get("general.architecture"))
    what = (model.get("general.type"), model.get("adapter.type"))
    if what != ("adapter", "lora"):
        raise ConfigError(
            f"{path} is no LoRA adapter (general.type, adapter.type: {shown(what)}): give "
            "the folder of a LoRA adapter, or the GGUF file of one"
        )
    if "adapter.alora.invocation_tokens" in model:
        raise ConfigError(
            f"{path} begins in the middle of a text (aLoRA), which is not supported: give a LoRA adapter"
        )
    _check_architecture(path, architecture, target)
    alpha = model.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, int | float) or not 0 <= alpha < 1e9:
        raise ConfigError(
            f"{path}: adapter.lora.alpha={shown(alpha)} is no number from 0 on: convert it again"
        )
    return _of_tensors(model, target, float(alpha))


def _of_tensors(model: Gguf, target: Path, alpha: float) -> Adapter:
    """alpha 0: the product of both matrices as it is, as llama.cpp takes it."""
    path, architecture, raw = model.path, model["general.architecture"], read_config(target)
    config, text = parse_target(raw), raw.get("text_config", raw)
    shapes, shared = spec_of(config.model_type).shapes(config), set(config.shared_layers)
    heads = text.get("num_attention_heads", 0), text.get("num_key_value_heads", 0)
    by_module: dict[str, dict[str, Tensor]] = {}
    skipped: list[str] = []
    for stored in model.tensors:
        base, _, part = stored.rpartition(".lora_")
        name = checkpoint_name(architecture, base) if part in ("a", "b") else None
        if name is None:
            raise PairError(f"{path} holds {shown(stored)}, which this target has no place for: {_MERGE}")
        if may_skip(name, shared):
            skipped.append(stored)
            continue
        rows = rotated_heads(architecture, base, *heads) if part == "b" else 0
        by_module.setdefault(name.removesuffix(".weight"), {})[part.upper()] = _gguf_part(model, stored, rows)
    parts = {}
    for module, tensors_of in by_module.items():
        rank = len(tensors_of.get("A", ()))
        parts[module] = _fitting(
            module, tensors_of, _Place(shapes, path), None, alpha / rank if alpha and rank else 1.0
        )
    if not parts:
        raise WeightsError(f"{path} has no tensors for the language model: give another adapter")
    return Adapter(path, parts, {}, skipped)


def _check_architecture(path: Path, architecture: str, target: Path) -> None:
    own = str(Gguf(target).get("general.architecture")) if is_gguf(target) else architecture
    if architecture not in NAMES or own != architecture:
        raise PairError(
            f"{path} is an adapter for the architecture {shown(architecture)}, which {target} is not: give the base it "
            "was trained on"
        )


def _gguf_part(model: Gguf, stored: str, heads: int) -> Tensor:
    """`heads` > 0: rows of that many heads go back from pairs side by side to half and half."""
    data = model.floats(stored)
    if data.ndim != 2 or not np.isfinite(data).all():
        raise WeightsError(
            f"{model.path}: {shown(stored)} is no matrix of finite numbers, of which adapters are made here: {_MERGE}"
        )
    if heads and len(data) % (2 * heads) == 0:
        data = data[half_split_rows(len(data), heads)]
    return torch.from_numpy(np.array(data))


def _positive(value: object, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and 0 < value < 1e9


def _matched(pattern: object, module: str, default: Any) -> Any:
    """The value of the first pattern that fits the module's name, as PEFT's `get_pattern_key` looks for it."""
    for key, value in (pattern if isinstance(pattern, dict) else {}).items():
        if fits(key, module):
            return value
    return default


def fits(key: str, module: str) -> bool:
    """Whether the regular expression `(.*\\.)?(key)$` fits a name, without backtracking. Raises ConfigError."""
    whole = key.startswith("^")
    key = key.removeprefix("^").removesuffix("$")
    if _PLAIN_KEY.fullmatch(key):  # of a plain name, as PEFT writes them, only the points are any character
        end = module[len(module) - len(key) :]
        before = module[: len(module) - len(key)]
        same = len(end) == len(key) and all(a in (b, ".") for a, b in zip(key, end))
        return same and (not before or (before.endswith(".") and not whole))
    return bool(_automaton(key if whole else rf"([^\n]*\.)?({key})")(module))


@lru_cache(64)
def _automaton(pattern: str) -> Callable[[str], bool]:
    """What tells whether a text fits a pattern as a whole, in time linear in the text."""
    import llguidance

    byte_tokens = llguidance.LLTokenizer("byte")
    grammar = llguidance.LLMatcher.grammar_from_regex(pattern)
    made = llguidance.LLMatcher(byte_tokens, grammar, log_level=0)
    if made.is_error():
        raise ConfigError(
            f"{CONFIG}: {shown(pattern)} is no pattern that can be matched without backtracking: write names in its place"
        )

    def fitting(text: str) -> bool:
        matcher, data = made.deep_copy(), list(text.encode())
        return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()

    return fitting


def unmerged(folder: Path) -> str | None:
    """One line if an adapter lies in a model's own folder, which is not merged unless it is asked for."""
    if not (folder / CONFIG).is_file():
        return None
    return (
        f"{folder / CONFIG} is an adapter beside the model, not merged: give --adapter {folder} to merge it"
    )
