"""Targets and drafter networks against transformers, on random checkpoints in the HF layout."""

from __future__ import annotations

import pytest
import torch
from transformers import Gemma4ForCausalLM

from checkpoints import FAMILIES, VOCAB, WINDOW, build_assistant, build_target
from paceline.core import ForwardBatch
from paceline.kv.cache import KVCache
from paceline.models.families.gemma4.target import GemmaTarget
from paceline.models.registry import load_assistant, load_target

TOLERANCE = 1e-4
LENGTHS = (3 * WINDOW + 3, 5, 2 * WINDOW)  # unequal, the longest three windows long


@pytest.fixture(scope="module", params=list(FAMILIES))
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    theirs = build_target(request.param, folder)
    return theirs, load_target(folder)


def prompts(seed: int = 5) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


def new_cache(target: GemmaTarget, **changes) -> KVCache:
    sizes = {"max_sequences": 4, "max_tokens": 64} | changes
    return KVCache(target.layout, dict.fromkeys(target.layout.kinds, 20), dtype=target.dtype, **sizes)


def run_chunks(target: GemmaTarget, cache: KVCache, texts: list[list[int]], chunk: int) -> list[torch.Tensor]:
    """Hidden states of all texts, computed side by side `chunk` tokens at a time."""
    for i, text in enumerate(texts):
        cache.open(i, text, share=False)
    parts: list[list[torch.Tensor]] = [[] for _ in texts]
    for start in range(0, max(map(len, texts)), chunk):
        live = [(i, t[start : start + chunk]) for i, t in enumerate(texts) if start < len(t)]
        with cache.tail(live) as tail:
            rows = tail.rows()
            hidden = target.forward(rows, cache)
            for (i, _), a, b in zip(live, rows.starts, rows.starts[1:]):
                parts[i].append(hidden[a:b].clone())
            tail.commit([len(tokens) for _, tokens in live])
    return [torch.cat(p) for p in parts]


@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
def test_logits_equal_transformers(pair, chunk, record_property):
    theirs, target = pair
    texts = prompts()
    worst = 0.0
    for text, hidden in zip(texts, run_chunks(target, new_cache(target), texts, chunk)):
        with torch.no_grad():
            expected = theirs(torch.tensor([text])).logits[0]
        assert expected.std() > 1, "a flat distribution would hide errors"
        worst = max(worst, (target.logits(hidden) - expected).abs().max().item())
    record_property("worst", worst)
    print(f"chunk {chunk}: worst {worst:.1e}")
    assert worst < TOLERANCE


@pytest.mark.parametrize("family", ["dense", "e2b"])
def test_multimodal_nesting_gives_the_same_model(family, tmp_path):
    plain, nested = tmp_path / "plain", tmp_path / "nested"
    build_target(family, plain)
    build_target(family, nested, multimodal=True)
    a, b = load_target(plain), load_target(nested)
    text = prompts()[:1]
    assert a.config.layers == b.config.layers
    (x,), (y,) = run_chunks(a, new_cache(a), text, 7), run_chunks(b, new_cache(b), text, 7)
    assert torch.equal(a.embedding.data, b.embedding.data)
    assert torch.equal(x, y)


def test_untied_head(tmp_path):
    theirs = build_target("dense", tmp_path, tie_word_embeddings=False)
    target = load_target(tmp_path)
    text = prompts()[0]
    (hidden,) = run_chunks(target, new_cache(target), [text], 64)
    with torch.no_grad():
        expected = theirs(torch.tensor([text])).logits[0]
    assert not torch.equal(target.head.data, target.embedding.data)
    assert (target.logits(hidden) - expected).abs().max() < TOLERANCE


