"""From windows to a folder: what transformers loads, and that its assisted text is unchanged."""

from __future__ import annotations

import errno
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Gemma4AssistantForCausalLM, Gemma4ForCausalLM, Gemma4UnifiedAssistantForCausalLM

from paceline.errors import CapacityError, PairError
from paceline.models.config import read_config
from paceline.models.families.gemma4.config import parse_assistant, parse_gemma
from paceline.models.registry import load_assistant, load_target
from paceline.train import Distilled, GemmaAssistant, HeadOptions, Recipe, TrainOptions, Windows, distil
from paceline.train import export as export_module
from paceline.train.distil import carry_out
from paceline.train.loop import Hooks, Run
from paceline.train.methods.gemma_assistant.files import scratch_config, set_head
from paceline.train.methods.gemma_assistant.heads import CentroidHead
from paceline.train.methods.gemma_assistant.learning import (
    AssistantModule,
    check_pair,
    load_module,
    new_module,
)

OPTIONS = TrainOptions(steps=4, batch=2, length=24, draft_tokens=3, eval_every=2, save_every=2, lr=1e-3)


def windows(count: int, seed: int) -> Windows:
    return Windows.of_array(np.random.default_rng(seed).integers(3, 96, size=(count, 24)))


def train(pair: tuple[Path, Path], out: Path, init: str | Path) -> Distilled:
    return distil(pair[0], windows(6, 0), windows(3, 1), out, Recipe(OPTIONS, init))


def assisted_text_is_unchanged(target_folder: Path, drafter: Path) -> int:
    """Greedy generation of transformers with and without the drafter; returns the draft steps that were
    run.
    """
    target = Gemma4ForCausalLM.from_pretrained(target_folder).eval()
    assistant = Gemma4AssistantForCausalLM.from_pretrained(drafter).eval()
    assert assistant.generation_config.num_assistant_tokens == 3
    calls = []
    assistant.register_forward_hook(lambda *_: calls.append(1))
    prompt = torch.tensor([[2, 5, 9, 17, 33, 65]])
    asked = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None}
    plain = target.generate(prompt, **asked)
    assert torch.equal(target.generate(prompt, assistant_model=assistant, **asked), plain)
    return len(calls)


@pytest.mark.parametrize("init", ["scratch", "folder"])
def test_the_export_runs_in_transformers_with_unchanged_text(
    pair: tuple[Path, Path], tmp_path: Path, init: str
) -> None:
    done = train(pair, tmp_path / "out", "scratch" if init == "scratch" else pair[1])
    assert done.run.stopped == "steps"
    assert assisted_text_is_unchanged(pair[0], tmp_path / "out") > 0
    load_assistant(tmp_path / "out", load_target(pair[0]))
    calibration = json.loads((tmp_path / "out" / "paceline_calibration.json").read_text())
    assert len(calibration["acceptance"]) == 3
    assert calibration["calibration_error"]["fitted"] < 0.2


