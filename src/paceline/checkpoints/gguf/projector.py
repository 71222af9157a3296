"""An mmproj file, the towers of a GGUF model: their configs, and tensors by the names of a Hugging Face checkpoint.

Names and metadata: llama.cpp's `gguf-py/gguf/constants.py` and `conversion/gemma.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.checkpoints.gguf.reader import Gguf
from paceline.errors import WeightsError

ARCHITECTURE = "clip"
KINDS: Mapping[str, str] = {  # projector type -> which part of which model it is
    "gemma4v": "vision", "gemma4uv": "vision", "gemma4a": "audio", "gemma4ua": "audio",
}  # fmt: skip
MEDIA_TEXTS: Mapping[str, str] = {  # ids of a config.json, which no GGUF file names -> what Gemma 4 calls them
    "image_token_id": "<|image|>", "boi_token_id": "<|image>", "eoi_token_id": "<image|>", "video_token_id": "<|video|>",
    "audio_token_id": "<|audio|>", "boa_token_id": "<|audio>", "eoa_token_id": "<audio|>",
}  # fmt: skip
_PATCH, _SIDE = 16, 48  # pixels of a patch, and of a square of the 12B
BOUNDS = ("input_min", "input_max", "output_min", "output_max")
TOP: Mapping[str, str] = {  # in the file -> in a checkpoint
    "v.patch_embd.weight": "vision_tower.patch_embedder.input_proj.weight",
    "v.position_embd.weight": "vision_tower.patch_embedder.position_embedding_table",
    "v.std_bias": "vision_tower.std_bias", "v.std_scale": "vision_tower.std_scale",
    "mm.input_projection.weight": "embed_vision.embedding_projection.weight",
    "mm.a.input_projection.weight": "embed_audio.embedding_projection.weight",
    "a.conv1d.0.weight": "audio_tower.subsample_conv_projection.layer0.conv.weight",
    "a.conv1d.1.weight": "audio_tower.subsample_conv_projection.layer1.conv.weight",
    "a.conv1d.0.norm.weight": "audio_tower.subsample_conv_projection.layer0.norm.weight",
    "a.conv1d.1.norm.weight": "audio_tower.subsample_conv_projection.layer1.norm.weight",
    "a.input_projection.weight": "audio_tower.subsample_conv_projection.input_proj_linear.weight",
    "a.pre_encode.out.weight": "audio_tower.output_proj.weight", "a.pre_encode.out.bias": "audio_tower.output_proj.bias",
}  # fmt: skip
UNIFIED: Mapping[str, str] = {
    "v.patch_embd.weight": "vision_embedder.patch_dense.weight", "v.patch_embd.bias": "vision_embedder.patch_dense.bias",
    "v.position_embd.weight": "vision_embedder.pos_embedding",
    **{f"v.patch_norm.{i}.{part}": f"vision_embedder.{name}.{part}"
       for i, name in enumerate(("patch_ln1", "patch_ln2", "pos_norm"), 1) for part in ("weight", "bias")},
}  # fmt: skip
VISION_LAYER: Mapping[str, str] = {
    "ln1": "input_layernorm", "attn_post_norm": "post_attention_layernorm", "ln2": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
}  # fmt: skip
VISION_LINEARS: Mapping[str, str] = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
AUDIO_LAYER: Mapping[str, str] = {  # llama.cpp crosses the two norms of the convolution
    "ffn_norm": "feed_forward1.pre_layer_norm", "ffn_post_norm": "feed_forward1.post_layer_norm",
    "ffn_norm_1": "feed_forward2.pre_layer_norm", "ffn_post_norm_1": "feed_forward2.post_layer_norm",
    "attn_pre_norm": "norm_pre_attn", "attn_post_norm": "norm_post_attn", "ln2": "norm_out",
    "conv_norm": "lconv1d.pre_layer_norm", "norm_conv": "lconv1d.conv_norm", "conv_dw": "lconv1d.depthwise_conv1d",
    "attn_k_rel": "self_attn.relative_k_proj",
}  # fmt: skip
AUDIO_LINEARS: Mapping[str, str] = {
    "ffn_up": "feed_forward1.ffw_layer_1", "ffn_down": "feed_forward1.ffw_layer_2",
    "ffn_up_1": "feed_forward2.ffw_layer_1", "ffn_down_1": "feed_forward2.ffw_layer_2",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.post", "conv_pw1": "lconv1d.linear_start", "conv_pw2": "lconv1d.linear_end",
}  # fmt: skip
_LAYER = re.compile(
    r"(?P<part>[va])\.blk\.(?P<layer>\d+)\.(?P<name>\w+)(?:\.(?P<end>weight|\w+_m(?:in|ax)))?"
)


def checkpoint_name(stored: str, unified: bool = False) -> str | None:
    """What a checkpoint calls a tensor of the file; None for one that is not known."""
    top = {**TOP, **UNIFIED} if unified else TOP
    if stored in top:
        return top[stored]
    match = _LAYER.fullmatch(stored)
    if match is None:
        return None
    seen = match["part"] == "v"
    at = f"vision_tower.encoder.layers.{match['layer']}" if seen else f"audio_tower.layers.{match['layer']}"
    if not seen and match["name"] == "per_dim_scale":
        return f"{at}.self_attn.per_dim_scale"
    linear = (VISION_LINEARS if seen else AUDIO_LINEARS).get(match["name"])
    if linear is not None and match["end"] in ("weight", *BOUNDS):
        return f"{at}.{linear}.linear.weight" if match["end"] == "weight" else f"{at}.{linear}.{match['end']}"
    name = (VISION_LAYER if seen else AUDIO_LAYER).get(match["name"])
    return f"{at}.{name}.weight" if name is not None and match["end"] == "weight" else None


def stored_name(name: str, unified: bool = False) -> str:
    """The other way round: what the file calls a checkpoint's tensor."""
    for stored, known in ({**TOP, **UNIFIED} if unified else TOP).items():
        if known == name:
            return stored
    inside = re.fullmatch(r"(vision_tower\.encoder|audio_tower)\.layers\.(\d+)\.(.+)", name)
    assert inside is not None, f"{name} is no tensor of a tower"
    seen, at, rest = inside[1].startswith("vision"), f"blk.{inside[2]}", inside[3]
    part = "v" if seen else "a"
    if rest == "self_attn.per_dim_scale":
        return f"{part}.{at}.per_dim_scale"
    base, _, end = rest.rpartition(".")
    for table in (VISION_LINEARS, VISION_LAYER) if seen else (AUDIO_LINEARS, AUDIO_LAYER):
        for stored, known in table.items():
            if base.removesuffix(".linear") == known:
                return f"{part}.{at}.{stored}.{end}"
    raise AssertionError(f"{name} is no tensor of a tower")


