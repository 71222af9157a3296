"""A head of some tokens only: the same logits as the whole head has for them, and a draft model that uses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import interpreted  # noqa: F401
from decoders import build_decoder
from paceline import LLM, SamplingParams, assembly
from paceline.drafters.draft_model import ModelDrafter
from paceline.models.registry import load_target
from paceline.ops import native
from paceline.ops.base import Runner
from paceline.ops.cuda.runner import CudaRunner
from paceline.ops.reference import EagerRunner


@pytest.mark.parametrize("family", ["llama", "gemma3", "cohere2"])
@pytest.mark.parametrize("kind", ["native", "torch", "cuda"])
def test_its_logits_are_those_of_the_whole_head(family: str, kind: str, tmp_path: Path) -> None:
    if kind == "native" and not native.available():
        pytest.skip("not built")
    build_decoder(family, tmp_path)
    make: dict[str, Callable[[], Runner]] = {
        "native": lambda: native.NativeRunner(2),
        "torch": EagerRunner,
        "cuda": lambda: CudaRunner(torch.device("cpu"), torch.float32, trusted=True),
    }
    runner = make[kind]()
    target = load_target(tmp_path, runner=runner)
    some = torch.tensor([7, 3, 90, 11])
    first, chosen = target.narrowed(slice(0, 33)), target.narrowed(some)
    runner.prepare([target.hidden_graph, target.logits_graph, first.logits_graph, chosen.logits_graph])
    hidden = torch.randn(3, target.hidden_size, generator=torch.Generator().manual_seed(1)).to(target.dtype)
    whole = target.logits(hidden).clone()
    assert first.vocab_size == 33
    off = 0.0 if kind == "native" else 1e-5  # torch adds in another order for another number of columns
    torch.testing.assert_close(first.logits(hidden), whole[:, :33], rtol=off, atol=off)
    torch.testing.assert_close(chosen.logits(hidden), whole[:, some], rtol=off, atol=off)
    assert torch.equal(target.logits(hidden), whole)


def test_a_draft_model_of_a_large_vocabulary_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=40, seed=3)
    for least, parts in ((10**6, None), (100, assembly.NARROW)):
        monkeypatch.setattr(assembly, "LARGE", least)
        with LLM("demo", drafter="model", max_model_len=128, profile_dir=None) as llm:
            drafter = llm.engine.state.drafters["model"]
            assert isinstance(drafter, ModelDrafter)
            assert (drafter.narrow and drafter.narrow.vocab_size) == (parts and drafter.vocab_size // parts)
            texts = [
                llm.generate(["def add(a, b):"], replace(params, drafter=name))[0]
                for name in ("none", "model")
            ]
            assert texts[0].token_ids == texts[1].token_ids
