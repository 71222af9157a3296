"""Drafters' networks as they learn: the gradient is that of the loss, and a training is what it was when each network was
written a second time for it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paceline.models.drafters.eagle3 import Eagle3Net
from paceline.train import DFlash2
from paceline.train.networks import NetworkModule
from paceline.train.parallel import choose_anchors
from train.recorded import FILE, KINDS, STEPS, build, numbers, windows

WANTED = json.loads(FILE.read_text())


@pytest.mark.parametrize("name", KINDS)
def test_a_training_of_a_seed_is_what_it_was(name: str, tmp_path: Path) -> None:
    made, wanted = numbers(name, tmp_path), WANTED[name]
    assert made["count"] == wanted["count"]
    assert made["rounds"] == wanted["rounds"]
    assert made["loss"] == pytest.approx(wanted["loss"], rel=1e-4)
    assert made["gradients"] == pytest.approx(wanted["gradients"], rel=1e-3)
    assert made["logits"] == pytest.approx(wanted["logits"], rel=1e-4)
    assert made["losses"] == pytest.approx(wanted["losses"], rel=1e-3)  # muon rounds to bfloat16
    assert made["norms"] == pytest.approx(wanted["norms"], rel=5e-3)
    assert made["accepted"] == pytest.approx(wanted["accepted"], rel=1e-3)
    assert made["tokens"] == pytest.approx(wanted["tokens"], rel=1e-3)


@pytest.mark.parametrize(
    "name", ["eagle3", "mtp for gemma4", "dflash, head of the target", "dflash2", "dspark", "gemma-assistant"]
)
def test_the_gradient_is_that_of_finite_differences(name: str, tmp_path: Path) -> None:
    method, kind = {**KINDS, "dflash2": (DFlash2(rank=8), "llama3")}[name]
    teacher = method.teacher(build(kind, tmp_path), "cpu")
    module = method.start(teacher, windows(5, 29, 17), "scratch", 0).module.double()
    captured = teacher.capture(windows(5, 29, 17))
    anchors = choose_anchors(captured, STEPS, 8, torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)

    def drawn(x: torch.Tensor) -> torch.Tensor:
        return torch.randn(x.shape, generator=generator, dtype=torch.float64)

    mix = [drawn(state) for state in module.unroll(captured, anchors, STEPS)]

    def value() -> torch.Tensor:
        states = module.unroll(captured, anchors, STEPS)
        return torch.stack([(state * part).sum() for state, part in zip(states, mix, strict=True)]).sum()

    value().backward()
    learnt = {n: p for n, p in module.trainable() if p.grad is not None}
    assert len(learnt) > 10
    for n, p in learnt.items():  # one by one: a lost path would hide in their sum
        assert p.grad is not None
        way, step = drawn(p), 1e-6
        ends = []
        with torch.no_grad():
            for sign in (1, -2):
                p.add_(way, alpha=sign * step)
                ends.append(float(value()))
            p.add_(way, alpha=step)
        wanted = (ends[0] - ends[1]) / (2 * step)
        assert float((p.grad * way).sum()) == pytest.approx(wanted, rel=2e-5, abs=1e-5), n


def test_the_network_reads_the_very_parameters(tmp_path: Path) -> None:
    """So what an optimizer changes is what the next round is drafted with, also on another device."""
    method, kind = KINDS["eagle3"]
    teacher = method.teacher(build(kind, tmp_path), "cpu")
    module = method.start(teacher, windows(5, 29, 17), "scratch", 0).module
    assert isinstance(module, NetworkModule)
    net, parameters = module.net, dict(module.named_parameters())
    assert isinstance(net, Eagle3Net)
    module.to(torch.float64)
    assert net.fc.data is parameters["fc.weight"]
    assert net.norm is parameters["norm.weight"]
    assert net.head.data is parameters["lm_head.weight"] is module.head
    assert not {"norm.weight", "layers.0.self_attn.q_proj.weight", "d2t"} - set(module.state_dict())
