"""A fine-tune of E2B whose per-layer table was not resized when tokens were added (REAL_FILES row 16): it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from checkpoints import VOCAB, build_assistant, build_target
from layouts import edit
from paceline import LLM, SamplingParams
from paceline.errors import PromptError, UsageError
from paceline.models.inspection import inspect
from paceline.models.registry import load_target

ADDED = 8
GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, logprobs=5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(the fine-tune, the model it was made from). The added tokens are what its head likes most."""
    place = tmp_path_factory.mktemp("short")
    base, tuned = place / "base", place / "tuned"
    for folder in (base, tuned):
        build_target("e2b", folder, tie_word_embeddings=False)
        letters = {chr(ord("0") + i): i for i in range(VOCAB + (ADDED if folder == tuned else 0))}
        Tokenizer(WordLevel(letters, unk_token="0")).save(str(folder / "tokenizer.json"))
    tensors = load_file(tuned / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.cat((tensors[name], 20 * tensors[name][:ADDED]))
    save_file(tensors, tuned / "model.safetensors", metadata={"format": "pt"})
    edit(tuned / "config.json", vocab_size=VOCAB + ADDED)
    return tuned, base


def test_it_is_looked_at_and_loaded(folders: tuple[Path, Path]) -> None:
    assert inspect(folders[0]).unsupported == []
    target = load_target(folders[0])
    assert (target.vocab_size, target.readable) == (VOCAB + ADDED, VOCAB)
    assert load_target(folders[1]).readable == VOCAB


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("drafter", ["none", "ngram", "assistant"])
def test_it_writes_what_its_base_writes(
    folders: tuple[Path, Path], drafter: str, native: bool, tmp_path: Path
) -> None:
    """The added tokens would win by far; none of them is ever written, greedy or sampled, nor drafted."""
    tuned, base = folders
    if drafter == "assistant":
        build_assistant("e2b", tmp_path, vocab_size=VOCAB + ADDED)
        edit(tmp_path / "config.json", vocab_size=VOCAB + ADDED)
    named: Any = str(tmp_path) if drafter == "assistant" else drafter
    prompts = ["ABCABCABCABC", "Q", "0123456789"]
    for sampling in (GREEDY, SamplingParams(max_tokens=30, temperature=1.3, seed=5, ignore_eos=True)):
        got = LLM(str(tuned), drafter=named, native=native).generate(prompts, sampling)
        want = LLM(str(base), drafter="none", native=native).generate(prompts, sampling)
        assert [one.token_ids for one in got] == [one.token_ids for one in want]
        assert all(len(one.token_ids) == sampling.max_tokens for one in got)


def test_only_a_prompt_with_such_a_token_is_refused(folders: tuple[Path, Path]) -> None:
    llm = LLM(str(folders[0]), drafter="ngram")
    with pytest.raises(
        PromptError, match=f"token id {VOCAB + 2} is past .* rows for {VOCAB} tokens"
    ) as caught:
        llm.generate([[5, VOCAB + 2, 7]], GREEDY)
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="is past the model's per-layer embedding"):
        llm.generate(["ABC"], SamplingParams(max_tokens=4, allowed_token_ids=[VOCAB, VOCAB + 1]))
    (one,) = llm.generate(
        ["ABC"], SamplingParams(max_tokens=4, allowed_token_ids=[4, VOCAB + 1], temperature=0)
    )
    assert set(one.token_ids) == {4}
    wanted = SamplingParams(max_tokens=8, temperature=0, logit_bias={VOCAB + 3: 100.0}, ignore_eos=True)
    (one,) = llm.generate(["ABC"], wanted)
    assert max(one.token_ids) < VOCAB
    # a draft that is copied from a text with such a token ends before it
    reference = SamplingParams(
        max_tokens=20, temperature=0, ignore_eos=True, reference=[*one.token_ids[:2], VOCAB + 1, 5]
    )
    (two,) = llm.generate(["ABC"], reference)
    assert max(two.token_ids) < VOCAB


def test_drafts_end_before_such_a_token() -> None:
    from paceline.core import Draft

    draft = Draft(tokens=[[1, 2], [3, 9, 4], [9]], confidence=[[0.5, 0.5], [0.9, 0.8, 0.7], [0.4]])
    draft.cut(9)
    assert draft.tokens == [[1, 2], [3], []]
    assert [len(row) for row in draft.confidence] == [2, 1, 0]


def test_the_model_itself_refuses_such_a_row(folders: tuple[Path, Path]) -> None:
    """Whoever asks it without the engine: no kernel reads past the table."""
    from paceline.kv.cache import KVCache

    target = load_target(folders[0])
    cache = KVCache(
        target.layout,
        dict.fromkeys(target.layout.kinds, 4),
        max_sequences=1,
        max_tokens=32,
        dtype=target.kv_dtype,
    )
    cache.open(0, [VOCAB], share=False)
    with cache.tail([(0, [VOCAB])]) as tail, pytest.raises(PromptError, match="is past the model's"):
        target.forward(tail.rows(), cache)
    logits = target.logits(torch.zeros(2, target.hidden_size))
    assert bool((logits[:, VOCAB:] == -torch.inf).all())
    assert bool(logits[:, :VOCAB].isfinite().all())
