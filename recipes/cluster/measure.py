"""What a cluster of this machine costs and gives, beside one server without Ray. Needs paceline[ray] and a quiet machine.

    python recipes/cluster/measure.py [--target demo] [--minutes 2] [throughput overhead prefixes kills]

throughput  16 clients: two replicas of one thread against one engine of two threads, in tokens a second, and two
            servers of one thread without Ray; in turns, the median of the turns' ratios
overhead    one stream without drafts: one replica of one thread against one engine of one thread, in ms for each token,
            and the processor time of the ingress for each token of 16 streams
prefixes    8 conversations of 6 turns: prompt tokens found in a cache, two replicas against one engine
kills       32 clients; a replica is killed with SIGKILL every 15 s; every text is compared with one undisturbed engine's
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx2 as httpx

PROMPTS = ["def parse(self, text):\n    ", "class Queue:\n", "import os\nimport ", "for item in items:\n"]
TURNS = 3  # of each kind, in throughput
COMMAND = [sys.executable, "-c", "from paceline.cli import main; main()", "serve"]


@contextmanager
def server(target: str, *options: str) -> Iterator[tuple[str, int]]:
    """(its address, its process id) of a server that is ready."""
    arguments = [*COMMAND, target, "--port", "0", "--max-model-len", "1024", "--no-request-log", *options]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as running:
        assert running.stdout is not None
        try:
            url = next(line.split()[-1] for line in running.stdout if "is ready on" in line)
            wanted = int(options[options.index("--replicas") + 1]) if "--replicas" in options else 0
            while len(replicas(running.pid)) < wanted:
                time.sleep(0.2)
            for i in range(8):
                complete(url, i, 32)
            yield url, running.pid
        finally:
            running.send_signal(signal.SIGTERM)
            running.wait(60)


def replicas(ingress: int) -> list[int]:
    """The processes of a server's replicas."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(b"ray::ServeReplica") and descends(
                int(path.parent.name), ingress
            ):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def descends(pid: int, ancestor: int) -> bool:
    while pid > 1 and pid != ancestor:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid == ancestor


def complete(url: str, i: int, tokens: int, **more: Any) -> tuple[str, int]:
    """(text, tokens) of the i-th request, streamed."""
    body = {
        "model": "x", "prompt": PROMPTS[i % 4], "seed": i, "temperature": 0.8 * (i % 2), "max_tokens": tokens,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    text, count = "", 0
    with httpx.stream("POST", f"{url}/v1/completions", json=body | more, timeout=300) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"status {answer.status_code}")
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise ValueError(chunk["error"]["message"])
                text += "".join(choice["text"] for choice in chunk["choices"])
                count = (chunk.get("usage") or {}).get("completion_tokens", count)
    return text, count


def rate(url: str, clients: int, seconds: float) -> tuple[float, int]:
    """(tokens a second, tokens) of clients that ask one thing after the other."""
    begin, done = time.monotonic(), [0] * clients

    def client(k: int) -> None:
        i = k
        while time.monotonic() - begin < seconds:
            done[k] += complete(url, i, 128)[1]
            i += clients

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(client, range(clients)))
    return sum(done) / (time.monotonic() - begin), sum(done)


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def throughput(target: str, seconds: float) -> None:
    apart = ["--threads", "1"]
    kinds = {
        "one engine of 2 threads": [["--threads", "2"]],
        "two replicas of 1": [["--replicas", "2", *apart]],
        "two servers of 1": [apart, apart],
    }
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(TURNS):
        for name, servers in kinds.items():
            with ExitStack() as up:  # nothing else runs meanwhile: an idle Ray takes time, too
                urls = [up.enter_context(server(target, *options))[0] for options in servers]
                share = partial(rate, clients=16 // len(urls), seconds=seconds / TURNS)
                with ThreadPoolExecutor(len(urls)) as pool:
                    rates[name].append(sum(each for each, _ in pool.map(share, urls)))
    first = rates["one engine of 2 threads"]
    for name, each in rates.items():
        ratios = sorted(r / base for r, base in zip(each, first, strict=True))
        print(
            f"throughput: {name}: {median(each):.0f} tokens/s, over one engine {median(ratios):.2f} "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f} in {TURNS} turns)"
        )


