"""Modules for multi-token prediction draft what their published source drafts, wherever they lie; misfits are refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from decoders import build_decoder
from mtp_files import MtpReference, build_mtp
from paceline import LLM
from paceline.assembly import choose_drafter
from paceline.config import EngineConfig
from paceline.convert.quantized import save_quantized
from paceline.errors import ConfigError, LoadError, PairError, UsageError, WeightsError
from paceline.hub.resolve import find_assistant
from paceline.models.inspection import inspect
from paceline.models.registry import load_network, load_target
from paceline.ops.base import Runner
from tapping import Pair, params, texts

# what is built: family of the target, and the modules
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek": ("llama", {}),
    "qwen": ("llama", {"layout": "qwen"}),
    "speculators": ("qwen3", {"layout": "speculators"}),
    "hidden first": ("mistral", {"mtp_hidden_states_first": True}),
    "own tables": ("llama", {"own": True, "modules": 2}),
    "head norms": ("qwen3", {"layout": "qwen"}),
    "gated": ("qwen3_5", {"layout": "qwen"}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_drafts_are_those_of_the_published_source(name: str, tmp_path: Path, runner: Runner) -> None:
    family, how = VARIANTS[name]
    target = tmp_path / "target"
    build_decoder(family, target)
    folder = build_mtp(target, tmp_path / "made", **how)
    reference = MtpReference(target, folder, how.get("layout", "deepseek"), how.get("modules", 1))
    pair = Pair(target if how.get("layout") == "speculators" else folder, folder, reference, runner)
    engine = pair.engine()
    for i, text in enumerate(texts(3)):
        engine.add(str(i), text, params())
    assert pair.right(engine) > 20
    assert pair.drafter.cache.open_sequences == 0


@pytest.mark.parametrize("modules", [1, 3])
def test_its_steps_are_those_of_transformers(modules: int, llama: Path, tmp_path: Path) -> None:
    """MtpModel of transformers, its modules filled with the same weights, drafts from the same states."""
    from transformers import LlamaForCausalLM
    from transformers.modeling_layers import MtpModel

    folder = build_mtp(llama, tmp_path / "made", modules=modules)
    pair = Pair(folder, folder, MtpReference(llama, folder, modules=modules))
    main = LlamaForCausalLM.from_pretrained(llama)
    main.config.num_mtp_layers = modules
    theirs = MtpModel(main, modules).eval()
    weights = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        at, _, rest = name.removeprefix("model.layers.").partition(".")
        if name.startswith("model.layers.") and int(at) >= 4:
            own = rest.split(".")[0] in ("enorm", "hnorm", "eh_proj")
            rest = (
                rest.replace("shared_head.norm", "post_norm")
                if own or "shared_head" in rest
                else f"mtp_block.{rest}"
            )
            weights[f"layers.{int(at) - 4}.{rest}"] = tensor
    got = theirs.load_state_dict(weights, strict=False)
    assert not got.unexpected_keys
    assert not [name for name in got.missing_keys if name.startswith("layers.")]
    for text in texts(3):
        states = pair.states(text)
        with torch.no_grad():
            drafted, logits, _ = theirs(
                torch.tensor([text[1:]]), states[None], None, torch.arange(1, len(text))[None], None
            )
        tokens, mine = pair.reference.draft(text, states, modules)
        assert drafted[0].tolist() == tokens == pair.expected(text, modules)
        assert float((torch.stack(mine) - logits[0]).abs().max()) < 1e-4 * float(logits.abs().max())


PROMISED = {"num_nextn_predict_layers": 1}


def test_they_are_found_inside_the_target_whatever_its_config_says(llama: Path, tmp_path: Path) -> None:
    for layout in ("deepseek", "qwen"):
        for said in ({}, PROMISED):
            folder = build_mtp(llama, tmp_path / f"{layout}{len(said)}", layout, **said)
            kind, source, why = choose_drafter(EngineConfig(target=str(folder)), folder)
            assert (kind, source) == ("mtp+ngram", folder)
            assert why == f"{folder} holds 1 module for multi-token prediction"
            assert inspect(folder).skipped.keys() == {"multi-token prediction"}
            seen = inspect(folder, target=folder)
            assert (seen.role, seen.unsupported) == ("drafter", [])
    folder = build_mtp(llama, tmp_path / "three", modules=3)
    assert find_assistant(folder, _raw(folder))[1] == f"{folder} holds 3 modules for multi-token prediction"
    assert choose_drafter(EngineConfig(target=str(folder), drafter="mtp"), folder)[:2] == ("mtp", folder)


def test_a_promise_that_the_file_does_not_keep_is_said(llama: Path, tmp_path: Path) -> None:
    folder = build_mtp(llama, tmp_path, without=[""], **PROMISED)  # nothing of them is stored
    kind, source, why = choose_drafter(EngineConfig(target=str(folder)), folder)
    assert (kind, source) == ("ngram", None)
    assert why.startswith(
        "config.json promises multi-token prediction (num_nextn_predict_layers=1), which the"
    )
    llm = LLM(str(folder), max_model_len=128, profile_dir="none")
    assert llm.info["drafter_reason"] == why
    assert llm.generate(["0123abc"], params(4))[0].token_ids
    with pytest.raises(UsageError, match="promises multi-token prediction"):
        choose_drafter(EngineConfig(target=str(folder), drafter="mtp"), folder)


def test_fewer_modules_than_promised_are_used_and_said(llama: Path, tmp_path: Path) -> None:
    folder = build_mtp(llama, tmp_path, num_nextn_predict_layers=3)
    kind, _, why = choose_drafter(EngineConfig(target=str(folder)), folder)
    assert kind == "mtp+ngram"
    assert why == (
        f"{folder} holds 1 module for multi-token prediction, where config.json promises 3 (num_nextn_predict_layers): "
        "another download of this model may hold the rest"
    )
    with pytest.raises(
        UsageError, match="is a drafter of another kind: leave drafter out to use it; or name"
    ):
        choose_drafter(EngineConfig(target=str(folder), drafter="heads"), folder)


@pytest.mark.parametrize("modules", [1, 2])
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_it_runs_as_a_user_loads_it(quantize: Any, modules: int, tmp_path: Path) -> None:
    """Also after `paceline quantize`, which keeps the modules."""
    target = tmp_path / "target"
    build_decoder("llama", target, hidden_size=64)
    folder = build_mtp(target, tmp_path / "made", modules=modules)
    if quantize is not None:
        save_quantized(folder, tmp_path / "quantized", quantize)
        folder = tmp_path / "quantized"
    settings: dict[str, Any] = {"max_model_len": 128, "profile_dir": "none", "draft_tokens": 3}
    each = params(20, temperature=0.8, seed=3)
    plain = LLM(str(folder), drafter="none", **settings).generate(["0123abc"], each)[0]
    llm = LLM(str(folder), **settings)
    assert llm.info["drafter_path"] == str(folder)
    got = llm.generate(["0123abc"], each)[0]
    assert got.token_ids == plain.token_ids
    assert got.stats.drafters.get("mtp")


def _raw(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))


def _spoil(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, folder / "model.safetensors")


LAYER = {"vocab_size": 88, "num_hidden_layers": 5, "hidden_size": 48}
BAD: dict[str, tuple[dict[str, Any], type[LoadError], str]] = {
    "a missing part": ({"without": ("enorm.weight",)}, WeightsError, "1 missing (layers.0.enorm.weight)"),
    "a missing projection": ({"layout": "qwen", "without": ("fc.weight",)}, WeightsError, "layers.0.eh_proj.weight"),
    "a missing layer": ({"without": ("mlp.up_proj.weight",), "own": True}, WeightsError, "layers.0.mlp.up_proj.weight"),
    "no norm of its own": ({"chain_hidden_post_norm": True}, ConfigError, "chain_hidden_post_norm=True is not supported"),
    "an odd order": ({"mtp_hidden_states_first": "yes"}, ConfigError, "it is either true or false"),
    "several in speculators": (
        {"layout": "speculators", "num_nextn_predict_layers": 2}, ConfigError, "several modules are not known"),
    "an unknown flag": ({"layout": "speculators", "use_gate": True}, ConfigError, "mtp: use_gate=True is not known"),
    "no layer": ({"layout": "speculators", "transformer_layer_config": None}, ConfigError, "no transformer_layer_config"),
    "another layer": (
        {"layout": "speculators", "transformer_layer_config": {"model_type": "gpt2"}}, ConfigError, "'gpt2' is not supp"),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(BAD))
def test_what_does_not_fit_is_refused_in_one_line(case: str, llama: Path, tmp_path: Path) -> None:
    how, error, said = BAD[case]
    if case == "a missing layer":
        how = {**how, "without": ()}
    folder = build_mtp(llama, tmp_path / "made", **how)
    if case == "a missing layer":
        tensors = load_file(folder / "model.safetensors")
        del tensors["model.layers.4.mlp.up_proj.weight"]
        save_file(tensors, folder / "model.safetensors")
    target = llama if how.get("layout") == "speculators" else folder
    with pytest.raises(error, match=re.escape(said)) as caught:
        load_network(folder, load_target(target))
    assert "\n" not in str(caught.value)
    assert inspect(folder, target=target).unsupported == [str(caught.value)]
    if target == folder:  # it is not asked for, so the target runs without
        kind, _, why = choose_drafter(EngineConfig(target=str(folder)), folder)
        assert kind == "ngram"
        assert str(caught.value) in why


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 96, "head_dim": 12}, "hidden size 48 against 96"),
        ({"num_hidden_layers": 3}, "layers 4 against 3"),
    ],
)
def test_another_targets_drafter_is_refused(
    changes: dict[str, Any], said: str, llama: Path, tmp_path: Path
) -> None:
    folder = build_mtp(llama, tmp_path / "made", "speculators")
    build_decoder("llama", tmp_path / "other", **changes)
    with pytest.raises(PairError, match=said):
        load_network(folder, load_target(tmp_path / "other"))


def test_a_head_of_another_size_is_refused(llama: Path, tmp_path: Path) -> None:
    folder = build_mtp(llama, tmp_path, own=True)
    _spoil(folder, "model.layers.4.shared_head.head.weight")
    with pytest.raises(WeightsError, match=re.escape("layers.0.lm_head.weight has shape [")):
        load_network(folder, load_target(folder))


def test_a_number_of_modules_is_counted_not_believed(llama: Path, tmp_path: Path) -> None:
    """Memory for as many would be asked for, by a file of a kilobyte."""
    folder = build_mtp(llama, tmp_path / "made")
    tensors = load_file(folder / "model.safetensors")
    for number in ("999999999", "9" * 5000):
        odd = {f"model.layers.{number}.x": next(iter(tensors.values())).clone()}
        save_file(tensors | odd, folder / "model.safetensors")
        kind, _, why = choose_drafter(EngineConfig(target=str(folder)), folder)
        assert kind == ("ngram" if len(number) < 10 else "mtp+ngram"), why


def test_modules_of_nemotron_are_refused_and_do_not_stop_the_target(tmp_path: Path) -> None:
    """Its modules are made of its own layers, which no published reader but llama.cpp's folds into one."""
    build_decoder("nemotron-h-moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"mtp.layers.0.enorm.weight": torch.ones(48)}, tmp_path / "model.safetensors")
    target = load_target(tmp_path)
    with pytest.raises(PairError, match="not read of a nemotron_h: use the drafter ngram"):
        load_network(tmp_path, target)
