"""`paceline info`: whether a model will run here, and how fast, from its config alone."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from paceline import LLM
from paceline.cli import main
from paceline.config import EngineConfig
from paceline.errors import LoadError
from paceline.forecast import estimate
from paceline.forecast.estimate import Size, fits, size_as_stored, size_of, slice_of, speed, ways
from paceline.forecast.published import DECODERS, GEMMA, published
from paceline.hub.outline import plan
from paceline.hub.resolve import bundled
from paceline.models.config import parse_target, read_config
from paceline.models.families import spec_of
from paceline.models.inspection import inspect
from paceline.ops.runners import pick_device, pick_runner

Capture = pytest.CaptureFixture[str]
# published numbers of parameters, in billions; of Gemma 4 those of the language model's own tensors
PARAMETERS = {
    "Qwen/Qwen3-0.6B": 0.596, "Qwen/Qwen3-1.7B": 1.72, "Qwen/Qwen3-4B": 4.02, "Qwen/Qwen3-8B": 8.19,
    "Qwen/Qwen3-14B": 14.77, "Qwen/Qwen3-32B": 32.76, "Qwen/Qwen3-30B-A3B": 30.53, "Qwen/Qwen3-235B-A22B": 235.09,
    "meta-llama/Llama-3.2-1B": 1.236, "meta-llama/Llama-3.2-3B": 3.213, "meta-llama/Llama-3.1-8B": 8.03,
    "meta-llama/Llama-3.1-70B": 70.55, "meta-llama/Llama-3.3-70B": 70.55, "meta-llama/Llama-3.1-405B": 405.85,
    "deepseek-ai/DeepSeek-V3": 671.03, "deepseek-ai/DeepSeek-R1": 671.03,
    "HuggingFaceTB/SmolLM2-135M": 0.1345, "HuggingFaceTB/SmolLM2-360M": 0.3618, "HuggingFaceTB/SmolLM2-1.7B": 1.711,
}  # fmt: skip


def call(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["paceline", *args])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Path:
        raise LoadError("cannot download it (no network): check the network")

    monkeypatch.setattr("paceline.hub.resolve.outline", fail)


@pytest.mark.parametrize("name", [*DECODERS, *GEMMA])
def test_published_shapes_have_the_published_number_of_parameters(name: str) -> None:
    found = published(name)
    assert found is not None
    config = parse_target(found[1])
    count = sum(prod(shape) for shape in spec_of(config.model_type).shapes(config).values()) / 1e9
    if name in PARAMETERS:
        assert count == pytest.approx(PARAMETERS[name], rel=0.002)
    for tuned in ("-it", "-Instruct", "-Base"):
        assert published(name + tuned) == (name + tuned, found[1])
    last = name.rpartition("/")[2]
    assert published(last.lower()) == found
    assert published("someone/" + last) is None


def test_a_context_shorter_than_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "SECONDS", 0.05)
    config = replace(parse_target(read_config(bundled("target"))), max_len=8)  # type: ignore[type-var]
    runner, _ = pick_runner(EngineConfig(), pick_device("cpu"))
    assert speed(config, "float32", size_of(config, "float32"), runner) > 0


def test_what_is_counted_is_what_is_held() -> None:
    """Weights of a loaded `demo`, against the bytes that were counted from its headers, and from its config alone."""
    config = parse_target(read_config(bundled("target")))
    stored = size_as_stored(inspect(bundled("target")), config)
    counted = size_of(config, "bfloat16")
    vectors = stored.memory - counted.memory  # norms are in no matrix
    assert 0 < vectors < 30_000
    assert (stored.head, stored.layers - vectors, stored.file - vectors) == (
        counted.head,
        counted.layers,
        counted.file,
    )
    assert counted.file == counted.layers + counted.head
    quantized = size_of(config, "int8")
    assert (
        quantized.memory == quantized.file + quantized.head
    )  # a tied head beside the table that tokens are read from
    assert quantized.file < counted.file * 0.52


def test_of_experts_those_are_read_that_a_token_is_given_to() -> None:
    config = parse_target(DECODERS["Qwen/Qwen3-30B-A3B"])
    size = size_of(config, "bfloat16")
    assert size.memory == pytest.approx(2 * 30.22e9, rel=0.01)  # without the table of tokens
    assert size.layers + size.head == pytest.approx(2 * 3.0e9, rel=0.1)  # "A3B"


@pytest.mark.parametrize("name", ["gemma-4-e2b", "gemma-4-12b", "qwen3-8b", "qwen3-30b-a3b", "llama-3.2-1b"])
def test_a_slice_is_a_model_of_its_own_and_bounded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "last_level_cache", lambda: 32 << 20)  # a server's can hold a whole model
    found = published(name)
    assert found is not None
    config = parse_target(found[1])
    for kind in ("bfloat16", "int4"):
        part = slice_of(config, kind)  # type: ignore[arg-type]
        size = size_of(part, kind)  # type: ignore[arg-type]
        assert (1 << 26) <= size.memory < (3 << 30)
        assert part.vocab_size < config.vocab_size
        assert spec_of(part.model_type).layout(part).layers


def test_the_estimate_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """That it is right is measured by hand: a shared machine's times have no place in a test."""
    monkeypatch.setattr(estimate, "SECONDS", 0.02)
    monkeypatch.setattr(estimate, "last_level_cache", lambda: 0)
    config = parse_target(read_config(bundled("target")))
    runner = pick_runner(EngineConfig(), pick_device("cpu"))[0]
    whole = size_of(config, "bfloat16")
    rate = speed(config, "bfloat16", whole, runner)
    assert 1 < rate < 1e5
    twice = Size(0, 0, 1000 * whole.layers, whole.head)
    assert speed(config, "bfloat16", twice, runner) < rate / 20
    (good, bad) = (
        fits(config, {"int8": whole}, runner, free, measure=False)[0] for free in (1 << 34, 1 << 24)
    )
    assert (good.context, good.speed, bad.context) == (4096, None, None)


