"""The bundled pair here and in `llama-server`: greedy, one request at a time, in turns, equal weights and threads.

    python recipes/compare/against_llama.py --llama-cpp LLAMA_CPP [--server BINARY] [--rounds 5] [--json OUT.json]

LLAMA_CPP is a llama.cpp source tree that knows gemma4-assistant, for instance `vendor/llama.cpp` in the source package of
llama-cpp-python (`pip download --no-binary :all: --no-deps llama-cpp-python`). Build its server with

    cmake -S LLAMA_CPP -B LLAMA_CPP/build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF \\
          -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_TESTS=OFF
    cmake --build LLAMA_CPP/build --target llama-server -j

Every mode of llama-server is a process of its own; within a round all modes and ours write the same prompts in turn, in
another order each round. Two speeds: `decode`, tokens after the first over the time from the first token to the last (as
llama-server measures it itself, so HTTP is not in it), and `request`, all tokens over the whole request with its prompt,
nothing cached. Prints a Markdown table of medians and where texts part, and writes all rounds as JSON.

Ways named `f32` multiply with float32 activations, those named `bf16` round them to bfloat16, which is faster; keys and
values are float32 in ours and float16 in llama-server's `bf16`. llama_modes.py has the flags of each.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from comparison import Speed, best, first_difference, parting, ratios, table
from llama_modes import CONTEXT, Mode, chosen, command_flags, file_name, files_needed, find_binary
from llama_server import LlamaServer, Reply

from paceline import LLM, SamplingParams
from paceline.convert.to_gguf import write_gguf
from paceline.errors import PacelineError, UsageError
from paceline.ops import native
from paceline.provenance import provenance

PAUSE = 0.02  # seconds between two ways, so that no pool of the last one still spins


@dataclass(frozen=True, slots=True)
class Own:
    """One way of ours."""

    name: str
    drafter: str
    draft_tokens: int | Literal["auto"] = 4
    activations: Literal["float32", "auto"] = "float32"

    @property
    def way(self) -> str:
        return f"paceline {self.name}"


OWN = (
    Own("f32 none", "none"),
    Own("f32 mtp 4", "mtp"),
    Own("f32 auto", "mtp+ngram", "auto"),
    Own("bf16 none", "none", 0, "auto"),
    Own("bf16 mtp 4", "mtp", 4, "auto"),
    Own("bf16 auto", "mtp+ngram", "auto", "auto"),
)
Way = Callable[[list[int]], Reply]


def write_own(llm: LLM, own: Own, tokens: int) -> Way:
    """A way that writes with `llm` and takes the times of the deltas."""
    params = SamplingParams(
        max_tokens=tokens, ignore_eos=True, drafter=own.drafter, draft_tokens=own.draft_tokens
    )

    def write(prompt: list[int]) -> Reply:
        ids: list[int] = []
        times: list[float] = []
        drafted = accepted = 0
        begin = time.perf_counter()
        for delta in llm.stream(prompt, params):
            times.append(time.perf_counter())
            ids += delta.token_ids
            if delta.stats is not None:
                drafted, accepted = delta.stats.drafted, delta.stats.accepted
        return Reply(ids, times[-1] - begin, times[-1] - times[0], drafted, accepted)

    return write


def write_llama(server: LlamaServer, tokens: int) -> Way:
    return lambda prompt: server.complete(prompt, tokens)


def export_all(modes: Seq[Mode], files: Path) -> None:
    """Every GGUF that `modes` need, into `files`."""
    for folder, weights in files_needed(modes):
        say(f"exporting demo/{folder} as {weights}")
        source = Path(str(resources.files("paceline") / "demo" / folder))
        write_gguf(source, files / file_name(folder, weights), weights)


def measure(ways: dict[str, Way], prompts: Seq[list[int]], rounds: int) -> dict[str, list[list[Reply]]]:
    """[way][round][prompt]: every way in every round, each round in another order; one prompt before warms up."""
    names = list(ways)
    found: dict[str, list[list[Reply]]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        begin = time.perf_counter()
        shift = turn * 5 % len(names)
        for name in names[shift:] + names[:shift]:
            time.sleep(PAUSE)
            replies = [ways[name](prompt) for prompt in (prompts if turn else prompts[:1])]
            if turn:
                found[name].append(replies)
        say(f"round {turn} of {rounds}: {time.perf_counter() - begin:.1f} s" + ("" if turn else " (warm-up)"))
    return found


def gap_at(llm: LLM, context: list[int], token: int) -> float | None:
    """By how much the target prefers its own next token to `token`, nats; None if `token` is not near the top."""
    params = SamplingParams(max_tokens=1, ignore_eos=True, drafter="none", logprobs=8)
    (got,) = llm.generate([context], params)[0].logprobs or [None]
    assert got is not None, "one token was asked for"
    return next((got.raw - distribution for other, distribution in got.top if other == token), None)


def agreement(llm: LLM, prompts: Seq[list[int]], found: dict[str, list[list[Reply]]]) -> dict[str, Any]:
    """Per way: how many texts equal our plain float32 ones, and where the others part from them."""
    plain = [reply.token_ids for reply in found[OWN[0].way][-1]]
    out: dict[str, Any] = {}
    for name, turns in found.items():
        parts = []
        for i, (prompt, text, reply) in enumerate(zip(prompts, plain, turns[-1], strict=True)):
            at = first_difference(text, reply.token_ids)
            if at is not None:
                gap = gap_at(llm, prompt + text[:at], reply.token_ids[at])
                parts.append({"prompt": i, "token": at, "gap_nats": gap})
        out[name] = {"equal": len(prompts) - len(parts), "of": len(prompts), "differ": parts}
    return out


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def version(binary: Path) -> str:
    done = subprocess.run([str(binary), "--version"], capture_output=True, text=True, check=False, timeout=60)
    said = (done.stdout + done.stderr).strip().splitlines()
    return " | ".join(line.strip() for line in said if "version" in line or "built" in line)


def held_out(llm: LLM, count: int) -> list[list[int]]:
    """`count` prompts spread evenly over the held-out ones, as token ids."""
    text = (resources.files("paceline") / "demo" / "heldout.jsonl").read_text(encoding="utf-8")
    lines = text.splitlines()
    if not 1 <= count <= len(lines):
        raise UsageError(f"--prompts {count} is not possible: there are {len(lines)}")
    picked = [lines[i * len(lines) // count] for i in range(count)]
    return [llm.tokenizer.encode(json.loads(line)["prompt"]) for line in picked]


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--llama-cpp", type=Path, required=True, help="llama.cpp source tree whose build/bin has llama-server"
    )
    parser.add_argument(
        "--server", type=Path, help="llama-server binary (default: LLAMA_CPP/build/bin, then PATH)"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--only", action="append", metavar="MODE", help="a mode of llama-server; may be repeated"
    )
    parser.add_argument("--json", type=Path, help="write every run here")
    args = parser.parse_args()
    for name in ("rounds", "tokens", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)} is not possible: give at least 1")
    if args.tokens < 2:
        parser.error("--tokens 1 is not possible: decoding is timed from the first token to the last")
    return args


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Export, start, measure, stop. Everything temporary is gone afterwards."""
    binary, modes = find_binary(args.server, args.llama_cpp), chosen(args.only)
    options = {"max_model_len": CONTEXT, "prefix_cache": False, "threads": args.threads}
    llms = {name: LLM("demo", activations=name, **options) for name in ("float32", "auto")}
    llm = llms["float32"]
    prompts = held_out(llm, args.prompts)
    ways: dict[str, Way] = {
        own.way: write_own(llms[own.activations], own, args.tokens)
        for own in OWN
        if own.activations == "float32"
        or (native.available() and native.bf16_dot())  # elsewhere the two are the same
    }
    with ExitStack() as stack:
        files = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="against_llama_")))
        export_all(modes, files)
        for i, mode in enumerate(modes):
            flags = command_flags(mode, files, args.threads)
            server = stack.enter_context(LlamaServer(binary, flags, files / f"{i}.log"))
            ways[f"llama {mode.name}"] = write_llama(server, args.tokens)
        say(f"{len(modes)} modes of llama-server are up")
        found = measure(ways, prompts, args.rounds)
    speeds = {name: Speed.of(turns) for name, turns in found.items()}
    counts = " ".join(
        f"--{name} {getattr(args, name)}" for name in ("rounds", "prompts", "tokens", "threads")
    )
    command = f"python recipes/compare/{Path(__file__).name} --llama-cpp LLAMA_CPP {counts}"  # no paths of a machine
    return {
        "provenance": provenance(command) | {"llama_server": version(binary)},
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "tokens": args.tokens,
        "modes": [asdict(mode) for mode in modes],
        "own": [asdict(own) for own in OWN],
        "speeds": {name: asdict(speed) for name, speed in speeds.items()},
        "agreement": agreement(llm, prompts, found),
    }


def show(found: dict[str, Any]) -> None:
    """The table and what it comes to, on stdout."""
    speeds = {name: Speed(**speed) for name, speed in found["speeds"].items()}
    rivals = [best(speeds, p) for p in ("llama f32", "llama bf16") if any(n.startswith(p) for n in speeds)]
    print(table(speeds, rivals[0]), "\n")
    for rival in rivals:
        own = [name for name in speeds if name.startswith("paceline " + rival.split()[1])]
        for way in own or [name for name in speeds if name.startswith("paceline")]:
            each = ratios(speeds, way, rival)
            middle = statistics.median(each)
            print(f"{way} over {rival}: {middle:.2f} (rounds {each[0]:.2f} to {each[-1]:.2f})")
    for name, agreed in found["agreement"].items():
        where = "; ".join(parting(part) for part in agreed["differ"])
        print(f"{name}: {agreed['equal']} of {agreed['of']} texts equal" + (f" ({where})" if where else ""))


def main() -> None:
    args = read_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are stopped then too
    try:
        found = run(args)
    except PacelineError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    show(found)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
