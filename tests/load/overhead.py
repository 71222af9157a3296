"""What the server costs: tokens per second of one streaming client against LLM.stream, in turns, in one run.

    python tests/load/overhead.py http://127.0.0.1:8000 [--target demo] [--rounds 21] [--tokens 200] [--key KEY]
The server has to serve the same target with the same settings. Prints one JSON object; the ratio should be over 0.9.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import httpx2 as httpx

from paceline import LLM, SamplingParams

PROMPT = "def read_config(path):\n"


def of_library(llm: LLM, tokens: int, seed: int) -> tuple[float, str]:
    """Tokens per second from the call to the last token, and the text."""
    params = SamplingParams(max_tokens=tokens, temperature=0.7, seed=seed, ignore_eos=True)
    begin, text = time.perf_counter(), ""
    for delta in llm.stream(PROMPT, params):
        text += delta.text
    return tokens / (time.perf_counter() - begin), text


def of_server(client: httpx.Client, model: str, tokens: int, seed: int) -> tuple[float, str]:
    body = {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": tokens,
        "temperature": 0.7,
        "seed": seed,
        "ignore_eos": True,
        "stream": True,
    }
    begin, text = time.perf_counter(), ""
    with client.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    return tokens / (time.perf_counter() - begin), text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--target", default="demo")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--key", default="none")
    given = parser.parse_args()
    llm = LLM(given.target, threads=given.threads)
    with httpx.Client(
        base_url=given.url, timeout=300, headers={"Authorization": f"Bearer {given.key}"}
    ) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        of_library(llm, 32, 0)
        of_server(client, model, 32, 0)
        library, server = [], []
        for seed in range(given.rounds):
            if seed % 2:  # whoever runs first in one pair runs second in the next
                second, streamed = of_server(client, model, given.tokens, seed)
            first, text = of_library(llm, given.tokens, seed)
            if not seed % 2:
                second, streamed = of_server(client, model, given.tokens, seed)
            if text != streamed:
                raise SystemExit(f"seed {seed}: the texts differ")
            library.append(first)
            server.append(second)
    ratios = [b / a for a, b in zip(library, server, strict=True)]
    print(json.dumps({
        "library_tokens_per_second": round(statistics.median(library), 1),
        "server_tokens_per_second": round(statistics.median(server), 1),
        "ratio_median": round(statistics.median(ratios), 3),
        "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "rounds": given.rounds, "tokens": given.tokens,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
