"""P-EAGLE drafts what its published source drafts; misfits are refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from checkpoints import VOCAB
from eagle3_files import build_eagle3
from paceline.control.fixed import FixedPolicy
from paceline.errors import ConfigError, LoadError, WeightsError
from paceline.models.drafters.networks import kind_of
from paceline.models.inspection import inspect
from paceline.models.registry import load_network, load_target
from paceline.ops.base import Runner
from peagle_files import PEagleReference, build_peagle
from tapping import Pair, params, texts

HIDDEN = 48
VARIANTS: dict[str, dict[str, Any]] = {
    "speculators": {"draft_vocab": 40},
    "of vLLM": {"theirs": True, "flat": True},
    "norms before fc": {"fc_norm": True, "norm_before_residual": True},
    "one norm, one layer": {"norm_before_fc": True, "layers": 1},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_drafts_are_those_of_the_published_source(
    name: str, llama: Path, tmp_path: Path, runner: Runner
) -> None:
    drafter = build_peagle(tmp_path, hidden=HIDDEN, vocab=VOCAB, **VARIANTS[name])
    assert kind_of(drafter, llama) == "peagle"
    pair = Pair(llama, drafter, PEagleReference(drafter), runner)
    for count in (1, 4):
        engine = pair.engine(policy=FixedPolicy(count), draft_tokens=count)
        for i, text in enumerate(texts(3)):
            engine.add(str(i), text, params())
        assert pair.right(engine) > 20


BAD: dict[str, tuple[dict[str, Any], type[LoadError], str]] = {
    "no mask": ({"mask_token_id": None}, ConfigError, "mask_token_id is None, no token"),
    "an inner flag": ({"dflash_config": {"use_swa": True}}, ConfigError, "of which only a mask token is known"),
    "an unknown flag": ({"num_depths": 4}, ConfigError, "peagle: num_depths=4 is not known"),
    "layers": ({"layers": 2}, WeightsError, "missing"),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(BAD))
def test_what_does_not_fit_is_refused_in_one_line(case: str, llama: Path, tmp_path: Path) -> None:
    changes, error, words = BAD[case]
    build_peagle(tmp_path, hidden=HIDDEN, vocab=VOCAB)
    config = json.loads((tmp_path / "config.json").read_text())
    if layers := changes.get("layers"):
        config["transformer_layer_config"]["num_hidden_layers"] = layers + 2
    else:
        config |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=re.escape(words)) as caught:
        load_network(tmp_path, load_target(llama))
    assert inspect(tmp_path, target=llama).unsupported == [str(caught.value)]


def test_a_head_without_its_learned_row_and_one_of_latent_attention(llama: Path, tmp_path: Path) -> None:
    build_peagle(tmp_path / "a", hidden=HIDDEN, vocab=VOCAB)
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    del tensors["mask_hidden"]
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    with pytest.raises(WeightsError, match="no mask_hidden, where a P-EAGLE head has one row of 144"):
        load_network(tmp_path / "a", load_target(llama))
    build_eagle3(tmp_path / "b", hidden=HIDDEN, vocab=VOCAB, original=True)
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    config["architectures"] = ["Eagle3DeepseekV2ForCausalLM"]
    (tmp_path / "b" / "config.json").write_text(json.dumps(config))
    assert kind_of(tmp_path / "b", llama) is None
    assert "an EAGLE-3 head with a layer of latent attention (MLA)" in str(
        inspect(tmp_path / "b").unsupported
    )
