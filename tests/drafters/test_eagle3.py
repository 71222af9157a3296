"""EAGLE-3 drafts what its published source drafts, whatever became of the texts before; misfits are refused by name."""

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
from eagle3_files import build_eagle3, eagle3_reference
from paceline import LLM
from paceline.assembly import choose_drafter, network_transform
from paceline.config import EngineConfig
from paceline.engine.picker import StepPicker
from paceline.errors import ConfigError, LoadError, PairError, UsageError, WeightsError
from paceline.hub.resolve import find_assistant
from paceline.models.drafters.eagle3 import Eagle3Net
from paceline.models.inspection import inspect
from paceline.models.registry import load_network, load_target
from paceline.ops import native
from paceline.ops.base import Runner, Stop
from paceline.ops.reference import dequantize
from paceline.ops.runners import pick_runner
from tapping import DEPTH, PARTLY, Pair, params, texts

HIDDEN = 48
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "original": {"original": True, "draft_vocab": 30},
    "before residual": {"norm_before_residual": True, "draft_vocab": 30},
    "before fc": {"norm_before_fc": True, "kind": "qwen3"},
    "3.1": {"fc_norm": True, "norm_output": True, "draft_vocab": 30},
    "target's own": {
        "without": ("embed_tokens.weight", "lm_head.weight"),
        "draft_vocab": 30,
        "original": True,
    },
    "wider": {"width": 64, "taps": (0, 2, 4), "without": ("t2d",)},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_drafts_are_those_of_the_published_source(
    name: str, llama: Path, tmp_path: Path, runner: Runner
) -> None:
    drafter = build_eagle3(tmp_path, hidden=HIDDEN, vocab=VOCAB, **VARIANTS[name])
    pair = Pair(llama, drafter, eagle3_reference(llama, drafter), runner)
    engine = pair.engine()
    for i, text in enumerate(texts(3)):
        engine.add(str(i), text, params())
    assert pair.right(engine) > 20
    assert pair.drafter.cache.open_sequences == 0


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")


def retensor(folder: Path, **changes: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, change in changes.items():
        tensors[name] = change(tensors[name])
    save_file(tensors, folder / "model.safetensors")


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], type[LoadError], str]] = {
    "unknown flag": ({"use_swa": True}, {}, ConfigError, "eagle3: use_swa=True is not known"),
    "no layer": ({"transformer_layer_config": None}, {}, ConfigError, "has no transformer_layer_config"),
    "both norms": ({"norm_before_fc": True, "fc_norm": True}, {}, ConfigError, "exclude each other"),
    "odd flag": ({"norm_output": "yes"}, {}, ConfigError, "norm_output='yes' is not supported: it is either true"),
    "taps are words": ({"eagle_aux_hidden_state_layer_ids": ["a"]}, {}, ConfigError, "not layer numbers"),
    "taps fall": ({"eagle_aux_hidden_state_layer_ids": [3, 2, 1]}, {}, ConfigError, "do not rise"),
    "a tap too far": ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, {}, PairError, "9], and the target has 4 layers"),
    "another target": ({"target_hidden_size": 64}, {}, PairError, "hidden size 64 against 48"),
    "missing norm": ({"fc_norm": True}, {}, WeightsError, "3 missing"),
    "ids for offsets": ({}, {"d2t": lambda d: d + torch.arange(30)}, WeightsError, "token id minus row number"),
    "d2t out of range": ({}, {"d2t": lambda d: d + VOCAB}, WeightsError, "does not lead to 30 tokens below"),
    "a token twice": ({}, {"d2t": lambda d: -torch.arange(30)}, WeightsError, "does not lead to 30 tokens"),
    "masks differ": ({}, {"t2d": lambda t: ~t}, WeightsError, "t2d and d2t name different tokens"),
    "head of another size": ({"draft_vocab_size": 29}, {}, WeightsError, "has shape"),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(BAD))
def test_what_does_not_fit_is_refused_in_one_line(case: str, llama: Path, tmp_path: Path) -> None:
    changes, tensors, error, said = BAD[case]
    build_eagle3(tmp_path, hidden=HIDDEN, vocab=VOCAB, draft_vocab=30)
    edit(tmp_path, **changes)
    retensor(tmp_path, **tensors)
    with pytest.raises(error, match=re.escape(said)) as caught:
        load_network(tmp_path, load_target(llama))
    assert "\n" not in str(caught.value)
    if error is not WeightsError or "norm" in case or "head" in case:  # seen without reading a weight
        assert inspect(tmp_path, target=llama).unsupported == [str(caught.value)]


def test_another_vocabulary_and_a_pickle_are_refused(llama: Path, tmp_path: Path) -> None:
    build_eagle3(tmp_path / "a", hidden=HIDDEN, vocab=VOCAB + 8)
    with pytest.raises(PairError, match=f"vocabulary {VOCAB + 8} against {VOCAB}"):
        load_network(tmp_path / "a", load_target(llama))
    build_eagle3(tmp_path / "b", hidden=HIDDEN, vocab=VOCAB)
    (tmp_path / "b" / "model.safetensors").rename(tmp_path / "b" / "pytorch_model.bin")
    with pytest.raises(WeightsError, match="only pickled weights"):
        load_network(tmp_path / "b", load_target(llama))


