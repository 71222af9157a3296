"""Write Hugging Face folders: bfloat16 safetensors in parts, configs, tokenizer files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from common import RecipeError, need_space, write_atomic, write_json
from drafter import DrafterShape, assistant_config
from model import FULL, Params, Shape, text_config
from safetensors.torch import save_file

PART = 15 << 20
VERSION = "5.22.2"


def parts_of(tensors: Params) -> list[Params]:
    """Split tensors into parts of at most PART bytes, in order."""
    parts: list[Params] = [{}]
    used = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if parts[-1] and used + size > PART:
            parts.append({})
            used = 0
        parts[-1][name] = tensor
        used += size
    return parts


def save_weights(folder: Path, tensors: Params) -> None:
    """model.safetensors, or numbered parts with an index."""
    parts = parts_of(tensors)
    if len(parts) == 1:
        write_atomic(folder / "model.safetensors", lambda path: save_file(parts[0], path, {"format": "pt"}))
        return
    where: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        write_atomic(folder / name, lambda path, part=part: save_file(part, path, {"format": "pt"}))
        where |= dict.fromkeys(part, name)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    write_json(
        folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where}
    )


def half(params: Params) -> Params:
    """Contiguous bfloat16 copies (integer tensors as they are)."""
    return {
        name: (p.detach().to(torch.bfloat16) if p.is_floating_point() else p.detach()).contiguous()
        for name, p in params.items()
    }


def full_text_config(shape: Shape) -> dict[str, Any]:
    """Everything about a text model in config.json, including what other loaders look for."""
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000000.0,
        },
    }
    per_layer = {str(i): {"head_dim": shape.global_head_dim} for i, k in enumerate(shape.kinds) if k == FULL}
    return text_config(shape) | {
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": rope,
        "per_layer_config": per_layer,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_k_eq_v": False,
        "enable_moe_block": False,
        "use_double_wide_mlp": False,
        "use_cache": True,
        "dtype": "bfloat16",
        "num_global_key_value_heads": None,
        "initializer_range": 0.02,
    }


def export_text(
    folder: Path, params: Params, shape: Shape, tokenizer: Path, sampling: dict[str, Any], capped: bool = True
) -> None:
    """A Gemma4ForCausalLM folder; the distilled draft model has no soft cap."""
    need_space(folder, 64)
    layers = {f"model.layers.{i}.layer_scalar": torch.ones(1) for i in range(shape.layers)}
    save_weights(folder, half(params | layers))
    write_json(
        folder / "config.json",
        full_text_config(shape)
        | {"architectures": ["Gemma4ForCausalLM"], "transformers_version": VERSION}
        | ({} if capped else {"final_logit_softcapping": None}),
    )
    write_json(
        folder / "generation_config.json",
        {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0, "transformers_version": VERSION} | sampling,
    )
    copy_tokenizer(tokenizer, folder)


def export_drafter(folder: Path, params: Params, shape: DrafterShape, target: Shape, tokenizer: Path) -> None:
    """A Gemma4AssistantForCausalLM folder."""
    need_space(folder, 64)
    layers = {f"model.layers.{i}.layer_scalar": torch.ones(1) for i in range(shape.layers)}
    save_weights(folder, half(params | layers))
    config = assistant_config(shape, target)
    config["text_config"] = full_text_config(shape.text(target)) | {"final_logit_softcapping": None}
    write_json(
        folder / "config.json",
        config
        | {
            "architectures": ["Gemma4AssistantForCausalLM"],
            "model_type": "gemma4_assistant",
            "dtype": "bfloat16",
            "transformers_version": VERSION,
        },
    )
    write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": 2,
            "eos_token_id": 1,
            "pad_token_id": 0,
            "num_assistant_tokens": shape.steps,
            "num_assistant_tokens_schedule": "constant",
            "transformers_version": VERSION,
        },
    )
    copy_tokenizer(tokenizer, folder)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Tokenizer files next to the weights."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if not (source / name).exists():
            raise RecipeError(f"{name} is missing: run the tokenizer stage")
        write_atomic(folder / name, lambda path, name=name: shutil.copyfile(source / name, path))


def check_export(folder: Path, params: Params, shape: Shape) -> float:
    """Load a text folder back with transformers and compare logits with ours in float32."""
    from model import hidden_states, logits, tables
    from transformers import AutoTokenizer, Gemma4ForCausalLM

    theirs = Gemma4ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rounded = {name: p.detach().to(torch.bfloat16).float() for name, p in params.items()}
    ids = torch.randint(
        6, shape.vocab, (1, min(300, shape.context)), generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        ours = logits(rounded, hidden_states(rounded, shape, ids, tables(shape, ids.shape[1]))[0])
        gap = float((ours - theirs(ids).logits).abs().max())
    if gap > 1e-3:
        raise RecipeError(
            f"exported {folder.name} gives other logits in transformers (largest gap {gap:.2g})"
        )
    text = "def f(x):\n    return x + 1  # é\n"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids_again = tokenizer(text)["input_ids"]
    if tokenizer.decode(ids_again, skip_special_tokens=True) != text:
        raise RecipeError(f"the tokenizer in {folder.name} does not give its text back")
    return gap


def folder_sizes(folder: Path) -> dict[str, int]:
    """Bytes per file below a folder."""
    return json.loads(
        json.dumps(
            {
                p.relative_to(folder).as_posix(): p.stat().st_size
                for p in sorted(folder.rglob("*"))
                if p.is_file()
            }
        )
    )
