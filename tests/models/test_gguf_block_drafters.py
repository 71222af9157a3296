"""DFlash, DFlash 2 and DSpark as GGUF files (llama.cpp's architecture dflash) draft as their folders do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from checkpoints import VOCAB
from decoders import build_decoder
from dflash2_files import DFlash2Reference, build_dflash2
from dflash_files import (
    BLOCK,
    EPS,
    HEAD_DIM,
    HEADS,
    INNER,
    KV_HEADS,
    MASK,
    THETA,
    DFlashReference,
    build_dflash,
)
from dspark_files import DSparkReference, build_dspark, pairs
from gguf_files import gguf_name, write_gguf
from paceline.errors import ConfigError, LoadError
from paceline.models.config import read_config
from paceline.models.drafters.networks import kind_of
from paceline.models.registry import load_network, load_target
from tapping import Pair, params, texts

HIDDEN, TAPS = 48, (1, 3)
NAMES = {
    "fc.weight": "fc.weight", "hidden_norm.weight": "enc.output_norm.weight", "d2t": "d2t",
    "markov_head.markov_w1.weight": "markov_w1.weight", "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight", "confidence_head.proj.bias": "conf_proj.bias",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
}  # fmt: skip
INSIDE = {
    "attention_conv.base_kernel": "attn_conv_base", "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base", "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}  # fmt: skip
FIELDS: dict[str, Any] = {
    "block_count": 2, "embedding_length": HIDDEN, "feed_forward_length": INNER, "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS, "attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM,
    "attention.layer_norm_rms_epsilon": EPS, "rope.freq_base": THETA, "context_length": 512, "block_size": BLOCK,
    "target_layers": list(TAPS), "attention.causal": False, "tokenizer.ggml.mask_token_id": MASK, "vocab_size": VOCAB,
}  # fmt: skip
PATH = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 12, "selector_top_k": 5}


def as_file(folder: Path, path: Path, **fields: Any) -> Path:
    """A folder as the converter writes it: ids in place of offsets, taps counted in layers done."""
    tensors: dict[str, np.ndarray] = {}
    for name, value in load_file(folder / "model.safetensors").items():
        if name == "t2d":
            continue
        data = value.numpy()
        if name == "d2t":
            data = data + np.arange(len(data))
        _, _, inside = name.partition("layers.")
        number, _, inside = inside.partition(".")
        if inside in INSIDE:
            tensors[f"blk.{number}.{INSIDE[inside]}"] = data
        else:
            tensors[NAMES[name] if name in NAMES else gguf_name(name)] = data
    return write_gguf(path, "dflash", FIELDS | fields, tensors)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "target"
    build_decoder("llama", folder)
    return folder


KINDS: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "dflash": (build_dflash, DFlashReference, {"draft_vocab": 40}, {}),
    "dflash of the target's head": (build_dflash, DFlashReference, {}, {}),
    "dspark": (build_dspark, DSparkReference, {"draft_vocab": 40, "anchored": True}, {}),
    "dspark, masks first": (
        build_dspark, DSparkReference, {"draft_vocab": 40, "anchored": False}, {"sample_from_anchor": False}),
    "dspark, states alone": (
        build_dspark, DSparkReference, {"reads_token": False, "anchored": True}, {"sample_from_anchor": True}),
    "dflash2": (build_dflash2, DFlash2Reference, {}, PATH),
    "windows": (
        build_dflash2, DFlash2Reference, {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12},
        PATH | {"attention.sliding_window": 12, "attention.sliding_window_pattern": [True, False]}),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_a_file_drafts_as_its_folder(name: str, llama: Path, tmp_path: Path) -> None:
    build, reference, variant, fields = KINDS[name]
    folder = build(tmp_path / "folder", hidden=HIDDEN, vocab=VOCAB, taps=TAPS, **variant)
    file = as_file(folder, tmp_path / "drafter.gguf", **fields)
    assert kind_of(file, llama) == name.split()[0].strip(",").replace("windows", "dflash2")
    pair = Pair(llama, file, reference(llama, folder))
    engine = pair.engine()
    for i, text in enumerate(texts(2)):
        engine.add(str(i), text, params(14))
    assert pair.right(engine) > 8


def test_pairs_side_by_side_are_put_in_order_by_the_converter_alone(tmp_path: Path) -> None:
    """A file's rotary is always half and half, whatever the folder's was."""
    build_dspark(tmp_path / "folder", hidden=HIDDEN, vocab=VOCAB, style="liquid")
    tensors = load_file(tmp_path / "folder" / "model.safetensors")
    assert any(not np.array_equal(pairs(name, value), value) for name, value in tensors.items())
    config = read_config(as_file(tmp_path / "folder", tmp_path / "drafter.gguf"))
    assert "rope_is_neox_style" not in config
    assert config["architectures"] == ["Qwen3DSparkModel"]
    assert json.dumps(config["dflash_config"]["target_layer_ids"]) == "[0, 2]"


@pytest.mark.parametrize("architecture", ["dspark", "dflash-draft"])
def test_a_forks_architecture_is_refused_by_name(architecture: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", architecture, FIELDS, {"a.weight": np.zeros((2, 2), np.float32)})
    with pytest.raises(ConfigError, match=r"a layout of llama.cpp's forks"):
        read_config(path)


def test_a_forks_keys_and_tensors_and_sinks_are_refused_by_name(llama: Path, tmp_path: Path) -> None:
    folder = build_dspark(tmp_path / "folder", hidden=HIDDEN, vocab=VOCAB)
    file = as_file(folder, tmp_path / "x.gguf", **{"dspark.block_size": 7})
    with pytest.raises(ConfigError, match=r"a layout of llama.cpp's forks"):
        read_config(file)
    tensors = {
        "blk.0.attn_sinks.weight": np.zeros(HEADS, np.float32),
        "fc.weight": np.zeros((48, 96), np.float32),
    }
    file = write_gguf(tmp_path / "y.gguf", "dflash", FIELDS, tensors)
    with pytest.raises(LoadError, match="attn_sinks"):
        load_network(file, load_target(llama))
