"""A finished drafter as a folder that transformers 5.22.x and other Gemma-4 engines load.

All files are written beside their places first and renamed together at the end: a full disk or a crash leaves
what was there before.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from paceline.train.calibration import FILE_NAME as CALIBRATION_FILE
from paceline.train.checkpoint import check_space, disk_errors
from paceline.train.heads import CentroidHead
from paceline.train.parallel import DrafterModule, DrafterShape

WEIGHTS_FILE = "model.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
FROM_TARGET = (  # of its text config: what the K/V, the tokens and the rotation dictate
    "head_dim", "global_head_dim", "num_key_value_heads", "num_global_key_value_heads", "num_attention_heads",
    "attention_k_eq_v", "sliding_window", "rope_parameters", "rms_norm_eps", "hidden_activation",
    "vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
TORCH_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(slots=True)
class Exported:
    """What goes into the folder beside the weights."""

    config: Mapping[str, Any]  # the assistant's config.json
    draft_tokens: int
    dtype: torch.dtype
    target: Path | None = None  # tokenizer files are copied from there
    calibration: Mapping[str, Any] | None = None
    texts: dict[str, str] = field(default_factory=dict)  # more files, e.g. the model card


def scratch_config(raw: Mapping[str, Any], layers: int = 4, hidden: int | None = None) -> dict[str, Any]:
    """config.json of a new assistant for a target's config.json: Q-only layers, the last one full attention.

    Width and depth follow the published pairs: about a fifth of the target's hidden size, FFN 8 times as wide.
    """
    target: Mapping[str, Any] = raw.get("text_config", raw)
    unified = "unified" in str(raw.get("model_type"))
    wide = int(target["hidden_size"])
    hidden = hidden or max(64, 64 * round(wide / 5.5 / 64))
    kinds = ["sliding_attention"] * (layers - 1) + ["full_attention"]
    text = {name: target[name] for name in FROM_TARGET if name in target}
    overrides = [v for v in (target.get("per_layer_config") or {}).values() if v]
    if overrides:
        text["per_layer_config"] = {str(layers - 1): dict(overrides[0])}
        text.setdefault(
            "global_head_dim", overrides[0].get("head_dim", target["head_dim"])
        )  # for older readers
    text |= {
        "model_type": "gemma4_unified_text" if unified else "gemma4_text", "hidden_size": hidden,
        "intermediate_size": 8 * hidden, "num_hidden_layers": layers, "num_kv_shared_layers": layers,
        "layer_types": kinds, "tie_word_embeddings": True, "attention_bias": False,
    }  # fmt: skip
    if not unified:  # these fields exist only there, and have other defaults
        text |= {
            "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "enable_moe_block": False,
            "use_double_wide_mlp": False,
        }  # fmt: skip
    kind = "Unified" if unified else ""
    return {
        "architectures": [f"Gemma4{kind}AssistantForCausalLM"],
        "model_type": "gemma4_unified_assistant" if unified else "gemma4_assistant",
        "backbone_hidden_size": wide, "use_ordered_embeddings": False, "tie_word_embeddings": True,
        "text_config": text,
    }  # fmt: skip


def set_head(module: DrafterModule, head: CentroidHead | None) -> DrafterModule:
    """The same drafter with another head: centroids, or dense (None)."""
    clusters = head.centroids.shape[0] if head else 0
    top = head.top_clusters if head else 0
    shape: DrafterShape = dataclasses.replace(module.shape, clusters=clusters, top_clusters=top)
    out = DrafterModule(shape).to(module.head.device)
    state = {n: t for n, t in module.state_dict().items() if not n.startswith("masked_embedding")}
    if head:
        state |= {
            "masked_embedding.centroids.weight": head.centroids,
            "masked_embedding.token_ordering": head.ordering,
        }
    out.load_state_dict(state)
    return out


def config_of(base: Mapping[str, Any], shape: DrafterShape, dtype: torch.dtype) -> dict[str, Any]:
    """config.json for `shape`, from the one that it started from."""
    out = dict(base)
    out |= {
        "use_ordered_embeddings": bool(shape.clusters),
        "dtype": TORCH_NAMES[dtype],
        "transformers_version": "5.22.2",
    }
    if shape.clusters:
        out |= {"num_centroids": shape.clusters, "centroid_intermediate_top_k": shape.top_clusters}
    out.pop("torch_dtype", None)
    return out


def weights_of(module: DrafterModule, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Tensors by their Hugging Face names, floats in `dtype`."""
    state = module.state_dict()
    return {
        n: (t.to(dtype) if t.is_floating_point() else t).detach().cpu().contiguous() for n, t in state.items()
    }


def export(module: DrafterModule, folder: Path, exported: Exported) -> None:
    """Write the drafter into `folder`. CapacityError on a full disk; what was there before then stays as
    it was.
    """
    weights = weights_of(module, exported.dtype)
    check_space(folder, sum(t.nbytes for t in weights.values()) + (8 << 20))
    files: dict[str, Callable[[Path], object]] = {
        WEIGHTS_FILE: lambda path: save_file(weights, path, metadata={"format": "pt"}),
        "config.json": _text(_json(config_of(exported.config, module.shape, exported.dtype))),
        "generation_config.json": _text(_json(_generation_config(exported))),
    }
    if exported.calibration is not None:
        files[CALIBRATION_FILE] = _text(_json(exported.calibration))
    files |= {name: _text(text) for name, text in exported.texts.items()}
    for name in TOKENIZER_FILES if exported.target else ():
        source = exported.target / name  # type: ignore[operator]
        if source.exists():
            files[name] = lambda path, source=source: shutil.copyfile(source, path)  # type: ignore[misc]
    write_folder(folder, files)


def publish(source: Path, folder: Path, texts: Mapping[str, str]) -> None:
    """Put the files of an exported drafter and some more texts into `folder`, all or nothing."""
    files: dict[str, Callable[[Path], object]] = {name: _text(text) for name, text in texts.items()}
    for path in source.iterdir():
        files[path.name] = lambda to, path=path: shutil.copyfile(path, to)  # type: ignore[misc]
    write_folder(folder, files)
    shutil.rmtree(source)


def write_folder(folder: Path, files: Mapping[str, Callable[[Path], object]]) -> None:
    """Fill files in a temporary folder inside `folder`, then rename each into place."""
    temporary = folder / f".export-{os.getpid()}"
    with disk_errors(folder, "what was there before is untouched"):
        temporary.mkdir(parents=True, exist_ok=True)
        try:
            for name, write in files.items():
                write(temporary / name)
                with (temporary / name).open("rb") as written:
                    os.fsync(written.fileno())
            for name in files:
                os.replace(temporary / name, folder / name)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content, encoding="utf-8")


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _generation_config(exported: Exported) -> dict[str, Any]:
    text = exported.config["text_config"]
    out = {
        "_from_model_config": True,
        "num_assistant_tokens": exported.draft_tokens,
        "transformers_version": "5.22.2",
    }
    out["num_assistant_tokens_schedule"] = "constant"
    return out | {
        n: text[n] for n in ("bos_token_id", "eos_token_id", "pad_token_id") if text.get(n) is not None
    }