def overhead(target: str, seconds: float) -> None:
    plain = {"speculation": {"drafter": "none"}}
    times = {}
    for name, options in (("without Ray", []), ("one replica", ["--replicas", "1"])):
        with server(target, "--threads", "1", *options) as (url, pid):
            best = []
            for i in range(7):
                begin = time.monotonic()
                _, count = complete(url, i, 512, **plain)
                best.append((time.monotonic() - begin) / count * 1000)
            times[name] = sorted(best)[3]
            if options:
                used = processor_seconds(pid)
                _, tokens = rate(url, 16, seconds)
                used = (processor_seconds(pid) - used) / tokens * 1000
                print(
                    f"overhead: the ingress takes {used:.3f} ms of a processor for each token of 16 streams"
                )
    ratio = times["one replica"] / times["without Ray"]
    print(
        "overhead: "
        + ", ".join(f"{name} {ms:.3f} ms a token" for name, ms in times.items())
        + f": {ratio:.2f}"
    )


def prefixes(target: str, seconds: float) -> None:
    shares = {}
    for name, options in (
        ("one engine", ["--threads", "2"]),
        ("two replicas", ["--replicas", "2", "--threads", "1"]),
    ):
        with server(target, *options) as (url, _):
            found = asked = 0

            def conversation(k: int, url: str = url) -> tuple[int, int]:
                text, found, asked = f"# conversation {k}\n" + PROMPTS[k % 4], 0, 0
                for turn in range(6):
                    body = {"model": "x", "prompt": text, "seed": k, "max_tokens": 48, "ignore_eos": True}
                    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()
                    found += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                    asked += answer["usage"]["prompt_tokens"]
                    text += answer["choices"][0]["text"] + f"\n# turn {turn}\n" + PROMPTS[(k + turn) % 4]
                return found, asked

            with ThreadPoolExecutor(8) as pool:
                for one in pool.map(conversation, range(8)):
                    found, asked = found + one[0], asked + one[1]
            shares[name] = found / asked
    ratio = shares["two replicas"] / shares["one engine"]
    print(
        "prefixes: " + ", ".join(f"{name} {share:.3f}" for name, share in shares.items()) + f": {ratio:.2f}"
    )


def kills(target: str, seconds: float) -> None:
    with server(target, "--threads", "2") as (url, _), ThreadPoolExecutor(16) as pool:
        expected = list(pool.map(lambda i: complete(url, i, 200)[0], range(32)))
    with server(target, "--replicas", "2", "--threads", "1", "--max-texts", "64") as (url, pid):
        end, wrong, right, refused = time.monotonic() + seconds, 0, 0, 0
        errors: list[str] = []
        lock = threading.Lock()

        def client(i: int) -> None:
            nonlocal wrong, right, refused
            while time.monotonic() < end:
                try:
                    same = complete(url, i, 200)[0] == expected[i]
                except RuntimeError:
                    with lock:
                        refused += 1
                    time.sleep(0.5)
                    continue
                except (ValueError, httpx.HTTPError) as error:
                    with lock:
                        errors.append(str(error))
                    continue
                with lock:
                    right, wrong = right + same, wrong + (not same)

        with ThreadPoolExecutor(33) as pool:
            streams = [pool.submit(client, i) for i in range(32)]
            killed = 0
            while time.monotonic() < end - 5:
                time.sleep(15)
                for victim in replicas(pid)[:1]:
                    os.kill(victim, signal.SIGKILL)
                    killed += 1
            for stream in streams:
                stream.result()
        shown = httpx.get(f"{url}/metrics", timeout=30).text
        moved = next(
            line.split()[-1] for line in shown.splitlines() if line.startswith("paceline_moved_total")
        )
    print(
        f"kills: {killed} replicas killed, {right} texts right, {wrong} wrong, {len(errors)} ended in an error, "
        f"{refused} refused, {float(moved):.0f} moves; errors: {sorted(set(errors))}"
    )


PARTS = {"throughput": throughput, "overhead": overhead, "prefixes": prefixes, "kills": kills}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, "all"], default="all")
    parser.add_argument("--target", default="demo")
    parser.add_argument(
        "--minutes", type=float, default=2.0, help="of kills; the other parts take a fifth of it, each kind"
    )
    asked = parser.parse_args()
    for part in PARTS if "all" in asked.parts else asked.parts:
        PARTS[part](asked.target, asked.minutes * 60 * (1 if part == "kills" else 0.2))
