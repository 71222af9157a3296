"""Tensors that a family spells in its own way: read under the usual names, and written back as they were."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from decoders import build_decoder
from paceline.checkpoints.loading import PREFIXES, canonical
from paceline.checkpoints.spellings import own


@pytest.mark.parametrize(
    ("name", "kind"), [("lfm2-biases", "lfm2"), ("lfm2-moe", "lfm2_moe"), ("mixtral", "mixtral")]
)
def test_names_of_a_family_there_and_back(name: str, kind: str, tmp_path: Path) -> None:
    build_decoder(name, tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        stored = list(file.keys())
    changed = 0
    for key in stored:
        inner = next((key[len(p) :] for p in PREFIXES if key.startswith(p)), key)
        assert own(kind, canonical(key)) == inner
        changed += canonical(key) != inner
    assert changed > 4


def test_names_of_others_stay() -> None:
    for name in (
        "layers.0.linear_attn.out_proj.weight",
        "norm.weight",
        "layers.3.mlp.gate.weight",
        "lm_head.weight",
    ):
        assert canonical(name) == name
        assert own("llama", name) == name
