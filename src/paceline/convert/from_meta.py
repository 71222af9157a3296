"""A model in Meta's layout (params.json, consolidated.pth) -> a folder in Hugging Face layout: Llama, and the extra heads
of facebook/multi-token-prediction beside it.

This is the one place where a pickle is opened: by `torch.load` with `weights_only`, which builds tensors and refuses
anything else. Meta turns rotary pairs that lie side by side, so the rows of q and k are moved.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoints.gguf.names import half_split_rows
from paceline.checkpoints.loading import Shapes
from paceline.checkpoints.sentencepiece import read_vocabulary
from paceline.convert.output import Report, check_free, check_space, whole
from paceline.convert.to_folder import FLOATS, cast, ids_of, shards_of, write_json, write_text, write_weights
from paceline.errors import ConfigError, LoadError, WeightsError
from paceline.files import check_file, read_json
from paceline.models.config import parse_target
from paceline.models.drafters.heads import ROOM, SAID, head_shapes
from paceline.models.fields import Fields, said_of, shown
from paceline.models.layers.decoder import decoder_shapes
from paceline.models.layers.decoder_config import DecoderConfig
from paceline.text.tokenizer import Tokenizer

PARAMS, WEIGHTS, SPM = "params.json", ("consolidated.pth", "consolidated.00.pth"), "tokenizer.model"
KNOWN = (
    "dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of", "ffn_dim_multiplier", "norm_eps",
    "rope_theta", "max_batch_size", "max_seq_len", SAID,
)  # fmt: skip
CONTEXT = 4096  # tokens, of Llama 2, where params.json names none
TOP = {"embed_tokens": "tok_embeddings", "norm": "norm", "lm_head": "output"}
LAYER = {
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
_INSIDE = re.compile(rf"((?:layers|{ROOM})\.\d+)\.(.+)")
SKIPPED = "rope.freqs"


def in_metas_layout(folder: Path) -> bool:
    return folder.is_dir() and (folder / PARAMS).exists() and not (folder / "config.json").exists()


def convert_meta(
    folder: Path, out: Path, kind: str | None = None, *, force: bool = False, report: Report = lambda done, total: None
) -> tuple[int, list[str]]:  # fmt: skip
    """Write the model to the folder `out`, weights as `kind` or as stored: (their bytes, what a user should know).

    Raises UsageError, LoadError and CapacityError; then there is no folder.
    """
    check_free(out, force)
    params, notes = read_json(folder / PARAMS) or {}, []
    file = _file(folder)
    stored = _load(file)
    with said_of(folder / PARAMS, "download it again"):
        raw = _config(params, stored)
        config = parse_target(raw)
    assert isinstance(config, DecoderConfig)
    shapes = decoder_shapes(config) | head_shapes(config, raw.get(SAID, 1) - 1)
    names = {name: _meta_name(name) for name in shapes}
    _check(file, stored, shapes, names)
    if params.get("max_seq_len") is None:
        notes.append(
            f"{PARAMS} names no max_seq_len: config.json gets a context of {CONTEXT} tokens (max_position_embeddings)"
        )
    tokenizer = _tokenizer(folder, config.vocab_size, notes)
    if tokenizer is not None:
        raw |= ids_of(tokenizer)
    dtype = stored[names["norm.weight"]].dtype if kind is None else FLOATS[kind]
    shards, total = shards_of(shapes, dtype.itemsize)
    check_space(out, total)

    def named(name: str) -> list[tuple[str, Tensor]]:
        data = stored[names[name]].clone()  # several may lie in one storage, which safetensors refuses
        rotated = config.heads if "q_proj" in name else config.kv_heads if "k_proj" in name else 0
        if rotated:
            data = data[torch.from_numpy(half_split_rows(len(data), rotated))]
        key = name if name.startswith((ROOM, "lm_head")) else f"model.{name}"
        return [(key, cast(key, data, dtype))]

    with whole(out) as part:
        part.mkdir()
        if tokenizer is not None:
            write_text(part, tokenizer)
            write_json(part / "generation_config.json", ids_of(tokenizer))
        write_json(part / "config.json", raw | {"dtype": str(dtype).removeprefix("torch.")})
        done = write_weights(part, shards, named, lambda count: report(count, total))
    return done, notes


def _file(folder: Path) -> Path:
    files = sorted(path for path in folder.glob("consolidated*.pth"))
    if len(files) != 1 or files[0].name not in WEIGHTS:
        held = ", ".join(path.name for path in files[:3]) or "no consolidated.pth"
        raise LoadError(
            f"{folder} holds {held}: a model in Meta's layout is converted from one consolidated.pth; join the parts, or "
            "take the checkpoint in Hugging Face layout"
        )
    check_file(files[0])
    return files[0]


def _load(file: Path) -> dict[str, Tensor]:
    """The tensors of a pickle, mapped into memory. WeightsError for one that holds, or would do, anything else."""
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # zip files, pickles and torch each have errors of their own
        reason = " ".join(str(error).split())[:160]
        raise WeightsError(
            f"{file} is not read ({reason}): only files of torch.save that hold nothing but tensors are; save its "
            "state_dict again where you trust it, or download it again"
        ) from error
    if not isinstance(tensors, Mapping) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in tensors.items()
    ):
        raise WeightsError(f"{file} does not hold tensors by name: save its state_dict alone")
    return dict(tensors)


def _config(params: Mapping[str, Any], stored: Mapping[str, Tensor]) -> dict[str, Any]:
    """config.json of what params.json describes. ConfigError for what would be run differently."""
    if unknown := [key for key, value in params.items() if key not in KNOWN and value not in (None, False)]:
        raise ConfigError(
            f"{unknown[0]}={shown(params[unknown[0]])} is not known, so it would be left out: take the checkpoint "
            "in Hugging Face layout"
        )
    fields = Fields(params, "llama")
    heads = fields.size("n_heads")
    layers, future = fields.size("n_layers"), fields.size(SAID, 1)
    if future > layers:
        raise ConfigError(
            f"{SAID}={future} with n_layers={layers}, which counts the extra heads: download it again"
        )
    inner = stored.get("layers.0.feed_forward.w1.weight")
    table = stored.get("tok_embeddings.weight")
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": fields.size("dim"), "num_hidden_layers": layers - future + 1, "num_attention_heads": heads,
        "num_key_value_heads": fields.size("n_kv_heads", heads), "rms_norm_eps": fields.number("norm_eps", 1e-5),
        "rope_theta": fields.number("rope_theta", 10_000.0), "tie_word_embeddings": False,
        "max_position_embeddings": fields.size("max_seq_len", CONTEXT),
        "intermediate_size": 1 if inner is None else inner.shape[0], "vocab_size": 1 if table is None else table.shape[0],
    } | ({SAID: future} if future > 1 else {})  # fmt: skip


def _meta_name(name: str) -> str:
    """What Meta calls a tensor."""
    inside = _INSIDE.fullmatch(name.removesuffix(".weight"))
    return (
        f"{inside[1]}.{LAYER[inside[2]]}.weight" if inside else f"{TOP[name.removesuffix('.weight')]}.weight"
    )


def _check(file: Path, stored: Mapping[str, Tensor], shapes: Shapes, names: Mapping[str, str]) -> None:
    """Raise WeightsError unless the tensors are those that params.json describes."""
    missing = [name for name in names.values() if name not in stored]
    extra = sorted({*stored} - {*names.values(), SKIPPED})
    if missing or extra:
        some = missing or extra
        raise WeightsError(
            f"{file} does not fit {PARAMS}: {some[0]} {'is missing' if missing else 'is not described'}"
            f"{f', and {len(some) - 1} more' if len(some) > 1 else ''}; download both again, from one release"
        )
    for name, shape in shapes.items():
        data = stored[names[name]]
        if tuple(data.shape) != shape or not data.is_floating_point():
            raise WeightsError(
                f"{file}: {names[name]} is {list(data.shape)} of {data.dtype} where {PARAMS} needs numbers of "
                f"{list(shape)}: download both again, from one release"
            )


def _tokenizer(folder: Path, rows: int, notes: list[str]) -> Tokenizer | None:
    """That of tokenizer.model, in the folder or the one above. None where there is none: `notes` say what to do."""
    path = next((place / SPM for place in (folder, folder.parent) if (place / SPM).exists()), None)
    if path is None:
        notes.append(
            f"there is no {SPM}: put the model's tokenizer.json into the new folder before you run it"
        )
        return None
    tokenizer = Tokenizer.from_gguf(read_vocabulary(path))
    if tokenizer.vocab_size > rows:
        raise ConfigError(
            f"{path} has {tokenizer.vocab_size} tokens for a model of {rows}: put its own {SPM} there"
        )
    return tokenizer
