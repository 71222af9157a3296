"""paceline: a GGUF file as it is.

Modes: `plain`, `ngram`, `lookahead`, `draft-model`, `bundled` (what comes with the model), each with a fixed number of
drafts, and `auto`, which drafts what pays.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from exchange import Answer, Channel, Question, setup


def arithmetic(info: Mapping[str, Any]) -> str:
    return f"{info['arithmetic']}, K/V {info['cache_dtype']}"


def main() -> None:
    wanted, channel = setup(), Channel()
    import torch

    torch.set_num_threads(wanted.threads)
    import paceline
    from paceline import LLM, SamplingParams

    drafter = {
        "plain": "none",
        "draft-model": wanted.draft,
        "bundled": "auto",
        "auto": wanted.draft or "auto",
    }
    chosen = drafter.get(wanted.mode, wanted.mode)
    llm = LLM(
        wanted.model,
        drafter=chosen,
        max_batch=wanted.parallel,
        max_model_len=wanted.context,
        threads=wanted.threads,
    )

    def answer(questions: Sequence[Question]) -> Iterator[Answer]:
        params = [
            SamplingParams(
                max_tokens=q.max_tokens,
                temperature=q.temperature,
                seed=q.seed,
                repetition_penalty=1.0,
                draft_tokens="auto" if wanted.mode == "auto" else wanted.drafts,
            )
            for q in questions
        ]
        begin = time.perf_counter()
        outs = llm.generate([q.prompt for q in questions], params)
        seconds = (time.perf_counter() - begin) / len(questions)
        for question, out in zip(questions, outs, strict=True):
            yield Answer(question.id, list(out.token_ids), seconds)

    channel.ready("paceline", paceline.__version__, arithmetic(llm.info))
    channel.serve(answer)


if __name__ == "__main__":
    main()