class Projector:
    """`vision` and `audio`: configs as config.json has them, {} where the file has no such part. Raises WeightsError."""

    def __init__(self, path: Path) -> None:
        self.path, self.model = path, Gguf(path)
        if self.model.get("general.architecture") != ARCHITECTURE:
            raise WeightsError(f"{path} is no mmproj file: give the one that was published beside the model")
        self.types = {part: self._type(part) for part in ("vision", "audio")}
        self.unified = self.types["vision"] == "gemma4uv" or self.types["audio"] == "gemma4ua"
        self.names: dict[str, str] = {}  # in a checkpoint -> in the file
        for stored in self.model.tensors:
            name = checkpoint_name(stored, self.unified)
            if name is None:
                raise WeightsError(
                    f"{path}: the tensor {stored[:80]!a} is no part of Gemma 4: use its safetensors checkpoint"
                )
            self.names[name] = stored
        self.vision = self._vision() if self.types["vision"] else {}
        self.audio = self._audio() if self.types["audio"] else {}

    def _type(self, part: str) -> str | None:
        if not self.model.get(f"clip.has_{part}_encoder", False):
            return None
        kind = self.model.get(f"clip.{part}.projector_type", self.model.get("clip.projector_type"))
        if KINDS.get(str(kind)) != part:
            raise WeightsError(
                f"{self.path} is the {part} part of another model ({str(kind)[:40]}): give the one of this model"
            )
        return str(kind)

    def width(self, part: str) -> int:
        """hidden_size of the language model that it was made for."""
        return int(self._said(part, "projection_dim"))

    def _said(self, part: str, key: str) -> Any:
        value = self.model.get(f"clip.{part}.{key}")
        if value is None:
            raise WeightsError(f"{self.path} does not say clip.{part}.{key}: download it again")
        return value

    def _shape(self, stored: str) -> tuple[int, ...]:
        if stored not in self.model.tensors:
            raise WeightsError(f"{self.path} lacks the tensor {stored}: download it again")
        return self.model.tensors[stored].shape

    def _vision(self) -> dict[str, Any]:
        eps = float(self.model.get("clip.vision.attention.layer_norm_epsilon", 1e-6))
        places, patch = self._shape("v.position_embd.weight"), self._shape("v.patch_embd.weight")
        pooling = int(self.model.get("clip.vision.projector.scale_factor", 3))
        common = {"patch_size": _PATCH, "pooling_kernel_size": pooling, "rms_norm_eps": eps}
        if self.unified:
            inner = self._shape("mm.input_projection.weight")[-1]
            return common | {"mm_embed_dim": patch[0], "mm_posemb_size": places[1], "output_proj_dims": inner}
        heads, hidden = (
            int(self._said("vision", "attention.head_count")),
            int(self._said("vision", "embedding_length")),
        )
        return common | {
            "hidden_size": hidden, "intermediate_size": int(self._said("vision", "feed_forward_length")),
            "num_hidden_layers": int(self._said("vision", "block_count")), "num_attention_heads": heads,
            "num_key_value_heads": heads, "head_dim": self._shape("v.blk.0.attn_q.weight")[0] // heads,
            "position_embedding_size": places[1],
            "use_clipped_linears": "v.blk.0.attn_q.input_min" in self.model.tensors,
            "standardize": "v.std_bias" in self.model.tensors,
        }  # fmt: skip

    def _audio(self) -> dict[str, Any]:
        if self.unified:
            return {"audio_embed_dim": self._shape("mm.a.input_projection.weight")[-1]}
        hidden = int(self._said("audio", "embedding_length"))
        return {
            "hidden_size": hidden, "num_hidden_layers": int(self._said("audio", "block_count")),
            "num_attention_heads": int(self._said("audio", "attention.head_count")),
            "subsampling_conv_channels": [self._shape(f"a.conv1d.{i}.weight")[0] for i in (0, 1)],
            "conv_kernel_size": self._shape("a.blk.0.conv_dw.weight")[-1],
            "output_proj_dims": self._shape("a.pre_encode.out.weight")[0],
            "use_clipped_linears": "a.blk.0.attn_q.input_min" in self.model.tensors,
        }  # fmt: skip

    def check(self, name: str, shape: tuple[int, ...]) -> str:
        """What a tensor is called in the file. Raises WeightsError for one that is missing or of another size."""
        stored = self.names.get(name)
        if stored is None:
            raise WeightsError(f"{self.path} lacks the tensor of {name}: download it again")
        held = self.model.tensors[stored].shape
        if torch.Size(held).numel() != torch.Size(shape).numel():
            raise WeightsError(
                f"{self.path}: {stored} has the shape {list(held)} where {list(shape)} is needed: give the file that was "
                "published beside this model"
            )
        return stored

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor as a checkpoint has it. Raises WeightsError as `check`."""
        return _back(name, _plain(self.model, self.check(name, shape))).reshape(shape)


def _plain(model: Gguf, stored: str) -> Tensor:
    """bfloat16 as stored, all else float32."""
    held = model.tensors[stored]
    if held.kind == "BF16":
        return torch.frombuffer(bytearray(model.raw(stored).tobytes()), dtype=torch.bfloat16).view(held.shape)
    return torch.from_numpy(model.floats(stored).reshape(held.shape).copy())


def _back(name: str, x: Tensor) -> Tensor:
    """In a checkpoint's order of columns, and without what the converter has computed already."""
    if name.endswith("patch_embedder.input_proj.weight"):
        return x.reshape(len(x), 3, -1).transpose(1, 2).reshape(len(x), -1)
    if "vision_embedder.patch_dense.weight" in name or "vision_embedder.patch_ln1." in name:
        flat = x.reshape(-1, 3, _SIDE * _SIDE).transpose(1, 2)
        return flat.reshape(-1, 3 * _SIDE * _SIDE) if name.endswith("dense.weight") else flat.reshape(-1)
    if name.endswith("vision_embedder.pos_embedding"):
        return x.transpose(0, 1)
    if name.endswith("per_dim_scale"):
        return torch.log(torch.expm1(x.double())).float()
    return x


def stored_as(name: str, x: Tensor) -> Tensor:
    """A checkpoint's tensor in the file's order: what `Projector.tensor` takes back."""
    if name.endswith("patch_embedder.input_proj.weight"):
        return x.reshape(len(x), _PATCH, _PATCH, 3).permute(0, 3, 1, 2).contiguous()
    if name.endswith("vision_embedder.patch_dense.weight"):
        return x.reshape(len(x), -1, 3).transpose(1, 2).reshape(len(x), 3, _SIDE, _SIDE)
    if "vision_embedder.patch_ln1." in name:
        return x.reshape(-1, 3).T.reshape(-1)
    if name.endswith("vision_embedder.pos_embedding"):
        return x.transpose(0, 1).contiguous()
    if name.endswith("per_dim_scale"):
        return F.softplus(x.double()).float()
    if name.endswith("depthwise_conv1d.weight"):
        return x.reshape(len(x), -1)
    return x.reshape(1) if not x.dim() else x
