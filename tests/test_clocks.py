"""No bit hangs on a clock: files that read one are listed in the manual, and a clock that jumps changes no text."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import pytest
import torch

from checkpoints import build_assistant, build_target
from decoders import write_letters
from paceline import LLM, SamplingParams
from paceline.check.again import observe
from paceline.check.subject import Subject
from paceline.ops import native

ROOT = Path(__file__).resolve().parents[1]
SOURCE, NATIVE, MANUAL = ROOT / "src" / "paceline", ROOT / "native", ROOT / "docs" / "processes.md"
READS = re.compile(
    r"\b(perf_counter|monotonic|time\.time|process_time|steady_clock|high_resolution_clock|rdtsc\w*)\b"
)
ROOMS = (
    "cli",
    "server",
    "cluster",
    "bench",
    "forecast",
    "train",
)  # none of them computes an answer's numbers


def reading() -> set[str]:
    """The files that read a clock, and for `ROOMS` the room."""
    out = set()
    for path in (*SOURCE.rglob("*.py"), *NATIVE.glob("*.cpp"), *NATIVE.glob("*.h")):
        if READS.search(path.read_text(encoding="utf-8")):
            name = path.relative_to(SOURCE if path.is_relative_to(SOURCE) else ROOT).as_posix()
            out.add(f"{room}/" if (room := name.split("/")[0]) in ROOMS else name)
    return out


def test_each_choice_by_a_clock_is_listed() -> None:
    text = MANUAL.read_text(encoding="utf-8")
    section = text[text.index("## What a clock decides") :]
    rows = [
        line.split("|")[1]
        for line in section[: section.index("\n\nWhich kernels")].splitlines()
        if "|" in line
    ]
    assert {name for row in rows for name in re.findall("`(.*?)`", row)} == reading()


def test_kernels_are_chosen_by_no_clock() -> None:
    for name in (
        "dispatch.cpp",
        "kernels.cpp",
        "attention.cpp",
        "linear.h",
        "tower.cpp",
        "round.cpp",
        "moe.cpp",
    ):
        text = (NATIVE / name).read_text(encoding="utf-8")
        assert not re.search("chrono|clock|rdtsc|gettime", re.sub("//.*", "", text)), name


class Jumping:
    """A clock that creeps, runs and leaps by the seconds of a lottery."""

    def __init__(self, seed: int) -> None:
        self.lots, self.now = random.Random(seed), 0.0

    def __call__(self) -> float:
        self.now += self.lots.choice((1e-9, 1e-6, 1e-3, 0.02, 0.5))
        return self.now


@pytest.mark.parametrize("kernels", [True, False])
def test_texts_under_a_clock_that_jumps(
    kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits, drafts of fixed lengths, texts with every drafter. `auto` drafts as the clock says, and writes the same."""
    if kernels and not native.available():
        pytest.skip("needs the native kernels")
    build_target("dense", tmp_path / "target")
    write_letters(tmp_path / "target")
    build_assistant("dense", tmp_path / "assistant")
    seen, texts = [], []
    for seed in range(4 if kernels else 2):
        if seed:
            monkeypatch.setattr(time, "perf_counter", Jumping(seed))
        torch.manual_seed(seed)
        with LLM(tmp_path / "target", drafter=str(tmp_path / "assistant"), draft_tokens="auto", native=kernels,
                 threads=1 + kernels, max_model_len=128, cache_memory=2**24, profile_dir="none") as llm:  # fmt: skip
            subject = Subject(llm.engine, ((5, 6, 7, 8) * 5, (9, 3, 4) * 4))
            seen.append(observe(subject, ""))
            auto = SamplingParams(max_tokens=32, temperature=0.8, seed=3, ignore_eos=True)
            texts.append([done[0].token_ids for done in subject.run([(p, auto) for p in subject.prompts])])
    assert all(one == seen[0] for one in seen)
    assert all(one == texts[0] for one in texts)
    assert {"logits", "drafts", "texts"} <= set(seen[0])
