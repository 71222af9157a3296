"""Configs in the shapes that drafters of DFlash's family are published in: each is read as its makers run it.

The numbers are those of the published files that each is named after, without what says nothing of the drafter.
"""

from __future__ import annotations

from typing import Any

import pytest

from paceline.checkpoints.foreign import drafter_kind
from paceline.errors import ConfigError
from paceline.models.drafters.dflash import DFlashConfig
from paceline.models.drafters.dspark import parse_dspark
from paceline.models.drafters.networks import PARSERS

QWEN3 = {
    "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 5, "vocab_size": 248320, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144, "max_window_layers": 5, "attention_dropout": 0.0, "tie_word_embeddings": False,
    "use_cache": True, "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"}, "initializer_range": 0.02,
}  # fmt: skip
HEADS = {
    "markov_rank": 256, "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}  # fmt: skip
SLIDING = {"layer_types": ["sliding_attention"] * 5, "sliding_window": 2048, "use_sliding_window": True}
TAPS = [5, 19, 33, 47, 61]


def speculators(
    kind: str, taps: list[int], drafts: int, layers: dict[str, Any], **more: Any
) -> dict[str, Any]:
    return {
        "speculators_model_type": kind, "architectures": ["DSparkDraftModel"], "aux_hidden_state_layer_ids": taps,
        "mask_token_id": 4, "speculators_version": "0.6.0", "transformer_layer_config": QWEN3 | layers,
        "speculators_config": {"algorithm": kind, "proposal_methods": [{"speculative_tokens": drafts}]}, **more,
    }  # fmt: skip


REDHAT = speculators(
    "dspark", [2, 10, 20, 30, 37], 8, {"hidden_size": 2048, "head_dim": 256, **SLIDING}, **HEADS, block_size=8,
    draft_vocab_size=32000, sample_from_anchor=True, sliding_window_non_causal=False,
)  # fmt: skip
WRITTEN_TODAY = {  # by speculators for each of its kinds
    "projector_type": "dflash", "pure_draft_prefix_len": 1, "emb_dim": 256, "gru_hidden_dim": 1024, "auf": True,
    "lambda_base_start": 1.0, "lambda_base_decay_ratio": 1.0, "shift_label": False, "max_anchors": 1024,
}  # fmt: skip
DEEPSPEC = QWEN3 | HEADS | {
    "architectures": ["Qwen3DSparkModel"], "block_size": 7, "mask_token_id": 4, "target_layer_ids": TAPS,
    "num_target_layers": 64, "num_anchors": 512, "layer_types": ["full_attention"] * 5, "sliding_window": None,
}  # fmt: skip
OF_QWEN3_5 = {  # what DeepSpec copies from such a target's config
    "attn_output_gate": True, "output_gate_type": "swish", "full_attention_interval": 4, "linear_num_key_heads": 16,
    "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
    "partial_rotary_factor": 0.25,
    "rope_parameters": {
        "rope_theta": 1e7, "rope_type": "default", "partial_rotary_factor": 0.25, "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
}  # fmt: skip
YARN = {
    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 8192, "rope_theta": 1e7,
    "rope_type": "yarn",
}  # fmt: skip
SPECFORGE = QWEN3 | {
    "architectures": ["DSparkDraftModel"], "auto_map": {"AutoModel": "dspark.DSparkDraftModel"}, "block_size": 7,
    "target_hidden_size": None, "rope_theta": 1e7, "rope_parameters": YARN, "num_target_layers": 64,
    "dflash_config": HEADS | {
        "attention_mode": "gqa", "confidence_head_alpha": 1.0, "mask_token_id": 4, "projector_type": "dspark",
        "target_layer_ids": TAPS,
    },
}  # fmt: skip
ZLAB = QWEN3 | SLIDING | {
    "architectures": ["DFlash2DraftModel"], "is_causal": False, "num_target_layers": 64, "dflash_config": {
        "block_size": 8, "conv_group_size": 16, "conv_kernel_size": 2, "mask_token_id": 4, "selector_rank": 256,
        "selector_top_k": 16, "target_layer_ids": TAPS,
    },
}  # fmt: skip
FIVE = (6, 20, 34, 48, 62)  # TAPS, counted in layers that are done
# of a file: (its kind, taps, rows, the row of the first token, whether windows are causal)
PUBLISHED: dict[str, tuple[dict[str, Any], tuple[str, tuple[int, ...], int, int, bool]]] = {
    "RedHatAI/Qwen3.6-35B-A3B-speculator.dspark": (REDHAT, ("dspark", (2, 10, 20, 30, 37), 8, 0, True)),
    "the same, written today": (REDHAT | WRITTEN_TODAY, ("dspark", (2, 10, 20, 30, 37), 8, 0, True)),
    "RedHatAI/GLM-5.2-speculator.dspark": (
        speculators("dspark", [8, 23, 39], 15, {"head_dim": 64}, **HEADS, block_size=16, max_anchors=1024),
        ("dspark", (8, 23, 39), 16, 1, False),
    ),
    "makora-ai/gemma4-26b-a4b-dspark": (
        speculators("dspark", [1, 9], 6, {}, **HEADS, block_size=7, draft_vocab_size=32000),
        ("dspark", (1, 9), 7, 1, False),
    ),
    "DaoCloud/Muse-Glimmer-30B-DSpark": (
        speculators("dspark", [2, 14], 15, SLIDING, **HEADS, block_size=15, sample_from_anchor=True,
                    sliding_window_non_causal=False),
        ("dspark", (2, 14), 15, 0, True),
    ),
    "RedHatAI/Qwen3-4B-speculator.dflash2": (
        speculators("dflash2", [2, 18], 7, SLIDING, block_size=8, sliding_window_non_causal=True) | WRITTEN_TODAY,
        ("dflash2", (2, 18), 8, 1, False),
    ),
    "deepseek-ai/dspark_qwen3_4b_block7": (DEEPSPEC, ("dspark", FIVE, 7, 0, False)),
    "satgeze/Qwen3.6-27B-DSpark": (
        DEEPSPEC | OF_QWEN3_5 | {"block_size": 15}, ("dspark", FIVE, 15, 0, False),
    ),
    "satgeze/Qwen3.5-0.8B-DSpark": (
        DEEPSPEC | OF_QWEN3_5 | {"model_type": "qwen3_5_text"}, ("dspark", FIVE, 7, 0, False),
    ),
    "RadixArk/Qwen3.8-27B-DSpark": (SPECFORGE, ("dspark", FIVE, 7, 0, False)),
    "the same, named before DSpark had a class": (
        SPECFORGE | {"architectures": ["DFlashDraftModel"]}, ("dspark", FIVE, 7, 0, False),
    ),
    "z-lab/Qwen3.8-27B-DFlash2": (ZLAB, ("dflash2", FIVE, 8, 1, False)),
    "z-lab/Qwen3.6-35B-A3B-DFlash": (
        QWEN3 | {"architectures": ["DFlashDraftModel"], "num_target_layers": 64,
                 "dflash_config": {"block_size": 16, "mask_token_id": 4, "target_layer_ids": TAPS}},
        ("dflash", FIVE, 16, 1, False),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read_as_its_makers_run_it(name: str) -> None:
    raw, (kind, taps, block, first, causal) = PUBLISHED[name]
    assert drafter_kind(raw) == kind
    read: Any = PARSERS[kind](raw)
    own: DFlashConfig = read if isinstance(read, DFlashConfig) else read.block
    assert (own.taps, own.block, own.first, own.causal) == (taps, block, first, causal)
    layers = raw.get("transformer_layer_config", raw)
    assert (own.layers.head_dim, own.layers.rotary.theta) == (layers["head_dim"], 1e7)
    assert own.layers.rotated is None, "the copied share of a head is the target's"
    slides = SLIDING["layer_types"] == layers.get("layer_types")
    assert own.windows == ((2048 if slides else None),) * 5


NVIDIA = QWEN3 | {  # NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4-DSpark
    "architectures": ["Qwen3DSparkModel"], "hidden_size": 2688, "intermediate_size": 6144, "num_hidden_layers": 6,
    "num_key_value_heads": 2, "vocab_size": 131072, "layer_types": ["sliding_attention"] * 6, "sliding_window": 1024,
    "block_size": 8, "dspark_bonus_anchor": True, "dflash_query_causal": True, "attention_sink_bias": True,
    "markov_rank": 512, "markov_head_type": "vanilla", "quantization_config": {"quant_method": "modelopt"},
    "dflash_config": {
        "attention_sink_bias": True, "causal": True, "mask_token_id": 990, "swa_window_size": 1024, "use_swa": True,
        "target_layer_ids": [1, 5, 19, 29, 41, 51], "sample_from_anchor": False,
    },
}  # fmt: skip


def test_nvidias_config_has_sinks_and_rows_that_see_none_behind_them() -> None:
    own = parse_dspark(NVIDIA)
    assert (own.rank, own.block.first, own.block.block, own.block.mask) == (512, 1, 8, 990)
    assert own.block.windows == (1024,) * 6
    assert own.block.causal
    assert own.block.layers.sinks
    plain = {name: x for name, x in NVIDIA["dflash_config"].items() if "swa" not in name}
    said = {"dflash_config": NVIDIA["dflash_config"] | {"sample_from_anchor": True}}
    for changes, words in (
        (
            {"layer_types": ["full_attention"] * 6, "dflash_config": plain},
            "are read where both are said and all layers have a window",
        ),
        ({"dflash_query_causal": False}, "are read where both are said"),
        (
            {"sliding_window": 512},
            "swa_window_size=1024 is not supported: it is not the window of its layers",
        ),
        (said, "sample_from_anchor=True and dspark_bonus_anchor=True say two things of the first row"),
        (
            {"attention_sink_bias": "yes"},
            "attention_sink_bias='yes' is not supported: it is either true or false",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            parse_dspark(NVIDIA | changes)


BAD = {
    "Domino's head": (REDHAT | {"projector_type": "domino"}, "projector_type='domino' is not supported"),
    "Domino's head inside": (
        ZLAB | {"dflash_config": ZLAB["dflash_config"] | {"projector_type": "domino"}},
        "dflash_config: projector_type='domino' is not supported",
    ),
    "labels moved by one": (REDHAT | WRITTEN_TODAY | {"shift_label": True}, "shift_label=True is not known"),
    "a backbone of Qwen 3.5": (
        DEEPSPEC | OF_QWEN3_5 | {"architectures": ["Qwen35DSparkModel"], "enable_qwen35_gated_q_proj": True},
        "is not known to this version",
    ),
    "a Markov head under DFlash's name": (
        DEEPSPEC | {"architectures": ["DFlashDraftModel"]}, "dflash: markov_rank=256 is not known",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_relatives_that_are_not_read_are_refused_by_name(case: str) -> None:
    raw, words = BAD[case]
    kind = drafter_kind(raw)
    with pytest.raises(ConfigError, match=words) as caught:
        PARSERS[kind](raw)
    assert "\n" not in str(caught.value)
