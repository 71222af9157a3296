"""What the controller keeps of texts goes with them, although a text ends before its last step is observed."""

from __future__ import annotations

from paceline import LLM, SamplingParams
from paceline.engine.controller import AutoController


def test_nothing_is_kept_of_texts_that_have_ended() -> None:
    llm = LLM("demo", draft_tokens=4, threads=1, max_model_len=256, profile_dir=None)
    controller = llm.engine.state.controller
    assert isinstance(controller, AutoController)
    for seed in range(6):
        prompts = ["def f(x):\n", "import os\n", "class A:\n"]
        llm.generate(prompts, SamplingParams(max_tokens=12, seed=seed))
    llm.generate("x", SamplingParams(max_tokens=140, ignore_eos=True))  # what has ended goes within 128 steps
    assert len(controller.budget.arms) <= 2  # at most the last text, by kind
