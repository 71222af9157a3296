"""`paceline bench --shape`: random weights of published shapes, verdicts by given chances."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from paceline.capacity import make_cache
from paceline.cli.bench import command
from paceline.config import EngineConfig
from paceline.control.adaptive import AdaptivePolicy
from paceline.control.cost_model import unmeasured
from paceline.core import SamplingParams
from paceline.drafters.assistant import MTPDrafter
from paceline.engine.engine import Engine, EngineParts
from paceline.errors import CapacityError, PacelineError, UsageError
from paceline.forecast import shapes
from paceline.forecast.random_target import GeneratedWeights, random_assistant, random_target
from paceline.forecast.shapes import TARGETS, assistant_config, bytes_of, check_memory, need_of, target_config
from paceline.models.drafters.gemma4_assistant import assistant_shapes, check_pair
from paceline.models.families.gemma4.config import parse_gemma
from paceline.models.families.gemma4.target import GemmaTarget, target_shapes
from paceline.ops.base import WeightKind
from paceline.ops.reference import EagerRunner, dequantize

TINY = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 2,
    "num_key_value_heads": 1, "sliding_window": 16,
}  # fmt: skip
SHORT = [
    "-b",
    "1",
    "-b",
    "2",
    "-k",
    "3",
    "-k",
    "auto",
    "--rounds",
    "2",
    "--tokens",
    "96",
    "--min-seconds",
    "0",
]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(shapes.TARGETS, "tiny", TINY)
    monkeypatch.setattr(shapes, "SMALL", (*shapes.SMALL, "tiny"))
    monkeypatch.setitem(shapes._COMMON, "vocab_size", 4096)
    monkeypatch.setitem(shapes._COMMON, "vocab_size_per_layer_input", 4096)
    return "tiny"


@pytest.mark.parametrize(
    ("name", "target_gigabytes", "assistant_megabytes"),
    [
        ("gemma-4-e2b", (4.4, 4.7), 155), ("gemma-4-e4b", (9.0, 9.5), 157), ("gemma-4-12b", (23.5, 24.5), 846),
        ("gemma-4-26b-a4b", (50, 52), 839), ("gemma-4-31b", (61, 62), 939),
    ],
)  # fmt: skip
def test_sizes_are_those_that_were_published(
    name: str, target_gigabytes: tuple[float, float], assistant_megabytes: int
) -> None:
    """bfloat16 files of google/gemma-4-*: E2B's and E4B's without the per-layer table, which a step does not read."""
    low, high = target_gigabytes
    assert low * 1e9 < need_of(name, "bfloat16", drafter=False) < high * 1e9
    assistant = bytes_of(assistant_shapes(assistant_config(name)), "bfloat16")
    assert round(assistant / 1e6) == assistant_megabytes
    check_pair(assistant_config(name), target_config(name))
    assert need_of(name, "int4", drafter=True) < need_of(name, "int8", drafter=True)


def test_what_is_counted_is_what_is_made(tiny: str) -> None:
    target = random_target(target_config(tiny), "bfloat16", EagerRunner())
    made = sum(w.nbytes for layer in target.layers for w in (layer.gate, layer.up, layer.down))
    made += sum(
        w.nbytes for layer in target.layers for w in (layer.attention.q, layer.attention.k, layer.attention.v,
                                                      layer.attention.o) if w is not None
    )  # fmt: skip
    assert made + target.embedding.nbytes == need_of(tiny, "bfloat16", drafter=False)


def test_kept_tokens_follow_the_chances_and_every_output_says_synthetic(tiny: str, tmp_path: Path) -> None:
    out, page = tmp_path / "b.json", tmp_path / "b.html"
    result = CliRunner().invoke(
        command,
        [
            "--shape",
            tiny,
            "--synthetic-acceptance",
            "0.9,0.5,0.0",
            *SHORT,
            "--json",
            str(out),
            "--html",
            str(page),
        ],
    )
    assert result.exit_code == 0, result.output
    facts = json.loads(out.read_text())
    assert "SYNTHETIC" in result.output
    assert "SYNTHETIC" in facts["verdict"][0]
    assert "SYNTHETIC" in page.read_text()
    assert facts["info"]["synthetic"]["acceptance"] == [0.9, 0.5, 0.0]
    assert {line["cell"]["workload"] for line in facts["lines"]} == {"synthetic"}
    assert "other text" not in result.output  # texts are not compared: they differ by design
    assert "every text is the same" not in result.output
    runs = [run for run in facts["runs"] if run["setting"]["draft_tokens"] == 3]
    drafted = [sum([*run["drafted_by_position"], 0, 0, 0][j] for run in runs) for j in range(3)]
    accepted = [sum([*run["accepted_by_position"], 0, 0, 0][j] for run in runs) for j in range(3)]
    assert drafted[0] > 200
    assert accepted[0] / drafted[0] == pytest.approx(0.9, abs=0.08)
    assert accepted[1] / drafted[1] == pytest.approx(0.45, abs=0.12)  # and the first one before it
    assert accepted[2] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "gemma-4-e2b"], "belong together"),
        (["--synthetic-acceptance", "0.5"], "belong together"),
        (["--shape", "gemma-5", "--synthetic-acceptance", "0.5"], "use one of gemma-4-e2b"),
        (["demo", "--shape", "gemma-4-e2b", "--synthetic-acceptance", "0.5"], "leave a TARGET out"),
        (["-w", "code", "--shape", "gemma-4-e2b", "--synthetic-acceptance", "0.5"], "leave --workload out"),
        (["--shape", "gemma-4-e2b", "--synthetic-acceptance", "0.5,0.6"], "rises from 0.5 to 0.6"),
        (["--shape", "gemma-4-e2b", "--synthetic-acceptance", "1.5"], "from 0 to 1"),
        (["--shape", "gemma-4-e2b", "--synthetic-acceptance", "a"], "no list of numbers"),
        (["--shape", "gemma-4-e2b", "--synthetic-acceptance", ",".join(["0.5"] * 17)], "give 1 to 16"),
        (["--shape", "gemma-4-e2b", "--synthetic-acceptance", "0.5", "--drafter", "ngram"], "random weights"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(command, arguments)
    assert isinstance(result.exception, UsageError)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)


def test_what_does_not_fit_is_refused_with_the_sum_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("paceline.bench.synthetic.free_memory", lambda device: 8 * 10**9)
    result = CliRunner().invoke(command, ["--shape", "gemma-4-12b", "--synthetic-acceptance", "0.5"])
    assert isinstance(result.exception, CapacityError)
    assert "24.7 GB of weights" in str(result.exception)
    assert "8.0 GB are free" in str(result.exception)
    with pytest.raises(PacelineError, match="use --quantize int8"):
        check_memory("gemma-4-12b", "bfloat16", 10**9, 16 * 10**9, drafter=True)
    check_memory("gemma-4-12b", "int4", 10**9, 16 * 10**9, drafter=True)
    assert set(shapes.SMALL) < set(TARGETS)


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
def test_weights_made_on_a_device_are_of_the_same_kinds(kind: WeightKind) -> None:
    config = parse_gemma(shapes.shrunk("gemma-4-26b-a4b"))
    made = GeneratedWeights(target_shapes(config), kind, torch.device("cpu"))
    target = GemmaTarget(config, made, EagerRunner(), torch.float32)  # type: ignore[arg-type]
    other = random_target(config, kind, EagerRunner())
    for mine, theirs in zip(target.layers, other.layers, strict=True):
        assert (mine.attention.q.kind, mine.attention.q.nbytes) == (
            theirs.attention.q.kind,
            theirs.attention.q.nbytes,
        )
        assert mine.moe is not None
        assert theirs.moe is not None
        assert [w.nbytes for w in mine.moe.experts.gate_up] == [w.nbytes for w in theirs.moe.experts.gate_up]
        parts = [w.data for w in mine.moe.experts.gate_up]
        assert len({part.untyped_storage().data_ptr() for part in parts}) == 1  # views, as of a file
    x = torch.randn(8, config.hidden_size)
    gain = dequantize(target.layers[0].attention.q, None, torch.float32) @ x.T
    assert 0.5 < float(gain.std()) < 2


def test_states_of_another_dtype_are_kept() -> None:
    """As with bfloat16 activations under a float32 target, which `--shape` on a GPU once had."""
    fields = shapes.shrunk("gemma-4-e2b")
    target = random_target(parse_gemma(fields), "bfloat16", EagerRunner(torch.bfloat16))
    net = random_assistant(shapes.assistant_of(fields, True), target)
    config = EngineConfig(max_model_len=128, max_batch=1, cache_memory=1 << 24)
    cache = make_cache(target, config, share=1.0)
    engine = Engine(
        EngineParts(target=target, cache=cache, drafters={"mtp": MTPDrafter(net)}, default_drafter="mtp",
                    policy=AdaptivePolicy(unmeasured()), max_batch=1, draft_tokens=3)
    )  # fmt: skip
    (done,) = engine.run({"a": ([5, 6, 7], SamplingParams(max_tokens=8, ignore_eos=True))})["a"]
    assert len(done.token_ids) == 8
    assert done.stats.drafted > 0, done.stats.reasons
