"""transformers' `generate`: a folder in Hugging Face layout.

Modes: `plain`, `assistant` (an assistant model with the same vocabulary), `prompt-lookup`, `universal` (an
assistant whose tokens are translated by their text). `assistant-shrinking` leaves transformers' own schedule of
draft lengths on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any

from exchange import Answer, Channel, Question, setup


def main() -> None:
    wanted, channel = setup(), Channel()
    import torch
    import transformers

    torch.set_num_threads(wanted.threads)
    torch.ones(8).cos()  # the first call of torch's vector math, in one thread
    transformers.logging.set_verbosity_error()
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(wanted.model, dtype=torch.float32).eval()
    more: dict[str, Any] = {}
    if wanted.draft is not None:
        assistant = load(wanted.draft, dtype=torch.float32).eval()
        assistant.generation_config.num_assistant_tokens = wanted.drafts
        if wanted.mode != "assistant-shrinking":
            assistant.generation_config.num_assistant_tokens_schedule = "constant"
            assistant.generation_config.assistant_confidence_threshold = 0.0
        more["assistant_model"] = assistant
    if wanted.mode == "universal":
        more["tokenizer"] = transformers.AutoTokenizer.from_pretrained(wanted.model)
        more["assistant_tokenizer"] = transformers.AutoTokenizer.from_pretrained(wanted.draft)
    if wanted.mode == "prompt-lookup":
        more = {"prompt_lookup_num_tokens": wanted.drafts, "max_matching_ngram_size": 3}

    def answer(questions: Sequence[Question]) -> Iterator[Answer]:
        for question in questions:
            ids = torch.tensor([question.prompt])
            sampled = {"do_sample": question.temperature > 0}
            if question.temperature > 0:
                sampled |= {"temperature": question.temperature, "top_k": 0, "top_p": 1.0}
            torch.manual_seed(question.seed)
            begin = time.perf_counter()
            written = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=question.max_tokens,
                repetition_penalty=1.0,
                pad_token_id=0,
                **sampled,
                **more,
            )
            yield Answer(question.id, written[0, ids.shape[1] :].tolist(), time.perf_counter() - begin)

    channel.ready("transformers", version("transformers") + f", torch {torch.__version__}", "float32")
    channel.serve(answer)


if __name__ == "__main__":
    main()
