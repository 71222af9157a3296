"""The loop: it learns, it resumes bit for bit, and it says what to do when memory or disk run out."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.errors import CapacityError, LoadError, UsageError
from paceline.train import GemmaAssistant, TrainOptions, Windows
from paceline.train import checkpoint as checkpoint_module
from paceline.train.checkpoint import STATE_FILE
from paceline.train.loop import Hooks, Run, learning_rate, make_optimizers, out_of_memory
from paceline.train.methods.gemma_assistant.learning import load_module

TINY = {"steps": 6, "batch": 2, "length": 24, "draft_tokens": 2, "eval_every": 2, "save_every": 1, "lr": 3e-3}


def windows(count: int, seed: int = 0) -> Windows:
    return Windows.of_array(np.random.default_rng(seed).integers(3, 96, size=(count, 24)))


def make(pair: tuple[Path, Path], folder: Path, **changes: object) -> Run:
    module, _, _ = load_module(pair[1])
    options = TrainOptions(**(TINY | changes))  # type: ignore[arg-type]
    return Run(module, GemmaAssistant().teacher(pair[0]), windows(7), windows(2, 1), options, folder)


def test_training_raises_held_out_acceptance(pair: tuple[Path, Path], tmp_path: Path) -> None:
    run = make(pair, tmp_path, steps=40, batch=4, eval_every=20, lr=1e-2)
    result = run.go()
    evaluations = [e["held_out"] for e in result.state.history if "held_out" in e]
    assert evaluations[-1]["sampled"][0] > evaluations[0]["sampled"][0] + 0.02
    assert len(evaluations[0]["greedy"]) == 2
    assert result.stopped == "steps"


@pytest.mark.parametrize(("stop_at", "optimizer"), [(1, "adamw"), (2, "adamw"), (5, "adamw"), (2, "muon")])
def test_a_killed_run_resumes_to_the_same_curve_bit_for_bit(
    pair: tuple[Path, Path], tmp_path: Path, stop_at: int, optimizer: str
) -> None:
    changes: dict[str, object] = {"accumulate": 2, "anchors": 5, "optimizer": optimizer}
    whole = make(pair, tmp_path / "whole", **changes)
    history = whole.go().state.history
    first = make(pair, tmp_path / "parts", **changes)

    def killed() -> bool:
        if first.state.step == stop_at:
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):  # before this step's own save: its work is lost and done again
        first.go(Hooks(should_stop=killed))
    again = make(pair, tmp_path / "parts", **changes)
    assert again.go().state.history == history
    for name, tensor in whole.module.state_dict().items():
        assert torch.equal(tensor, again.module.state_dict()[name]), name


def test_asking_to_stop_saves(pair: tuple[Path, Path], tmp_path: Path) -> None:
    run = make(pair, tmp_path, save_every=100)
    result = run.go(Hooks(should_stop=lambda: run.state.step == 3))
    assert result.stopped == "interrupted"
    assert make(pair, tmp_path, save_every=100).go().state.step == 6


def test_other_options_are_refused_for_a_run_folder(pair: tuple[Path, Path], tmp_path: Path) -> None:
    make(pair, tmp_path, steps=2).go()
    with pytest.raises(UsageError, match="--out"):
        make(pair, tmp_path, steps=3).go()


def test_a_damaged_checkpoint_is_named(pair: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / STATE_FILE).write_bytes(b"nothing")
    with pytest.raises(LoadError, match="remove it"):
        make(pair, tmp_path).go()


def test_patience_stops_early_and_keeps_the_best(pair: tuple[Path, Path], tmp_path: Path) -> None:
    run = make(pair, tmp_path, steps=50, eval_every=1, patience=2, lr=5.0, warmup=0.0)
    result = run.go()
    assert result.stopped == "no progress"
    assert result.state.step < 50
    assert all(torch.equal(t, run.best[n]) for n, t in run.module.state_dict().items())


def test_a_full_disk_keeps_the_last_good_checkpoint(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = checkpoint_module.save_file, []

    def full(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        calls.append(1)
        if len(calls) == 3:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        real(tensors, path, metadata)

    monkeypatch.setattr(checkpoint_module, "save_file", full)
    with pytest.raises(CapacityError, match=r"disk is full.*free some space"):
        make(pair, tmp_path).go()
    assert [p.name for p in tmp_path.iterdir()] == [STATE_FILE]
    monkeypatch.undo()
    again = make(pair, tmp_path)
    steps = []
    again.go(Hooks(report=lambda entry: steps.append(entry["step"])))
    assert min(steps) == 3  # two steps were saved


def test_out_of_memory_names_the_setting_and_by_how_much(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(pair, tmp_path)

    def exhausted(windows: Windows) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(run.teacher, "capture", exhausted)
    with pytest.raises(CapacityError, match="--batch 1 --accumulate 2"):
        run.backward(0)
    assert "--anchors 256" in str(out_of_memory(TrainOptions(batch=1, length=512)))
    assert "--length 256" in str(out_of_memory(TrainOptions(batch=1, length=512, anchors=16)))


def test_the_learning_rate_warms_up_and_falls_to_a_tenth() -> None:
    options = TrainOptions(steps=100, lr=1.0, warmup=0.1)
    rates = [learning_rate(options, s) for s in range(100)]
    assert rates[0] == 0.1
    assert max(rates) == rates[9] == 1.0
    assert 0.1 <= rates[-1] < 0.11


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objective": "mse"}, "use one of"),
        ({"length": 4}, "at least 6"),
        ({"lr": 0.0}, "lr must"),
        ({"batch": 0}, "batch=0"),
        ({"optimizer": "sgd"}, "adamw or muon"),
    ],
)
def test_impossible_options_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TrainOptions(**change)  # type: ignore[arg-type]


def test_muon_takes_the_matrices_inside_and_adamw_the_rest(pair: tuple[Path, Path]) -> None:
    module, _, _ = load_module(pair[1])
    adamw, muon = make_optimizers(module, TrainOptions(optimizer="muon"))
    names = {id(p): name for name, p in module.named_parameters()}
    inside = {names[id(p)] for p in muon.param_groups[0]["params"]}
    others = {names[id(p)] for p in adamw.param_groups[0]["params"]}
    assert inside | others == {name for name, _ in module.trainable()}
    assert all(name.endswith("proj.weight") or name.endswith("projection.weight") for name in inside)
    assert "model.embed_tokens.weight" in others


def test_a_loss_that_is_no_number_ends_the_run(pair: tuple[Path, Path], tmp_path: Path) -> None:
    run = make(pair, tmp_path)
    with torch.no_grad():
        run.module.head[0, 0] = torch.nan
    with pytest.raises(UsageError, match="lower --lr"):
        run.go()
