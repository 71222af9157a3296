"""One GGUF model -> a folder in Hugging Face layout: config.json, tokenizer, chat template and weights as safetensors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoints.defaults import read_defaults
from paceline.checkpoints.gguf.projector import MEDIA_TEXTS, Projector
from paceline.checkpoints.gguf.source import GgufCheckpoint
from paceline.checkpoints.interleaved import GATE_UP_BIAS, stored_as
from paceline.checkpoints.spellings import own
from paceline.convert.output import Report, check_free, check_space, whole
from paceline.errors import UsageError
from paceline.models.families.qwen3_5 import GGUF_LAYOUT
from paceline.models.inspection import check
from paceline.models.towers.load import projected_shapes
from paceline.text.tokenizer import Tokenizer

FLOATS = {"bf16": torch.bfloat16, "f32": torch.float32, "f16": torch.float16}
SHARD = 4_000_000_000  # bytes of one file
OUTSIDE = (
    "lm_head.",
    "pre_projection.",
    "post_projection.",
    "masked_embedding.",
)  # what is not below `model.`
STACKED = re.compile(r"(?P<at>layers\.\d+\.mlp\.experts)\.(?P<part>gate_up_proj|down_proj)")


def write_folder(
    file: Path,
    out: Path,
    kind: str = "bf16",
    *,
    towers: Projector | None = None,
    force: bool = False,
    report: Report = lambda done, total: None,
) -> int:
    """Write the GGUF model `file` to the folder `out`, weights as `kind`; returns their bytes. `towers`: what it sees and
    hears with.

    Raises UsageError, LoadError and CapacityError; then there is no folder.
    """
    check_free(out, force)
    check(file)
    checkpoint, tokenizer = GgufCheckpoint(file), Tokenizer.load(file)
    if GGUF_LAYOUT in checkpoint.config:
        raise UsageError(
            f"{file}: heads and norms of a {checkpoint.config['model_type']} stand otherwise in a folder, which is not "
            "written of it: paceline runs the file as it is, or take the safetensors checkpoint of this model"
        )
    dtype = FLOATS[kind]
    seen = {} if towers is None else projected_shapes(towers, checkpoint.config)
    shapes = {name: piece.shape for name, piece in checkpoint.pieces.items()} | seen
    shards, total = shards_of(shapes, dtype.itemsize)
    check_space(out, total)
    in_turns = any(name.endswith(GATE_UP_BIAS) for name in checkpoint.pieces)

    def named(stored: str) -> Iterator[tuple[str, Tensor]]:
        if towers is not None and stored in seen:
            yield f"model.{stored}", cast(stored, towers.tensor(stored, seen[stored]), dtype)
            return
        name, data = stored, checkpoint.tensor(stored)
        if in_turns:
            name, data = stored_as(name, data)
        for key, value in _named(checkpoint.config["model_type"], name, data, not in_turns):
            yield key if towers is None else name_inside(key), cast(key, value, dtype)

    with whole(out) as part:
        part.mkdir()
        write_text(part, tokenizer)
        config = checkpoint.config | ids_of(tokenizer) | {"dtype": str(dtype).removeprefix("torch.")}
        write_json(
            part / "config.json", config if towers is None else config_around(config, towers, tokenizer)
        )
        write_json(part / "generation_config.json", ids_of(tokenizer) | read_defaults(file).given())
        done = write_weights(part, shards, named, lambda count: report(count, total))
        check(part)
    return done


def shards_of(shapes: Mapping[str, tuple[int, ...]], itemsize: int) -> tuple[list[list[str]], int]:
    """(which tensors go into which file, bytes in all)."""
    shards: list[list[str]] = [[]]
    total = size = 0
    for name, shape in shapes.items():
        nbytes = prod(shape) * itemsize
        if shards[-1] and size + nbytes > SHARD:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size, total = size + nbytes, total + nbytes
    return shards, total


def write_weights(
    folder: Path,
    shards: list[list[str]],
    named: Callable[[str], Iterable[tuple[str, Tensor]]],
    report: Callable[[int], None],
) -> int:
    """Write the tensors that `named` gives for each stored one, file by file; returns their bytes."""
    done, names = 0, dict[str, str]()
    for number, shard in enumerate(shards, 1):
        name = (
            f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        )
        tensors: dict[str, Tensor] = {}
        for stored in shard:
            for key, value in named(stored):
                tensors[key] = value
                done += value.nbytes
            report(done)
        _save(tensors, folder / name)
        names |= dict.fromkeys(tensors, name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": done}, "weight_map": names}
        write_json(folder / "model.safetensors.index.json", index)
    return done


def _named(model_type: str, name: str, data: Tensor, apart: bool) -> Iterator[tuple[str, Tensor]]:
    """A tensor under the name that it has in checkpoints of the family; `apart`: experts one by one, as of Qwen3-MoE."""
    stacked = STACKED.fullmatch(name) if apart else None
    if stacked is None:
        own_name = own(model_type, name)
        yield (name if name.startswith(OUTSIDE) else f"model.{own_name}"), data
        return
    parts = ("gate_proj", "up_proj") if stacked["part"] == "gate_up_proj" else ("down_proj",)
    for i, expert in enumerate(data):
        for part, value in zip(parts, expert.chunk(len(parts)), strict=True):
            expert_name = own(model_type, f"{stacked['at']}.{i}.{part}.weight")
            yield f"model.{expert_name}", value


def cast(name: str, data: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor as it is stored. UsageError for what float16 cannot hold."""
    if not data.is_floating_point():
        return data.long()  # the order of tokens in an ordered head
    out = data.to(dtype).contiguous()
    if dtype == torch.float16 and not bool(out.isfinite().all()):
        raise UsageError(f"{name} has values past float16's largest, 65504: give --to bf16 or --to f32")
    return out


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write one file; whatever goes wrong is an OSError."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error