def test_ways_to_keep_the_weights() -> None:
    config = parse_target(read_config(bundled("target")))
    assert list(ways(inspect(bundled("target")), config)) == ["bfloat16", "int8", "int4"]


def test_a_config_alone_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    found = published("Qwen3-0.6B")
    assert found is not None
    (tmp_path / "config.json").write_text(json.dumps(found[1]), encoding="utf-8")
    assert call(monkeypatch, "info", str(tmp_path), "--no-measure") == 0
    out = capsys.readouterr().out
    assert f"target       {tmp_path}\n" in out
    assert "596.05 M parameters" in out
    assert "weights      not here" in out
    assert f"fetch the weights into {tmp_path}" in out
    table = out.partition("kept as")[2].partition("next")[0]
    assert max(map(len, table.splitlines())) <= 80
    with pytest.raises(LoadError):  # it is no model that could be loaded
        LLM(str(tmp_path))


@pytest.mark.usefixtures("offline")
def test_published_models_are_known_without_a_network(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    for name in ("google/gemma-4-E2B-it", "https://huggingface.co/google/gemma-4-E2B-it", "gemma-4-E2B-it"):
        assert call(monkeypatch, "info", name, "--no-measure", "--json") == 0
        out = capsys.readouterr()
        facts = json.loads(out.out)
        assert facts["models"][0]["path"] == "google/gemma-4-E2B-it"
        assert "google/gemma-4-E2B-it-assistant" in facts["reason"]
        assert [fit["kind"] for fit in facts["fits"]] == ["bfloat16", "int8", "int4"]
        assert facts["fits"][0]["size"]["file"] > facts["fits"][1]["size"]["file"]
        assert ("no network" in out.err) == ("/" in name)
    monkeypatch.setattr("paceline.capacity.free_memory", lambda device: 6 << 30)
    assert call(monkeypatch, "info", "Llama-3.1-8B-Instruct", "--no-measure") == 0
    out = capsys.readouterr().out
    assert "too large" in out
    assert "paceline run meta-llama/Llama-3.1-8B-Instruct --quantize int4" in out
    assert call(monkeypatch, "info", "Llama-3.1-405B", "--no-measure") == 0
    assert "it does not fit" in capsys.readouterr().out
    assert call(monkeypatch, "info", "org/gone", "--no-measure") == 3
    assert "no network" in capsys.readouterr().err


def test_a_plan_reads_like_a_checkpoint(tmp_path: Path) -> None:
    for name in ("gemma-4-26B-A4B", "Qwen3-30B-A3B", "Llama-3.2-1B"):
        found = published(name)
        assert found is not None
        seen = inspect(plan(found[1], tmp_path / name))
        assert seen.unsupported == []
        assert (tmp_path / name / "model.safetensors").stat().st_blocks * 512 < 1 << 20  # a header and a hole


def test_latents_of_deepseek_are_counted_once() -> None:
    config = parse_target(DECODERS["deepseek-ai/DeepSeek-V3"])
    per_token = spec_of(config.model_type).layout(config).bytes_per_token(4)
    assert per_token == {"full_attention": 61 * (512 + 64) * 4}
    assert size_of(config, "int8").layers == pytest.approx(
        36e9, rel=0.05
    )  # "37B activated", of which 0.9 are the head
