"""A model folder -> one GGUF file, tensor by tensor, so that memory holds a part of one at a time.

What is written is read again before any weight is: what the format cannot say of a model is refused, not dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.checkpoints.defaults import GGUF_KEYS, read_defaults
from paceline.checkpoints.gguf.blocks import BY_NAME
from paceline.checkpoints.gguf.metadata import read_config as read_gguf_config
from paceline.checkpoints.gguf.mixtures import FILE_TYPES
from paceline.checkpoints.gguf.names import (
    interleaved_rows,
    names_of,
    norm_shift,
    rotated_heads,
    stored_shape,
)
from paceline.checkpoints.gguf.reader import Gguf
from paceline.checkpoints.gguf.tokenizer import end_ids
from paceline.checkpoints.loading import Tensors
from paceline.checkpoints.safetensors_file import Entry
from paceline.convert import kquants
from paceline.convert.header import (
    ARCHITECTURES,
    Config,
    architecture_of,
    context_of,
    metadata,
    not_said,
    rotary_factors,
)
from paceline.convert.mixtures import MIXTURES, Shape, kind_for
from paceline.convert.output import Report, check_free, check_space, whole
from paceline.convert.vocabulary import SAMPLES, differing, vocabulary
from paceline.drafter_kinds import ASSISTANT_TYPES
from paceline.errors import ConfigError, LoadError, UsageError
from paceline.models.config import parse_target, read_config
from paceline.models.drafters.gemma4_assistant import assistant_shapes
from paceline.models.drafters.heads import ROOM
from paceline.models.families import spec_of
from paceline.models.families.gemma4.config import AssistantConfig, GemmaConfig, parse_assistant
from paceline.models.layers.decoder_config import DecoderConfig
from paceline.text.tokenizer import Tokenizer

FLOATS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
BLOCKS = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
KINDS = (*FLOATS, *BLOCKS, *MIXTURES)
AS_BLOCKS = "mxfp4"  # never asked for, but kept where experts are stored so
EXPERT_BIAS = "_exps.bias"
AT_LEAST_Q8 = ("token_embd.weight", "output.weight")  # they steer, and are a small part of large models
ELEMENTS = 32  # of a block of any of BLOCKS
ALIGNMENT = 32
PIECE = 1 << 22  # values that are converted at a time
FULL_PRECISION = ("ffn_gate_inp", "shortconv.conv", "exp_probs_b")  # small, and routers decide
CLUSTERS = "masked_embedding."


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of the file: the values of checkpoint tensor `source`, or of one `part` of `parts` along `axis`."""

    name: str
    source: str
    shape: tuple[int, ...]
    kind: str
    part: int = 0
    parts: int = 1
    heads: int = 0  # > 0: rows of that many heads go from half and half to pairs side by side
    shift: float = 0.0  # what is added to the values
    axis: int = -2  # rows; -1: of biases of experts

    @property
    def nbytes(self) -> int:
        layout = BY_NAME[self.kind.upper()]
        return prod(self.shape) // layout.elements * layout.size


@dataclass(slots=True)
class Written:
    """What became of it: bytes, and what a user should know."""

    nbytes: int
    notes: list[str] = field(default_factory=list)


def write_gguf(
    folder: Path, out: Path, kind: str | None, text_from: Path | None = None, *, force: bool = False,
    report: Report = lambda done, total: None,
) -> Written:  # fmt: skip
    """Write the model in `folder` to the file `out`; kind None: as stored. `text_from`: the folder with the tokenizer.

    Raises UsageError, LoadError and CapacityError; then there is no file.
    """
    check_free(out, force)
    config, tensors = _open(folder)
    if tensors.scales or tensors.quantized:
        raise UsageError(f"{folder} is quantized already: convert the original")
    notes: list[str] = []
    plan = _plan(config, tensors, kind, notes)
    factors = rotary_factors(config)
    tokenizer = Tokenizer.load(text_from or folder)
    head = _head(config, tokenizer, folder) | {
        "general.name": out.stem,
        "general.file_type": _file_type(plan, kind),
    }
    total = sum(padded(tensor.nbytes) for tensor in plan) + sum(
        padded(tensor.nbytes) for tensor in factors.values()
    )
    check_space(out, total)
    with whole(out) as part:
        end = write_head(part, architecture_of(config), head, plan, factors)
        with part.open("r+b") as file:
            start = padded(end)
            file.truncate(start + total)
            file.seek(start)
            for values in factors.values():
                put(file, [values])
            file.flush()
            notes += _check(part, config, tokenizer, folder)
            for pieces in _converted(plan, tensors):
                put(file, pieces)
                report(file.tell() - start, total)
    return Written(out.stat().st_size, notes)


