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
from paceline.core import sampling_line
from paceline.errors import ConfigError
from paceline.server.loading import Facts, furnish
from paceline.server.params import sampling_params
from paceline.server.schema import CompletionRequest
from paceline.server.settings import ServerConfig

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


def test_all_that_a_model_suggests_holds_and_minus_one_is_off(tmp_path: Path) -> None:
    """As Qwen2.5 (repetition_penalty) and LFM2 (min_p) have it; -1 is how vLLM writes a top_k that is off."""
    made = layouts.model(tmp_path / "model")
    more = {"temperature": 0.3, "min_p": 0.15, "repetition_penalty": 1.05, "top_k": -1, "top_p": 0.8}
    layouts.write(made / "generation_config.json", more)
    said = {**more, "top_k": 0}
    assert read_defaults(made).given() == said
    with LLM(str(made), **OPTIONS) as llm:
        assert llm.params() == SamplingParams(**said)
        assert llm.info["sampling"] == said
        expected = llm.generate("def f(", SamplingParams(**said, seed=3, max_tokens=12))[0].token_ids
        assert llm.generate("def f(", seed=3, max_tokens=12)[0].token_ids == expected
    keys = {"temp": 0.3, "min_p": 0.15, "penalty_repeat": 1.05, "top_k": 64}
    fields = {f"general.sampling.{name}": value for name, value in keys.items()}
    file = write_gguf(tmp_path / "m.gguf", "llama", fields, {"token_embd.weight": np.zeros((8, 32))})
    assert read_defaults(file).given() == {
        "temperature": 0.3, "min_p": 0.15, "repetition_penalty": 1.05, "top_k": 64,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["min_p", "repetition_penalty", "top_k"])
def test_a_suggestion_that_cannot_be_is_refused_by_name(tmp_path: Path, name: str) -> None:
    made = layouts.model(tmp_path / "model")
    layouts.write(made / "generation_config.json", {name: -7})
    with pytest.raises(ConfigError, match=rf"generation_config.json: {name} is -7, not a .*number from"):
        read_defaults(made)


@pytest.mark.parametrize("native", [True, False])
def test_top_p_0_is_the_most_likely_token(native: bool) -> None:
    with LLM("demo", drafter="none", native=native, max_model_len=128, profile_dir="none") as llm:
        greedy = llm.generate("def f(", max_tokens=16)[0].token_ids
        assert llm.generate("def f(", max_tokens=16, temperature=1.5, top_p=0, seed=3)[0].token_ids == greedy
        assert llm.generate("def f(", max_tokens=16, temperature=1.5, seed=3)[0].token_ids != greedy


@pytest.mark.parametrize("suggested", [{}, SUGGESTED, {"do_sample": False, "temperature": 0.6}])
def test_run_and_serve_sample_alike(tmp_path: Path, suggested: dict[str, object]) -> None:
    """The same model with nothing said at either door: `LLM.params` is what `run` and `generate` use."""
    made = layouts.model(tmp_path / "model")
    layouts.write(made / "generation_config.json", suggested)
    with LLM(str(made), **OPTIONS) as llm:
        facts = Facts.of(llm.engine)
        for config, said in ((ServerConfig(), {}), (ServerConfig(sampling={"top_p": 0.5}), {"top_p": 0.5})):
            room = furnish(llm.tokenizer, facts, config)
            body = CompletionRequest(prompt="def f(", max_tokens=128, seed=7)
            assert sampling_params(body, 1000, {}, room.sampling) == llm.params(seed=7, **said)
            body = CompletionRequest(prompt="def f(", max_tokens=128, seed=7, temperature=0.25, top_p=0.75)
            assert sampling_params(body, 1000, {}, room.sampling) == llm.params(
                seed=7, temperature=0.25, top_p=0.75
            )


def test_it_is_said_how_texts_are_sampled() -> None:
    assert sampling_line({}, {}) == "sampling: greedy (the model suggests nothing)"
    assert sampling_line({}, {"seed": 3, "max_tokens": 5}) == "sampling: greedy (the model suggests nothing)"
    assert sampling_line(SUGGESTED, {}) == (
        "sampling: temperature 0.9, top_k 7, top_p 0.95 (as the model suggests)"
    )
    assert sampling_line({"repetition_penalty": 1.05}, {"top_k": 3, "temperature": 0.5}) == (
        "sampling: temperature 0.5, top_k 3, repetition_penalty 1.05 (as chosen and as the model suggests)"
    )


def test_run_and_generate_use_them_too(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = LLM(str(folder), **OPTIONS)
    want = llm.generate("def f(", SamplingParams(**SUGGESTED, seed=5, max_tokens=10))[0].text
    assert call(monkeypatch, "run", str(folder), "def f(", "--no-chat", "--seed", "5", "-n", "10", *FAST) == 0
    out = capsys.readouterr()
    assert out.out == f"def f({want}\n"
    assert "sampling: temperature 0.9, top_k 7, top_p 0.95 (as the model suggests)" in out.err
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
