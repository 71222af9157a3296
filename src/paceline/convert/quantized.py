"""A quantized model folder: what it looks like, how it is written, and what the quantization costs.

The folder is the source's, with each quantized matrix `x` stored as int8 [out, in] or, two values a byte, as uint8
[out, in / 2], beside its float32 scales `x_scale`, and `paceline_quantization` in config.json. Towers of other
modalities are left out.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.checkpoints.gguf.reader import is_gguf
from paceline.checkpoints.interleaved import is_interleaved, order_of
from paceline.checkpoints.loading import SCALE, canonical, find_files, may_skip, read_entries
from paceline.checkpoints.quantized.table import see_quantized
from paceline.errors import CapacityError, LoadError, UsageError
from paceline.files import read_json
from paceline.hub.resolve import ASSISTANT_KEY, find_assistant
from paceline.kv.cache import KVCache
from paceline.models.target import GraphTarget
from paceline.ops.base import Weight
from paceline.ops.quantize import QuantKind, kind_for, quantize

ENTRY = "paceline_quantization"
EXPERTS_IN_BLOCKS = "_proj_blocks"  # of gpt-oss
CHUNK = 64  # rows per forward when measuring


def save_quantized(source: Path, out: Path, kind: QuantKind) -> dict[str, int]:
    """Write `source` quantized to `out`; returns bytes before and after. Raises UsageError, LoadError, CapacityError."""
    config = _read_config(source)
    if ENTRY in config:
        raise UsageError(
            f"{source} is quantized already ({config[ENTRY].get('kind')}): quantize the original"
        )
    entries = read_entries(source)
    _, kinds = see_quantized(dict(entries), {}, source)
    how = next(iter(kinds), "MXFP4" if any(name.endswith(EXPERTS_IN_BLOCKS) for name in entries) else None)
    if how is not None:
        raise UsageError(f"{source} is quantized already ({how}): it can be run as it is")
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"{out} is not empty: name a new folder")
    names: dict[str, str] = {}
    sizes = {"before": 0, "after": 0}
    with _whole_or_nothing(out):
        for path in find_files(source):
            tensors = _quantize_file(path, kind, sizes, is_interleaved(entries))
            save_file(tensors, out / path.name, metadata={"format": "pt"})
            names.update(dict.fromkeys(tensors, path.name))
        index = {"metadata": {"total_size": sizes["after"]}, "weight_map": names}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
        for path in sorted(source.iterdir()):
            if (
                path.is_file()
                and path.suffix in (".json", ".jinja", ".model", ".txt")
                and "index" not in path.name
            ):
                shutil.copyfile(path, out / path.name)
        if (more := source / "additional_chat_templates").is_dir():
            shutil.copytree(more, out / more.name)
        assistant, _ = find_assistant(source, config)
        if assistant not in (None, source):  # the new folder does not lie beside it
            config[ASSISTANT_KEY] = str(assistant.resolve())
        config[ENTRY] = {"kind": kind, "version": 1}
        (out / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return sizes


@contextmanager
def _whole_or_nothing(out: Path) -> Iterator[None]:
    """The new folder `out`, taken away again if anything goes wrong. CapacityError where it cannot be written."""
    new = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException as error:
        for path in out.iterdir() if out.is_dir() else ():
            path.unlink()
        if new and out.is_dir():
            out.rmdir()
        if isinstance(error, OSError | SafetensorError):
            reason = getattr(error, "strerror", None) or error
            raise CapacityError(
                f"cannot write {out} ({reason}): free space or name another folder; nothing is left there"
            ) from error
        raise


def _read_config(source: Path) -> dict[str, Any]:
    if is_gguf(source):
        raise UsageError(
            f"{source} is a GGUF file: it runs as it is; to quantize, name the safetensors checkpoint"
        )
    config = read_json(source / "config.json")
    if config is None:
        raise LoadError(f"{source} has no config.json: give a model folder")
    return config


def _quantize_file(path: Path, kind: QuantKind, sizes: dict[str, int], in_turns: bool) -> dict[str, Tensor]:
    """`in_turns`: experts are put in order first, see checkpoints/interleaved.py."""
    out: dict[str, Tensor] = {}
    with safe_open(path, framework="pt", device="cpu") as file:
        for stored in file.keys():  # noqa: SIM118  not a dict
            name = canonical(stored)
            if may_skip(name, set()):
                continue
            data = file.get_tensor(stored)
            sizes["before"] += data.nbytes
            if in_turns and (order := order_of(name, tuple(data.shape))) is not None:
                stored = stored.removesuffix(name) + order[0]  # noqa: PLW2901  its name from here on
                name, data = order[0], order[1](data)
            for key, tensor in _quantize_tensor(stored, name, data, kind).items():
                out[key] = tensor
                sizes["after"] += tensor.nbytes
    return out


def _quantize_tensor(stored: str, name: str, data: Tensor, kind: QuantKind) -> dict[str, Tensor]:
    """One tensor as it is stored: itself, or packed values with their scales. Experts are quantized one by one."""
    stacked = data.dim() == 3 and ".experts." in name
    matrix = data.dim() == 2 and name.endswith(".weight") and data.is_floating_point()
    chosen = kind_for(name, data.shape[-1], kind) if stacked or matrix else None
    if chosen is None:
        return {stored: data}
    parts = [quantize(part, chosen) for part in (data if stacked else data[None])]
    packed, scale = torch.stack([p.data for p in parts]), torch.stack([_scale_of(p) for p in parts])
    return {stored: packed if stacked else packed[0], stored + SCALE: scale if stacked else scale[0]}


def _scale_of(weight: Weight) -> Tensor:
    assert weight.scale is not None
    return weight.scale


@dataclass(frozen=True, slots=True)
class Loss:
    """What quantization did to the next-token distribution, over `positions` of a text of `text_bytes` bytes."""

    positions: int
    kl: float  # mean KL(unquantized || quantized), bits per token
    agree: float  # share of positions with the same most likely token
    bits_per_byte: float  # of the unquantized target
    quantized_bits_per_byte: float


def measure_loss(target: GraphTarget, quantized: GraphTarget, tokens: list[int], text_bytes: int) -> Loss:
    """Score `tokens` (the text of `text_bytes` bytes) with both. Raises UsageError for fewer than two tokens."""
    if len(tokens) < 2:
        raise UsageError("the text to measure on has fewer than two tokens: give a longer one")
    if target.vocab_size != quantized.vocab_size:
        raise UsageError("the quantized folder is of another target: their vocabularies differ")
    first, second = _Scorer(target, len(tokens)), _Scorer(quantized, len(tokens))
    kl = agree = bits = other_bits = 0.0
    for start in range(0, len(tokens), CHUNK):
        part = tokens[start : start + CHUNK]
        p, q = first.distributions(part), second.distributions(part)
        nexts = torch.tensor(tokens[start + 1 : start + CHUNK + 1])
        p, q = p[: len(nexts)], q[: len(nexts)]
        kl += float((p.exp() * (p - q)).nan_to_num().sum())
        agree += float((p.argmax(-1) == q.argmax(-1)).sum())
        bits -= float(p.gather(1, nexts[:, None]).sum())
        other_bits -= float(q.gather(1, nexts[:, None]).sum())
    count, ln2 = len(tokens) - 1, math.log(2)
    return Loss(
        count, kl / count / ln2, agree / count, bits / ln2 / text_bytes, other_bits / ln2 / text_bytes
    )


class _Scorer:
    """Runs one text through one target."""

    def __init__(self, target: GraphTarget, length: int) -> None:
        pages = dict.fromkeys(target.layout.kinds, length // 16 + 2)
        self.target = target
        self.cache = KVCache(target.layout, pages, max_sequences=1, max_tokens=length, dtype=target.kv_dtype)
        self.cache.open(0, [0] * length, share=False)

    def distributions(self, tokens: list[int]) -> Tensor:
        """Log probabilities after each of the next `tokens`, float64 [N, V]."""
        with self.cache.tail([(0, tokens)]) as tail:
            hidden = self.target.forward(tail.rows(), self.cache)
            distributions = torch.log_softmax(self.target.logits(hidden).double(), -1)
            tail.commit([len(tokens)])
        return distributions
