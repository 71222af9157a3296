"""Load: N streaming clients with random disconnects, then whether everything is back where it began.

Run by hand against a server on this machine:
    python tests/load/streams.py http://127.0.0.1:8000 --pid PID --clients 64 --seconds 120 [--key KEY]
Prints one JSON object. Status 429 is promised under load and counted apart; any other error is a fault.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2 as httpx

PROMPTS = [
    "def parse(self, text):\n",
    "class Queue:\n",
    "import os\n",
    "for item in items:\n    ",
    "def test_",
]


def footprint(pid: int) -> dict[str, float]:
    """Resident MiB, open files and threads of the server's process."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return {
        "rss_mib": int(fields["VmRSS"].split()[0]) / 1024,
        "open_files": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(fields["Threads"]),
    }


async def gauges(client: httpx.AsyncClient) -> dict[str, float]:
    text = (await client.get("/metrics")).text
    out = {}
    for line in text.splitlines():
        if line.startswith(
            ("paceline_cache_use", "paceline_open_texts", "paceline_queue", "paceline_running")
        ):
            name, value = line.rsplit(" ", 1)
            out[name] = float(value)
    return out


async def one(client: httpx.AsyncClient, model: str, rng: random.Random, seen: Counter[str]) -> None:
    """One request; a third of the clients leave at a random moment."""
    body: dict[str, Any] = {
        "model": model, "prompt": rng.choice(PROMPTS) + str(rng.randrange(50)), "max_tokens": rng.choice((8, 32, 96)),
        "seed": rng.randrange(1000), "stream": True, "n": rng.choice((1, 1, 1, 2)),
        "speculation": rng.choice(({}, {"drafter": "none"}, {"drafter": "mtp"}, {"draft_tokens": 2})),
    }  # fmt: skip
    leave = rng.choice((None, None, rng.uniform(0, 2)))
    try:
        async with asyncio.timeout(leave):
            async with client.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    seen[f"status {response.status_code}"] += 1
                    await asyncio.sleep(float(response.headers.get("retry-after", 0)) * rng.random())
                    return
                last = ""
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        chunk = json.loads(line[6:])
                        seen["error in a stream"] += "error" in chunk
                        seen["tokens at least"] += "choices" in chunk
                    last = line or last
                seen["finished" if last == "data: [DONE]" else "cut short"] += 1
    except TimeoutError:
        seen["left early"] += 1


async def load(arguments: argparse.Namespace) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {arguments.key}"} if arguments.key else {}
    limits = httpx.Limits(max_connections=arguments.clients + 4)
    seen: Counter[str] = Counter()
    async with httpx.AsyncClient(
        base_url=arguments.url, headers=headers, timeout=120, limits=limits
    ) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        await asyncio.gather(*(one(client, model, random.Random(i), Counter()) for i in range(8)))  # warm
        await asyncio.sleep(3)
        before = footprint(arguments.pid) | await gauges(client)
        end = time.monotonic() + arguments.seconds

        async def keep_on(number: int) -> None:
            rng = random.Random(number)
            while time.monotonic() < end:
                await one(client, model, rng, seen)

        highest = footprint(arguments.pid)
        tasks = [asyncio.create_task(keep_on(i)) for i in range(arguments.clients)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(1)
            highest = {k: max(v, footprint(arguments.pid)[k]) for k, v in highest.items()}
        for task in tasks:
            task.result()
        await client.aclose()
    await asyncio.sleep(12)  # idle connections are closed after their keep-alive time
    async with httpx.AsyncClient(base_url=arguments.url, headers=headers) as client:
        after = footprint(arguments.pid) | await gauges(client)
    return {"clients": arguments.clients, "seconds": arguments.seconds, "seen": dict(seen),
            "before": before, "highest": highest, "after": after}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--key")
    print(json.dumps(asyncio.run(load(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
