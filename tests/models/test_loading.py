"""Each tensor is used exactly once, in the dtype asked for, and passes through the transform."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from checkpoints import build_assistant, build_target
from paceline.checkpoints.loading import Tensors, Weights
from paceline.models.drafters.gemma4_assistant import assistant_shapes
from paceline.models.families.gemma4.target import target_shapes
from paceline.models.registry import choose_dtypes, load_assistant, load_target
from paceline.ops.base import Weight


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    build_target("26b", root / "target")
    build_assistant("26b", root / "assistant", ordered=True)
    return root


def test_every_tensor_is_used_once(pair, monkeypatch):
    """What the graphs hold is what the files hold: each name taken once, none left, none unread."""
    taken: Counter[str] = Counter()
    take = Tensors.take
    monkeypatch.setattr(Tensors, "take", lambda self, name: taken.update([name]) or take(self, name))
    target = load_target(pair / "target")
    assert set(taken) == set(target_shapes(target.config))
    taken.clear()
    net = load_assistant(pair / "assistant", target)
    assert set(taken) == set(assistant_shapes(net.config))
    assert set(taken.values()) == {1}


def test_a_tensor_that_is_never_read_is_caught(pair, monkeypatch):
    monkeypatch.setattr(Weights, "norm", lambda self, name: torch.ones(1))
    with pytest.raises(AssertionError, match="never used"):
        load_target(pair / "target")


def test_every_matrix_passes_through_the_transform(pair):
    seen: Counter[str] = Counter()

    def doubled(name: str, weight: Weight) -> Weight:
        seen[name] += 1
        return Weight(weight.data * 2, weight.kind)

    plain, target = load_target(pair / "target"), load_target(pair / "target", transform=doubled)
    assert set(seen.values()) == {1}
    assert {"embed_tokens", "layers.5.mlp.down_proj", "layers.0.experts.gate_up_proj.5"} <= set(seen)
    assert target.head is target.embedding
    assert torch.equal(target.head.data, plain.head.data * 2)
    assert torch.equal(target.layers[0].gate.data, plain.layers[0].gate.data * 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtype_on_cpu_is_that_of_the_weights(pair, dtype):
    target = load_target(pair / "target", dtype=dtype)
    net = load_assistant(pair / "assistant", target, dtype=dtype)
    kinds = {target.embedding.kind, target.layers[0].gate.kind, net.pre.kind, net.head.kind}
    assert kinds == {str(dtype).removeprefix("torch.")}
    assert target.dtype == torch.float32
    assert target.norm.dtype == torch.float32


def test_dtypes_by_device():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert choose_dtypes(None, cpu) == (torch.float32, None)
    assert choose_dtypes(torch.bfloat16, cpu) == (torch.float32, torch.bfloat16)
    assert choose_dtypes(torch.float64, cpu) == (torch.float64, None)
    assert choose_dtypes(None, cuda) == (torch.bfloat16, torch.bfloat16)
    assert choose_dtypes(torch.float16, cuda) == (torch.float16, torch.float16)


def test_graphs_are_one_object_each(pair):
    """A runner keeps its recording under the graph."""
    target = load_target(pair / "target")
    net = load_assistant(pair / "assistant", target)
    assert target.hidden_graph is target.hidden_graph
    assert target.logits_graph is target.logits_graph
    assert net.step_graph is net.step_graph
    assert net.runner is target.runner


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_weights_are_mapped_not_copied(pair):
    """A matrix as stored lies inside the mapping of its file: loading costs no private copy on the CPU."""
    target = load_target(pair / "target")
    address = target.layers[0].gate.data.data_ptr()
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [
        line.split()[0].split("-") for line in lines if str(pair / "target" / "model.safetensors") in line
    ]
    assert any(int(a, 16) <= address < int(b, 16) for a, b in spans)