def test_bfloat16_weights_stay_and_are_exact(tmp_path):
    """Stored bfloat16 stays bfloat16; the arithmetic is that of the same values widened to float32."""
    build_target("e2b", tmp_path).to(torch.bfloat16).save_pretrained(tmp_path)
    theirs = Gemma4ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    target = load_target(tmp_path)
    text = prompts()[0]
    (hidden,) = run_chunks(target, new_cache(target), [text], 64)
    with torch.no_grad():
        expected = theirs(torch.tensor([text])).logits[0]
    assert target.embedding.kind == "bfloat16"
    assert hidden.dtype == torch.float32
    assert (target.logits(hidden) - expected).abs().max() < TOLERANCE


def test_float64_activations_agree_with_transformers_in_float64(tmp_path):
    theirs = build_target("e2b", tmp_path).double()
    target = load_target(tmp_path, dtype=torch.float64)
    text = prompts()[0]
    (hidden,) = run_chunks(target, new_cache(target), [text], 3)
    with torch.no_grad():
        expected = theirs(torch.tensor([text])).logits[0]
    assert hidden.dtype == torch.float64
    assert (
        target.logits(hidden) - expected
    ).abs().max() < 1e-4  # transformers computes norms in float32 there


@pytest.mark.parametrize("ordered", [False, True], ids=["dense-head", "ordered-head"])
def test_draft_steps_equal_transformers(pair, ordered, tmp_path, request):
    theirs, target = pair
    family = request.node.callspec.params["pair"]
    drafter = build_assistant(family, tmp_path, ordered=ordered)
    net = load_assistant(tmp_path, target)
    for text in prompts():
        worst = compare_draft(theirs, target, drafter, net, text)
        print(f"{family} ordered={ordered} length {len(text)}: worst {worst:.1e}")
        assert worst < TOLERANCE


@torch.no_grad()
def compare_draft(theirs, target, drafter, net, text, steps: int = 4) -> float:
    """Largest difference over candidates' logits and hidden states of greedy draft steps after `text`."""
    length = len(text)
    ids = torch.tensor([text[:-1]])
    out = theirs.base_model(ids, return_shared_kv_states=True, use_cache=False)
    hidden = out.last_hidden_state[:, -1:]
    table = theirs.get_input_embeddings()
    cache = new_cache(target)
    (mine,) = run_chunks(target, cache, [text[:-1]], 7)
    feed, token = mine[-1:], text[-1]
    worst = 0.0
    for _ in range(steps):
        expected = drafter(
            inputs_embeds=torch.cat([table(torch.tensor([[token]])), hidden], dim=-1),
            position_ids=torch.tensor([[length - 1]]),
            attention_mask=None,
            shared_kv_states=dict(out.shared_kv_states),
            use_cache=False,
        )
        rows = ForwardBatch(
            torch.tensor([token]),
            torch.tensor([length - 1], dtype=torch.int32),
            torch.tensor([cache.slot(0)], dtype=torch.int32),
            [0, 1],
        )
        got = net.step(rows, feed, cache)
        scores = expected.logits[0]
        candidates = scores if got.ids is None else scores.gather(1, got.ids)
        if got.ids is not None:
            assert (scores > scores.min()).sum() == got.ids.shape[1] == 4 * VOCAB // 12
        worst = max(worst, (got.logits - candidates).abs().max().item())
        worst = max(worst, (got.hidden - expected.last_hidden_state[0]).abs().max().item())
        best = got.logits.argmax(-1)
        token = int(best if got.ids is None else got.ids[0, best])
        assert token == int(scores.argmax())
        feed, hidden = got.hidden, expected.last_hidden_state
    return worst


def test_a_row_sees_no_neighbour(pair):
    """Another sequence's NaN in the pages and in the batch leaves a row's logits finite and unchanged."""
    _, target = pair
    texts = prompts()
    alone = run_chunks(target, new_cache(target), texts[:1], 64)[0]
    cache = new_cache(target)
    for store in (*cache.k, *cache.v):
        store.fill_(float("nan"))
    together = run_chunks(target, cache, texts, 64)[0]
    assert torch.allclose(alone, together, atol=1e-5)
