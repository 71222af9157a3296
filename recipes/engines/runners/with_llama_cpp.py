"""llama.cpp, by the package `xllamacpp`, which has its server in a wheel. Asked over its own HTTP interface.

Modes: `plain`, `draft-simple`, `draft-eagle3`, `draft-mtp` (with a draft file) and the n-gram kinds `ngram-simple`,
`ngram-map-k`, `ngram-map-k4v`, `ngram-mod`, `ngram-cache`.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import version
from typing import Any

from exchange import Answer, Channel, Question, Setup, setup


def parameters(wanted: Setup) -> Any:
    """The server's parameters: its defaults, but for what a comparison of texts needs."""
    import xllamacpp as llama

    params = llama.CommonParams()
    params.model.path = wanted.model
    params.n_ctx = wanted.context * wanted.parallel
    params.n_parallel = wanted.parallel
    params.cpuparams.n_threads = wanted.threads
    params.cpuparams_batch.n_threads = wanted.threads
    params.port = 0
    params.warmup = False
    params.ui = False
    if wanted.mode != "plain":
        kind = "COMMON_SPECULATIVE_TYPE_" + wanted.mode.upper().replace("-", "_")
        params.speculative.types = [getattr(llama.common_speculative_type, kind)]
        draft = params.speculative.draft
        draft.n_max = wanted.drafts
        draft.cpuparams.n_threads = wanted.threads
        draft.cpuparams_batch.n_threads = wanted.threads
        if wanted.draft is not None:
            draft.mparams.path = wanted.draft
        for name in ("ngram_simple", "ngram_map_k", "ngram_map_k4v"):
            kinds = getattr(params.speculative, name)
            kinds.size_n, kinds.size_m = 3, wanted.drafts  # the defaults (12, 48) are made for long copies
    return params


def main() -> None:
    wanted, channel = setup(), Channel()
    import xllamacpp as llama

    server = llama.Server(parameters(wanted))
    address = server.listening_address

    def ask(question: Question) -> Answer:
        body = {
            "prompt": question.prompt,
            "n_predict": question.max_tokens,
            "temperature": question.temperature,
            "seed": question.seed,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "samplers": ["temperature"],
            "cache_prompt": True,
            "return_tokens": True,
            "stream": False,
        }
        request = urllib.request.Request(
            f"{address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        begin = time.perf_counter()
        with urllib.request.urlopen(request, timeout=600) as reply:
            value = json.load(reply)
        return Answer(question.id, value["tokens"], time.perf_counter() - begin)

    def answer(questions: Sequence[Question]) -> Iterator[Answer]:
        with ThreadPoolExecutor(wanted.parallel) as pool:
            yield from (done.result() for done in as_completed([pool.submit(ask, q) for q in questions]))

    channel.ready(
        "llama.cpp", f"xllamacpp {version('xllamacpp')}", "defaults: K/V float16, activations 8 bits"
    )
    channel.serve(answer)


if __name__ == "__main__":
    main()