def ids_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """Its special tokens as a config names them."""
    ends = list(tokenizer.eos_ids)
    ids = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": tokenizer.pad_id,
    }
    return {name: value for name, value in ids.items() if value is not None}


def write_text(folder: Path, tokenizer: Tokenizer) -> None:
    """tokenizer.json and what belongs to it."""
    raw = json.loads(tokenizer.to_json())
    bos = tokenizer.special_tokens.get("bos_token")
    if tokenizer.adds_bos and bos is not None:
        raw["post_processor"] = _begin_with(bos, tokenizer.bos_id)
    write_json(folder / "tokenizer.json", raw)
    tokens = tokenizer.special_tokens | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": tokenizer.adds_bos and bos is not None,
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / "tokenizer_config.json", tokens)
    if tokenizer.template is not None:
        (folder / "chat_template.jinja").write_text(tokenizer.template, encoding="utf-8")
    if tokenizer.tool_template is not None:
        (folder / "additional_chat_templates").mkdir(exist_ok=True)
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(
            tokenizer.tool_template, encoding="utf-8"
        )


def _begin_with(token: str, token_id: int | None) -> dict[str, Any]:
    """The post-processor that puts BOS before a text."""
    bos = {"SpecialToken": {"id": token, "type_id": 0}}
    first, other = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    known = {token: {"id": token, "ids": [token_id], "tokens": [token]}}
    return {
        "type": "TemplateProcessing",
        "single": [bos, first],
        "pair": [bos, first, other],
        "special_tokens": known,
    }


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")


_BOTH = ("dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")


def config_around(text: Mapping[str, Any], towers: Projector, tokenizer: Tokenizer) -> dict[str, Any]:
    """The config.json of both, of that of the language model."""
    kind, name = ("gemma4_unified", "Gemma4Unified") if towers.unified else ("gemma4", "Gemma4")
    inner = dict(text) | {"model_type": f"{kind}_text"}
    if not text.get("hidden_size_per_layer_input"):  # no file says it: rows of a picture see each other
        inner["use_bidirectional_attention"] = "vision"
    ids = {field: tokenizer.token_id(shown) for field, shown in MEDIA_TEXTS.items()}
    return {
        "model_type": kind, "architectures": [f"{name}ForConditionalGeneration"], "text_config": inner,
        "vision_config": towers.vision | {"model_type": f"{kind}_vision"} if towers.vision else None,
        "audio_config": towers.audio | {"model_type": f"{kind}_audio"} if towers.audio else None,
        **{field: token_id for field, token_id in ids.items() if token_id is not None},
        **{field: text[field] for field in _BOTH if field in text},
    }  # fmt: skip


def name_inside(key: str) -> str:
    """What a tensor of a language model is called with towers around it."""
    return key.replace("model.", "model.language_model.", 1) if key.startswith("model.") else key
