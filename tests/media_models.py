"""Small random Gemma 4 models that see, saved by transformers, with a byte-level tokenizer and Google's chat template.

Patches and pooling are real; a full layer stands in the middle, or nothing would read what its mask hides.
"""

from __future__ import annotations

import io
import json
import random
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    PreTrainedModel,
)

TEMPLATE = Path(__file__).parent / "text" / "templates" / "google_v5.jinja"
S, F = "sliding_attention", "full_attention"
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>", "<|image>", "<|image|>", "<image|>", "<|audio>",
           "<|audio|>", "<audio|>", "<|video|>", "<|channel>", "<channel|>", "<|think|>"]  # fmt: skip
ID = {text: i for i, text in enumerate(SPECIAL)}
VOCAB = len(SPECIAL) + 256
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB, "hidden_size": 48, "intermediate_size": 64,
    "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32,
    "sliding_window": 40, "layer_types": [S, F, S, S, F], "hidden_size_per_layer_input": 0, "pad_token_id": 0,
    "max_position_embeddings": 4096, "bos_token_id": 2, "eos_token_id": 1, "final_logit_softcapping": 30.0,
    "tie_word_embeddings": False,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 12, "position_embedding_size": 512, "patch_size": 16, "pooling_kernel_size": 3,
}  # fmt: skip
AUDIO: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "subsampling_conv_channels": [128, 4],
    "output_proj_dims": 40,
}  # fmt: skip
BOTH_WAYS = {
    "use_bidirectional_attention": "vision",
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "e2b": ({"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
             "num_key_value_heads": 1},
            {"use_clipped_linears": True, "head_dim": 16}),
    "moe26b": (BOTH_WAYS | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24},
               {"standardize": True}),
    "dense31b": (BOTH_WAYS | {"sliding_window": 300}, {"standardize": True}),
    "unified12b": (BOTH_WAYS, {}),
}  # fmt: skip
IDS = {
    "image_token_id": ID["<|image|>"], "boi_token_id": ID["<|image>"], "eoi_token_id": ID["<image|>"],
    "audio_token_id": ID["<|audio|>"], "boa_token_id": ID["<|audio>"], "eoa_token_index": ID["<audio|>"],
    "video_token_id": ID["<|video|>"],
}  # fmt: skip


def build_seeing(kind: str, folder: Path, *, seed: int = 0, **text: Any) -> PreTrainedModel:
    """Make, save and return the transformers model of one kind (eager attention, float32)."""
    torch.manual_seed(seed)
    text_config, vision = TEXT | KINDS[kind][0] | text, VISION | KINDS[kind][1]
    audio: Any = {"audio_embed_dim": 640} if kind == "unified12b" else AUDIO if kind == "e2b" else None
    if kind == "unified12b":
        text_config = {k: v for k, v in text_config.items() if "per_layer_input" not in k}
        vision = {"mm_embed_dim": 48, "output_proj_dims": 48, "mm_posemb_size": 128}
        config: Any = Gemma4UnifiedConfig(
            text_config=text_config, vision_config=vision, audio_config=audio, **IDS
        )
        model: PreTrainedModel = Gemma4UnifiedForConditionalGeneration(config)
    else:
        config = Gemma4Config(
            text_config=text_config,
            vision_config=vision,
            audio_config=audio,
            tie_word_embeddings=False,
            **IDS,
        )
        model = Gemma4ForConditionalGeneration(config)
    _randomize(model)
    model.eval()
    model.set_attn_implementation("eager")
    model.save_pretrained(folder)
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE.read_text(encoding="utf-8"), encoding="utf-8")
    return model


@torch.no_grad()
def _randomize(model: PreTrainedModel) -> None:
    """Matrices of unit gain, norms that differ, clips that bite; nobody writes a placeholder."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(("embed_scale", "inv_freq", "inv_timescales", "softcap")):
            continue
        if name.endswith(("input_max", "output_max")):
            tensor.uniform_(0.8, 1.6)
        elif name.endswith(("input_min", "output_min")):
            tensor.uniform_(-1.6, -0.8)
        elif name.endswith("layer_scalar"):
            tensor.uniform_(0.7, 1.1)
        elif "position_embedding" in name or "pos_embedding" in name:
            tensor.normal_(0, 1.0)
        elif tensor.dim() >= 2:
            tensor.normal_(0, (tensor.numel() / tensor.shape[0]) ** -0.5)
        elif name.endswith(".bias") or name.endswith("std_bias"):
            tensor.normal_(0, 0.3)
        else:
            tensor.uniform_(0.6, 1.4)
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            tensor.mul_(tensor.shape[0] ** -0.25)
        if name.endswith(("model.norm.weight", "language_model.norm.weight")):
            tensor.mul_(3.0)


def write_tokenizer(folder: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = ID | {letter: len(SPECIAL) + i for i, letter in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    backend.add_special_tokens(SPECIAL)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    named = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "image_token": "<|image|>"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(named | {"add_bos_token": True}), encoding="utf-8"
    )


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Coarse squares of colour with fine noise: something that resizing changes."""
    rng = random.Random(seed * 100_003 + width * 1009 + height)
    small = Image.frombytes("RGB", (7, 5), rng.randbytes(7 * 5 * 3))
    large = small.resize((width, height), Image.Resampling.NEAREST)
    noise = Image.frombytes("L", (width, height), rng.randbytes(width * height))
    return Image.composite(large, Image.new("RGB", (width, height), (10, 200, 90)), noise)


def file_of(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def tone(seconds: float, rate: int = 16_000, seed: int = 0) -> Any:
    """float32 samples: a few tones that come and go, with noise."""
    rng = np.random.default_rng(seed)
    t = np.arange(int(seconds * rate)) / rate
    waves = sum(np.sin(2 * np.pi * f * t + seed) * np.sin(3 * t + f) for f in (220, 440 + 50 * seed, 1330))
    return (0.2 * waves + 0.02 * rng.standard_normal(len(t))).astype(np.float32)


def wav(samples: Any, rate: int = 16_000, bits: int = 16) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        file.setsampwidth(bits // 8)
        file.setframerate(rate)
        whole = np.round(samples.astype(np.float64) * (2 ** (bits - 1) - 1)).astype(np.int64)
        data = (whole + 128).astype(np.uint8).tobytes() if bits == 8 else (whole << (32 - bits)).astype("<i4").view(
            np.uint8).reshape(-1, 4)[:, 4 - bits // 8 :].tobytes()  # fmt: skip
        file.writeframes(data)
    return out.getvalue()
