"""Checkpoints that others quantized, old spellings of the config, and which assistant fits a fine-tune."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import build_target
from layouts import edit, model, write
from paceline.convert.quantized import save_quantized
from paceline.errors import LoadError
from paceline.hub.resolve import find_assistant
from paceline.models.config import read_config
from paceline.models.registry import inspect, load_target

NAME = "model.layers.0.mlp.up_proj"


@pytest.fixture
def folder(tmp_path):
    build_target("e2b", tmp_path / "gemma")
    return tmp_path / "gemma"


@pytest.mark.parametrize(
    ("ends", "kind"),
    [
        (("qweight", "qzeros", "g_idx"), "GPTQ"),
        (("qweight", "qzeros"), "AWQ or GPTQ"),
        (("weight.absmax", "weight.quant_map"), "bitsandbytes (4 bit)"),
        (("SCB",), "bitsandbytes (8 bit)"),
        (("scales", "biases"), "MLX"),
        (("weight_scale", "weight_scale_2"), "ModelOpt (NVFP4)"),
        (("weight._data", "weight._scale"), "quanto"),
        (("W_q", "meta"), "HQQ"),
        (("weight_scales",), "EETQ"),
        (("weight_blocks", "weight_scales"), "MXFP4"),
    ],
)
def test_quantized_by_others_is_named_by_its_tensors(folder, ends, kind):
    """Rows 13 and 14: with or without a quantization_config; the card names what to take instead."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {f"{NAME}.{end}": torch.zeros(2, 2) for end in ends}, path)
    write(folder / "README.md", "---\nlicense: gemma\nbase_model:\n- google/gemma-4-E2B-it\n---\n# Mine\n")
    (line,) = inspect(folder).unsupported
    assert f"weights quantized by {kind} are not supported: use google/gemma-4-E2B-it, paceline" in line
    with pytest.raises(LoadError, match="are not supported: use"):
        load_target(folder)


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("gemma-4-12b-it-qat-4bit", ""),
        ("mine", "---\nbase_model: google/gemma-4-12B-it-qat-q4_0-gguf\n---\n"),
        ("gemma-4-12B-it-QAT-w8a8", "---\nbase_model: google/gemma-4-12B-it\n---\n"),
    ],
)
def test_of_a_qat_model_the_one_that_google_stores_unquantized_is_named(folder, name, card):
    """Row 14: neither the base, which was not trained for it, nor a GGUF file."""
    path = folder.rename(folder.with_name(name)) / "model.safetensors"
    save_file(load_file(path) | {f"{NAME}.{end}": torch.zeros(2, 2) for end in ("scales", "biases")}, path)
    write(path.with_name("README.md"), card)
    (line,) = inspect(path.parent).unsupported
    assert (
        "quantized by MLX are not supported: use google/gemma-4-12B-it-qat-q4_0-unquantized, paceline" in line
    )


def test_fp8_is_named_by_its_dtype(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[f"{NAME}.weight"] = tensors[f"{NAME}.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, path)
    (line,) = inspect(folder).unsupported
    assert "weights quantized by FP8 without scales are not supported: use the" in line


def test_a_left_over_quantization_config_does_not_matter(folder):
    """Row 13: the tensors decide."""
    edit(folder / "config.json", quantization_config={"quant_method": "fp8"})
    assert not inspect(folder).unsupported
    load_target(folder)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope_scaling of type 'yarn' is not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling of type 'linear' is not supported"),
        ({"rope_parameters": ..., "rope_theta": 5e5}, "rope_theta=500000.0 is written in the old way"),
        ({"rope_parameters": ..., "rope_local_base_freq": 5e4}, "rope_local_base_freq=50000.0 is written in the old"),
        ({"rope_parameters": ..., "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": None}, None),
    ],
)  # fmt: skip
def test_old_spellings_of_rope(folder, changes, line):
    """Row 15: what would be ignored is refused."""
    edit(folder / "config.json", **changes)
    about = inspect(folder).unsupported
    assert not about if line is None else line in about[0]


def test_quantize_remembers_the_assistant(tmp_path):
    """Row 19."""
    source, assistant = model(tmp_path / "gemma"), model(tmp_path / "gemma-assistant", "assistant")
    out = tmp_path / "elsewhere" / "small"
    save_quantized(source, out, "int8")
    assert json.loads((out / "config.json").read_text())["assistant_model"] == str(assistant)
    assert find_assistant(out, read_config(out))[0] == assistant


@pytest.mark.parametrize(
    ("card", "config", "line"),
    [
        ("---\nbase_model: google/gemma-4-31B-it\n---\n", {}, "google/gemma-4-31B-it-assistant fits"),
        ("---\nbase_model:\n  - unsloth/gemma-4-E4B-it\n---\n", {}, "google/gemma-4-E4B-it-assistant fits"),
        ("no front matter\nbase_model: google/gemma-4-31B-it\n", {}, "no mine-assistant beside the target"),
        (
            "",
            {"text_config": {"hidden_size": 1536, "num_hidden_layers": 35}},
            "google/gemma-4-E2B-it-assistant fits",
        ),
        ("---\nbase_model: org/llama\n---\n", {"hidden_size": 8}, "no mine-assistant beside the target"),
    ],
)
def test_which_assistant_fits_a_fine_tune(tmp_path, card, config, line):
    """Row 25."""
    write(tmp_path / "mine" / "README.md", card)
    found, why = find_assistant(tmp_path / "mine", {"model_type": "gemma4", **config})
    assert found is None
    assert line in why