def test_a_centroid_head_loads_everywhere_and_covers_the_dense_choice(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    module, raw, dtype = load_module(pair[1])
    ordering = torch.randperm(96, generator=torch.Generator().manual_seed(0))
    head = CentroidHead(torch.randn(8, 16), ordering, 8, 1.0)  # all clusters: the same distribution as dense
    sparse = set_head(module, head)
    export_module.export(GemmaAssistant(), sparse, tmp_path, export_module.Exported(raw, 3, dtype))
    back, _, _ = load_module(tmp_path)
    assert torch.equal(back.named("masked_embedding.token_ordering"), ordering)
    assert assisted_text_is_unchanged(pair[0], tmp_path) > 0
    load_assistant(tmp_path, load_target(pair[0]))
    dense = set_head(back, None)
    assert torch.equal(dense.head, module.head)
    assert "masked_embedding.centroids.weight" not in dense.state_dict()


def test_a_rebuilt_head_reaches_its_recall_and_runs(pair: tuple[Path, Path], tmp_path: Path) -> None:
    recipe = Recipe(OPTIONS, pair[1], GemmaAssistant(HeadOptions("centroid", clusters=12, recall=0.9)))
    done = distil(pair[0], windows(6, 0), windows(3, 1), tmp_path / "a", recipe)
    assert float(done.note.rpartition(" ")[2]) >= 0.9
    assert isinstance(done.module, AssistantModule)
    assert sorted(done.module.named("masked_embedding.token_ordering").tolist()) == list(range(96))
    again = distil(pair[0], windows(6, 0), windows(3, 1), tmp_path / "b", Recipe(OPTIONS, tmp_path / "a"))
    assert again.module.config.clusters == 12  # kept
    assert assisted_text_is_unchanged(pair[0], tmp_path / "b") > 0


def test_what_is_done_beside_the_updates_is_told_as_it_goes(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """U10: minutes of silence after the last update, in which the head was fitted."""
    said: list[tuple[str, int, int]] = []
    method = GemmaAssistant(HeadOptions("centroid", clusters=12, recall=0.9))
    teacher = method.teacher(pair[0])
    start = method.start(teacher, windows(6, 0), pair[1], 0)
    run = Run(start.module, teacher, windows(6, 0), windows(3, 1), OPTIONS, tmp_path / "run")
    hooks = Hooks(phase=lambda name, done, of: said.append((name, done, of)))
    assert carry_out(run, method, hooks) is not None
    names = list(dict.fromkeys(name for name, _, _ in said))
    assert names == [
        "evaluating",
        "fitting the head",
        "judging the finished drafter",
    ]
    for name in names:
        steps = [(done, of) for other, done, of in said if other == name]
        assert steps[-1][0] == steps[-1][1] > 0
    assert [done for name, done, _ in said if name == "fitting the head"] == list(
        range(method.head.batches + 1)
    )


def test_a_full_disk_leaves_the_exported_drafter_as_it_was(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(pair[1], tmp_path / "out")
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    module, raw, dtype = load_module(pair[1])

    def full(weights: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(export_module, "save_file", full)
    with pytest.raises(CapacityError, match="disk is full"):
        export_module.export(
            GemmaAssistant(), module, tmp_path / "out", export_module.Exported(raw, 3, dtype)
        )
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before


def test_a_drafter_of_another_target_is_refused(pair: tuple[Path, Path]) -> None:
    _, raw, _ = load_module(pair[1])
    target = parse_gemma(read_config(pair[0]))
    check_pair(parse_assistant(raw), target)
    for other in (replace(target, hidden_size=48), replace(target, vocab_size=128)):
        with pytest.raises(PairError, match="scratch"):
            check_pair(parse_assistant(raw), other)
    raw["text_config"]["head_dim"] = 4
    with pytest.raises(PairError, match="scratch"):
        check_pair(parse_assistant(raw), target)


def test_a_scratch_drafter_for_a_unified_target_is_a_unified_one(tmp_path: Path) -> None:
    text = {
        "model_type": "gemma4_unified_text", "vocab_size": 96, "hidden_size": 32, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1,
        "attention_k_eq_v": True, "sliding_window": 8, "rms_norm_eps": 1e-6, "max_position_embeddings": 64,
    }  # fmt: skip
    config = scratch_config({"model_type": "gemma4_unified", "text_config": text})
    module = new_module(parse_assistant(config), 0)
    export_module.export(GemmaAssistant(), module, tmp_path, export_module.Exported(config, 3, torch.float32))
    theirs = Gemma4UnifiedAssistantForCausalLM.from_pretrained(tmp_path)
    assert set(module.state_dict()) <= set(theirs.state_dict())
    assert theirs.model.layers[-1].self_attn.num_key_value_groups == 4


def test_the_module_has_the_names_of_the_published_layout(pair: tuple[Path, Path]) -> None:
    theirs = Gemma4AssistantForCausalLM.from_pretrained(pair[1]).state_dict()
    module, _, _ = load_module(pair[1])
    assert set(module.state_dict()) == {n for n in theirs if n != "lm_head.weight"}
