"""One model, however its config.json is written; and checkpoints that hold more than the language model."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import (
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
)

from checkpoints import FAMILIES, SIZES, build_assistant, build_target, finish
from paceline.models.config import parse_target, read_config
from paceline.models.families.gemma4.config import parse_assistant
from paceline.models.registry import inspect, load_target


def older(raw: dict) -> dict:
    """As Google and older transformers write the text config: full layers' sizes as two global fields."""
    raw = dict(raw)
    overrides = raw.pop("per_layer_config")
    (sizes,) = {(o["head_dim"], o.get("num_key_value_heads")) for o in overrides.values()}
    return raw | {"global_head_dim": sizes[0], "num_global_key_value_heads": sizes[1]}


@pytest.mark.parametrize("family", list(FAMILIES))
def test_older_and_newer_writing_mean_the_same(family, tmp_path):
    build_target(family, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    text = raw.get("text_config", raw)
    plain = parse_target(raw)
    changed = raw | {"text_config": older(text)} if "text_config" in raw else older(text)
    assert "per_layer_config" in text
    assert parse_target(changed) == plain
    padded = {k.zfill(2): v for k, v in text["per_layer_config"].items()}
    every = [text["per_layer_config"].get(str(i), {}) for i in range(6)]
    for overrides in (padded, every):
        new = text | {"per_layer_config": overrides}
        assert parse_target(raw | {"text_config": new} if "text_config" in raw else new) == plain


def test_both_ways_at_once_may_agree(tmp_path):
    build_target("31b", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert parse_target(raw | {"global_head_dim": 32, "num_global_key_value_heads": 1}) == parse_target(raw)


def test_assistant_in_both_ways(tmp_path):
    build_assistant("31b", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert parse_assistant(raw | {"text_config": older(raw["text_config"])}) == parse_assistant(raw)
    bare = {k: v for k, v in raw["text_config"].items() if k != "num_kv_shared_layers"}
    assert parse_assistant(raw | {"text_config": bare}) == parse_assistant(raw)


def test_e2b_as_published():
    """Sizes of the published E2B: what is shared, what is wide, and what a token costs."""
    kinds = (["sliding_attention"] * 4 + ["full_attention"]) * 7
    text = {
        "attention_bias": False, "attention_k_eq_v": False, "enable_moe_block": False, "eos_token_id": 1,
        "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256, "hidden_size": 1536,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 256, "intermediate_size": 6144,
        "layer_types": kinds, "max_position_embeddings": 131072, "model_type": "gemma4_text",
        "num_attention_heads": 8, "num_global_key_value_heads": None, "num_hidden_layers": 35,
        "num_key_value_heads": 1, "num_kv_shared_layers": 20, "rms_norm_eps": 1e-06, "sliding_window": 512,
        "tie_word_embeddings": True, "use_bidirectional_attention": None, "use_double_wide_mlp": True,
        "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
    }  # fmt: skip
    config = parse_target(
        {"model_type": "gemma4", "text_config": text, "eos_token_id": [1, 106], "vision_config": {}}
    )
    assert config.eos_token_ids == (1, 106)
    assert config.modalities == ("vision",)
    assert [layer.shared for layer in config.layers] == [False] * 15 + [True] * 20
    assert [layer.intermediate_size for layer in config.layers] == [6144] * 15 + [12288] * 20
    assert config.layers[4].head_dim == 512
    assert config.layers[5].head_dim == 256


def test_no_window_is_needed_without_sliding_layers(tmp_path):
    build_target("dense", tmp_path, layer_types=["full_attention"] * 6)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert parse_target(raw | {"sliding_window": None}).layers == parse_target(raw).layers


def test_eos_of_the_generation_config_wins(tmp_path):
    build_target("dense", tmp_path)
    assert parse_target(read_config(tmp_path)).eos_token_ids == (1,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert parse_target(read_config(tmp_path)).eos_token_ids == (7, 9)


TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def test_vision_and_audio_towers_are_skipped(tmp_path):
    vision = TOWER | {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16}
    audio = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 16}
    audio["subsampling_conv_channels"] = [4, 4]
    text = SIZES | FAMILIES["e4b"]
    finish(
        Gemma4ForConditionalGeneration(
            Gemma4Config(text_config=text, vision_config=vision, audio_config=audio)
        ),
        tmp_path,
    )
    check_skipped(tmp_path, {"vision_tower", "audio_tower", "embed_vision", "embed_audio"})


def test_unified_embedders_are_skipped(tmp_path):
    text = {k: v for k, v in (SIZES | FAMILIES["12b"]).items() if "per_layer_input" not in k}
    vision = {"patch_size": 2, "pooling_kernel_size": 1, "mm_embed_dim": 16, "mm_posemb_size": 8}
    config = Gemma4UnifiedConfig(
        text_config=text, vision_config=vision | {"output_proj_dims": 48}, audio_config={"audio_embed_dim": 8}
    )
    finish(Gemma4UnifiedForConditionalGeneration(config), tmp_path)
    skipped = check_skipped(tmp_path, set())
    assert skipped <= {"vision_embedder", "embed_vision", "embed_audio"}
    assert skipped


def check_skipped(folder, expected: set[str]) -> set[str]:
    target, about = load_target(folder), inspect(folder)
    assert not about.unsupported
    assert expected <= set(about.skipped)
    assert target.config.modalities == ("vision", "audio")
    stored = sum(about.skipped.values()) + about.weight_bytes
    assert stored == pytest.approx((folder / "model.safetensors").stat().st_size, rel=0.2)
    assert torch.isfinite(target.embedding.data).all()
    return set(about.skipped)
