"""OpenVINO GenAI, by the package `openvino-genai`: a GGUF file as its pipeline reads it.

Modes: `plain`, `prompt-lookup`, `draft-model` (with a draft file). All of them go through the pipeline with
continuous batching.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from exchange import Answer, Channel, Question, Setup, setup


def as_folder(gguf: Path) -> str:
    """A GGUF file as OpenVINO's own format, which is what it takes for a draft model: written once, beside the file."""
    import openvino_genai as genai

    folder = gguf.with_suffix(".openvino")
    if not (folder / "openvino_model.xml").exists():
        folder.mkdir(exist_ok=True)
        copy = folder / gguf.name
        copy.unlink(missing_ok=True)
        os.link(gguf, copy)
        genai.LLMPipeline(str(copy), "CPU", enable_save_ov_model=True)
    return str(folder)


def pipeline(wanted: Setup) -> Any:
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs = wanted.parallel
    scheduler.cache_size = 1  # GiB
    more: dict[str, Any] = {"INFERENCE_NUM_THREADS": wanted.threads}
    if wanted.draft is not None:
        folder = as_folder(Path(wanted.draft))
        more["draft_model"] = genai.draft_model(folder, "CPU", INFERENCE_NUM_THREADS=wanted.threads)
    if wanted.mode == "prompt-lookup":
        more["prompt_lookup"] = True
    return genai.LLMPipeline(wanted.model, "CPU", scheduler_config=scheduler, **more)


def config(wanted: Setup, question: Question) -> Any:
    import openvino_genai as genai

    made = genai.GenerationConfig()
    made.max_new_tokens = question.max_tokens
    made.do_sample = question.temperature > 0
    if made.do_sample:
        made.temperature, made.rng_seed = question.temperature, question.seed
        made.top_p, made.top_k = 1.0, 0
    if wanted.mode != "plain":
        made.num_assistant_tokens = wanted.drafts
    if wanted.mode == "prompt-lookup":
        made.max_ngram_size = 3
    return made


def main() -> None:
    wanted, channel = setup(), Channel()
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    pipe = pipeline(wanted)

    def answer(questions: Sequence[Question]) -> Iterator[Answer]:
        for question in questions:
            ids = np.array([question.prompt], dtype=np.int64)
            given = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
            begin = time.perf_counter()
            result = pipe.generate(given, config(wanted, question))
            yield Answer(question.id, list(result.tokens[0]), time.perf_counter() - begin)

    channel.ready("OpenVINO GenAI", genai.get_version(), "defaults; a file of q8_0 blocks, which it unpacks")
    channel.serve(answer)


if __name__ == "__main__":
    main()
