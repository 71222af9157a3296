"""The page's own modules, run in Node where there is one: events cut anywhere, and SHA-256 against hashlib."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

import paceline

PAGE = Path(paceline.__file__).parent / "server" / "page"
pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node here")


def node(tmp_path: Path, source: str) -> object:
    for file in PAGE.glob("*.js"):
        (tmp_path / file.with_suffix(".mjs").name).write_text(
            file.read_text(encoding="utf-8"), encoding="utf-8"
        )
    script = tmp_path / "test.mjs"
    script.write_text(source, encoding="utf-8")
    done = subprocess.run(["node", str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_sha256_of_token_ids(tmp_path: Path) -> None:
    rng = random.Random(1)
    lists = [[rng.randrange(2**18) for _ in range(n)] for n in (0, 1, 13, 14, 15, 16, 17, 200)]
    source = f"""import {{ sha256OfIds }} from "./sha256.mjs";
        console.log(JSON.stringify({json.dumps(lists)}.map((ids) => sha256OfIds(ids))));"""
    expected = [hashlib.sha256(struct.pack(f"<{len(ids)}I", *ids)).hexdigest() for ids in lists]
    assert node(tmp_path, source) == expected


def test_events_do_not_depend_on_the_cuts(tmp_path: Path) -> None:
    payloads = [
        json.dumps({"text": text}, ensure_ascii=False) for text in ("a", "é🎉", "x\n\ny", "data: z", "")
    ] + ["[DONE]"]
    rng = random.Random(2)
    cuts = []
    for ending in ("\n", "\r\n"):
        text = "".join(f"data: {payload}{ending}{ending}" for payload in payloads)
        for _ in range(100):
            rest, pieces = text, []
            while rest:
                size = rng.randint(1, 8)
                pieces.append(rest[:size])
                rest = rest[size:]
            cuts.append(pieces)
    source = f"""import {{ EventSplitter }} from "./stream.mjs";
        console.log(JSON.stringify({json.dumps(cuts)}.map((pieces) => {{
          const splitter = new EventSplitter();
          return pieces.flatMap((piece) => splitter.push(piece));
        }})));"""
    assert node(tmp_path, source) == [payloads] * len(cuts)


def test_one_clock_for_both_lanes_of_a_race(tmp_path: Path) -> None:
    """What is shown at the end is the engine's time, so lanes and verdict cannot disagree."""
    source = """import { Meter } from "./meters.mjs";
        const made = [0.5, 0.2].map((seconds) => {
          const meter = new Meter();
          const before = meter.speed;
          const step = { tokens: [1, 2], pieces: ["a", "b"], origins: ["draft", "target"], proposed: [1] };
          for (let i = 0; i < 5; i++) meter.add(step);
          meter.report = { seconds };
          return { before, seconds: meter.seconds, speed: meter.speed };
        });
        console.log(JSON.stringify(made));"""
    plain, fast = node(tmp_path, source)  # type: ignore[misc]
    assert plain == {"before": 0, "seconds": 0.5, "speed": 20}
    assert fast["speed"] / plain["speed"] == plain["seconds"] / fast["seconds"]