def _open(folder: Path) -> tuple[Config, Tensors]:
    raw = read_config(folder)
    if raw.get("model_type") in ASSISTANT_TYPES:
        assistant = parse_assistant(raw)
        text = assistant.text
        return assistant, Tensors(folder, assistant_shapes(assistant), range(len(text.layers)), text.tied)
    config: Any = parse_target(raw)
    if not isinstance(config, GemmaConfig) and config.model_type not in ARCHITECTURES:
        raise UsageError(
            f"{folder} is a {config.model_type}, of which no GGUF files are written: it runs as it is, and "
            "`paceline quantize` makes it smaller"
        )
    return config, Tensors(
        folder, spec_of(config.model_type).shapes(config), config.shared_layers, config.tied
    )


def _plan(config: Config, tensors: Tensors, wanted: str | None, notes: list[str]) -> list[Stored]:
    """Every tensor of the file, in the order of the checkpoint. ConfigError for one that GGUF has no name for."""
    architecture, out = architecture_of(config), []
    if any(name.startswith(f"{ROOM}.") for name in tensors.skipped):
        notes.append("the parallel heads are left out, because GGUF has no place for them")
    clusters = [source for source in tensors.entries if source.startswith(CLUSTERS)]
    if clusters:
        notes.append(
            "the clusters of the head are left out, because llama.cpp refuses them: all tokens are scored there"
        )
    for source in clusters:
        tensors.take(source)
    for source, entry in tensors.entries.items():
        names = names_of(architecture, source)
        if not names:
            raise ConfigError(
                f"{tensors.folder}: GGUF's architecture {architecture} has no place for {source}: run the folder as it is"
            )
        axis, shape = -1 if names[0].endswith(EXPERT_BIAS) else -2, stored_shape(names[0], entry.shape)
        if len(names) > 1:
            shape = (*shape[:axis], shape[axis] // len(names), *shape[axis:][1:])
        for i, name in enumerate(names):
            heads = 0
            if isinstance(config, DecoderConfig):
                heads = rotated_heads(architecture, name, config.heads, config.kv_heads)
            kind, shift = _kind_of(name, entry, wanted, _shape_of(config)), norm_shift(architecture, name)
            out.append(Stored(name, source, shape, kind, i, len(names), heads, shift, axis))
    uneven = [tensor for tensor in out if wanted in (*BLOCKS, *MIXTURES) and tensor.kind == "f16"]
    if uneven:
        notes.append(f"{len(uneven)} tensors have rows of no multiple of {ELEMENTS} values: kept as f16")
    return out


def _shape_of(config: Config) -> Shape:
    """What the rules of mixtures ask."""
    text = config.text if isinstance(config, AssistantConfig) else config
    kv_heads = text.layers[0].kv_heads if isinstance(text, GemmaConfig) else text.kv_heads
    experts = 0 if text.moe is None else text.moe.experts
    return Shape(text.layer_count, text.heads // kv_heads, experts, text.tied)


def _kind_of(name: str, entry: Entry, wanted: str | None, shape: Shape) -> str:
    if len(entry.shape) == 1 or any(part in name for part in FULL_PRECISION) or name.endswith(EXPERT_BIAS):
        return "f32"
    if wanted is not None and wanted in MIXTURES:
        return kind_for(name, entry.shape[-1], wanted, shape)
    if wanted not in BLOCKS:
        return wanted or entry.dtype.lower()
    if entry.shape[-1] % ELEMENTS:
        return "f16"
    return "q8_0" if name in AT_LEAST_Q8 else wanted


def _file_type(plan: list[Stored], wanted: str | None) -> int:
    """The number of what was asked for, or of what most matrices are."""
    kinds = Counter(tensor.kind for tensor in plan if len(tensor.shape) > 1)
    kind = AS_BLOCKS if AS_BLOCKS in kinds else kinds.most_common(1)[0][0]
    return FILE_TYPES[wanted if wanted is not None and wanted in MIXTURES else kind]


def _head(config: Config, tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """All metadata by its full key, but the architecture itself."""
    architecture = architecture_of(config)
    text = config.text if isinstance(config, AssistantConfig) else config
    out: dict[str, Any] = {
        "general.type": "model",
        "general.quantization_version": 2,
    }
    out |= {GGUF_KEYS[name]: value for name, value in read_defaults(folder).given().items()}
    out |= {f"{architecture}.{key}": value for key, value in metadata(config).items()}
    silent = read_config(folder).get("suppress_tokens")
    if isinstance(silent, list) and silent:
        out["tokenizer.ggml.suppress_tokens"] = silent
    words = vocabulary(tokenizer, text.vocab_size, architecture.startswith("gemma4"), folder)
    return out | {f"tokenizer.{key}": value for key, value in words.items()}


def write_head(
    part: Path,
    architecture: str,
    head: dict[str, Any],
    plan: list[Stored],
    factors: dict[str, NDArray[np.float32]],
) -> int:
    """Everything before the tensors' values; returns its size."""
    gguf = _library()
    writer = gguf.GGUFWriter(None, architecture)
    for key, value in head.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    extra = [Stored(name, "", values.shape, "f32") for name, values in factors.items()]
    for tensor in [*extra, *plan]:
        kind = gguf.GGMLQuantizationType[tensor.kind.upper()]
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, kind)
    try:
        writer.write_header_to_file(part)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()
    return part.stat().st_size


def _library() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise UsageError("writing GGUF needs the package gguf: pip install 'paceline[convert]'") from error
    return gguf


def _check(part: Path, config: Config, tokenizer: Tokenizer, folder: Path) -> list[str]:
    """What a user should know of the file, read again. Raises LoadError where the model would compute something else."""
    model = Gguf(part)
    raw = read_gguf_config(model)
    parsed: Any = parse_assistant(raw) if isinstance(config, AssistantConfig) else parse_target(raw)
    lost = not_said(config, parsed)
    if lost:
        raise LoadError(
            f"{folder} cannot be written as GGUF, whose architecture {architecture_of(config)} cannot say "
            f"{', '.join(lost)}: run the folder as it is"
        )
    notes = []
    if isinstance(config, DecoderConfig) and context_of(config) < config.max_len:
        notes.append(
            f"the context is cut from {config.max_len} tokens to the window of {context_of(config)}: GGUF's architecture "
            f"{architecture_of(config)} knows no window"
        )
    other = differing(tokenizer, Tokenizer.from_gguf(model))
    if other:
        notes.append(
            f"GGUF cannot say how this tokenizer cuts text: {other} of {len(SAMPLES)} sample texts get other token ids"
        )
    if not set(tokenizer.eos_ids) <= set(found_ends := end_ids(model)):
        notes.append(f"of the end tokens {list(tokenizer.eos_ids)} GGUF keeps {list(found_ends)}")
    return notes


def _converted(plan: list[Stored], tensors: Tensors) -> Iterator[Iterator[NDArray[Any]]]:
    """The values of each tensor, in pieces."""
    data = torch.empty(0)
    for tensor in plan:
        if tensor.part == 0:
            blocks = tensors.take_blocks(tensor.source) if tensor.kind == AS_BLOCKS else None
            data = tensors.take(tensor.source) if blocks is None else blocks[0]
        yield _values(data, tensor)
    tensors.finish()


def _values(data: Tensor, tensor: Stored) -> Iterator[NDArray[Any]]:
    if tensor.parts > 1:
        data = data.chunk(tensor.parts, tensor.axis)[tensor.part]
    if tensor.heads:
        data = data[torch.from_numpy(interleaved_rows(data.shape[0], tensor.heads))]
    if tensor.shift:
        data = data.float() + tensor.shift
    rows = data.reshape(-1, data.shape[-1]) if data.dim() > 1 else data.reshape(1, -1)
    step = max(1, PIECE // rows.shape[-1])
    for start in range(0, len(rows), step):
        yield encoded(rows[start : start + step], tensor)


def encoded(rows: Tensor, tensor: Stored) -> NDArray[Any]:
    if tensor.kind == AS_BLOCKS:
        return rows.numpy()
    if tensor.kind in kquants.QUANTIZERS:
        if not bool((rows.abs() <= kquants.LARGEST).all()):
            raise UsageError(
                f"{tensor.source} has values past {kquants.LARGEST:.0e}, or no numbers: give --to bf16 or --to f32"
            )
        return kquants.quantize(tensor.kind, rows).numpy()
    if tensor.kind in BLOCKS:
        gguf = _library()
        packed: NDArray[np.uint8] = gguf.quants.quantize(
            rows.float().contiguous().numpy(), gguf.GGMLQuantizationType[tensor.kind.upper()]
        )
        return packed
    values = rows.to(FLOATS[tensor.kind]).contiguous()
    if tensor.kind == "f16" and not bool(values.isfinite().all()):
        raise UsageError(
            f"{tensor.source} has values past float16's largest, 65504: give --to bf16 or --to f32"
        )
    return values.view(torch.int16).numpy() if tensor.kind == "bf16" else values.numpy()


def put(file: BinaryIO, values: Iterable[NDArray[Any]]) -> None:
    for piece in values:
        file.write(np.ascontiguousarray(piece).data.cast("B"))
    file.write(bytes(padded(file.tell()) - file.tell()))


def padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
