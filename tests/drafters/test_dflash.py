"""DFlash drafts what its published source drafts, however short the drafts are; misfits are refused by name."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import VOCAB
from dflash_files import BLOCK, DFlashReference, build_dflash
from paceline import LLM
from paceline.assembly import choose_drafter
from paceline.config import EngineConfig
from paceline.control.fixed import FixedPolicy
from paceline.errors import ConfigError, LoadError, PairError, WeightsError
from paceline.models.inspection import inspect
from paceline.models.registry import load_network, load_target
from paceline.ops.base import Runner
from tapping import Pair, params, texts

HIDDEN = 48
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16}
# shorter than a block and than the texts: both ends of a window lie within what a row could see
WINDOWS = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 5,
    "use_sliding_window": True,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "original": {"original": True},
    "anchor": {"sample_from_anchor": True, "draft_vocab": 30},
    "last layer": {"taps": (2, 4), "layers": 3},
    "yarn": {"original": True, "rope_theta": None, "rope_parameters": YARN},
    "final norm": {"taps": (1, 4), "original": True},  # transformers norms the state after all layers
    "windows": {"original": True, **WINDOWS},
    "causal windows": {"sliding_window_non_causal": False, "layer": WINDOWS},
}


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("name", VARIANTS)
def test_drafts_are_those_of_the_published_source(
    name: str, count: int, llama: Path, tmp_path: Path, runner: Runner
) -> None:
    drafter = build_dflash(tmp_path, hidden=HIDDEN, vocab=VOCAB, **VARIANTS[name])
    pair = Pair(llama, drafter, DFlashReference(llama, drafter), runner)
    assert pair.drafter.max_tokens == BLOCK - (name != "anchor")
    engine = pair.engine(policy=FixedPolicy(count), draft_tokens=count)
    for i, text in enumerate(texts(3)):
        engine.add(str(i), text, params())
    assert pair.right(engine) > 20
    assert pair.drafter.cache.open_sequences == 0


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_it_runs_as_a_user_loads_it(quantize: Any, llama: Path, tmp_path: Path) -> None:
    """Found inside the target's folder, beside it, or given by name."""
    target = tmp_path / "mine"
    shutil.copytree(llama, target)
    inside = build_dflash(target / "dflash", hidden=HIDDEN, vocab=VOCAB, draft_vocab=32)
    assert choose_drafter(EngineConfig(target=str(target)), target)[:2] == ("dflash+ngram", inside)
    beside = inside.rename(tmp_path / "mine-dflash")
    assert choose_drafter(EngineConfig(target=str(target), drafter="dflash"), target)[:2] == (
        "dflash",
        beside,
    )
    settings: dict[str, Any] = {"max_model_len": 128, "profile_dir": "none", "draft_tokens": 3}
    each = params(20, temperature=0.8, seed=3)
    plain = LLM(str(target), drafter="none", **settings).generate(["0123abc"], each)[0]
    llm = LLM(str(target), drafter=str(beside), quantize_drafter=quantize, **settings)
    got = llm.generate(["0123abc"], each)[0]
    assert got.token_ids == plain.token_ids
    assert got.stats.drafters.get("dflash")


INNER = {"mask_token_id": 3, "target_layer_ids": [0, 2]}
BAD: dict[str, tuple[dict[str, Any], type[LoadError], str]] = {
    "unknown flag": ({"markov_rank": 8}, ConfigError, "dflash: markov_rank=8 is not known to this version"),
    "unknown inner flag": (
        {"original": True, "dflash_config": INNER | {"swa_sinks": True}}, ConfigError, "swa_sinks=True is not known"),
    "windows that no layer has": (
        {"original": True, "dflash_config": INNER | {"use_swa": True}}, ConfigError, "use_swa=True is not supported"),
    "sliding layers without a window": (
        {"original": True, "layer_types": ["sliding_attention"] * 2}, ConfigError, "there is no sliding_window in use"),
    "a window of nothing": ({"original": True, **WINDOWS, "sliding_window": 0}, ConfigError, "sliding_window is 0"),
    "a causality of words": ({"sliding_window_non_causal": "no"}, ConfigError, "sliding_window_non_causal='no'"),
    "no layer": ({"transformer_layer_config": None}, ConfigError, "has no transformer_layer_config"),
    "no mask": ({"mask_token_id": None}, ConfigError, "mask_token_id is None, no token of a vocabulary"),
    "a mask beyond": ({"mask_token_id": VOCAB}, ConfigError, f"mask_token_id is {VOCAB}, no token"),
    "taps are words": ({"aux_hidden_state_layer_ids": ["a"]}, ConfigError, "ids is ['a'], not layer numbers"),
    "no taps": ({"aux_hidden_state_layer_ids": None}, ConfigError, "dflash_config.target_layer_ids is None"),
    "a tap too far": ({"aux_hidden_state_layer_ids": [1, 9]}, PairError, "[1, 9], and the target has 4 layers"),
    "one row": ({"block_size": 1}, ConfigError, "block_size"),
    "a million rows": ({"block_size": 10**6}, ConfigError, "block_size is 1000000, not a whole number from 2 to 256"),
    "another target": ({"target_hidden_size": 64}, PairError, "hidden size 64 against 48"),
    "more layers": ({"original": True, "num_target_layers": 36}, PairError, "layers 36 against 4"),
    "head of another size": ({"draft_vocab_size": 29}, WeightsError, "has shape"),
    "a missing layer": ({"layers": 1}, WeightsError, "missing"),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(BAD))
def test_what_does_not_fit_is_refused_in_one_line(case: str, llama: Path, tmp_path: Path) -> None:
    changes, error, said = BAD[case]
    vocab = {} if changes.get("original") else {"draft_vocab": 30}
    build_dflash(tmp_path, hidden=HIDDEN, vocab=VOCAB, **vocab, **changes)
    if case == "a missing layer":
        config = json.loads((tmp_path / "config.json").read_text())
        config["transformer_layer_config"]["num_hidden_layers"] = 2
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=re.escape(said)) as caught:
        load_network(tmp_path, load_target(llama))
    assert "\n" not in str(caught.value)
    assert inspect(tmp_path, target=llama).unsupported == [str(caught.value)]


def test_states_that_are_no_numbers_change_no_text(llama: Path, tmp_path: Path) -> None:
    drafter = build_dflash(tmp_path, hidden=HIDDEN, vocab=VOCAB)
    tensors = load_file(drafter / "model.safetensors")
    tensors["fc.weight"] = torch.full_like(tensors["fc.weight"], 3e38)  # finite; sums of it are not
    save_file(tensors, drafter / "model.safetensors")
    settings: dict[str, Any] = {"max_model_len": 128, "profile_dir": "none", "draft_tokens": 3}
    each = params(20, temperature=0.8, seed=3)
    plain = LLM(str(llama), drafter="none", **settings).generate(["0123abc"], each)[0]
    told = LLM(str(llama), drafter=str(drafter), quantize_drafter="none", **settings).generate(
        ["0123abc"], each
    )[0]
    assert told.token_ids == plain.token_ids