def test_it_is_found_beside_and_inside_the_target(llama: Path, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    shutil.copytree(llama, target)
    assert find_assistant(target, {"model_type": "llama"})[0] is None
    beside = build_eagle3(tmp_path / "mine-eagle3", hidden=HIDDEN, vocab=VOCAB)
    assert find_assistant(target, {"model_type": "llama"})[0] == beside
    inside = build_eagle3(target / "eagle3", hidden=HIDDEN, vocab=VOCAB)
    assert find_assistant(target, {"model_type": "llama"})[0] == inside
    file = tmp_path / "small.gguf"
    file.touch()
    of_file = build_eagle3(tmp_path / "small-eagle3", hidden=HIDDEN, vocab=VOCAB)
    assert find_assistant(file, {"model_type": "llama"})[0] == of_file
    assert choose_drafter(EngineConfig(target=str(target)), target)[0] == "eagle3+ngram"
    with pytest.raises(UsageError, match="is a drafter of another kind"):
        choose_drafter(EngineConfig(target=str(target), drafter="mtp"), target)


@pytest.mark.skipif(not native.available(), reason="needs the compiled kernels")
@pytest.mark.parametrize(
    ("asked", "kind"),
    [({}, "int8"), ({"quantize_drafter": "none"}, "float32"), ({"quantize_drafter": "int4"}, "int4"),
     ({"dtype": "float32"}, "float32"), ({"verify": "reject"}, "float32")],
)  # fmt: skip
def test_it_is_int8_on_a_cpu_where_no_text_can_change(
    asked: dict[str, Any], kind: str, llama: Path, tmp_path: Path
) -> None:
    drafter = build_eagle3(tmp_path, hidden=HIDDEN, width=64, vocab=VOCAB, draft_vocab=32)
    config = EngineConfig(target=str(llama), drafter=str(drafter), **asked)
    target = load_target(llama, runner=pick_runner(config, torch.device("cpu"))[0])
    net = load_network(drafter, target, transform=network_transform(config, target))
    assert isinstance(net, Eagle3Net)
    assert net.layer.attention.q.weight.kind == kind
    eager = load_target(llama)
    assert network_transform(EngineConfig(target=str(llama)), eager) is None
    shared = build_eagle3(tmp_path, hidden=HIDDEN, vocab=VOCAB, draft_vocab=32, without=("lm_head.weight",))
    net = load_network(shared, target, transform=network_transform(config, target))
    assert isinstance(net, Eagle3Net)
    assert net.ids is not None
    assert net.head.kind == (
        "int8" if kind == "int4" else kind
    )  # a copy of the target's rows is the drafter's own
    rows = dequantize(target.head, net.ids, torch.float32)
    error = (dequantize(net.head, None, torch.float32) - rows).abs().amax(-1)
    assert bool((error <= rows.abs().amax(-1) / 200).all())


@pytest.mark.parametrize("quantize", [None, "none", "int8", "int4"])
def test_it_runs_as_a_user_loads_it(quantize: Any, llama: Path, tmp_path: Path) -> None:
    drafter = build_eagle3(tmp_path, hidden=HIDDEN, width=64, vocab=VOCAB, draft_vocab=32)
    settings: dict[str, Any] = {"max_model_len": 128, "profile_dir": "none", "draft_tokens": 3}
    each = params(20, temperature=0.8, seed=3)
    plain = LLM(str(llama), drafter="none", **settings).generate(["0123abc"], each)[0]
    llm = LLM(str(llama), drafter=str(drafter), quantize_drafter=quantize, **settings)
    got = llm.generate(["0123abc"], each)[0]
    assert got.token_ids == plain.token_ids
    assert got.stats.drafters.get("eagle3")


@pytest.mark.skipif(not native.available(), reason="needs the compiled kernels")
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8}, {"temperature": 1.0, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize("stop", [None, Stop(16, (0.3, 0.4, 0.5, 1.0), ((0.2, 0.8),) * 12, price=0.08)])
def test_one_call_equals_its_steps(
    stop: Stop | None, settings: dict[str, Any], llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The native round moves on by a position with each token, and ends where the confidence does, as the steps do."""
    make, whole, rounds = StepPicker.__init__, native.NativeRunner.draft_round, [0]
    if stop is not None:
        monkeypatch.setattr(
            StepPicker, "__init__", lambda self, r, stops, *rest: make(self, r, [stop] * len(stops), *rest)
        )

    def counted(self: native.NativeRunner, *args: Any) -> Any:
        out = whole(self, *args)
        rounds[0] += out is not None
        return out

    def drafts() -> list[list[int]]:
        drafter = build_eagle3(tmp_path, hidden=HIDDEN, vocab=VOCAB, draft_vocab=40)
        pair = Pair(llama, drafter, eagle3_reference(llama, drafter), native.NativeRunner(1))
        engine = pair.engine(forced=PARTLY)
        for i, text in enumerate(texts(3)):
            engine.add(str(i), text, params(24, seed=i, **settings))
        out = []
        while engine.has_work:
            out += [delta.proposed for delta in engine.step()]
        return out

    monkeypatch.setattr(native.NativeRunner, "draft_round", counted)
    together = drafts()
    assert rounds[0] > 3
    monkeypatch.setattr(native.NativeRunner, "draft_round", lambda self, *args: None)
    assert drafts() == together
    lengths = {len(draft) for draft in together}
    assert DEPTH in lengths
    assert stop is None or len(lengths) > 3
