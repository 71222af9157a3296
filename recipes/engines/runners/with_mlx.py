"""mlx-lm on MLX's CPU build for Linux: a folder in Hugging Face layout.

Modes: `plain`, `draft-model` (with a draft folder).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any

from exchange import Answer, Channel, Question, setup


def main() -> None:
    wanted, channel = setup(), Channel()
    import mlx.core as mx
    from mlx_lm import load
    from mlx_lm.generate import stream_generate
    from mlx_lm.sample_utils import make_sampler

    model, tokenizer = load(wanted.model)
    more: dict[str, Any] = {}
    if wanted.mode == "draft-model":
        more = {"draft_model": load(wanted.draft)[0], "num_draft_tokens": wanted.drafts}

    def answer(questions: Sequence[Question]) -> Iterator[Answer]:
        for question in questions:
            mx.random.seed(question.seed)
            sampler = make_sampler(temp=question.temperature)
            begin = time.perf_counter()
            steps = stream_generate(
                model, tokenizer, question.prompt, max_tokens=question.max_tokens, sampler=sampler, **more
            )
            tokens = [int(step.token) for step in steps]
            yield Answer(question.id, tokens, time.perf_counter() - begin)

    channel.ready(
        "mlx-lm", f"{version('mlx-lm')}, mlx {version('mlx')} on CPU", "the folder's weights as they are"
    )
    channel.serve(answer)


if __name__ == "__main__":
    main()
