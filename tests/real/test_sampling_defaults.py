"""What generation_config.json suggests is what holds where nothing else is said: library, run and generate."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from tests import layouts

from gguf_files import write_gguf
from paceline import LLM, SamplingParams, UsageError
from paceline.checkpoints.defaults import read_defaults
from paceline.cli import main
from paceline.errors import ConfigError

SUGGESTED = {"temperature": 0.9, "top_k": 7, "top_p": 0.95}
OPTIONS = {"drafter": "ngram", "max_model_len": 256, "threads": 1}
FAST = ["--drafter", "ngram", "--max-model-len", "64", "--threads", "1", "--profile-dir", "none"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = layouts.model(tmp_path_factory.mktemp("defaults") / "model")
    layouts.write(made / "generation_config.json", SUGGESTED)
    return made


def call(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["paceline", *args])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


def test_the_library_samples_as_the_model_suggests_and_what_is_said_wins(folder: Path) -> None:
    llm = LLM(str(folder), **OPTIONS)
    assert llm.params() == SamplingParams(**SUGGESTED)
    assert llm.params(temperature=0.0).temperature == 0
    assert llm.params(seed=3, max_tokens=8) == SamplingParams(**SUGGESTED, seed=3, max_tokens=8)
    said = SamplingParams(temperature=0.9, top_k=7, top_p=0.95, seed=3, max_tokens=12)
    assert (
        llm.generate("def f(", llm.params(seed=3, max_tokens=12))[0].text
        == llm.generate("def f(", said)[0].text
    )
    texts = {llm.generate("def f(")[0].text for _ in range(4)}  # no params at all: sampled
    assert len(texts) > 1
    with pytest.raises(UsageError, match="did you mean temperature"):
        llm.params(temprature=1.0)


def test_a_model_that_suggests_nothing_is_greedy() -> None:
    llm = LLM("demo", **OPTIONS)
    assert llm.params() == SamplingParams()
    assert llm.generate("def f(")[0].token_ids == llm.generate("def f(", SamplingParams())[0].token_ids


def test_do_sample_false_is_greedy(tmp_path: Path) -> None:
    made = layouts.model(tmp_path / "model")
    layouts.write(made / "generation_config.json", SUGGESTED | {"do_sample": False})
    assert LLM(str(made), **OPTIONS).params().temperature == 0


def test_run_and_generate_use_them_too(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = LLM(str(folder), **OPTIONS)
    want = llm.generate("def f(", SamplingParams(**SUGGESTED, seed=5, max_tokens=10))[0].text
    assert call(monkeypatch, "run", str(folder), "def f(", "--no-chat", "--seed", "5", "-n", "10", *FAST) == 0
    out = capsys.readouterr()
    assert out.out == f"def f({want}\n"
    assert "stopped at max_tokens=10 (-n gives more)" in out.err
    source, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": "def f(", "seed": 5, "max_tokens": 10}, {"prompt": "def f(", "temperature": 0}]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert (
        call(
            monkeypatch,
            "generate",
            str(source),
            "-o",
            str(answers),
            "--target",
            str(folder),
            "-n",
            "6",
            *FAST,
        )
        == 0
    )
    records = {record["id"]: record["text"] for record in map(json.loads, answers.read_text().splitlines())}
    first, second = records[1], records[2]
    assert first == want
    greedy = SamplingParams(temperature=0, top_k=7, top_p=0.95, max_tokens=6)
    assert second == llm.generate("def f(", greedy)[0].text


def test_a_full_context_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("run", "def f(", "--target", str(folder), "-n", "500", "--ignore-eos", "-t", "0", *FAST)
    assert call(monkeypatch, *args) == 0
    assert "the context of 64 tokens is full (--max-model-len)" in capsys.readouterr().err


def test_a_gguf_file_with_an_unusable_suggestion_is_refused(tmp_path: Path) -> None:
    fields = {"general.sampling.temp": -1.0, "general.sampling.top_p": 0.9}
    file = write_gguf(tmp_path / "m.gguf", "llama", fields, {"token_embd.weight": np.zeros((8, 32))})
    with pytest.raises(ConfigError, match=r"temperature is -1\.0, not a number from 0 to 100: correct it"):
        read_defaults(file)
