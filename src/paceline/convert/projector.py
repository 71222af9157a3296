"""The towers of a model folder -> an mmproj file beside the GGUF file of its language model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.checkpoints.gguf.mixtures import FILE_TYPES
from paceline.checkpoints.gguf.projector import Projector, stored_as, stored_name
from paceline.convert.output import check_free, check_space, whole
from paceline.convert.to_gguf import ELEMENTS, FLOATS, Stored, encoded, padded, put, write_head
from paceline.models.config import parse_target, read_config
from paceline.models.towers.load import stored_towers

_TYPES = {
    ("vision", False): "gemma4v",
    ("vision", True): "gemma4uv",
    ("audio", False): "gemma4a",
    ("audio", True): "gemma4ua",
}
_PLAIN = (
    "position_embd",
    "conv1d",
    "conv_dw",
    "per_dim_scale",
)  # stored as float32, as llama.cpp's converter does


def write_projector(folder: Path, out: Path, kind: str | None, *, force: bool = False) -> int | None:
    """Write the file `out`; returns its bytes, None for a model without towers. kind None: as stored; blocks below 8 bits
    become q8_0. Raises UsageError, LoadError and CapacityError; then there is no file.
    """
    raw = read_config(folder)
    towers = stored_towers(folder, raw)
    if not towers:
        return None
    check_free(out, force)
    unified = str(raw.get("model_type")) == "gemma4_unified"
    values = {
        stored_name(name, unified): stored_as(name, take(name))
        for shapes, take in towers.values()
        for name in shapes
    }
    plan = [Stored(name, name, tuple(x.shape), _kind(name, x, kind)) for name, x in values.items()]
    total = sum(padded(tensor.nbytes) for tensor in plan)
    check_space(out, total)
    head = _head(raw, list(towers), unified) | {
        "general.file_type": FILE_TYPES[plan[0].kind],
        "general.name": out.stem,
    }
    with whole(out) as part:
        end = write_head(part, "clip", head, plan, {})
        with part.open("r+b") as file:
            file.truncate(padded(end) + total)
            file.seek(padded(end))
            for tensor in plan:
                x = values[tensor.name]
                put(file, [encoded(x.reshape(-1, x.shape[-1]), tensor)])
        Projector(part)  # whatever is wrong with it is said before it is there
    return out.stat().st_size


def _kind(name: str, x: Tensor, wanted: str | None) -> str:
    if x.dim() == 1 or any(part in name for part in _PLAIN):
        return "f32"
    if wanted is None or wanted in FLOATS:
        return wanted or {"torch.bfloat16": "bf16", "torch.float16": "f16"}.get(str(x.dtype), "f32")
    return "q8_0" if x.dim() == 2 and x.shape[-1] % ELEMENTS == 0 else "f16"


def _head(raw: Mapping[str, Any], parts: list[str], unified: bool) -> dict[str, Any]:
    width = parse_target(raw).hidden_size
    head: dict[str, Any] = {"general.type": "mmproj"}
    for part in parts:
        section = raw[f"{part}_config"]
        at = f"clip.{part}"
        head |= {
            f"clip.has_{part}_encoder": True, f"{at}.projector_type": _TYPES[part, unified],
            f"{at}.projection_dim": width,
            f"{at}.embedding_length": int(section.get("hidden_size") or section.get("mm_embed_dim") or width),
            f"{at}.feed_forward_length": int(
                section.get("intermediate_size") or 4 * int(section.get("hidden_size") or width)
            ),
            f"{at}.block_count": 0 if unified else int(section["num_hidden_layers"]),
            f"{at}.attention.head_count": 1 if unified else int(section["num_attention_heads"]),
            f"{at}.attention.layer_norm_epsilon": float(section.get("rms_norm_eps") or 1e-6),
        }  # fmt: skip
    if "vision" in parts:
        head |= {
            "clip.vision.image_size": 224, "clip.vision.patch_size": 16, "clip.vision.image_mean": [0.0, 0.0, 0.0],
            "clip.vision.image_std": [1.0, 1.0, 1.0],
            "clip.vision.projector.scale_factor": int(raw["vision_config"].get("pooling_kernel_size", 3)),
        }  # fmt: skip
    if "audio" in parts and not unified:
        head["clip.audio.num_mel_bins"] = 128
    return head
